"""Score joint responses with a task's reward, in worker processes with a time limit.

User code runs here and nowhere else: a reward that raises, hangs (in C code as well), or ends its process costs the one
joint response it was called for, which is recorded as such; the others are scored. Each worker loads the task once.
What a reward returns is either a number per joint response, as it is written, or an error: never a silent 0.
"""

import faulthandler
import math
import multiprocessing
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from pebble import ProcessExpired, ProcessPool

from comlrl_stages.errors import UserError
from comlrl_stages.tasks.protocol import Task, TaskSource, load_task, user_traceback

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
START_TRIES = 3
KILL_GRACE_S = 30.0

RESULT_FORM = (
    "a list with one entry per joint response: a number, or (number, {name: number}), or "
    '{"reward": number, name: number}; with reward_scope "agent", a list of one number per agent for the number'
)


@dataclass(frozen=True)
class JointReward:
    """The reward of one joint response.

    `raw` is what the reward function returned (the mean over agents where it returns one number per agent),
    `reward = scale * raw + shift`, and `agent_rewards` are processed in the same way.
    `status` is "ok", "nan" (raw or reward is not finite), "exception" or "timeout"; unless ok, `reward` is NaN.
    """

    raw: float
    reward: float
    agent_rewards: tuple[float, ...] | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    status: str = "ok"
    error: str | None = None


@dataclass(frozen=True)
class _Batch:
    """One call of the reward: `texts[i][agent]` are joint responses to the same item, wanted at `positions[i]`."""

    item: Mapping[str, Any]
    texts: list[tuple[str, ...]]
    positions: list[list[int]]


@dataclass(frozen=True)
class _Result:
    """What came back for one joint response, before scale and shift."""

    raw: float = math.nan
    agents: tuple[float, ...] | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    status: str = "ok"
    error: str | None = None


@dataclass(frozen=True)
class _Refusal:
    """A mistake of the task as a whole: it does not load, or its reward breaks the contract."""

    message: str


