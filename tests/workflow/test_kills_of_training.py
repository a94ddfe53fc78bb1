"""Training of several turns that is killed at random moments: SIGKILL by pid, then again, to the same bytes."""

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import Workflow, make_workflow
from .test_kills import executed, processes_of

pytestmark = pytest.mark.slow
CHOSEN = ("--config", "experiments=turns")
METHODS = Path("results/turns/seed0/methods")
KILLS = 5
STEADY = {"learning_rate": 1e-3, "items_per_step": 2, "epochs": 10}
WATCHED = {"eval_interval": 12, "eval_num_samples": 2, "eval_generations": 2, "keep_best": "eval/turn_2/reward_mean"}
EXPERIMENT = {
    "task": "length_ratio_feedback",
    "episode": {"turns": 2, "discount": 0.9},
    "items": {"limit": 12, "validation_fraction": 0.3},
    "team": "tiny",
    "sampling": {"max_new_tokens": 24},
    "methods": {
        "maac": {**STEADY, **WATCHED, "generations": 4, "train_batch_size": 5, "buffer_epochs": 2},
        "cross": {**STEADY, **WATCHED, "algorithm": "magrpo", "joint_mode": "cross", "generations": 2},
    },
    "evaluation": {"samples_per_task": 2, "bootstrap_replicates": 200},
    "runtime": {"checkpoint_interval": 3, "log_seconds": 0},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """The two methods, trained without a kill."""
    workflow = make_workflow(tmp_path_factory.mktemp("turns"))
    workflow.write_experiment(EXPERIMENT, "turns")
    workflow.run(*(target(method) for method in EXPERIMENT["methods"]), *CHOSEN)
    return workflow


def target(method: str) -> str:
    return f"{METHODS}/{method}/round001/policy.manifest.json"


@pytest.mark.parametrize("method", list(EXPERIMENT["methods"]))
def test_a_stage_killed_five_times_ends_with_the_same_bytes(undisturbed: Workflow, tmp_path: Path, method: str) -> None:
    workflow = undisturbed.copy(tmp_path / "project")
    log = workflow.folder / METHODS / method / "round001/policy.log"
    before, generator, logs = undisturbed.manifests(), random.Random(method), []
    kills, forced = 0, ["--force"]
    while kills < KILLS:
        running = subprocess.Popen(workflow.command(target(method), *forced, *CHOSEN), **workflow.process())
        killed, forced = kill_at_random(running, log, generator), []
        output, _ = running.communicate(timeout=300)
        logs.append(log.read_text(encoding="utf-8") if log.exists() else "")
        if not killed:
            assert running.returncode == 0, output
            break
        assert running.returncode != 0 and not (workflow.folder / target(method)).exists()
        kills += 1
    else:
        workflow.run(target(method), *CHOSEN)
        logs.append(log.read_text(encoding="utf-8"))
    assert kills >= 3, "the training was over before it could be killed"
    assert workflow.manifests() == before
    steps = int(re.findall(r": \d+/(\d+)", "".join(logs))[0])
    assert sum(map(executed, logs)) <= steps + kills * EXPERIMENT["runtime"]["checkpoint_interval"]


def kill_at_random(running: subprocess.Popen, log: Path, generator: random.Random) -> bool:
    """SIGKILL the training from its first second to a few steps after it began or went on; False if it ended before."""
    deadline = time.monotonic() + 240
    log.unlink(missing_ok=True)
    begins = generator.random() < 0.2  # one in five is killed before it has done anything
    while time.monotonic() < deadline and running.poll() is None:
        found = processes_of("optimize", running)
        if found and (begins or (log.exists() and ": " in log.read_text(encoding="utf-8"))):
            time.sleep(generator.uniform(0, 0.8))
            for process in found:
                if process.is_running():
                    os.kill(process.pid, signal.SIGKILL)
                    return True
            return False
        time.sleep(0.01)
    return False
