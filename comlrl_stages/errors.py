"""The exception that means: the user can mend this; hints for misspelt names; words for faults of the machine."""

import difflib
import errno
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in a config, a file or a user function.

    Its message says what was found, where (file, key, row), what was expected and what to do. The command line
    prints it without a traceback and exits with code 1.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (nearest: ..)" if one of the `known` names resembles `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (nearest: {close[0]!r})" if close else ""


_FILE_FAULTS = {
    errno.ENOSPC: "the disk is full. Free some space",
    errno.EDQUOT: "the disk quota is used up. Free some space",
    errno.EROFS: "the folder is read-only. Make it writable",
    errno.EACCES: "the file or folder may not be written or read. Change its permissions",
    errno.EIO: "the disk reports an error. Check it",
}
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc")


def machine_fault(error: BaseException) -> str | None:
    """Say what to do about a fault that is the machine's: a full or read-only disk, too little memory; else None."""
    text = str(error)
    if isinstance(error, MemoryError) or any(sign in text for sign in _OUT_OF_MEMORY):
        return (
            f"out of memory ({text.splitlines()[0] if text else 'MemoryError'}). Lower compute.training_tokens or "
            "compute.sampling_tokens, run fewer jobs at once (--cores), or take a machine with more memory; finished "
            "work is kept."
        )
    number = getattr(error, "errno", None)
    if number is None:  # libraries in other languages give the number as text
        number = next((code for code in _FILE_FAULTS if f"os error {code})" in text or f"Errno {code}]" in text), None)
    if number not in _FILE_FAULTS:
        return None
    place = getattr(error, "filename", None) or text
    return f"{place}: {_FILE_FAULTS[number]}, then run the same command again; finished work is kept."
