"""How the report writes numbers: as many digits as their uncertainty supports, and no more."""

import math
from collections.abc import Iterable

from comlrl_stages.reporting.statistics import Estimate

MISSING = "–"


def number(value: float | None, decimals: int | None = None, *, signed: bool = False) -> str:
    """Write a number, by default with about three significant digits; a missing one is a dash."""
    if value is None or math.isnan(value):
        return MISSING
    decimals = _fitting(value) if decimals is None else decimals
    text = f"{value:{'+' if signed else ''},.{decimals}f}"
    zero = not text.strip("+-0.,")
    return text.lstrip("+-") if zero else text.replace("-", "−")


def estimate(found: Estimate | None, *, signed: bool = False) -> str:
    """Write `value [low, high]`, with digits that suit the width of the interval."""
    if found is None or math.isnan(found.value):
        return MISSING
    if math.isnan(found.low):
        return number(found.value, signed=signed)
    decimals = _resolving(found)
    ends = ", ".join(number(end, decimals, signed=signed) for end in (found.low, found.high))
    return f"{number(found.value, decimals, signed=signed)} [{ends}]"


def alike(values: Iterable[float], *, signed: bool = False) -> list[str]:
    """Write the numbers of one column with equally many decimals, those that its largest needs."""
    values = [float(value) for value in values]
    decimals = _fitting(max((abs(value) for value in values if not math.isnan(value)), default=0.0))
    return [number(value, decimals, signed=signed) for value in values]


def percent(share: float | None) -> str:
    """Write a share between 0 and 1 as a percentage."""
    return MISSING if share is None or math.isnan(share) else f"{number(100 * share, 0 if share in (0, 1) else 1)} %"


def duration(seconds: float) -> str:
    """Write seconds as the two largest units that fit."""
    if seconds < 60:
        return f"{number(seconds, 1 if seconds < 10 else 0)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def plural(count: int, noun: str) -> str:
    """Write a count with its noun, `1 seed` or `3 seeds`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _fitting(value: float) -> int:
    size = abs(value)
    if size >= 100 or (size >= 10 and value == round(value)):
        return 0
    return 1 if size >= 10 else 2 if size >= 0.1 or size == 0 else 3


def _resolving(found: Estimate) -> int:
    width = found.high - found.low
    least = _fitting(max(abs(found.value), abs(found.low), abs(found.high), 0.1))
    if width <= 0:
        return least
    decimals = max(least, -math.floor(math.log10(width)))
    nearest = min(abs(found.low), abs(found.high))
    if not found.covers(0) and nearest < 0.5 * 10.0**-decimals:  # an end must not be written as the 0 it excludes
        decimals = -math.floor(math.log10(nearest))
    return min(decimals, 5)
