"""Which of one item's candidates become preference pairs.

Candidates are joint responses with a reward. Of two with different rewards the better is the winner. Every candidate
or pair that is left out is counted under its reason.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Rule = Literal["reward_gap", "random", "all"]
GAP_DECIMALS = 9
LARGEST_GAP = np.finfo(np.float64).max


@dataclass(frozen=True)
class Selection:
    """pairs: (winner, loser) indices of candidates, in order of selection.

    dropped: number left out by reason. nan counts candidates; equal_tokens, tie, small_gap and over_limit count pairs.
    """

    pairs: list[tuple[int, int]]
    dropped: dict[str, int]


def select_pairs(
    rewards: Sequence[float],
    token_keys: Sequence[Hashable],
    *,
    selection: Rule,
    limit: int | None,
    generator: np.random.Generator,
    min_gap: float = 0.0,
) -> Selection:
    """Return the pairs of one item's candidates.

    rewards: one per candidate; one that is not finite drops its candidate. token_keys: equal where all agents' token
    ids are equal; such a pair holds no preference, whatever its rewards. min_gap: smallest reward difference.
    selection: reward_gap takes the largest gaps first and spreads equal gaps evenly over winners and losers; random
    takes any; all takes all, in order of index. `limit` is the largest number of pairs, None for no limit; `all` has
    none by its meaning.
    """
    winners, losers, gaps, dropped = _eligible(np.asarray(rewards, dtype=np.float64), token_keys, min_gap)
    kept = len(gaps) if limit is None or selection == "all" else min(limit, len(gaps))
    if selection == "reward_gap":
        order = _largest_gaps(winners, losers, gaps, kept, generator)
    elif selection == "random":
        order = generator.permutation(len(gaps))[:kept]
    elif selection == "all":
        order = np.arange(kept)
    else:
        raise ValueError(f"unknown selection {selection!r}; expected reward_gap, random or all")
    dropped["over_limit"] = len(gaps) - kept
    return Selection([(int(winners[i]), int(losers[i])) for i in order], dropped)


def _eligible(
    rewards: np.ndarray, token_keys: Sequence[Hashable], min_gap: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, int]]:
    """Return winners, losers and gaps of all pairs that hold a preference, and the counts of those that do not."""
    finite = np.flatnonzero(np.isfinite(rewards))
    number_of = {key: number for number, key in enumerate(dict.fromkeys(token_keys))}
    keys = np.array([number_of[key] for key in token_keys], dtype=np.int64)
    upper, lower = np.triu_indices(len(finite), k=1)
    first, second = finite[upper], finite[lower]
    with np.errstate(over="ignore"):  # gaps beyond the largest float count as equal
        gaps = np.clip(rewards[first] - rewards[second], -LARGEST_GAP, LARGEST_GAP)
    equal = keys[first] == keys[second]
    tie = ~equal & (gaps == 0)
    small = ~equal & ~tie & (np.abs(gaps) < min_gap)
    keep = ~(equal | tie | small)
    first, second, gaps = first[keep], second[keep], gaps[keep]
    dropped = {
        "nan": len(rewards) - len(finite),
        "equal_tokens": int(equal.sum()),
        "tie": int(tie.sum()),
        "small_gap": int(small.sum()),
    }
    return np.where(gaps > 0, first, second), np.where(gaps > 0, second, first), np.abs(gaps), dropped


def _largest_gaps(
    winners: np.ndarray, losers: np.ndarray, gaps: np.ndarray, kept: int, generator: np.random.Generator
) -> list[int]:
    """Return the positions of `kept` pairs, largest gap first; among equal gaps the least used candidates first.

    Gaps count as equal up to a billionth of the largest, so that 0.3 - 0.1 equals 0.4 - 0.2. Without the spreading,
    binary rewards would fill the limit with the pairs of one single winner.
    """
    if kept == 0:
        return []
    levels = np.round(gaps / gaps.max(), GAP_DECIMALS)
    uses = np.zeros((2, max(winners.max(), losers.max()) + 1), dtype=np.int64)
    order: list[int] = []
    for level in np.unique(levels)[::-1]:
        waiting = generator.permutation(np.flatnonzero(levels == level))
        while waiting.size and len(order) < kept:
            position = np.argmin(uses[0, winners[waiting]] + uses[1, losers[waiting]])
            pair = int(waiting[position])
            uses[0, winners[pair]] += 1
            uses[1, losers[pair]] += 1
            order.append(pair)
            waiting = np.delete(waiting, position)
        if len(order) == kept:
            break
    return order
