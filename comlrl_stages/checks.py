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
from comlrl_stages.config_methods import ActorCritic, Madpo, Reinforcement, RewardedMethod, method_warnings
from comlrl_stages.errors import UserError
from comlrl_stages.files import write_json
from comlrl_stages.job_settings import instances
from comlrl_stages.project import Project
from comlrl_stages.provenance import MEMORY, TASK_PARTS, strings, task_fingerprint

_ALL_PARTS = tuple(sorted({part for parts in TASK_PARTS.values() for part in parts}))


def check_project(project: Project) -> Iterator[str]:
    """Check every experiment's task against its team and methods and yield a line per experiment. Raises UserError."""
    for name, experiment in project.experiments.items():
        facts = task_facts(experiment.task)
        check_task(name, experiment, facts)
        methods, seeds = len(experiment.methods), len(experiment.seeds)
        yield f"{name}: {facts['agents']} agents, {methods} methods, {seeds} seeds: fine"


def check_sources(project: Project) -> None:
    """Files, folders and packages that items and models come from must be there. Raises UserError."""
    for stage in ("prepare", "split"):
        for job in instances(project, stage):
            try:
                strings(project, stage, job)
            except UserError as error:
                raise UserError(f"{_place(project, stage, job, str(error))}: {error}") from None


def _place(project: Project, stage: str, job: Any, told: str) -> str:
    """Where the source stands in the configuration that is missing for a stage's job, as the error `told`."""
    if stage == "split":
        place, task = f"experiment {job.experiment}", project.experiments[job.experiment].task
        kind = "task" if told.startswith(f"{task.file}:") else "items"
        return place if told.startswith("task.") else f"{place}: {kind}"
    experiment = next((name for name in project.saved if job.model.startswith(f"{name}.agent_")), None)
    return f"model {job.model}" if experiment is None else f"experiment {experiment}: team.model.path"


def check_items(project: Project) -> Iterator[str]:
    """Run the split stage of every experiment in a folder that goes again; yield a line where it cannot be run.

    It reads the items as the workflow will, and makes every prompt. Raises UserError.
    """
    for job in instances(project, "split"):
        items = project.experiments[job.experiment].items
        if items.is_on_hub():
            yield f"{job.experiment}: items of the hub are read by the stage split, not here"
            continue
        with tempfile.TemporaryDirectory() as folder:
            splits = ["train", "eval", *(["validation"] if items.has_validation() else [])]
            outputs = [f"--{split}={folder}/{split}.parquet" for split in splits]
            done = _command("split", *outputs, *strings(project, "split", job).values())
        if done.returncode != 0:
            raise UserError(f"experiment {job.experiment}: {_message('its items', done)}")


def warnings_of(project: Project) -> list[str]:
    """What is allowed, but hardly meant."""
    return [
        f"warning: {name}: {text}" for name, experiment in project.experiments.items() for text in _warnings(experiment)
    ]


def _warnings(experiment: Experiment) -> Iterator[str]:
    unused = unused_sections(experiment)
    if unused:
        yield f"no method uses {', '.join(unused)}"
    for name, method in experiment.methods.items():
        yield from (f"methods.{name}.{text}" for text in method_warnings(method))
        if isinstance(method, Madpo) and experiment.episode.turns > 1:
            yield f"methods.{name}: learns from responses of the first turn only; episode.turns is for the others"
        if getattr(method, "reward_model", None) is not None and experiment.episode.turns > 1:
            yield f"methods.{name}: its reward model is fitted on responses of the first turn, and judges those of all"


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
    if experiment.episode.turns > 1 and not facts["has_transition"]:
        raise UserError(
            f"experiment {name}: episode.turns is {experiment.episode.turns}, but the task has no transition, which "
            "makes the prompts of the next turn. Set episode.turns to 1, or give the task one."
        )
    for method_name, method in experiment.methods.items():
        _check_method(f"experiment {name}: methods.{method_name}", method, facts)


def _check_method(path: str, method: Any, facts: dict[str, Any]) -> None:
    """What a method reads of the task must be there."""
    is_central = isinstance(method, ActorCritic) and method.algorithm == "maac" and method.reward_model is None
    if is_central and facts["reward_scope"] == "agent":
        raise UserError(
            f"{path}.algorithm: maac has one critic for the reward that all agents share, but the task declares "
            "reward_scope agent. Take iac, or a group method, or a task with one reward for the team."
        )
    if isinstance(method, Reinforcement) and method.keep_best is not None and not _is_measured(method, facts):
        raise UserError(
            f"{path}.keep_best: the evaluation while training measures no {method.keep_best!r}. It measures "
            f"eval/turn_<k>/ with {', '.join(_MEASURED)} and parts/<name of a part>, with a reward_model also "
            "task_reward_mean, and what the task's metrics_callback returns; this task has none."
        )


_MEASURED = ("reward_mean", "expected_return")


def _is_measured(method: Reinforcement, facts: dict[str, Any]) -> bool:
    """Whether a metric that is waited for can be there; what a metrics_callback returns is known only when it runs."""
    _, _, name = method.keep_best.removeprefix("eval/").partition("/")
    learned = isinstance(method, RewardedMethod) and method.reward_model is not None
    of_turn = method.keep_best.startswith("eval/turn_")
    known = of_turn and (name in _MEASURED or name.startswith("parts/") or (learned and name == "task_reward_mean"))
    return known or facts["has_metrics_callback"]


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
