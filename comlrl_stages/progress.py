"""Progress of a stage: a bar on a terminal, one line every few seconds in a log."""

import sys
import time
from collections.abc import Callable


def progress_reporter(total: int, label: str, seconds_between_lines: float) -> Callable[..., None]:
    """Return `advance(n=1, note="", kept=False)`, to be called as work gets done; `total` units in all.

    `kept` marks units that an earlier, killed run had done.
    """
    if total == 0:
        return lambda n=1, note="", kept=False: None
    return _terminal_bar(total, label) if sys.stderr.isatty() else _log_lines(total, label, seconds_between_lines)


def _terminal_bar(total: int, label: str) -> Callable[..., None]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(label, total=total, note="")
    bar.start()
    done = 0

    def advance(n: int = 1, note: str = "", kept: bool = False) -> None:
        nonlocal done
        done += n
        bar.update(task, advance=n, note=note)
        if done >= total:
            bar.stop()

    return advance


def _log_lines(total: int, label: str, seconds_between_lines: float) -> Callable[..., None]:
    done, kept_units, last = 0, 0, time.monotonic()

    def say(text: str) -> None:
        print(f"{label}: {text}", file=sys.stderr, flush=True)

    def advance(n: int = 1, note: str = "", kept: bool = False) -> None:
        nonlocal done, kept_units, last
        done += n
        if kept:
            kept_units += n
            return
        if kept_units:
            say(f"{kept_units}/{total} kept from an earlier run")
            kept_units = 0
        now = time.monotonic()
        if done >= total or now - last >= seconds_between_lines:
            last = now
            say(f"{done}/{total} {note}".rstrip())

    return advance
