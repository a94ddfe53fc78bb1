"""What the numbers say: the answer in plain words, and the reasons to doubt it."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from comlrl_stages.reporting.numbers import estimate, number, percent, plural
from comlrl_stages.reporting.summary import (
    TRUNCATED,
    Design,
    Result,
    agent_values,
    difference,
    kl_per_token,
    reported,
)

FEW_SEEDS, FEW_ITEMS = 5, 10
MOST_ZERO_VARIANCE, MOST_TRUNCATED, LEAST_ACCURACY, MOST_KL = 0.8, 0.2, 0.6, 1.0


def headline(found: Sequence[Result], design: Design) -> list[str]:
    """Return the answer as a few sentences, the best method first."""
    ranked = sorted((r for r in found if not np.isnan(r.mean.value)), key=lambda r: -r.mean.value)
    if not ranked:
        return ["No eval reward could be computed: every sample failed to score."]
    best, quantity = ranked[0], "reward of the last turn" if design.turns > 1 else "reward"
    sentences = [f"{best.method} scores highest: mean eval {quantity} {estimate(best.mean)} over {design.size}."]
    sentences += _against_base(best, ranked)
    sentences += _against_runner_up(ranked, design)
    return [*sentences, _caution(design)]


def warnings(
    evaluation: pd.DataFrame,
    logs: pd.DataFrame,
    accuracies: dict[str, float],
    found: Sequence[Result],
    design: Design,
) -> list[str]:
    """Return every reason for doubt that the data show, one sentence each."""
    rows = reported(evaluation, design)
    return [
        *_unclear(found),
        *_missing(evaluation, design),
        *_unscored(evaluation),
        *_flat_groups(logs),
        *_truncated(rows),
        *_weak_reward_models(accuracies),
        *_far_from_reference(rows),
    ]


def _against_base(best: Result, ranked: Sequence[Result]) -> list[str]:
    base = next((result for result in ranked if result.method == "base"), None)
    if base is None:
        return []
    if best is base:
        return ["No method beats the untrained base team."]
    clear = "" if not best.difference.covers(0) else ", an interval that holds 0: the gain is not established"
    return [
        f"The untrained base team scores {estimate(base.mean)}; "
        f"the paired difference is {estimate(best.difference, signed=True)}{clear}."
    ]


def _against_runner_up(ranked: Sequence[Result], design: Design) -> list[str]:
    others = [result for result in ranked[1:] if result.method != "base"]
    if not others or ranked[0].method == "base":
        return []
    lead = difference(ranked[0], others[0], design)
    verdict = "which holds 0: the two are not told apart" if lead.covers(0) else "which favours this order"
    return [f"Its lead over the next method, {others[0].method}, is {estimate(lead, signed=True)}, {verdict}."]


def _caution(design: Design) -> str:
    level = f"{100 * design.confidence:g} % bootstrap intervals over seeds and items"
    few = [
        plural(n, noun)
        for n, noun, least in ((len(design.seeds), "seed", FEW_SEEDS), (len(design.items), "item", FEW_ITEMS))
        if n < least
    ]
    if not few:
        return f"Brackets are {level}."
    return f"Brackets are {level}; with only {' and '.join(few)} they are rough and tend to be too narrow."


def _unclear(found: Sequence[Result]) -> Iterable[str]:
    for result in found:
        if result.difference is not None and result.difference.covers(0):
            yield (
                f"{result.method}: the interval of its difference to base, "
                f"{estimate(result.difference, signed=True)}, holds 0. Neither a gain nor a loss is established."
            )


def _missing(evaluation: pd.DataFrame, design: Design) -> Iterable[str]:
    present = set(zip(evaluation["method"], evaluation["seed"], strict=True))
    for method in design.methods:
        absent = [str(seed) for seed in design.seeds if (method, seed) not in present]
        if absent:
            yield f"{method}: no evaluation for seed {', '.join(absent)}. Its numbers rest on the other seeds."


def _unscored(evaluation: pd.DataFrame) -> Iterable[str]:
    failed = evaluation[evaluation["reward"].isna()]
    for method, rows in failed.groupby("method"):
        total = int((evaluation["method"] == method).sum())
        reasons = ", ".join(f"{count:,} {status}" for status, count in rows["status"].value_counts().items())
        yield (
            f"{method}: {len(rows):,} of {plural(total, 'evaluated joint response')} have no reward ({reasons}). "
            "They are left out of every mean, not counted as zero."
        )


def _flat_groups(logs: pd.DataFrame) -> Iterable[str]:
    shares = logs[logs["name"] == "zero_variance_share"].groupby("owner")["value"].mean()
    for owner, share in shares[shares > MOST_ZERO_VARIANCE].items():
        yield (
            f"{owner}: in {percent(share)} of the training groups all rewards were equal, so they carried no gradient. "
            "More samples per group, a higher temperature or a finer reward would help."
        )


def _truncated(rows: pd.DataFrame) -> Iterable[str]:
    reasons = agent_values(rows, "finish_reasons")
    shares = (reasons["finish_reasons"] == TRUNCATED).groupby(reasons["method"]).mean()
    for method, share in shares[shares > MOST_TRUNCATED].items():
        yield f"{method}: {percent(share)} of its eval responses ran into the length limit and were cut."


def _weak_reward_models(accuracies: dict[str, float]) -> Iterable[str]:
    for name, accuracy in accuracies.items():
        if accuracy < LEAST_ACCURACY:
            yield (
                f"reward model {name}: held-out accuracy {percent(accuracy)}, near the 50 % of a coin. "
                "What is trained on it follows mostly noise."
            )


def _far_from_reference(rows: pd.DataFrame) -> Iterable[str]:
    for method, own in rows.groupby("method"):
        kl = kl_per_token(own)
        if kl > MOST_KL:
            yield (
                f"{method}: {number(kl)} nats per token away from the reference team. "
                "Read its sample responses below for signs of over-optimisation."
            )
