"""A copy of the shipped workflow in a folder of its own, run for real on a tiny model."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
SNAKEMAKE = Path(sys.executable).parent / "snakemake"

EXPERIMENT = {
    "task": "length_ratio",
    "items": {"limit": 10},
    "team": "tiny",
    "sampling": {"max_new_tokens": 24},
    "collections": {"default": {"candidates": 4}},
    "preferences": {"default": {"pairs_per_task": 3}},
    "reward_models": {"default": {"epochs": 1, "batch_size": 8, "max_length": 200}},
    "methods": {
        "base": {},
        "madpo": {"learning_rate": 1e-4, "batch_size": 4},
        "marlhf": {"learning_rate": 1e-4, "epochs": 2, "generations": 2, "items_per_step": 2},
    },
    "evaluation": {"samples_per_task": 3, "bootstrap_replicates": 200},
    "compute": {"sampling_tokens": 512},
    "runtime": {"checkpoint_interval": 1},
}


@dataclass
class Workflow:
    """A project folder with its own copy of the workflow and of the package."""

    folder: Path
    code: Path

    def run(self, *arguments: str, cores: int = 2, check: bool = True) -> str:
        """Run Snakemake in the project folder, its environment not activated; return what it printed."""
        done = subprocess.run(self.command(*arguments, cores=cores), **self.process(), check=False)
        if check and done.returncode != 0:
            pytest.fail(f"snakemake {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def command(self, *arguments: str, cores: int = 2) -> list[str]:
        return [str(SNAKEMAKE), "-s", str(self.code / "Snakefile"), "--cores", str(cores), *arguments]

    def process(self) -> dict:
        """Settings of a process: no virtual environment on PATH, this copy of the package, no network."""
        environment = {
            **{key: os.environ[key] for key in ("HOME", "LANG", "TMPDIR") if key in os.environ},
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(self.code),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        return {
            "cwd": self.folder,
            "env": environment,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }

    def jobs(self, *arguments: str) -> dict[str, set[str]]:
        """What a dry run would run: rule name to the wildcards of its jobs."""
        return planned_jobs(self.run("-n", *arguments))

    def write(self, path: str, text: str) -> None:
        """Write a text file of the project."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def write_experiment(self, values: dict, name: str = "small") -> None:
        self.write(f"config/experiments/{name}.yaml", yaml.safe_dump(values, allow_unicode=True))

    def manifests(self) -> dict[str, str]:
        """Every manifest of the results, by path."""
        found = sorted((self.folder / "results").rglob("*.manifest.json"))
        return {str(path.relative_to(self.folder)): path.read_text(encoding="utf-8") for path in found}

    def copy(self, folder: Path) -> "Workflow":
        """A second project folder with the same results, Snakemake's records included."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Workflow(folder, self.code)


def planned_jobs(said: str) -> dict[str, set[str]]:
    """The jobs that a dry run names: rule name to the wildcards of its jobs."""
    found: dict[str, set[str]] = {}
    rule = ""
    for line in said.splitlines():
        if line.startswith(("rule ", "localrule ")):
            rule = line.split()[1].rstrip(":")
            found.setdefault(rule, set())
        elif line.strip().startswith("wildcards:"):
            found[rule].add(line.split(":", 1)[1].strip())
    return found


def make_workflow(root: Path) -> Workflow:
    """Copy what ships into `root / code`, and a small experiment into a project folder beside it."""
    code, folder = root / "code", root / "my próject"
    code.mkdir(parents=True)
    for name in ("comlrl_stages", "workflow", "profiles", "config"):
        shutil.copytree(REPOSITORY / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "Snakefile", code)
    workflow = Workflow(folder, code)
    workflow.write("config/models/tiny.yaml", yaml.safe_dump({"builtin": "tiny", "pretraining_steps": 10}))
    workflow.write_experiment(EXPERIMENT)
    return workflow


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """The small experiment, run from nothing to its report. Tests leave its results as they are."""
    workflow = make_workflow(tmp_path_factory.mktemp("workflow"))
    workflow.run("--config", "experiments=small")
    return workflow
