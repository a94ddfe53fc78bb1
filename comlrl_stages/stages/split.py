"""Read the task items, check the task on every one of them, and write the splits.

A formatter that fails for the last of a thousand items is found here, in a second, and not after hours of sampling.
"""

from collections.abc import Mapping
from typing import Any

from comlrl_stages.artifacts import Work, write_table
from comlrl_stages.errors import UserError
from comlrl_stages.settings import SplitSettings
from comlrl_stages.tasks.items import load_items
from comlrl_stages.tasks.protocol import Task, TaskSource, load_task
from comlrl_stages.tasks.rehearsal import rehearse


def run(settings: SplitSettings, work: Work) -> None:
    """Write the tables `train`, `eval` and, where it is asked for, `validation`: the user's fields after `task_id`."""
    source = TaskSource(**settings.task.model_dump())
    rehearsed = rehearse(settings, source)
    task = load_task(source)
    if task.agents != settings.agents:
        raise UserError(
            f"{task.source}: is a task of {task.agents} agents, but the team has {settings.agents}. "
            f"Set team.agents to {task.agents}, or choose another task."
        )
    splits = load_items(settings, task, rehearsed)
    if splits.commits:
        work.resolved(revision=[f"{source}@{commit}" for source, commit in splits.commits.items()])
    tables = {"train": splits.train, "eval": splits.eval, "validation": splits.validation}
    for name, table in tables.items():
        if table is None:
            continue
        for item in table.to_pylist():
            _check_prompts(task, item)
        write_table(work.output(name), table)
        work.count(name, rows=table.num_rows, dropped=splits.dropped[name])


def _check_prompts(task: Task, item: Mapping[str, Any]) -> None:
    """Raise UserError unless there is a prompt for each agent, the same one whenever a stage asks for it."""
    for agent, (one, other) in enumerate(zip(task.format(item), task.format(item), strict=True)):
        if one != other:
            raise UserError(
                f"{task.source}: the formatter of agent_{agent} made two prompts of item {item['task_id']}: "
                f"{one!r:.80} and {other!r:.80}. Every stage formats anew, so use no random number, clock or counter "
                "there; what shall differ belongs to the items."
            )
