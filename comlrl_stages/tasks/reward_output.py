"""What rewards print: passed on to the stage's log, up to a limit."""

import codecs
import os
import sys
from contextlib import suppress

KEPT_BYTES = 64 * 1024
PIPE_BYTES = 64 * 1024


class RewardOutput:
    """Standard output and error of all workers of a stage: the first KEPT_BYTES are shown, the rest is counted."""

    def __init__(self) -> None:
        self._left = KEPT_BYTES
        self._omitted = 0
        self._open_line = False

    def show(self, text: str, size: int) -> None:
        """Write text of `size` bytes to standard error, as far as the limit allows."""
        if size > self._left:
            text = text.encode()[: self._left].decode(errors="ignore")
        self._omitted += max(0, size - self._left)
        self._left = max(0, self._left - size)
        if text:
            sys.stderr.write(text)
            sys.stderr.flush()
            self._open_line = not text.endswith("\n")

    def close(self) -> None:
        """End the last line, and tell in one line how much was left out."""
        if self._open_line:
            sys.stderr.write("\n")
        if self._omitted:
            print(
                f"(the reward printed {self._omitted:,} bytes more than the {KEPT_BYTES:,} shown)",
                file=sys.stderr,
                flush=True,
            )
        self._open_line, self._omitted = False, 0


class OutputPipe:
    """The reading end of one worker's standard output and error."""

    def __init__(self, descriptor: int, output: RewardOutput):
        self._descriptor, self._output = descriptor, output
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.open = True
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        """The descriptor, to wait for output."""
        return self._descriptor

    def read(self) -> None:
        """Pass on what a full pipe holds at most."""
        with suppress(BlockingIOError):
            data = os.read(self._descriptor, PIPE_BYTES)
            self._output.show(self._decoder.decode(data, final=not data), len(data))
            if not data:
                self.open = False

    def close(self) -> None:
        """Pass on the rest. A process that escaped may still write: nobody waits for it."""
        if self.open:
            self.read()
        os.close(self._descriptor)
