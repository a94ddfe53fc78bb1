"""Deleting what nothing will go on from: unfinished work and kept checkpoints of other settings, code or inputs."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl_stages import artifacts
from comlrl_stages.checkpoint_places import KEPT
from comlrl_stages.condition import Results, checkpoint_in, progress_of, work_of, worker_on
from comlrl_stages.errors import UserError
from comlrl_stages.jobs import Job


@dataclass(frozen=True)
class Work:
    """A folder of unfinished work or of kept checkpoints, its bytes, and whether a job of today goes on from it."""

    path: str
    size: int
    is_claimed: bool
    why: str

    def __str__(self) -> str:
        return f"{readable_size(self.size):>9}  {self.path}  ({self.why})"


def work_in_progress(results: Results, folder: str) -> list[Work]:
    """Every folder of work in progress below a folder."""
    claimants = {job.partial: job for job in results.jobs}
    found = []
    for place, folders, _ in os.walk(results.root / folder):  # unlike rglob, it bears folders that go while it walks
        named = [Path(place) / name for name in sorted(folders) if name.endswith(".partial")]
        folders[:] = sorted(name for name in folders if not name.endswith(".partial"))
        for path in filter(_is_work, named):
            inside = path.relative_to(results.root).as_posix()
            is_claimed, why = _claim(results, path, claimants.get(inside))
            found.append(Work(inside, _size(path), is_claimed, why))
    return found


def _is_work(path: Path) -> bool:
    """Whether a stage made this folder; an empty one was left by a stage that was killed at its very end."""
    if path.is_symlink() or not path.is_dir():
        return False
    return (path / ".lock").exists() or (path / "key").exists() or not any(path.iterdir())


def _claim(results: Results, partial: Path, job: Job | None) -> tuple[bool, str]:
    """Whether a folder of work in progress is to be kept, and why."""
    if (worker := worker_on(partial)) is not None:
        return True, f"in use: {worker}"
    if job is None:
        return False, "of no job of the present configuration"
    try:
        if results.is_done(job):
            return False, "its artifact is finished"
        key = results.work_key(job)
    except UserError as error:
        return True, f"not known: {error}"
    if key is None:
        return True, f"not known: {results.inputs_not_here(job)[0]} is not here"
    if key != work_of(partial):
        return False, "of other settings, code or inputs"
    return True, f"goes on: {progress_of(partial, results.kept_checkpoints(job))}"


def kept_checkpoints(results: Results, folder: str) -> list[Work]:
    """Every folder of kept checkpoints below a folder: one for each kind of run that a policy had."""
    found = []
    for place, folders, _ in os.walk(results.root / folder):
        kept = [Path(place) / name for name in sorted(folders) if name.endswith(KEPT)]
        folders[:] = sorted(name for name in folders if not name.endswith((KEPT, ".partial")))
        for path in (path for one in kept for path in sorted(one.iterdir()) if checkpoint_in(path)):
            is_claimed, why = _claim_on_kept(results, path)
            found.append(Work(path.relative_to(results.root).as_posix(), _size(path), is_claimed, why))
    return found


def _claim_on_kept(results: Results, path: Path) -> tuple[bool, str]:
    if (worker := _trainer_on(path)) is not None:
        return True, f"in use: {worker}"
    job = results.makers.get(_policy_of(path).relative_to(results.root).as_posix())
    if job is None:
        return False, "checkpoints of no job of the present configuration"
    try:
        place = results.kept_checkpoints(job)
        if place is None and (lost := results.inputs_not_here(job)):
            return True, f"not known: {lost[0]} is not here"
    except UserError as error:
        return True, f"not known: {error}"
    if place != path:
        return False, "checkpoints of other settings, code or inputs, or of a method that keeps none now"
    return True, f"more epochs go on: {checkpoint_in(path)}"


def _policy_of(kept: Path) -> Path:
    """The policy that a folder of kept checkpoints lies beside."""
    return kept.parent.with_name(kept.parent.name.removesuffix(KEPT))


def _trainer_on(kept: Path) -> str | None:
    """Who trains the policy that a folder of kept checkpoints belongs to, or None."""
    policy = _policy_of(kept)
    return worker_on(policy.with_name(f"{policy.name}.partial"))


def _size(folder: Path) -> int:
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a stage at work tidies up
                size += (Path(place) / name).lstat().st_size
    return size


def readable_size(size: float) -> str:
    """Bytes for people: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def prune(results: Results, folder: str, confirm: Callable[[str], bool]) -> Iterator[str]:
    """List unfinished work and kept checkpoints, and after `confirm(question)` delete what no job will go on from."""
    found = [*work_in_progress(results, folder), *kept_checkpoints(results, folder)]
    kept, unclaimed = [one for one in found if one.is_claimed], [one for one in found if not one.is_claimed]
    yield from (f"keep    {one}" for one in kept)
    yield from (f"delete  {one}" for one in unclaimed)
    if not unclaimed:
        yield "nothing to delete"
        return
    total = readable_size(sum(one.size for one in unclaimed))
    if not confirm(f"Delete {_folders(unclaimed)} of unfinished work and old checkpoints ({total})?"):
        yield f"deleted nothing ({total} could go)"
        return
    gone = [one for one in unclaimed if _delete_any(results.root / one.path)]
    yield f"deleted {_folders(gone)}, {readable_size(sum(one.size for one in gone))}"


def _folders(found: Sequence[Work]) -> str:
    return f"{len(found)} folder{'s' * (len(found) != 1)}"


def _delete_any(path: Path) -> bool:
    if not path.parent.name.endswith(KEPT):
        return _delete(path)
    if _trainer_on(path) is not None:
        return False
    shutil.rmtree(path)
    with suppress(OSError):  # others are kept beside it
        path.parent.rmdir()
    return True


def _delete(partial: Path) -> bool:
    """Delete a folder of work in progress under its lock; one that a stage has taken meanwhile stays."""
    lock = partial / ".lock"
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:  # a stage has just ended and deleted it
        return False
    with os.fdopen(descriptor, "r+") as stream:
        if not artifacts._try_lock(stream) or not artifacts._is_still(lock, stream):
            return False
        artifacts._remove(partial)
        return True


def asking(yes: bool, ask: Callable[[str], Any]) -> Callable[[str], bool]:
    """How to have a deletion confirmed: `--yes` says so, a terminal is asked, anything else is a dry run."""
    if yes:
        return lambda question: True
    return (lambda question: bool(ask(question))) if sys.stdin.isatty() else (lambda question: False)
