"""Progress of a stage: a bar on a terminal, one line every few seconds in a log."""

import sys
import time
from collections.abc import Callable

SECONDS_BETWEEN_LINES = 10.0


def progress_reporter(total: int, label: str) -> Callable[..., None]:
    """Return `advance(n=1, note="")`, to be called as work gets done; `total` units in all."""
    if total == 0:
        return lambda n=1, note="": None
    return _terminal_bar(total, label) if sys.stderr.isatty() else _log_lines(total, label)


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

    def advance(n: int = 1, note: str = "") -> None:
        nonlocal done
        done += n
        bar.update(task, advance=n, note=note)
        if done >= total:
            bar.stop()

    return advance


def _log_lines(total: int, label: str) -> Callable[..., None]:
    done, last = 0, time.monotonic()

    def advance(n: int = 1, note: str = "") -> None:
        nonlocal done, last
        done += n
        now = time.monotonic()
        if done >= total or now - last >= SECONDS_BETWEEN_LINES:
            last = now
            print(f"{label}: {done}/{total}{' ' + note if note else ''}", file=sys.stderr, flush=True)

    return advance
