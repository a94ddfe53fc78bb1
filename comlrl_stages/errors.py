"""The one exception that means: the user can mend this; and the hint for a misspelt name."""

import difflib
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
