"""What a field of a task item may hold: what comes back from a file as it was, equal in every process."""

import datetime
import decimal
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from comlrl_stages.errors import UserError

_PLAIN = (str, int, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)
_ADVICE = {
    set: "A set has no order of its own; make it a list with sorted(...)",
    frozenset: "A set has no order of its own; make it a list with sorted(...)",
    bytes: "Decode it to text, or leave the field out",
    bytearray: "Decode it to text, or leave the field out",
    float: "Leave the number out, or make it None",
}


def check_item(item: Mapping[str, Any], number: int, where: str) -> None:
    """Raise UserError, naming the item by `number` (from 1), the key and the type, for a value that cannot be kept.

    Fields hold text, finite numbers, true and false, None, dates and times, and lists and dicts of these.
    """
    found = next((found for name, value in item.items() for found in _unfit(value, name)), None)
    if found is None:
        return
    path, value = found
    advice = next((advice for kind, advice in _ADVICE.items() if isinstance(value, kind)), "Write it as text")
    raise UserError(
        f"{where}: item {number}, key {path}: is {_named(value)}. An item holds text, finite numbers, true and false, "
        f"None, dates and times, and lists and dicts of these. {advice}."
    )


def _unfit(value: Any, path: str) -> list[tuple[str, Any]]:
    """Paths and values inside `value` that no item may hold."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float):
        return [] if math.isfinite(value) else [(path, value)]
    if value is None or isinstance(value, _PLAIN):
        return []
    if isinstance(value, list | tuple):
        return [found for index, inner in enumerate(value) for found in _unfit(inner, f"{path}.{index}")]
    if isinstance(value, Mapping):
        odd = [(f"{path} (a key inside)", key) for key in value if not isinstance(key, str)]
        return odd or [found for key, inner in value.items() for found in _unfit(inner, f"{path}.{key}")]
    return [(path, value)]


def _named(value: Any) -> str:
    kind = type(value).__name__
    return f"the {kind} {value}" if isinstance(value, float) else f"of type {kind} ({value!r:.80})"
