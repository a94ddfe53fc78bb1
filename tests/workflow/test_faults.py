"""Faults of the machine: a full or read-only disk, no memory, two workflows, a clock set back, a moved folder."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import pytest

from .conftest import EXPERIMENT, Workflow

pytestmark = pytest.mark.slow
SMALL = ("--config", "experiments=small")
PAIRS = "results/small/seed0/preferences/default/pairs.parquet.manifest.json"
COLLECTION = "results/small/seed0/collections/default/completions.parquet.manifest.json"


@pytest.fixture
def workflow(finished: Workflow, tmp_path: Path) -> Workflow:
    return finished.copy(tmp_path / "project")


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A small file system at `folder`; skips where this user may not mount."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting a small file system needs root: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(finished: Workflow, workflow: Workflow) -> None:
    results = workflow.folder / "results"
    kept = workflow.folder / "kept"
    results.rename(kept)
    results.mkdir()
    with mounted(results, "size=12m"):
        shutil.copytree(kept / "small" / "split", results / "small" / "split")
        for path in (kept / "models").iterdir():
            destination = results / "models" / path.name
            destination.parent.mkdir(exist_ok=True)
            shutil.copytree(path, destination) if path.is_dir() else shutil.copy(path, destination)
        filler = results / "filler"
        room = shutil.disk_usage(results).free - 65536
        filler.write_bytes(b"0" * room)
        output = workflow.run(COLLECTION, *SMALL, check=False)
        assert "the disk is full" in output and "Traceback" not in output, output
        filler.unlink()
        workflow.run(COLLECTION, *SMALL)
        made = (results / COLLECTION.removeprefix("results/")).read_text(encoding="utf-8")
    assert made == finished.manifests()[COLLECTION]


def test_a_read_only_results_folder_is_told(workflow: Workflow) -> None:
    results = workflow.folder / "results" / "small" / "seed0" / "preferences" / "default"
    with mounted(results, "size=1m"):
        remount(results, "ro")
        output = workflow.run(PAIRS, *SMALL, check=False)
    assert "ead-only" in output, output


def test_a_second_workflow_in_the_same_folder_is_refused_and_the_first_ends_well(
    finished: Workflow, workflow: Workflow
) -> None:
    first = subprocess.Popen(workflow.command(COLLECTION, "--force", *SMALL), **workflow.process())
    locks = workflow.folder / ".snakemake" / "locks"
    deadline = time.monotonic() + 60
    while not (locks.exists() and any(locks.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.01)
    second = workflow.run(COLLECTION, "--force", *SMALL, check=False)
    output, _ = first.communicate(timeout=120)
    assert "lock" in second.lower(), second
    assert first.returncode == 0, output
    assert workflow.manifests() == finished.manifests()


def test_two_workflows_that_ignore_the_lock_do_not_mix_their_work(finished: Workflow, workflow: Workflow) -> None:
    command = workflow.command(COLLECTION, "--force", "--nolock", *SMALL)
    running = [subprocess.Popen(command, **workflow.process()) for _ in range(2)]
    outputs = [process.communicate(timeout=180)[0] for process in running]
    if any(process.returncode for process in running):
        workflow.run(COLLECTION, *SMALL)
    assert workflow.manifests() == finished.manifests(), outputs


def test_a_clock_set_back_runs_nothing_again_and_what_changes_still_runs_once(workflow: Workflow) -> None:
    tomorrow = time.time() + 86400
    for path in (workflow.folder / "results").rglob("*"):
        os.utime(path, (tomorrow, tomorrow))
    assert workflow.jobs(*SMALL) == {}
    values = deepcopy(EXPERIMENT)
    values["preferences"]["default"]["pairs_per_task"] = 2
    workflow.write_experiment(values)
    assert "pair" in workflow.jobs(PAIRS, *SMALL)
    workflow.run(PAIRS, *SMALL)
    assert workflow.jobs(PAIRS, *SMALL) == {}


def test_a_project_moved_elsewhere_runs_nothing_again(finished: Workflow, tmp_path: Path) -> None:
    moved = finished.copy(tmp_path / "another place" / "project")
    assert moved.jobs(*SMALL) == {}
    shutil.rmtree(moved.folder / ".snakemake")
    assert moved.jobs(*SMALL) == {}


#: Runs at the start of every Python process: a stage has no memory left when its own work begins.
SITECUSTOMIZE = """
import importlib
import resource
import sys

import_module = importlib.import_module


def import_and_limit(name, package=None):
    module = import_module(name, package)
    if name.startswith("comlrl_stages.stages."):
        with open("/proc/self/statm") as stream:
            used = int(stream.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, resource.RLIM_INFINITY))
    return module


if any(part.endswith("/comlrl-stages") for part in sys.orig_argv):
    importlib.import_module = import_and_limit
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit is set from what Linux tells of a process")
def test_a_stage_without_memory_says_so_and_goes_on_when_there_is_some(
    finished: Workflow, workflow: Workflow, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    process = workflow.process()
    process["env"]["PYTHONPATH"] = os.pathsep.join([str(tmp_path), process["env"]["PYTHONPATH"]])
    done = subprocess.run(workflow.command(COLLECTION, "--force", *SMALL), **process, check=False)
    before, found, _ = done.stdout.partition("error: out of memory (")
    assert done.returncode != 0 and found and "Traceback" not in before, done.stdout
    assert not (workflow.folder / COLLECTION).exists()
    workflow.run(COLLECTION, *SMALL)
    assert workflow.manifests() == finished.manifests()
