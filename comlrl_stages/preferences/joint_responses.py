"""From the key of a joint response to what its agents wrote.

Pairs and rewards name completions by key, so that every prompt and token id stands in one place. This module follows
the keys: joint response -> samples of the agents -> completions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from comlrl_stages.artifacts import KEY_NAMES
from comlrl_stages.errors import UserError

CENTRALISED = -1
SIDES = ("winner", "loser")


class JointResponses:
    """The joint responses of completions and rewards tables, by key.

    Only `columns` of the completions are held in memory, as plain Python values.
    """

    def __init__(self, completions: pa.Table, rewards: pa.Table, columns: Sequence[str]):
        samples = rewards.select([*KEY_NAMES, "joint", "samples"]).to_pylist()
        self._samples = {(*_context(row), row["joint"]): row["samples"] for row in samples}
        rows = completions.select([*KEY_NAMES, "sample", "agent"]).to_pylist()
        contents = completions.select(list(columns)).to_pylist()
        self._completions = {
            (*_context(row), row["sample"], row["agent"]): content for row, content in zip(rows, contents, strict=True)
        }

    def agents(self, task_id: str, side: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the completions of one side of a pair (`winner` or `loser` struct), in actor order.

        One model that wrote all roles gives a single completion. Raises UserError for a key that names nothing.
        """
        context = _context({**side, "task_id": task_id})
        samples = self._samples.get((*context, side["joint"]))
        if samples is None:
            raise UserError(_unknown("joint response", context, side["joint"], "rewards"))
        whole = self._completions.get((*context, samples[0], CENTRALISED))
        if whole is not None:
            return [whole]
        found = [self._completions.get((*context, sample, agent)) for agent, sample in enumerate(samples)]
        if None in found:
            agent = found.index(None)
            raise UserError(_unknown(f"completion of agent {agent}", context, samples[agent], "completions"))
        return found


def _context(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY_NAMES)


def _unknown(what: str, context: tuple[Any, ...], number: int, table: str) -> str:
    key = ", ".join(f"{name}={value!r}" for name, value in zip(KEY_NAMES, context, strict=True))
    return (
        f"a pair names {what} {number} of {key}, which the {table} table does not hold. The tables are not of the same "
        "run: make the pairs again from these completions and rewards."
    )
