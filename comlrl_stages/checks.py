"""Checks before any work that need more than the configuration: tasks fit their teams, data files are there."""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from comlrl_stages.config import Experiment, Task, unused_sections
from comlrl_stages.errors import UserError
from comlrl_stages.files import write_json
from comlrl_stages.project import Project
from comlrl_stages.provenance import MEMORY, TASK_PARTS, strings, task_fingerprint
from comlrl_stages.settings import instances

_ALL_PARTS = tuple(sorted({part for parts in TASK_PARTS.values() for part in parts}))


def check_project(project: Project) -> Iterator[str]:
    """Check every experiment's task against its team and yield a line per experiment. Raises UserError."""
    for name, experiment in project.experiments.items():
        facts = task_facts(experiment.task)
        check_task(name, experiment, facts)
        methods, seeds = len(experiment.methods), len(experiment.seeds)
        yield f"{name}: {facts['agents']} agents, {methods} methods, {seeds} seeds: fine"


def check_sources(project: Project) -> None:
    """Files, folders and packages that items and models come from must be there. Raises UserError."""
    for stage in ("prepare", "split"):
        for job in instances(project, stage):
            place = f"model {job.model}" if stage == "prepare" else f"experiment {job.experiment}: items"
            try:
                strings(project, stage, job)
            except UserError as error:
                raise UserError(f"{place}: {error}") from None


def check_items(project: Project) -> Iterator[str]:
    """Run the split stage of every experiment in a folder that goes again; yield a line where it cannot be run.

    It reads the items as the workflow will, and makes every prompt. Raises UserError.
    """
    for job in instances(project, "split"):
        if project.experiments[job.experiment].items.is_on_hub():
            yield f"{job.experiment}: items of the hub are read by the stage split, not here"
            continue
        with tempfile.TemporaryDirectory() as folder:
            outputs = [f"--train={folder}/train.parquet", f"--eval={folder}/eval.parquet"]
            done = _command("split", *outputs, *strings(project, "split", job).values())
        if done.returncode != 0:
            raise UserError(f"experiment {job.experiment}: {_message('its items', done)}")


def warnings_of(project: Project) -> list[str]:
    """What is allowed, but hardly meant."""
    unused = {name: unused_sections(experiment) for name, experiment in project.experiments.items()}
    return [f"warning: {name}: no method uses {', '.join(found)}" for name, found in unused.items() if found]


def check_task(name: str, experiment: Experiment, facts: dict[str, Any]) -> None:
    """The number of agents must be that of the formatters and of the reward's completion lists."""
    if facts["agents"] != experiment.team.agents:
        raise UserError(
            f"experiment {name}: the team has {experiment.team.agents} agents, but the reward and formatters of the "
            f"task are for {facts['agents']}. Change team.agents (or team.models) or the task."
        )
    if not facts["has_items"] and experiment.items.source == "task":
        raise UserError(
            f"experiment {name}: the task has no items of its own; set items.source to a file, folder or hub id"
        )
    unknown = set(experiment.scoring.parameters) - set(facts["reward_parameters"])
    if unknown:
        raise UserError(
            f"experiment {name}: scoring.parameters.{sorted(unknown)[0]}: the reward function has no such parameter "
            f"with a default; it has: {', '.join(facts['reward_parameters']) or 'none'}"
        )


def task_facts(task: Task) -> dict[str, Any]:
    """What a task has. A user's file may be slow to import, so it is imported in another process, once per content."""
    if task.file is None:
        return describe(task)
    known = f"{task_fingerprint(task, _ALL_PARTS)} {task.model_dump_json()} {sys.version}"
    memory = MEMORY / f"task_{hashlib.sha256(known.encode()).hexdigest()[:16]}.json"
    if memory.is_file():
        return json.loads(memory.read_text(encoding="utf-8"))
    done = _command("config", "describe-task", task.model_dump_json())
    if done.returncode != 0:
        raise UserError(_message(f"{task.file}", done))
    facts = json.loads(done.stdout.splitlines()[-1])
    write_json(memory, facts)
    return facts


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `comlrl-stages` in another process."""
    return subprocess.run(
        [sys.executable, "-m", "comlrl_stages.cli", *arguments], capture_output=True, text=True, check=False
    )


def _message(culprit: str, done: subprocess.CompletedProcess[str]) -> str:
    """The mistake that the other process told, after whatever the user's code printed."""
    *_, told = re.split(r"^error: ", done.stderr, flags=re.MULTILINE)
    if told != done.stderr:
        return told.strip()
    code = f"{culprit}: ended the process that imported it (exit code {done.returncode})"
    return f"{code}\n{done.stderr}".strip()


def describe(task: Task) -> dict[str, Any]:
    """Load a task and say what it has."""
    from comlrl_stages.tasks.protocol import TaskSource, describe_task

    return describe_task(TaskSource(**task.model_dump()))
