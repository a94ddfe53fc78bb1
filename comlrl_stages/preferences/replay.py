"""Which rounds' pairs train in an iterative method, and in which order.

Rounds weigh equally whatever their size: a weight is the chance that a draw comes from that round, not from a pair.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from comlrl_stages.errors import UserError

Mode = Literal["current", "nearest_k", "all_history", "lambda_decay"]


def replay_weights(mode: Mode, ages: Sequence[int], *, k: int = 1, decay: float = 1.0) -> np.ndarray:
    """Return the weight of each round, (rounds,) float64 with sum 1.

    ages: rounds since each round, 0 is the current one; only rounds that have pairs are given, in any order.
    current: age 0 alone. nearest_k: the k youngest alike. all_history: all alike. lambda_decay: decay^age / sum, which
    for decay 0 is the youngest alone.

    Raises UserError where no round has pairs, or the current one has none in mode `current`.
    """
    ages_array = np.asarray(ages, dtype=np.int64)
    if ages_array.size == 0:
        raise UserError(
            "no round has a preference pair, so there is nothing to train on. Equal rewards give no pair: look at the "
            "drops counted in the manifests of the pairs and sample more candidates."
        )
    youngest = np.sort(ages_array)
    if mode == "current":
        if youngest[0] != 0:
            raise UserError(
                f"the current round has no preference pair; the youngest round that has any is {youngest[0]} rounds "
                "old. Sample more candidates, or choose replay mode 'nearest_k', which takes the last rounds that "
                "have pairs."
            )
        weights = (ages_array == 0).astype(np.float64)
    elif mode == "nearest_k":
        weights = (ages_array <= youngest[min(k, len(youngest)) - 1]).astype(np.float64)
    elif mode == "all_history":
        weights = np.ones(len(ages_array))
    elif mode == "lambda_decay":
        weights = np.power(float(decay), ages_array - youngest[0])
    else:
        raise ValueError(f"unknown replay mode {mode!r}; expected current, nearest_k, all_history or lambda_decay")
    return weights / weights.sum()


def draw(
    sizes: Sequence[int], weights: np.ndarray, draws: int, generator: np.random.Generator
) -> list[tuple[int, int]]:
    """Return `draws` training pairs as (round position, pair index), in training order.

    sizes: pairs of each round; weights: from `replay_weights`, same order. The rounds are drawn by weight; within a
    round pairs do not repeat before all were drawn once (whole shuffled cycles); the union is shuffled.
    """
    counts = generator.multinomial(draws, weights)
    drawn = [
        (position, int(pair))
        for position, (size, count) in enumerate(zip(sizes, counts, strict=True))
        for pair in _cycles(size, int(count), generator)
    ]
    return [drawn[i] for i in generator.permutation(len(drawn))]


def _cycles(size: int, count: int, generator: np.random.Generator) -> np.ndarray:
    if count == 0:
        return np.empty(0, dtype=np.int64)
    cycles = [generator.permutation(size) for _ in range(-(-count // size))]
    return np.concatenate(cycles)[:count]
