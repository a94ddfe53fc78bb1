"""Estimates and their uncertainty: the one statistics module of the project.

Scores stand in arrays whose leading axes are seeds and items. A *cell* is one seed on one item; its score is the mean
of the samples drawn there. Missing scores (a reward that failed) are NaN and are left out, never counted as zero.

Two designs occur, and each has its bootstrap:

- one team, several items, several samples of each item: items are resampled, then samples within each drawn item;
- several seeds on *the same* items: seeds and items are resampled independently of each other and one drawn set of
  items serves all drawn seeds (Owen 2007, "The pigeonhole bootstrap"). Drawing new items for every seed would average
  the difficulty of the items away and give intervals that are too narrow.

Metrics follow Agarwal et al. 2021 ("Deep RL at the edge of the statistical precipice") and Chen et al. 2021 (pass@k).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from comlrl_stages.seeding import stream

Statistic = Callable[[np.ndarray], np.ndarray]

#: A difference as small as this is none: it comes from rounding.
ROUNDING = 1e-12
_CHUNK = 4_000_000  # resampled numbers held at a time; decides memory, and is fixed so that draws are too


@dataclass(frozen=True)
class Estimate:
    """A number and its percentile interval; the interval is NaN where nothing varies that could be resampled."""

    value: float
    low: float
    high: float

    def covers(self, number: float) -> bool:
        """Return whether the interval holds `number`; an unknown interval holds everything."""
        return not (number < self.low or number > self.high)

    @property
    def excludes_zero(self) -> bool:
        """Return whether a difference is established: its interval is known and does not hold 0."""
        return not self.covers(0) and abs(self.value) > ROUNDING


def mean(scores: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis without NaN; NaN where nothing is left."""
    known = ~np.isnan(scores)
    return _divide(np.where(known, scores, 0.0).sum(axis=-1), known.sum(axis=-1))


def iqm(scores: np.ndarray) -> np.ndarray:
    """Return the interquartile mean over the last axis: the mean without the lowest and the highest quarter.

    `floor(n / 4)` of the n known scores are cut at either end, as in `scipy.stats.trim_mean`.
    """
    ordered = np.sort(scores, axis=-1)  # NaN last
    known = (~np.isnan(ordered)).sum(axis=-1, keepdims=True)
    rank, cut = np.arange(ordered.shape[-1]), known // 4
    middle = (rank >= cut) & (rank < known - cut)
    return _divide(np.where(middle, ordered, 0.0).sum(axis=-1), middle.sum(axis=-1))


def optimality_gap(scores: np.ndarray, gamma: float = 1.0) -> np.ndarray:
    """Return how far the scores stay below `gamma` on average; what lies above it earns nothing."""
    return gamma - mean(np.where(np.isnan(scores), np.nan, np.minimum(scores, gamma)))


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the share of pairs in which a score of `x` (..., n) beats one of `y` (..., m); ties count one half."""
    gap = x[..., :, None] - y[..., None, :]
    known = ~np.isnan(gap)
    wins = ((gap > 0) + 0.5 * (gap == 0)).sum(axis=(-2, -1))
    return _divide(wins, known.sum(axis=(-2, -1)))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased chance that k of `samples` joint responses, `correct` of them right, hold a right one.

    1 - C(n - c, k) / C(n, k), as the stable product of Chen et al. 2021.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@k needs k in 1..samples and correct in 0..samples, got {k=}, {samples=}, {correct=}")
    if samples - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - correct + 1, samples + 1)))


def samples_by_item(items: Iterable[str], scores: Iterable[float]) -> tuple[list[str], np.ndarray]:
    """Return the items in the order of their names and their scores (items, samples), NaN where there is none.

    items, scores: one of each for every sample; the samples of an item stay in the order in which they are given.
    """
    grouped: dict[str, list[float]] = {}
    for item, score in zip(items, scores, strict=True):
        grouped.setdefault(item, []).append(score)
    names = sorted(grouped)
    table = np.full((len(names), max(map(len, grouped.values()), default=0)), np.nan)
    for row, name in enumerate(names):
        table[row, : len(grouped[name])] = grouped[name]
    return names, table


def per_token(values: Iterable[float], tokens: Iterable[int]) -> float:
    """Return the mean of `values` with every token weighing alike; NaN without tokens."""
    values, tokens = np.asarray(list(values), dtype=np.float64), np.asarray(list(tokens), dtype=np.float64)
    return float(_divide((values * tokens).sum(), tokens.sum()))


def team_bootstrap(
    scores: np.ndarray, seed: int, *place: str | int, replicates: int = 5000, confidence: float = 0.95
) -> Estimate:
    """Estimate the mean score of one trained team, as its card, its metrics and the report show it.

    scores: (items, samples) of `samples_by_item`. The stream belongs to the team's seed and the `place`, split and
    decoding (and the turn, if it is not about the score of whole episodes): whoever asks gets the same digits.
    """
    draws = stream(seed, "evaluate", "bootstrap", *place)
    return item_bootstrap(scores, draws, replicates=replicates, confidence=confidence)


def item_bootstrap(
    scores: np.ndarray,
    generator: np.random.Generator,
    *,
    statistic: Statistic = mean,
    replicates: int = 5000,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate a statistic of one team's item scores: items are resampled, then the samples of each drawn item.

    Args:
        scores: (items, samples), NaN where a sample has no score.
        generator: source of all draws.
        statistic: maps (..., items) to (...); it is given the mean of each item's samples.
        replicates: number of resampled data sets.
        confidence: mass between the two ends of the interval.
    """
    scores = _shaped(scores, 2)
    items, samples = scores.shape
    packed, known = _known_first(scores)

    def resampled(size: int) -> np.ndarray:
        rows = generator.integers(items, size=(size, items))
        columns = _below(generator.random((*rows.shape, samples)), known[rows][..., None])
        taken = np.where(np.arange(samples) < known[rows][..., None], packed[rows[..., None], columns], np.nan)
        return statistic(mean(taken))

    known_scores = int(known.sum())
    return _bootstrap(statistic(mean(scores)), resampled, scores.size, known_scores, replicates, confidence)


