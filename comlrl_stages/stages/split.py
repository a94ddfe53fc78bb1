"""Read the task items, check the task on every one of them, and write the splits.

A formatter that fails for the last of a thousand items is found here, in a second, and not after hours of sampling.
"""

from comlrl_stages.artifacts import Work, write_table
from comlrl_stages.errors import UserError
from comlrl_stages.settings import SplitSettings
from comlrl_stages.tasks.items import load_items
from comlrl_stages.tasks.protocol import TaskSource, load_task
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
            task.format(item)
        write_table(work.output(name), table)
        work.count(name, rows=table.num_rows, dropped=splits.dropped[name])
