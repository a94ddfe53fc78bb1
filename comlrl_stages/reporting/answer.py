"""The answer in plain words: which method scores highest, by how much, and whether that is told apart from chance."""

from collections.abc import Sequence

import numpy as np

from comlrl_stages.reporting.numbers import estimate, plural
from comlrl_stages.reporting.statistics import ROUNDING, Estimate
from comlrl_stages.reporting.summary import BASE, Design, Result, difference, on_common_cells

FEW_SEEDS, FEW_ITEMS = 5, 10
MANY = 4  # so many methods that are not told apart are told with a number each


def headline(found: Sequence[Result], design: Design) -> list[str]:
    """Return the answer as a few sentences, the best method first.

    Methods are ranked over the cells that all of them have, and called apart only where the interval of their
    difference excludes 0.
    """
    scored = [result for result in found if result.known.any()]
    if not scored:
        return ["No eval reward could be computed: every sample failed to score."]
    common = on_common_cells(scored, design)
    if not common[0].known.any():
        return [_nothing_in_common(scored, design)]
    ranked = sorted(common, key=lambda result: -result.mean.value)
    over = _over(ranked[0], design)
    if len(ranked) == 1:
        return [_alone(ranked[0], over, design), _caution(design)]
    leads = [difference(ranked[0], other, design) for other in ranked[1:]]
    rivals = [(other, lead) for other, lead in zip(ranked[1:], leads, strict=True) if not lead.excludes_zero]
    if rivals:
        return [*_tied(ranked[0], rivals, over, design), _caution(design)]
    return [*_first(ranked, leads, over, design), _caution(design)]


def _quantity(design: Design) -> str:
    return f"mean eval {design.quantity}"


def _over(result: Result, design: Design) -> str:
    """Say what the answer is about; `result` stands on the cells that all methods have."""
    if result.known.all():
        return f"over {design.size}"
    return (
        f"over the {result.known.sum():,} of {plural(design.cells, 'cell')} (a seed on an item) in which every method "
        f"has a reward, of {design.size}"
    )


def _nothing_in_common(scored: Sequence[Result], design: Design) -> str:
    means = ", ".join(f"{result.method} {estimate(result.mean)}" for result in scored)
    return (
        "The methods cannot be ranked: in no cell (a seed on an item) do all of them have a reward. "
        f"Each one's {_quantity(design)} over its own cells: {means}."
    )


def _alone(only: Result, over: str, design: Design) -> str:
    name = "The base team" if only.method == BASE else only.method
    return (
        f"{name} has {_quantity(design)} {estimate(only.mean)} {over}. No other method has a reward to compare it with."
    )


def _tied(best: Result, rivals: Sequence[tuple[Result, Estimate]], over: str, design: Design) -> list[str]:
    """Say that the highest means are not told apart; rivals come with the difference of `best` to them."""
    group = [best, *(rival for rival, _ in rivals)]
    if len(group) > MANY:
        return _many_tied(group, rivals[-1][1], over, design)
    names, means = (_listed(texts) for texts in ([r.method for r in group], [estimate(r.mean) for r in group]))
    leads = _listed([f"{estimate(lead, signed=True)} over {rival.method}" for rival, lead in rivals])
    if all(abs(lead.value) < ROUNDING for _, lead in rivals):
        sentences = [f"{names} tie: {_quantity(design)} {means} {over}."]
    elif any(np.isnan(lead.low) for _, lead in rivals):
        sentences = [
            f"{names} cannot be told apart by a single score of each: {_quantity(design)} {means} {over}.",
            f"The lead of {best.method} is {leads}; nothing can be resampled, so it has no interval.",
        ]
    else:
        sentences = [
            f"{names} are not told apart: {_quantity(design)} {means} {over}.",
            f"The lead of {best.method} is {leads}; {'its' if len(rivals) == 1 else 'each'} interval holds 0.",
        ]
    return [*sentences, *_against_base(group)]


def _many_tied(group: Sequence[Result], lead: Estimate, over: str, design: Design) -> list[str]:
    """Say the same of many methods by the ends of their row; lead: the difference of the first to the last."""
    best, last = group[0], group[-1]
    return [
        f"{len(group)} methods are not told apart from the one with the highest mean, {best.method}: "
        f"{_quantity(design)} from {estimate(best.mean)} ({best.method}) to {estimate(last.mean)} ({last.method}) "
        f"{over}.",
        f"They are {_listed([result.method for result in group])}; the lead of {best.method} over {last.method} is "
        f"{estimate(lead, signed=True)}.",
        *_against_base(group),
    ]


def _against_base(group: Sequence[Result]) -> list[str]:
    if any(result.method == BASE for result in group):
        return ["The base team is among them: no gain from training is established."]
    best = group[0]
    if best.difference is None:
        return []
    return [f"The paired difference of {best.method} to base is {estimate(best.difference, signed=True)}."]


def _first(ranked: Sequence[Result], leads: Sequence[Estimate], over: str, design: Design) -> list[str]:
    """Say that the first is apart from all others; `leads` are its differences to them."""
    best, *others = ranked
    sentences = [f"{best.method} scores highest: {_quantity(design)} {estimate(best.mean)} {over}."]
    if best.method == BASE:
        return [*sentences, "No method beats the base team."]
    base = next((result for result in others if result.method == BASE), None)
    if base is not None:
        sentences.append(
            f"The base team scores {estimate(base.mean)}; "
            f"the paired difference is {estimate(best.difference, signed=True)}."
        )
    trained = [(other, lead) for other, lead in zip(others, leads, strict=True) if other is not base]
    if trained:
        second, lead = trained[0]
        sentences.append(
            f"Its lead over the next method, {second.method}, is {estimate(lead, signed=True)}, "
            "which favours this order."
        )
    return sentences


def _listed(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _caution(design: Design) -> str:
    level = f"{100 * design.confidence:g} % bootstrap intervals over {design.resampled}"
    if len(design.seeds) == 1:
        level += " of the one seed, and say nothing of how another seed would do"
    few = [
        plural(n, noun)
        for n, noun, least in ((len(design.seeds), "seed", FEW_SEEDS), (len(design.items), "item", FEW_ITEMS))
        if n < least
    ]
    if not few:
        return f"Brackets are {level}."
    return f"Brackets are {level}; with only {' and '.join(few)} they are rough and tend to be too narrow."
