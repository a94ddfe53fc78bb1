"""How good a reward model's margins are: accuracy with ties apart, Brier score, calibration error.

A margin is score(winner) - score(loser). Plain numpy, so that a report can use it without loading torch.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


def accuracy(margins: ArrayLike) -> float:
    """Return the share of margins above zero. A tie counts as wrong: a constant model has accuracy 0, not 1."""
    return float(np.mean(np.asarray(margins) > 0))


def tie_share(margins: ArrayLike) -> float:
    """Return the share of margins that are exactly zero."""
    return float(np.mean(np.asarray(margins) == 0))


def brier(margins: ArrayLike) -> float:
    """Return the mean of (sigmoid(margin) - 1)^2: the winner did win."""
    return float(np.mean((_sigmoid(margins) - 1.0) ** 2))


@dataclass(frozen=True)
class ConfidenceBin:
    """Pairs whose confidence max(p, 1 - p) lies in one bin: their number, mean confidence and share that was right."""

    pairs: int
    confidence: float
    accuracy: float


def reliability(margins: ArrayLike, bins: int = 10) -> list[ConfidenceBin]:
    """Return the non-empty bins of equal width over the confidence range [0.5, 1].

    Which side of a pair is called the winner is not known to the model, so its probability is folded to the side that
    it favours. A tie favours neither and is half right at confidence 0.5.
    """
    margins = np.asarray(margins, dtype=np.float64)
    confidence = _sigmoid(np.abs(margins))
    right = np.where(margins == 0, 0.5, margins > 0)
    index = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    members = [index == i for i in np.unique(index)]
    return [ConfidenceBin(int(m.sum()), float(confidence[m].mean()), float(right[m].mean())) for m in members]


def expected_calibration_error(margins: ArrayLike, bins: int = 10) -> float:
    """Return the mean over pairs of |share right - mean confidence| of the pair's bin (arXiv 1706.04599)."""
    table = reliability(margins, bins)
    return sum(b.pairs * abs(b.accuracy - b.confidence) for b in table) / sum(b.pairs for b in table)


def _sigmoid(margins: ArrayLike) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * np.asarray(margins, dtype=np.float64)))