class RewardRunner:
    """Calls the reward of a task; a context manager. Workers start at the first score and serve every later one.

    A call holds up to `batch_size` joint responses of one item. If a call of several fails, they are called again one
    by one, so that only the failing one is marked. Equal joint responses to equal items are scored once. The results
    do not depend on the number of workers. Workers have one thread for numeric libraries.
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
        self._source = source
        self._parameters = dict(parameters or {})
        self._scale, self._shift = scale, shift
        self._time_limit_s = time_limit_s
        self._batch_size = batch_size
        self._workers = workers
        self._pool: ProcessPool | None = None

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def score(self, items: Sequence[Mapping[str, Any]], responses: Sequence[tuple[str, ...]]) -> list[JointReward]:
        """Score `responses[i]` (one text per agent, in actor order) to `items[i]`; results come in the same order.

        Raises UserError if the task cannot be loaded, or if its reward returns something else than RESULT_FORM.
        """
        batches = list(self._plan(items, responses))
        rewards: list[JointReward | None] = [None] * len(responses)
        for batch, results in zip(batches, self._run(batches), strict=True):
            for positions, result in zip(batch.positions, results, strict=True):
                for position in positions:
                    rewards[position] = self._processed(result)
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
                yield _Batch(item, texts[part], positions[part])

    def _run(self, batches: list[_Batch]) -> Iterator[list[_Result]]:
        futures = [self._schedule(batch) for batch in batches]
        try:
            for batch, future in zip(batches, futures, strict=True):
                results = self._wait(batch, future)
                if results[0].status != "ok" and len(batch.texts) > 1:
                    singles = [_Batch(batch.item, [texts], [[]]) for texts in batch.texts]
                    results = [single for (single,) in self._run(singles)]
                yield results
        finally:
            for future in futures:
                future.cancel()

    def _schedule(self, batch: _Batch) -> Any:
        if self._pool is None or not self._pool.active:
            self._stop()
            self._pool = ProcessPool(
                max_workers=self._workers,
                initializer=_start_worker,
                initargs=(self._source, self._parameters),
                context=multiprocessing.get_context("spawn"),
            )
        arguments = (batch.item, batch.texts, self._time_limit_s)
        return self._pool.schedule(_call_reward, args=arguments, timeout=self._time_limit_s)

    def _wait(self, batch: _Batch, future: Any) -> list[_Result]:
        for _ in range(START_TRIES):
            try:
                results = future.result()
            except TimeoutError:
                text = f"the reward took longer than {self._time_limit_s:g} s (scoring.time_limit_s) and was stopped"
                return [_Result(status="timeout", error=text)] * len(batch.texts)
            except ProcessExpired as error:
                text = f"worker died while the reward ran (exit code {error.exitcode})"
                return [_Result(status="exception", error=text)] * len(batch.texts)
            except BrokenProcessPool:
                future = self._schedule(batch)
                continue
            if isinstance(results, _Refusal):
                raise UserError(results.message)
            return results
        raise UserError(
            f"{self._source}: worker processes that load the task ended {START_TRIES} times in a row without an error. "
            "Load the task in a Python session of your own to see why."
        )

    def _processed(self, result: _Result) -> JointReward:
        reward = self._scale * result.raw + self._shift
        status, error = result.status, result.error
        if status == "ok" and not math.isfinite(reward):
            status, error = "nan", f"the reward is {result.raw:g}, which is not a finite number"
        agents = None if result.agents is None else tuple(self._scale * r + self._shift for r in result.agents)
        return JointReward(
            raw=result.raw,
            reward=reward if status == "ok" else math.nan,
            agent_rewards=agents,
            parts=result.parts,
            status=status,
            error=error,
        )

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None


# --- inside a worker ----------------------------------------------------------------------------------------------

_loaded: tuple[Task, dict[str, Any]] | _Refusal


def _start_worker(source: TaskSource, parameters: dict[str, Any]) -> None:
    """Load the task, before any time limit runs. One thread per worker: as many as cores would slow each other down."""
    global _loaded
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        task = load_task(source)
        task.reward.check_parameters(parameters, str(source))
        _loaded = task, parameters
    except UserError as error:
        _loaded = _Refusal(str(error))


def _call_reward(
    item: Mapping[str, Any], texts: list[tuple[str, ...]], time_limit_s: float
) -> list[_Result] | _Refusal:
    """Call the reward once for joint responses to one item."""
    if isinstance(_loaded, _Refusal):
        return _loaded
    task, parameters = _loaded
    with open(os.devnull, "w") as nowhere:
        # The pool kills a worker that is late; this ends one whose parent was killed meanwhile.
        faulthandler.dump_traceback_later(time_limit_s + KILL_GRACE_S, exit=True, file=nowhere)
        try:
            returned = task.reward(list(zip(*texts, strict=True)), [item] * len(texts), parameters)
        except UserError as error:
            return _Refusal(f"{task.source}: item {item.get('task_id', '(no task_id)')}: {error}")
        except BaseException as error:  # SystemExit is an error of the reward as well
            return [_Result(status="exception", error=user_traceback(error))] * len(texts)
        finally:
            faulthandler.cancel_dump_traceback_later()
    try:
        return _read_results(returned, len(texts), task)
    except UserError as error:
        return _Refusal(f"{task.source}: item {item.get('task_id', '(no task_id)')}: {error} Expected {RESULT_FORM}.")


def _read_results(returned: Any, count: int, task: Task) -> list[_Result]:
    returned = _as_list(returned)
    if not isinstance(returned, list | tuple):
        raise UserError(f"the reward returned {type(returned).__name__} ({returned!r:.80}).")
    if len(returned) != count:
        raise UserError(f"the reward returned {len(returned)} results for {count} joint responses.")
    return [_read_result(entry, task) for entry in returned]


def _read_result(entry: Any, task: Task) -> _Result:
    parts: Mapping[str, Any] = {}
    if isinstance(entry, Mapping):
        if "reward" not in entry:
            raise UserError(f"an entry of the reward's result has the keys {list(entry)}, but no 'reward'.")
        entry, parts = entry["reward"], {name: value for name, value in entry.items() if name != "reward"}
    elif isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], Mapping):
        entry, parts = entry
    parts = {str(name): _number(value, f"part {name!r}") for name, value in parts.items()}
    if task.reward_scope == "team":
        return _Result(raw=_number(entry, "the reward"), parts=parts)
    numbers = _as_list(entry)
    if not isinstance(numbers, list | tuple) or len(numbers) != task.agents:
        raise UserError(f"the reward_scope is agent with {task.agents} agents, but an entry is {entry!r:.80}.")
    agents = tuple(_number(value, f"the reward of agent_{agent}") for agent, value in enumerate(numbers))
    return _Result(raw=sum(agents) / len(agents), agents=agents, parts=parts)


def _as_list(value: Any) -> Any:
    """Arrays and tensors as (nested) lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _number(value: Any, what: str) -> float:
    if not hasattr(value, "__float__"):  # numbers, and scalars of numpy and torch; not text
        raise UserError(f"{what} is {type(value).__name__} ({value!r:.80}), not a number.")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(f"{what} is {type(value).__name__} ({value!r:.80}), not a number ({error}).") from error
