"""The condition of results on disk: whether they are whole, and whether the present configuration and code made them.

Everything is read from the manifests and provenance beside the artifacts, so it also holds for results that were copied
without Snakemake's records.
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comlrl_stages.artifacts import Work, artifact_digest, read_manifest
from comlrl_stages.checkpoint_places import kept_folder
from comlrl_stages.config import ProjectConfig
from comlrl_stages.errors import UserError
from comlrl_stages.files import beside
from comlrl_stages.jobs import Job, as_list, jobs_of
from comlrl_stages.project import Project, load_project, parse
from comlrl_stages.provenance import strings

SHOWN = 60


@dataclass(frozen=True)
class Difference:
    """One thing that an artifact was made with and that is another now; None where there was or is none."""

    key: str
    recorded: str | None
    present: str | None

    @property
    def is_of_code(self) -> bool:
        """Whether a refactor or an update of a library explains it, and no setting or input."""
        return self.key in ("code", "task_code") or self.key.startswith("versions.")

    def __str__(self) -> str:
        both = zip(self.recorded or "", self.present or "", strict=False)
        first = next((place for place, (one, other) in enumerate(both) if one != other), 0)
        return f"{self.key}: {_window(self.recorded, first)} -> {_window(self.present, first)}"


def _window(text: str | None, first: int) -> str:
    """A text, or what lies around its character number `first` if it is long."""
    if text is None:
        return "(none)"
    start = max(0, first - SHOWN // 3) if len(text) > SHOWN else 0
    return f"{'…' * (start > 0)}{text[start : start + SHOWN]}{'…' * (len(text) > start + SHOWN)}"


@dataclass
class Results:
    """Results on disk beside the jobs of the present configuration."""

    project: Project
    root: Path  # the project's folder: it holds `results/`
    jobs: list[Job]
    makers: dict[str, Job] = field(init=False)
    _digests: dict[str, str | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.makers = {path: job for job in self.jobs for path in job.outputs}

    def tracked(self, job: Job) -> dict[str, str]:
        """What the provenance of a job would record now: values by key. Raises UserError where its data are missing."""
        return {key: string.removeprefix(f"{key}=") for key, string in self._strings(job).items()}

    def _strings(self, job: Job) -> dict[str, str]:
        return strings(self.project, job.stage, job.wildcards)

    def digest(self, path: str) -> str | None:
        """The digest of a finished artifact, from its manifest, or None where there is none."""
        if path not in self._digests:
            self._digests[path] = None
            if beside(self.root / path, "manifest").exists():
                with suppress(UserError, OSError):
                    self._digests[path] = artifact_digest(self.root / path)
        return self._digests[path]

    def work_key(self, job: Job) -> str | None:
        """The key of a job's work in progress, or None while one of its inputs is not there."""
        work = self._work(job)
        return work and work.key

    def kept_checkpoints(self, job: Job) -> Path | None:
        """Where a job keeps checkpoints beyond its end, or None: its method keeps none, or an input is not there."""
        if job.stage != "optimize":
            return None
        method = self.project.experiments[job.wildcards.experiment].methods[job.wildcards.method]
        work = self._work(job) if getattr(method, "keep_checkpoints", False) else None
        return work and kept_folder(work)

    def _work(self, job: Job) -> Work | None:
        if any(self.digest(path) is None for path in job.input_paths()):
            return None
        digests = {
            name: [self.digest(path) for path in given] if isinstance(given, list) else self.digest(given)
            for name, given in job.inputs.items()
        }
        identity = {"stage": job.stage, "tracked": self.tracked(job), "inputs": digests}
        targets = {path: self.root / path for path in job.outputs}
        return Work(job.stage, {}, targets, self.root / job.partial, {}, identity)

    def differences(self, path: str) -> list[Difference]:
        """What has changed since an artifact was made: its settings, code, libraries, inputs.

        An input that is not here is no difference: nothing can be said of it. Raises UserError where the provenance or
        the present settings cannot be read.
        """
        job, provenance = self.makers[path], read_provenance(self.root / path)
        recorded, present = provenance["tracked"], self.tracked(job)
        keys = dict.fromkeys([*present, *recorded])
        changed = [key for key in keys if recorded.get(key) != present.get(key)]
        return [
            *(Difference(key, recorded.get(key), present.get(key)) for key in changed),
            *self._input_differences(provenance["inputs"], job),
        ]

    def _input_differences(self, recorded: Sequence[Mapping[str, str]], job: Job) -> list[Difference]:
        found = []
        for name in dict.fromkeys([*(given["name"] for given in recorded), *job.inputs]):
            before = [(given["path"], given["digest"]) for given in recorded if given["name"] == name]
            paths, now = [path for path, _ in before], as_list(job.inputs.get(name, []))
            if paths != now:
                found.append(Difference(f"input {name}", _without(paths, now), _without(now, paths)))
                continue
            present = [(path, digest, self.digest(path)) for path, digest in before]
            changed = [one for one in present if one[2] not in (None, one[1])]
            found += [Difference(f"input {name} {path}", f"{a:.16}", f"{b:.16}") for path, a, b in changed]
        return found

    def inputs_not_here(self, job: Job) -> list[str]:
        """Inputs of a job that are no finished artifacts."""
        return list(dict.fromkeys(path for path in job.input_paths() if self.digest(path) is None))

    def absences(self, job: Job) -> list[str]:
        """What is missing of a job's artifacts, sizes looked at and not digests; empty when it is done."""
        return [problem for path in job.outputs for problem in absences(self.root / path)]

    def is_done(self, job: Job) -> bool:
        """Whether a job's artifacts are there and are what the job would make now."""
        return not self.absences(job) and not any(self.differences(path) for path in job.outputs)


