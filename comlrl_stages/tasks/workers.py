"""The worker processes that call a task's reward, as the stage sees them.

A worker has a session of its own and ends with all that it started: when its call is late, when the reward ends the
process, when the stage has no more calls, and when the stage is killed.
"""

import heapq
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from multiprocessing.connection import wait

from comlrl_stages.errors import UserError
from comlrl_stages.tasks.process_groups import MARK, Guard, end_processes
from comlrl_stages.tasks.reward_output import OutputPipe, RewardOutput
from comlrl_stages.tasks.reward_process import Call, Refusal, Result, Setup, Started, failed, late

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
START_TRIES = 3
POLL_S = 0.05  # a worker whose end of the pipe lives on in a child of its own ends unnoticed
ANSWER_S = 0.1  # how long the answer of a call that was in time may be under way
END_S = 2.0  # how long a process may take to end after it closed its pipe

Key = tuple[int, ...]


class Worker:
    """One process and the call that it works on."""

    def __init__(self, setup: Setup, mark: str, output: RewardOutput):
        self.loaded = False
        self.key: Key = ()
        self.call: Call | None = None
        self.started_at: float | None = None
        self._mark = mark
        self.channel, theirs = multiprocessing.Pipe()
        reading, writing = os.pipe()
        self.output = OutputPipe(reading, output)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _program(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            # A reward that goes through a set must give the same in every process.
            env={**os.environ, **ONE_THREAD, "PYTHONHASHSEED": "0", MARK: mark},
        )
        theirs.close()
        os.close(writing)
        self.send(setup)

    def send(self, message: Setup | Call) -> None:
        """Send a message; a process that has ended is noticed by its silence."""
        with suppress(OSError):
            self.channel.send(message)

    def take(self, key: Key, call: Call) -> None:
        """Begin with a call."""
        self.key, self.call, self.started_at = key, call, None
        self.send(call)

    def has_ended(self) -> bool:
        """Whether the process is gone and has nothing more to say."""
        return self.process.poll() is not None and not self.channel.poll()

    def end(self) -> int | None:
        """Kill the process with all that it started; returns its exit code if it ended by itself."""
        code = self.process.poll()
        end_processes([self.process.pid], self._mark)
        self.process.wait()
        self.output.close()
        self.channel.close()
        return code


class WorkerPool:
    """Up to `workers` processes. They start with the first call and serve every later one, the smallest key first."""

    def __init__(self, setup: Setup, workers: int):
        self._setup, self._most = setup, workers
        self._workers: list[Worker] = []
        self._waiting: list[tuple[Key, Call]] = []
        self._answers: dict[Key, list[Result] | Refusal] = {}
        self._deaths = 0  # workers that ended in a row without a call of the reward
        self._output = RewardOutput()
        self._mark = f"{uuid.uuid4().hex}/"
        self._numbers = itertools.count()
        self._guard = Guard(self._mark)

    def submit(self, key: Key, call: Call) -> None:
        """Have a call made in its turn."""
        heapq.heappush(self._waiting, (key, call))

    def results(self, key: Key) -> list[Result]:
        """Wait for the results of a call. Raises UserError if the task does not load or breaks the contract."""
        while key not in self._answers:
            self._work()
        answer = self._answers.pop(key)
        if isinstance(answer, Refusal):
            raise UserError(answer.message)
        return answer

    def close(self) -> None:
        """End all workers, busy or not."""
        for worker in self._workers:
            worker.end()
        self._workers = []
        self._guard.close()
        self._output.close()

    def _work(self) -> None:
        """Give out calls, then wait for the next thing to happen."""
        self._start_workers()
        for worker in self._workers:
            if worker.loaded and worker.call is None and self._waiting:
                worker.take(*heapq.heappop(self._waiting))
        streams = [stream for worker in self._workers for stream in _streams(worker)]
        ready = wait(streams, min([POLL_S, *(self._time_left(worker) for worker in self._workers)]))
        for worker in list(self._workers):
            if worker.output in ready:
                worker.output.read()
            if worker.channel in ready:
                self._listen(worker)
            elif worker.has_ended():
                self._replace(worker)
            elif self._time_left(worker) <= 0:
                self._answers[worker.key] = late(worker.call, self._setup.time_limit_s)
                self._remove(worker)

    def _start_workers(self) -> None:
        busy = sum(worker.call is not None for worker in self._workers)
        while len(self._workers) < min(self._most, busy + len(self._waiting)):
            worker = Worker(self._setup, f"{self._mark}{next(self._numbers)}/", self._output)
            self._workers.append(worker)
            self._guard.watch(worker.process.pid for worker in self._workers)

    def _time_left(self, worker: Worker) -> float:
        """Seconds until a call is late beyond doubt."""
        if worker.started_at is None:
            return POLL_S
        return max(0.0, worker.started_at + self._setup.time_limit_s + ANSWER_S - time.monotonic())

    def _listen(self, worker: Worker) -> None:
        try:
            message = worker.channel.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return
        if isinstance(message, Started):
            worker.started_at = message.at
            self._deaths = 0
        elif worker.loaded:
            self._answers[worker.key] = message
            worker.call = worker.started_at = None
        elif isinstance(message, Refusal):
            raise UserError(message.message)
        else:
            worker.loaded = True

    def _replace(self, worker: Worker) -> None:
        """Say how a process ended during its call; one that ended before is no fault of the call, which is repeated."""
        ending = self._remove(worker, patience_s=END_S)
        if worker.started_at is not None:
            error = f"the reward's process {ending} while scoring {worker.call}"
            self._answers[worker.key] = failed(worker.call, "exception", error)
            return
        if worker.call is not None:
            self.submit(worker.key, worker.call)
        self._deaths += 1
        if self._deaths >= START_TRIES:
            raise UserError(
                f"{self._setup.source}: worker processes that load the task ended {START_TRIES} times in a row without "
                f"an error; the last one {ending}. Load the task in a Python session of your own to see why."
            )

    def _remove(self, worker: Worker, patience_s: float = 0.0) -> str:
        """End a worker; returns how it ended, for which `patience_s` may be waited."""
        if patience_s:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(patience_s)
        code = worker.end()
        self._workers.remove(worker)
        self._guard.watch(worker.process.pid for worker in self._workers)
        return _ending(code)


def _program(descriptor: int) -> str:
    """Python code of a worker. It finds modules where this process does."""
    return (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from comlrl_stages.tasks.reward_process import main; main({descriptor})"
    )


def _streams(worker: Worker) -> list[object]:
    return [worker.channel, worker.output] if worker.output.open else [worker.channel]


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its connection to the stage"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    return f"ended with signal {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
