"""Renames as on a network file system: they take seconds, are confirmed late, or are seen late by other processes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from comlrl_stages.artifacts import mismatches

from .conftest import Workflow

pytestmark = pytest.mark.slow
SMALL = ("--config", "experiments=small")
SEED = "results/small/seed0"
PAIRS = f"{SEED}/preferences/default/pairs.parquet"
EXPORT = f"{SEED}/methods/madpo/export"

#: Runs at the start of every Python process; only stages get slow renames, and only of the file that a test names.
SITECUSTOMIZE = '''
import os
import subprocess
import sys
import time

replace = os.replace


def tell(moment):
    """Leave the process's id in a file that the test waits for."""
    with open(os.path.join(os.environ["RENAMES"], moment + ".new"), "w") as stream:
        stream.write(str(os.getpid()))
    replace(stream.name, stream.name.removesuffix(".new"))


def slow_replace(source, target):
    """Rename; the named file half a minute later, or at once with a confirmation half a minute later."""
    if not str(target).endswith("/" + os.environ["SLOW_FILE"]) or ".partial" in str(target):
        return replace(source, target)
    if os.environ["SLOW_MOMENT"] == "asked":
        tell("asked")
        wait()
    replace(source, target)
    if os.environ["SLOW_MOMENT"] == "done":
        tell("done")
        wait()


def wait():
    """Half a minute, or until the test has seen enough."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not os.path.exists(os.path.join(os.environ["RENAMES"], "go on")):
        time.sleep(0.05)


def late_replace(source, target):
    """Rename; others see the named file only two seconds after the process that renamed it has gone on."""
    if not str(target).endswith("/" + os.environ["SLOW_FILE"]) or ".partial" in str(target):
        return replace(source, target)
    hidden = os.path.join(os.environ["RENAMES"], "hidden")
    replace(source, hidden)
    tell("late")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(["sh", "-c", 'sleep 2; mv "$0" "$1"', hidden, str(target)], start_new_session=True, **quiet)


if any(part.endswith("/comlrl-stages") for part in sys.orig_argv):
    os.replace = late_replace if os.environ["SLOW_MOMENT"] == "late" else slow_replace
'''


@dataclass
class SlowRename:
    """A workflow in whose stages the rename of one file is slow."""

    workflow: Workflow
    folder: Path
    file: str
    moment: str

    def start(self, target: str) -> subprocess.Popen:
        """Make one artifact again."""
        self.folder.mkdir()
        (self.folder / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
        process = self.workflow.process()
        process["env"] |= {
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(self.workflow.code)]),
            "RENAMES": str(self.folder),
            "SLOW_FILE": self.file,
            "SLOW_MOMENT": self.moment,
        }
        return subprocess.Popen(self.workflow.command(f"{target}.manifest.json", "--force", *SMALL), **process)

    def stage(self, running: subprocess.Popen) -> int:
        """Wait until the rename is at its moment; return the process id of the stage."""
        told = self.folder / self.moment
        deadline = time.monotonic() + 120
        while not told.exists():
            if running.poll() is not None or time.monotonic() > deadline:
                running.kill()
                pytest.fail(f"no stage came to its rename: {running.communicate()[0]}")
            time.sleep(0.02)
        return int(told.read_text(encoding="utf-8"))

    def go_on(self) -> None:
        (self.folder / "go on").touch()


@pytest.fixture
def workflow(finished: Workflow, tmp_path: Path) -> Workflow:
    workflow = finished.copy(tmp_path / "project")
    workflow.write("config/config.yaml", "experiments: [small]\n")
    return workflow


def half_made(workflow: Workflow) -> list[str]:
    """What manifests say is there and is not; one in a folder of unfinished work says nothing yet."""
    problems = []
    for path, text in workflow.manifests().items():
        if ".partial/" not in path:
            artifact = workflow.folder / path.removesuffix(".manifest.json")
            problems += mismatches(artifact, json.loads(text))
    return problems


def comlrl_stages(workflow: Workflow, *arguments: str) -> subprocess.CompletedProcess:
    """Run `comlrl-stages` in the project folder."""
    command = [sys.executable, "-m", "comlrl_stages.cli", *arguments]
    return subprocess.run(command, **workflow.process(), check=False)


@pytest.mark.parametrize(
    ("artifact", "file", "moment"),
    [
        (PAIRS, "pairs.parquet", "asked"),
        (PAIRS, "pairs.parquet", "done"),
        (PAIRS, "pairs.parquet.manifest.json", "asked"),
        (PAIRS, "pairs.parquet.manifest.json", "done"),
        (EXPORT, "export", "asked"),
        (EXPORT, "export", "done"),
    ],
)
def test_a_workflow_killed_in_a_rename_leaves_nothing_half_made_and_ends_with_the_same_bytes(
    finished: Workflow, workflow: Workflow, tmp_path: Path, artifact: str, file: str, moment: str
) -> None:
    rename = SlowRename(workflow, tmp_path / "renames", file, moment)
    running = rename.start(artifact)
    stage = rename.stage(running)
    running.kill()
    os.kill(stage, signal.SIGKILL)
    running.communicate(timeout=60)
    assert half_made(workflow) == []
    is_published = (file, moment) == ("pairs.parquet.manifest.json", "done")
    assert (workflow.folder / f"{artifact}.manifest.json").exists() == is_published
    workflow.run("--unlock", *SMALL)
    workflow.run(f"{artifact}.manifest.json", *SMALL)
    assert workflow.manifests() == finished.manifests() and half_made(workflow) == []


def test_a_stage_that_the_system_kills_is_told_and_made_again(
    finished: Workflow, workflow: Workflow, tmp_path: Path
) -> None:
    rename = SlowRename(workflow, tmp_path / "renames", "pairs.parquet", "done")
    running = rename.start(PAIRS)
    os.kill(rename.stage(running), signal.SIGKILL)
    said, _ = running.communicate(timeout=60)
    assert running.returncode != 0 and "SIGKILL" in said and "rule pair" in said, said
    assert not (workflow.folder / f"{PAIRS}.manifest.json").exists() and half_made(workflow) == []
    workflow.run(f"{PAIRS}.manifest.json", *SMALL)
    assert workflow.manifests() == finished.manifests()


def test_who_reads_before_the_manifest_is_there_is_told_that_nothing_is_finished(
    finished: Workflow, workflow: Workflow, tmp_path: Path
) -> None:
    rename = SlowRename(workflow, tmp_path / "renames", "pairs.parquet.manifest.json", "asked")
    running = rename.start(PAIRS)
    stage = rename.stage(running)
    assert (workflow.folder / PAIRS).exists(), "the table is in place, and only its manifest is not"
    reader = comlrl_stages(workflow, "replay", "--pairs", PAIRS, "--output", "elsewhere/training_pairs.parquet")
    status = comlrl_stages(workflow, "status").stdout
    rename.go_on()
    said, _ = running.communicate(timeout=120)
    assert (
        reader.returncode == 1 and f"{PAIRS} is not a finished artifact. Run the stage that makes it" in reader.stdout
    )
    assert f" {stage})" in status and "in work (" in status
    assert running.returncode == 0, said
    assert workflow.manifests() == finished.manifests()


def test_a_manifest_that_is_seen_late_is_waited_for(finished: Workflow, workflow: Workflow, tmp_path: Path) -> None:
    rename = SlowRename(workflow, tmp_path / "renames", "pairs.parquet.manifest.json", "late")
    running = rename.start(PAIRS)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 0 and (tmp_path / "renames" / "late").exists(), said
    assert workflow.manifests() == finished.manifests()
