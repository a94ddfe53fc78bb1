"""Inside a worker process: load the task once, then call its reward for one request after the other.

workers.py starts it with one end of a pipe and reads the answers: None when the task is loaded (or a Refusal), then for
each Call a Started and a list of Results (or a Refusal). User code may do what it likes here; what it returns is read
strictly.
"""

import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from comlrl_stages.errors import UserError
from comlrl_stages.tasks.protocol import Task, TaskSource, load_task, user_traceback

ERROR_CHARACTERS = 8000
NO_ID = "(no task_id)"

RESULT_FORM = (
    "a list with one entry per joint response: a number, or (number, {name: number}), or "
    '{"reward": number, name: number}; with reward_scope "agent", a list of one number per agent for the number'
)


@dataclass(frozen=True)
class Setup:
    """What all calls share."""

    source: TaskSource
    parameters: Mapping[str, Any]
    time_limit_s: float


@dataclass(frozen=True)
class Call:
    """One call of the reward: `texts[i][agent]` are joint responses to the same item."""

    item: Mapping[str, Any]
    texts: list[tuple[str, ...]]

    def __str__(self) -> str:
        return f"item {self.item.get('task_id', NO_ID)}"


@dataclass(frozen=True)
class Started:
    """The call begins, at this time of the machine's monotonic clock."""

    at: float


@dataclass(frozen=True)
class Result:
    """What came back for one joint response, before scale and shift."""

    raw: float = math.nan
    agents: tuple[float, ...] | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    status: str = "ok"
    error: str | None = None


@dataclass(frozen=True)
class Refusal:
    """A mistake of the task as a whole: it does not load, or its reward breaks the contract."""

    message: str


def failed(call: Call, status: str, error: str) -> list[Result]:
    """The results of a call that failed."""
    return [Result(status=status, error=error)] * len(call.texts)


def late(call: Call, time_limit_s: float) -> list[Result]:
    """The results of a call that took too long."""
    text = f"the reward took longer than {time_limit_s:g} s (scoring.time_limit_s) and was stopped"
    return failed(call, "timeout", text)


def main(descriptor: int) -> None:
    """Serve the other end of the pipe until it is closed."""
    os.set_inheritable(descriptor, False)
    sys.stdout.reconfigure(line_buffering=True)  # what a reward printed before it crashed is seen
    with suppress(EOFError, OSError):  # the stage is gone, or the reward closed the pipe
        _serve(Connection(descriptor))
    os._exit(0)  # a reward that closed or replaced the standard streams would fail the interpreter's own end


def _serve(channel: Connection) -> None:
    process = os.getpid()

    def send(message: Any) -> None:
        if os.getpid() != process:
            os._exit(0)  # a child that user code forked and that came back here
        channel.send(message)

    setup = channel.recv()
    loaded = _load(setup)
    send(loaded if isinstance(loaded, Refusal) else None)
    while True:
        call = channel.recv()
        started = time.monotonic()
        send(Started(started))
        answer = _answer(call, loaded, setup.parameters)
        if time.monotonic() - started > setup.time_limit_s:
            answer = late(call, setup.time_limit_s)
        send(answer)


def _load(setup: Setup) -> Task | Refusal:
    try:
        task = load_task(setup.source)
        task.reward.check_parameters(setup.parameters, str(setup.source))
    except UserError as error:
        return Refusal(str(error))
    return task


def _answer(call: Call, task: Task, parameters: Mapping[str, Any]) -> list[Result] | Refusal:
    """Call the reward once and read what it returns."""
    count = len(call.texts)
    try:
        returned = task.reward(list(zip(*call.texts, strict=True)), [call.item] * count, parameters)
    except UserError as error:
        return Refusal(f"{task.source}: {call}: {error}")
    except BaseException as error:  # SystemExit is an error of the reward as well
        return failed(call, "exception", _shortened(user_traceback(error)))
    try:
        return _read_results(returned, count, task)
    except UserError as error:
        return Refusal(f"{task.source}: {call}: {error} Expected {RESULT_FORM}.")
    except Exception as error:  # an object of the user's that cannot be shown or read
        return failed(call, "exception", _shortened(user_traceback(error)))


def _shortened(text: str) -> str:
    """Keep both ends of a long text: the user's first line is in one, the error in the other."""
    if len(text) <= ERROR_CHARACTERS:
        return text
    half = ERROR_CHARACTERS // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half:,} characters left out)\n{text[-half:]}"


# --- reading what a reward returns --------------------------------------------------------------------------------


def _read_results(returned: Any, count: int, task: Task) -> list[Result]:
    returned = _as_list(returned)
    if not isinstance(returned, list | tuple):
        raise UserError(f"the reward returned {type(returned).__name__} ({returned!r:.80}).")
    if len(returned) != count:
        raise UserError(f"the reward returned {len(returned)} results for {count} joint responses.")
    return [_read_result(entry, task) for entry in returned]


def _read_result(entry: Any, task: Task) -> Result:
    parts: Mapping[str, Any] = {}
    if isinstance(entry, Mapping):
        if "reward" not in entry:
            raise UserError(f"an entry of the reward's result has the keys {list(entry)}, but no 'reward'.")
        entry, parts = entry["reward"], {name: value for name, value in entry.items() if name != "reward"}
    elif isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], Mapping):
        entry, parts = entry
    parts = {str(name): _number(value, f"part {name!r}") for name, value in parts.items()}
    if task.reward_scope == "team":
        return Result(raw=_number(entry, "the reward"), parts=parts)
    numbers = _as_list(entry)
    if not isinstance(numbers, list | tuple) or len(numbers) != task.agents:
        raise UserError(f"the reward_scope is agent with {task.agents} agents, but an entry is {entry!r:.80}.")
    agents = tuple(_number(value, f"the reward of agent_{agent}") for agent, value in enumerate(numbers))
    return Result(raw=sum(agents) / len(agents), agents=agents, parts=parts)


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
