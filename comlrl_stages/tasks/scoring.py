"""Score joint responses with a task's reward, in worker processes with a time limit.

The reward runs there and nowhere else: if it raises, hangs (in C code as well), or ends its process, that costs the one
joint response it was called for, which is recorded as such; the others are scored. What a reward returns is either a
number per joint response, as it is written, or an error: never a silent 0.
"""

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comlrl_stages.errors import UserError
from comlrl_stages.tasks.protocol import TaskSource
from comlrl_stages.tasks.reward_process import NO_ID, Call, Result, Setup
from comlrl_stages.tasks.workers import WorkerPool

LARGEST_REWARD = 3.4028234663852886e38  # of float32; sums, squares and differences of such are finite in float64
FAILED = ("exception", "timeout")
FAILURES_SHOWN = 5
TEXT_SHOWN = 60


@dataclass(frozen=True)
class JointReward:
    """The reward of one joint response.

    `raw` is what the reward function returned (the mean over agents where it returns one number per agent),
    `reward = scale * raw + shift`, and `agent_rewards` are processed in the same way.
    `status` is "ok", "nan" (one of these numbers is not finite, or is beyond LARGEST_REWARD), "exception" or "timeout";
    unless ok, `reward` is NaN.
    """

    raw: float
    reward: float
    agent_rewards: tuple[float, ...] | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    status: str = "ok"
    error: str | None = None


class Tolerance:
    """How many rewards may fail: a share of the `total` joint responses of a stage, counted over all of its calls."""

    def __init__(self, share: float, total: int):
        self._share, self._total = share, total
        self._scored = self._failed = 0
        self._first: list[str] = []

    def count(self, task_id: Any, texts: Sequence[str], status: str, error: str | None, times: int = 1) -> None:
        """Count `times` equal joint responses. Raises UserError once more have failed than are tolerated."""
        self._scored += times
        if status not in FAILED:
            return
        self._failed += times
        if len(self._first) < FAILURES_SHOWN:
            shown = ", ".join(repr(text if len(text) <= TEXT_SHOWN else f"{text[:TEXT_SHOWN]}...") for text in texts)
            self._first.append(f"item {task_id}, responses {shown}: {status}: {error}")
        if self._failed > self._share * self._total:
            raise UserError(
                f"the reward failed for {self._failed} of {self._scored} joint responses so far ({self._total} in "
                f"all); scoring.tolerate_failures allows a share of {self._share:g}. The first:\n"
                + "\n".join(self._first)
            )


@dataclass(frozen=True)
class _Batch:
    """One call of the reward, whose results are wanted at `positions[i]` for its i-th joint response."""

    call: Call
    positions: list[list[int]]


