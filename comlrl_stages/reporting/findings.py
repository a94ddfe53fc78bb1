"""The reasons to doubt the numbers, each in a sentence."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from comlrl_stages.reporting.numbers import estimate, number, percent, plural
from comlrl_stages.reporting.summary import (
    BASE,
    TRUNCATED,
    Design,
    Result,
    agent_values,
    kl_per_token,
    reported,
)

MOST_ZERO_VARIANCE, MOST_TRUNCATED, LEAST_ACCURACY, MOST_KL = 0.8, 0.2, 0.6, 1.0
#: Algorithms that compare no response with its group: they learn from equal rewards, too.
_NOT_COMPARED = ("mareinforce", "iac", "maac")


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
        *_unscored(evaluation, found),
        *_left_out(found),
        *_unchanged(logs),
        *_flat_groups(logs),
        *_truncated(rows),
        *_weak_reward_models(accuracies),
        *_far_from_reference(rows),
    ]


def _unclear(found: Sequence[Result]) -> Iterable[str]:
    for result in found:
        lead = result.difference
        if lead is None or np.isnan(lead.value) or lead.excludes_zero:
            continue
        why = "has no interval" if np.isnan(lead.low) else "has an interval that holds 0"
        yield (
            f"{result.method}: its difference to base, {estimate(lead, signed=True)}, {why}. "
            "Neither a gain nor a loss is established."
        )


def _missing(evaluation: pd.DataFrame, design: Design) -> Iterable[str]:
    present = set(zip(evaluation["method"], evaluation["seed"], strict=True))
    for method in design.methods:
        absent = [str(seed) for seed in design.seeds if (method, seed) not in present]
        if absent:
            yield f"{method}: no evaluation for seed {', '.join(absent)}. Its numbers rest on the other seeds."


def _unscored(evaluation: pd.DataFrame, found: Sequence[Result]) -> Iterable[str]:
    failed = evaluation[evaluation["reward"].isna()]
    thin = {result.method: int(((result.scored < result.drawn) & result.known).sum()) for result in found}
    for method, rows in failed.groupby("method"):
        total = int((evaluation["method"] == method).sum())
        reasons = ", ".join(f"{count:,} {status}" for status, count in rows["status"].value_counts().items())
        fewer = (
            f" {plural(thin[method], 'cell')} (a seed on an item) rest on fewer samples." if thin.get(method) else ""
        )
        yield (
            f"{method}: {len(rows):,} of {plural(total, 'evaluated joint response')} have no reward ({reasons}). "
            f"They are left out of every mean, not counted as zero.{fewer}"
        )


def _left_out(found: Sequence[Result]) -> Iterable[str]:
    """Count the cells that a comparison with base leaves out, each under one reason."""
    base = next((result for result in found if result.method == BASE), None)
    for result in found if base is not None else ():
        missing = ~(result.known & base.known)
        if result is base or not missing.any():
            continue
        reasons = []
        for one in (result, base):
            for why, cells in (("not evaluated", one.drawn == 0), ("without any reward", one.drawn > 0)):
                count = int((missing & ~one.known & cells).sum())
                reasons += [f"{count:,} {why} for {one.method}"] if count else []
            missing = missing & one.known
        total = result.cells.size
        left_out = int((~(result.known & base.known)).sum())
        yield (
            f"{result.method}: of {plural(total, 'cell')} (a seed on an item) {left_out:,} are left out of its "
            f"comparison with base ({', '.join(reasons)}), which is over the other {total - left_out:,}. "
            "The mean of each method is over all cells that it has itself."
        )


def _unchanged(logs: pd.DataFrame) -> Iterable[str]:
    still = logs[(logs["name"] == "changed_share") & (logs["value"] == 0)]
    for (owner, seed), rows in still.groupby(["owner", "seed"], dropna=False):
        agents = ", ".join(f"agent_{agent:.0f}" for agent in sorted(rows["agent"]))
        yield (
            f"{owner}: training changed no weight of {agents} with seed {seed}, for every gradient was zero. "
            "There it is the untrained team."
        )


def _flat_groups(logs: pd.DataFrame) -> Iterable[str]:
    compared = logs[(logs["name"] == "zero_variance_share") & ~logs["phase"].isin(_NOT_COMPARED)]
    shares = compared.groupby("owner")["value"].mean()
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
