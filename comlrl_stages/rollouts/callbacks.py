"""Numbers that a task's own functions make of responses, in training and in evaluation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from comlrl_stages.errors import UserError
from comlrl_stages.tasks.protocol import Task, user_traceback

_EXAMPLE = '{"words": 12.5}'


@dataclass(frozen=True)
class Rollout:
    """One agent's response as a task's `metrics_callback` reads it.

    `metadata` has its item, turn (0 is the first), node, sample and reward.
    """

    agent_idx: int
    prompt: str
    completion: str
    metadata: dict[str, Any]


def callback_means(task: Task, by_item: Iterable[Sequence[Rollout]]) -> dict[str, float]:
    """Means over items of what the task's metrics_callback returns for each item's rollouts; empty without one."""
    if task.metrics_callback is None:
        return {}
    found = [user_numbers(task, "metrics_callback", lambda own=own: task.metrics_callback(own)) for own in by_item]
    names = dict.fromkeys(name for values in found for name in values)
    return {name: fmean(values[name] for values in found if name in values) for name in names}


def user_numbers(task: Task, what: str, call: Callable[[], Mapping[str, Any]]) -> dict[str, float]:
    """The named numbers that a function of the task returns.

    Raises UserError, with the user's lines if it fails, else with what it returned that is no name with a number.
    """
    try:
        found = call()
    except (Exception, SystemExit) as error:
        raise UserError(f"{task.source}: {what} failed:\n{user_traceback(error)}") from error
    if not isinstance(found, Mapping):
        raise UserError(f"{task.source}: {what} returned {found!r:.80}, expected numbers by name such as {_EXAMPLE}")
    try:
        return {str(name): float(value) for name, value in found.items()}
    except (TypeError, ValueError):
        raise UserError(
            f"{task.source}: {what} returned {dict(found)!r:.200}, expected a number for each name, such as {_EXAMPLE}"
        ) from None