class RewardRunner:
    """Calls the reward of a task; a context manager. Workers start at the first score and serve every later one.

    A call holds up to `batch_size` joint responses of one item. If a call of several fails, they are called again one
    by one, so that only the failing one is marked. Equal joint responses to equal items are scored once. The results
    do not depend on the number of workers. Workers have one thread for numeric libraries.

    `time_limit_s` runs from the moment the reward is called in its worker, and never while a worker loads the task. A
    call that returns later than that is late, by the worker's clock; one that does not return is stopped within 0.2 s.

    With a `tolerance`, scoring ends as soon as more rewards failed than it allows; calls that are not needed to know
    that are not waited for.
    """

    def __init__(
        self,
        source: TaskSource,
        *,
        parameters: Mapping[str, Any] | None = None,
        scale: float = 1.0,
        shift: float = 0.0,
        time_limit_s: float = 60.0,
        batch_size: int = 1,
        workers: int = 1,
    ):
        self.tolerance: Tolerance | None = None
        self._setup = Setup(source, dict(parameters or {}), time_limit_s)
        self._scale, self._shift = scale, shift
        self._batch_size = batch_size
        self._workers = workers
        self._pool: WorkerPool | None = None

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def score(self, items: Sequence[Mapping[str, Any]], responses: Sequence[tuple[str, ...]]) -> list[JointReward]:
        """Score `responses[i]` (one text per agent, in actor order) to `items[i]`; results come in the same order.

        Raises UserError if the task cannot be loaded, if its reward returns something else than RESULT_FORM, or if
        more rewards fail than `tolerance` allows. Nothing can be scored after that.
        """
        batches = list(self._plan(items, responses))
        rewards: list[JointReward | None] = [None] * len(responses)
        for positions, result in self._results(batches):
            reward = self._processed(result)
            for position in positions:
                rewards[position] = reward
            if self.tolerance is not None:
                task_id, texts = items[positions[0]].get("task_id", NO_ID), responses[positions[0]]
                self.tolerance.count(task_id, texts, reward.status, reward.error, len(positions))
        return rewards

    def _plan(self, items: Sequence[Mapping[str, Any]], responses: Sequence[tuple[str, ...]]) -> Iterator[_Batch]:
        by_item: dict[bytes, tuple[Mapping[str, Any], dict[tuple[str, ...], list[int]]]] = {}
        contents: dict[int, bytes] = {}  # by identity, since callers repeat the same dict for all responses of an item
        for position, (item, texts) in enumerate(zip(items, responses, strict=True)):
            content = contents.get(id(item)) or contents.setdefault(id(item), pickle.dumps(item))
            by_item.setdefault(content, (item, {}))[1].setdefault(tuple(texts), []).append(position)
        for item, distinct in by_item.values():
            texts, positions = list(distinct), list(distinct.values())
            for start in range(0, len(texts), self._batch_size):
                part = slice(start, start + self._batch_size)
                yield _Batch(Call(item, texts[part]), positions[part])

    def _results(self, batches: Sequence[_Batch]) -> Iterator[tuple[list[int], Result]]:
        """Positions and result of each distinct joint response, in the order of the plan at any number of workers."""
        if not batches:
            return
        if self._pool is None:
            self._pool = WorkerPool(self._setup, self._workers)
        for number, batch in enumerate(batches):
            self._pool.submit((number,), batch.call)
        for number, batch in enumerate(batches):
            results: Iterator[Result] = iter(self._pool.results((number,)))
            if len(batch.positions) > 1:
                results = self._one_by_one_if_failed(number, batch.call, list(results))
            yield from zip(batch.positions, results, strict=True)

    def _one_by_one_if_failed(self, number: int, call: Call, results: list[Result]) -> Iterator[Result]:
        if results[0].status == "ok":
            yield from results
            return
        for index, texts in enumerate(call.texts):
            self._pool.submit((number, index), Call(call.item, [texts]))
        for index in range(len(call.texts)):
            yield from self._pool.results((number, index))

    def _processed(self, result: Result) -> JointReward:
        reward = self._scale * result.raw + self._shift
        agents = None if result.agents is None else tuple(self._scale * r + self._shift for r in result.agents)
        status, error = result.status, result.error
        if status == "ok":
            error = _flaw({"reward": result.raw, "processed reward (scale * raw + shift)": reward}) or _flaw(
                {f"processed reward of agent_{agent}": value for agent, value in enumerate(agents or ())}
            )
            status = "ok" if error is None else "nan"
        return JointReward(
            raw=result.raw,
            reward=reward if status == "ok" else math.nan,
            agent_rewards=agents,
            parts=result.parts,
            status=status,
            error=error,
        )


def _flaw(numbers: Mapping[str, float]) -> str | None:
    """Why a reward cannot be trained on or averaged, if one of its numbers is not finite or too large."""
    for name, value in numbers.items():
        if not math.isfinite(value):
            return f"the {name} is {value:g}, which is not a finite number"
        if abs(value) > LARGEST_REWARD:
            return f"the {name} is {value:g}; expected at most {LARGEST_REWARD:.2g} in size, what float32 holds"
    return None