def seed_item_bootstrap(
    scores: np.ndarray,
    generator: np.random.Generator,
    *,
    statistic: Statistic = mean,
    replicates: int = 5000,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate a statistic of cell scores (seeds, items): seeds and items are resampled, crossed.

    `statistic` maps (..., seeds * items) to (...). With one seed the interval speaks of items only.
    """
    scores = _shaped(scores, 2)

    def resampled(size: int) -> np.ndarray:
        seeds, items = _crossed(scores.shape, size, generator)
        taken = scores[seeds[:, :, None], items[:, None, :]]
        return statistic(taken.reshape(size, -1))

    known = int((~np.isnan(scores)).sum())
    return _bootstrap(statistic(scores.ravel()), resampled, scores.size, known, replicates, confidence)


def paired_difference(
    scores: np.ndarray,
    base: np.ndarray,
    generator: np.random.Generator,
    *,
    replicates: int = 5000,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate the mean of `scores - base`, both (seeds, items), paired cell by cell.

    A cell that is missing in either is left out.
    """
    return seed_item_bootstrap(
        _shaped(scores, 2) - _shaped(base, 2), generator, replicates=replicates, confidence=confidence
    )


def improvement_bootstrap(
    scores: np.ndarray,
    base: np.ndarray,
    generator: np.random.Generator,
    *,
    replicates: int = 5000,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate the probability of improvement of `scores` over `base`, both (seeds, items).

    On a random item, how likely is it that a random seed of the one beats a random seed of the other? Seeds of either
    side are resampled on their own, items together.
    """
    scores, base = _shaped(scores, 2), _shaped(base, 2)

    def resampled(size: int) -> np.ndarray:
        seeds, items = _crossed(scores.shape, size, generator)
        other = generator.integers(len(base), size=(size, len(base)))
        won = probability_of_improvement(
            scores.T[items[:, :, None], seeds[:, None, :]], base.T[items[:, :, None], other[:, None, :]]
        )
        return mean(won)

    value = mean(probability_of_improvement(scores.T, base.T))
    pairs = scores.T[:, :, None] - base.T[:, None, :]
    return _bootstrap(value, resampled, pairs.size, int((~np.isnan(pairs)).sum()), replicates, confidence)


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's correlation of two arrays (n,), ties sharing their mean rank; NaN where one is constant."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    known = ~(np.isnan(x) | np.isnan(y))
    ranks = np.stack([_ranks(x[known]), _ranks(y[known])])
    if ranks.shape[1] < 2 or (ranks.std(axis=1) == 0).any():
        return float("nan")
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def _crossed(shape: tuple[int, ...], size: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw for each of `size` replicates seeds (size, seeds) and, independently of them, items (size, items)."""
    seeds, items = shape
    return generator.integers(seeds, size=(size, seeds)), generator.integers(items, size=(size, items))


def _bootstrap(
    value: np.ndarray,
    resampled: Callable[[int], np.ndarray],
    size: int,
    known: int,
    replicates: int,
    confidence: float,
) -> Estimate:
    """Return `value` with the percentile interval of `resampled`, which maps a number of replicates to as many draws.

    size: numbers that one replicate holds in memory. known: scores behind the value; a single one has no interval.
    """
    draws = np.concatenate([resampled(part) for part in _chunks(replicates, size)])
    draws = draws[~np.isnan(draws)]
    if known < 2 or not len(draws):
        return Estimate(float(value), float("nan"), float("nan"))
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(value), float(low), float(high))


def _known_first(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Move the known scores of each row to its front, so that a draw below their number never meets a NaN."""
    missing = np.isnan(scores)
    order = np.argsort(missing, axis=-1, kind="stable")
    return np.take_along_axis(scores, order, axis=-1), (~missing).sum(axis=-1)


def _below(uniform: np.ndarray, bound: np.ndarray) -> np.ndarray:
    return np.minimum((uniform * bound).astype(np.int64), np.maximum(bound - 1, 0))


def _chunks(replicates: int, width: int) -> list[int]:
    """Return how many replicates are drawn at a time."""
    step = max(1, _CHUNK // max(1, width))
    return [min(step, replicates - start) for start in range(0, replicates, step)]


def _shaped(scores: np.ndarray, axes: int) -> np.ndarray:
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != axes or not scores.size:
        raise ValueError(f"expected a filled array with {axes} axes, got shape {scores.shape}")
    return scores


def _divide(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=np.asarray(count) > 0)