def _without(paths: Sequence[str], others: Sequence[str]) -> str | None:
    """The paths that are not among the others; all of them if only the order differs."""
    own = [path for path in paths if path not in others] or (paths if sorted(paths) == sorted(others) else [])
    return ", ".join(own) or None


def results_of(
    config: Mapping[str, Any], folders: Sequence[Path], origin: str, folder: Path | None = None
) -> tuple[Results, str]:
    """Results of the experiments that a folder holds, or that the configuration lists, and the folder's path below.

    Every experiment whose results lie in the folder is compared with its own file, whether the configuration lists it
    or not. Raises UserError for a folder that is no results.
    """
    configured = parse(ProjectConfig, config, origin).experiments
    root, inside = _place(folder or Path("results"))
    if folder is not None:
        held = [name for name in _experiments_in(root, inside) if _has_file(name, folders)]
        configured = held if len(inside) > 1 and inside[1] != "models" and held else [*configured, *held]
    project = load_project({**config, "experiments": list(dict.fromkeys(configured))}, folders, origin)
    return Results(project, root, jobs_of(project)), "/".join(inside)


def _place(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """The project's folder, and the parts of the path from there on: `results`, ..."""
    path = Path(os.path.abspath(folder))
    here = Path.cwd()
    parts = path.relative_to(here).parts if path.is_relative_to(here) else ()
    if parts[:1] == ("results",):
        return here, parts
    if "results" not in path.parts:
        raise UserError(f"{folder}: is no results; give a folder called results, or one below it")
    start = len(path.parts) - 1 - path.parts[::-1].index("results")
    return Path(*path.parts[:start]), path.parts[start:]


def _experiments_in(root: Path, inside: Sequence[str]) -> list[str]:
    if len(inside) > 1 and inside[1] != "models":
        return [inside[1]]
    found = (root / "results").glob("*/")
    return sorted(path.name for path in found if path.is_dir() and path.name != "models")


def _has_file(experiment: str, folders: Sequence[Path]) -> bool:
    return any((folder / "experiments" / f"{experiment}.yaml").is_file() for folder in folders)


# --- what lies beside an artifact ---------------------------------------------------------------------------------


def read_provenance(artifact: Path) -> dict[str, Any]:
    """Read the provenance beside an artifact. Raises UserError where it is missing or damaged."""
    path = beside(artifact, "provenance")
    try:
        provenance = json.loads(path.read_text(encoding="utf-8"))
        return {**provenance, "tracked": dict(provenance["tracked"]), "inputs": list(provenance["inputs"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}), so nobody knows what made {artifact}") from None


def absences(artifact: Path) -> list[str]:
    """Say what is missing of an artifact, without reading it: its manifest, files, or some of their bytes."""
    if not beside(artifact, "manifest").exists():
        return ["not made yet"]
    try:
        files = read_manifest(artifact)["files"]
    except UserError as error:
        return [str(error)]
    if not artifact.exists():
        return [f"{artifact.name} is gone, its manifest is not"]
    root = artifact if artifact.is_dir() else artifact.parent
    lost = [name for name, facts in files.items() if _size(root / name) != facts["bytes"]]
    return [f"{name} is missing or has another size than the manifest says" for name in lost]


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


# --- work in progress ---------------------------------------------------------------------------------------------


def worker_on(partial: Path) -> str | None:
    """Who works in a folder of work in progress (host and pid), or None if nobody does."""
    try:
        with open(partial / ".lock", encoding="utf-8") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return stream.read() or "unknown"
    except FileNotFoundError:
        pass
    return None


def progress_of(partial: Path, kept: Path | None = None) -> str:
    """How far the work in a folder is; `kept` is where it has its checkpoints, if not there."""
    if (partial / "complete.json").exists():
        return "finished, not yet in place"
    shards = len(list((partial / "shards").glob("*.parquet")))
    told = [text] if (text := checkpoint_in(kept or partial / "checkpoints")) else []
    return ", ".join(told + ([f"{shards} shards"] if shards else [])) or "begun"


def checkpoint_in(folder: Path) -> str:
    """Which checkpoint a folder holds; empty if it holds none."""
    steps = sorted(folder.glob("step_*"))
    return f"checkpoint of step {int(steps[-1].name.removeprefix('step_'))}" if steps else ""


def work_of(partial: Path) -> str:
    """The key of the work that a folder holds; empty if it holds none."""
    key = partial / "key"
    return key.read_text(encoding="utf-8") if key.is_file() else ""
