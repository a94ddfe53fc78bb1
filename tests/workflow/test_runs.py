"""The shipped workflow, run for real: what it makes, and that a kill changes nothing."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from .conftest import Workflow

SMALL = ("--config", "experiments=small")
RESULTS = Path("results") / "small"


def test_the_whole_pipeline_runs_from_another_folder_with_no_environment_activated(finished: Workflow) -> None:
    report = finished.folder / RESULTS / "report"
    summary = pd.read_csv(report / "summary.csv")
    assert summary["method"].tolist() == ["base", "madpo", "marlhf"]
    assert summary["eval_reward_mean"].between(0, 1).all()
    assert (report / "report.html").stat().st_size > 50_000


def test_nothing_is_left_in_progress(finished: Workflow) -> None:
    assert not list((finished.folder / "results").rglob("*.partial"))
    assert not list((finished.folder / "results").rglob("*.tmp"))


def test_an_export_loads_with_from_pretrained_and_its_checksums_hold(finished: Workflow) -> None:
    export = finished.folder / RESULTS / "seed0" / "methods" / "madpo" / "export"
    for agent in ("agent_0", "agent_1"):
        AutoModelForCausalLM.from_pretrained(export / agent)
        AutoTokenizer.from_pretrained(export / agent)
    done = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=export, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((export / "provenance.json").read_text(encoding="utf-8"))["stage"] == "optimize"
    assert "How to load it" in (export / "agent_1" / "README.md").read_text(encoding="utf-8")


def test_manifests_hold_no_path_and_no_time(finished: Workflow) -> None:
    for path, text in finished.manifests().items():
        assert str(finished.folder) not in text, path
        assert set(json.loads(text)) == {"schema", "files", "counts"}, path


@pytest.mark.slow
@pytest.mark.parametrize("method", ["madpo", "marlhf"])
def test_a_killed_training_goes_on_to_the_same_bytes(finished: Workflow, tmp_path: Path, method: str) -> None:
    workflow = finished.copy(tmp_path / "project")
    before = finished.manifests()
    folder = workflow.folder / RESULTS / "seed0" / "methods" / method / "round001"
    target = str((folder / "policy.manifest.json").relative_to(workflow.folder))
    running = subprocess.Popen(workflow.command(target, "--force", *SMALL), **workflow.process())
    killed_at = kill_stage_after_a_checkpoint(running, folder / "policy.partial" / "checkpoints")
    output, _ = running.communicate(timeout=120)
    assert running.returncode != 0, output
    assert (folder / f"policy.partial/checkpoints/{killed_at}").is_dir(), "the kill must leave the last checkpoint"
    workflow.run(target, *SMALL)
    assert workflow.manifests() == before


def kill_stage_after_a_checkpoint(running: subprocess.Popen, checkpoints: Path) -> str:
    """SIGKILL the optimize stage as soon as its first checkpoint is there; return the checkpoint's name."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and running.poll() is None:
        if any(checkpoints.glob("step_*")):
            for process in psutil.Process(running.pid).children(recursive=True):
                if any("comlrl-stages" in part for part in process.cmdline()) and "optimize" in process.cmdline():
                    os.kill(process.pid, signal.SIGKILL)
                    process.wait(timeout=10)
                    return sorted(checkpoints.glob("step_*"))[-1].name
        time.sleep(0.01)
    pytest.fail(f"no checkpoint appeared in {checkpoints}: {running.communicate()[0]}")
