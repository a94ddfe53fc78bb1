"""Killed anywhere, nothing is lost: SIGKILL by pid, then the same command again, to the same bytes.

The numbers of executed units come from the stages' own logs: with `log_seconds: 0` each unit is a line.
"""

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from .conftest import EXPERIMENT, Workflow

pytestmark = pytest.mark.slow
SMALL = ("--config", "experiments=small")
SEED = Path("results") / "small" / "seed0"
#: The manifest that a stage makes, its log, and how many units (updates, completions, joint responses) one line is.
STAGES = {
    "sample": (SEED / "collections/default/completions.parquet", SEED / "collections/default/completions.log"),
    "score": (SEED / "collections/default/rewards.parquet", SEED / "collections/default/rewards.log"),
    "reward": (SEED / "reward_models/default", SEED / "reward_models/default.log"),
    "optimize": (SEED / "methods/marlhf/round001/policy", SEED / "methods/marlhf/round001/policy.log"),
}


@pytest.fixture
def workflow(finished: Workflow, tmp_path: Path) -> Workflow:
    """A copy of the finished project whose stages log every unit and keep every checkpoint."""
    workflow = finished.copy(tmp_path / "project")
    workflow.write_experiment({**EXPERIMENT, "runtime": {"checkpoint_interval": 1, "log_seconds": 0}})
    return workflow


def processes_of(stage: str, running: subprocess.Popen) -> list[psutil.Process]:
    """The processes of a stage that a Snakemake runs."""
    try:
        children = psutil.Process(running.pid).children(recursive=True)
        return [
            child for child in children if stage in child.cmdline() and "comlrl-stages" in " ".join(child.cmdline())
        ]
    except psutil.NoSuchProcess:
        return []


def executed(log: str) -> int:
    """Units that a stage's log says it executed itself; those kept from an earlier run do not count."""
    done = [int(found) for found in re.findall(r": (\d+)/\d+(?! kept)", log)]
    kept = [int(found) for found in re.findall(r": (\d+)/\d+ kept", log)]
    return (done[-1] - (kept[0] if kept else 0)) if done else 0


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_stage_killed_three_times_ends_with_the_same_bytes_and_repeats_little(
    finished: Workflow, workflow: Workflow, stage: str
) -> None:
    artifact, log = STAGES[stage]
    before = finished.manifests()
    target = f"{artifact}.manifest.json"
    generator = random.Random(stage)
    logs, kills, force = [], 0, ["--force"]
    while kills < 3:
        running = subprocess.Popen(workflow.command(target, *force, *SMALL), **workflow.process())
        force = []
        killed = kill_at_random(stage, running, workflow.folder / log, generator)
        output, _ = running.communicate(timeout=180)
        logs.append((workflow.folder / log).read_text(encoding="utf-8"))
        if not killed:
            assert running.returncode == 0, output
            break
        kills += 1
    else:
        workflow.run(target, *SMALL)
        logs.append((workflow.folder / log).read_text(encoding="utf-8"))
    assert workflow.manifests() == before
    total = int(re.findall(r": \d+/(\d+)", "".join(logs))[0])
    unit = {"sample": 12, "score": 256}.get(stage, 1)  # a batch of completions, a shard, an update
    assert sum(map(executed, logs)) <= total + kills * unit


def kill_at_random(stage: str, running: subprocess.Popen, log: Path, generator: random.Random) -> bool:
    """SIGKILL the stage's process a random moment after its first unit; False if it ended before."""
    deadline = time.monotonic() + 120
    log.unlink(missing_ok=True)
    while time.monotonic() < deadline and running.poll() is None:
        if log.exists() and re.search(r": \d+/\d+", log.read_text(encoding="utf-8")):
            time.sleep(generator.uniform(0, 0.4))
            for process in processes_of(stage, running):
                os.kill(process.pid, signal.SIGKILL)
                return True
            return False
        time.sleep(0.01)
    return False


def test_snakemake_killed_then_unlocked_and_run_again_while_the_orphan_lives(
    finished: Workflow, workflow: Workflow
) -> None:
    before = finished.manifests()
    artifact, _ = STAGES["optimize"]
    target = f"{artifact}.manifest.json"
    running = subprocess.Popen(workflow.command(target, "--force", *SMALL), **workflow.process())
    orphans = wait_for_checkpoint("optimize", running, workflow.folder / f"{artifact}.partial" / "checkpoints")
    os.kill(running.pid, signal.SIGKILL)
    running.wait(timeout=10)
    assert any(orphan.is_running() for orphan in orphans), "the stage must still live when its workflow is dead"
    workflow.run("--unlock", *SMALL)
    workflow.run(target, *SMALL)
    assert workflow.manifests() == before
    assert not any(orphan.is_running() for orphan in orphans)


def wait_for_checkpoint(stage: str, running: subprocess.Popen, checkpoints: Path) -> list[psutil.Process]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and running.poll() is None:
        if any(checkpoints.glob("step_*")):
            return processes_of(stage, running)
        time.sleep(0.01)
    pytest.fail(f"no checkpoint appeared in {checkpoints}: {running.communicate()[0]}")
