"""End worker processes with all that they started, also when the stage itself is killed.

Run as a script (`python process_groups.py MARK`), this is the guard: it reads the living process groups, a whole line
each time they change, until the stage is gone, and ends what lives then. It needs the standard library alone.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MARK = "COMLRL_STAGES_REWARD_PROCESS"
PASSES = 20
SECONDS_BETWEEN_PASSES = 0.01


class Guard:
    """A process that outlives this one by a moment, and ends the groups that it watches and the processes of `mark`."""

    def __init__(self, mark: str):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, groups: Iterable[int]) -> None:
        """Tell which process groups live now."""
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{' '.join(map(str, groups))}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """End the guard alone: what it watched was ended before."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()


def end_processes(groups: Iterable[int], mark: str) -> None:
    """Kill process groups, and on Linux every process whose environment variable MARK begins with `mark`.

    The mark finds children that left their parent's group for a session of their own.
    """
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for _ in range(PASSES):  # one may have started another while the list was read
        found = _marked(mark)
        if not found:
            return
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(SECONDS_BETWEEN_PASSES)


def _marked(mark: str) -> list[int]:
    sought = f"\0{MARK}={mark}".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # of another user, or just gone
            if sought in b"\0" + environment.read_bytes():
                found.append(int(environment.parent.name))
    return found


if __name__ == "__main__":
    last = ""
    for line in sys.stdin:
        last = line
    end_processes(map(int, last.split()), sys.argv[1])
