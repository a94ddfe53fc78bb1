"""What stands on the page: the sections in order, their figures with captions, their tables.

A caption says what is seen, how much data stands behind it and how the interval was computed.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from comlrl_stages.learning import calibration
from comlrl_stages.reporting import answer, cost, diagram, figures, findings, learning, records
from comlrl_stages.reporting.material import Material, RewardModel
from comlrl_stages.reporting.numbers import MISSING, estimate, number, percent, plural
from comlrl_stages.reporting.page import Figure, Page, Section, Table
from comlrl_stages.reporting.responses import sample_responses
from comlrl_stages.reporting.statistics import rank_correlation
from comlrl_stages.reporting.summary import Design, Result, agent_values, method_table, written


def page_of(material: Material) -> Page:
    """Return the whole page."""
    design = material.design
    sections = [
        _results(material),
        *learning.sections(material),
        _reward_models(material),
        _responses(material),
        _cost(material),
        _pipeline(material),
        _dropped(material),
        _seeds(material),
        _provenance(material),
    ]
    note, items = sample_responses(material.evaluation, design)
    return Page(
        title=material.experiment,
        description=material.description,
        headline=answer.headline(material.results, design),
        facts=_facts(material),
        warnings=findings.warnings(
            material.evaluation, material.logs, _accuracies(material.reward_models), material.results, design
        ),
        sections=[section for section in sections if section],
        items=items,
        items_note=_items_note(note, len(items), design),
        variables={m: figures.VARIABLES[colour] for m, colour in figures.colours(design.methods).items()},
    )


def _facts(material: Material) -> list[tuple[str, str]]:
    design = material.design
    return [
        ("methods", f"{len(design.methods)}"),
        ("seeds", ", ".join(str(seed) for seed in design.seeds)),
        ("eval items", f"{len(design.items):,}"),
        ("samples per item", f"{design.samples:,}"),
        ("decoding", design.decoding),
        ("joint responses scored", f"{len(material.evaluation):,}"),
    ]


def _items_note(chosen: str, shown: int, design: Design) -> str:
    return (
        f"Shown is {chosen} for {'all' if shown == len(design.items) else f'the first {shown} of'} "
        f"{plural(len(design.items), 'eval item')}, before training and after, not picked by hand. "
        "It is one draw: read it for style and for errors, not for a ranking."
    )


# --- sections -----------------------------------------------------------------------------------------------------


def _results(material: Material) -> Section:
    design, found = material.design, material.results
    shown = [_scores(material)]
    compared = [result for result in found if result.improvement is not None]
    if compared:
        shown.append(_improvement(material, compared))
    tables = [(f"Methods, over {design.size}", Table(*method_table(found, design)))]
    return Section("results", "Results", figures=shown, tables=tables, tables_first=True)


def _scores(material: Material) -> Figure:
    design, found = material.design, material.results
    quantity = design.quantity
    if len(design.seeds) > 1:
        dots, redrawn = "the dots above are single seeds", "seeds and, crossed with them, items"
    else:
        dots, redrawn = "the dot above is the one seed", "items; with one seed they say nothing of other seeds"
    return material.figure(
        "scores",
        figures.scores(found, quantity),
        "Eval scores. " + "; ".join(f"{r.method} {estimate(r.mean)}" for r in found),
        f"Mean eval {quantity} (disc) and interquartile mean (diamond) over {design.resampled}, "
        f"{100 * design.confidence:g} % intervals; {dots}. {design.size}, {design.decoding}. The intervals are "
        f"percentiles of {design.replicates:,} bootstrap data sets that redraw {redrawn}.",
    )


def _improvement(material: Material, compared: Sequence[Result]) -> Figure:
    design = material.design
    several = len(design.seeds) > 1
    seeds = ("a random seed", "a random seed", "Each seed's") if several else ("the one seed", "that", "Its")
    resampled = "seeds (of either side) and items" if several else "items"
    return material.figure(
        "improvement",
        figures.improvement(compared, design.methods),
        "Probability of improvement over base. " + "; ".join(f"{r.method} {estimate(r.improvement)}" for r in compared),
        f"How likely {seeds[0]} of the method is to beat {seeds[1]} of base on a random eval item, ties counting one "
        f"half. {seeds[2]} score on an item is its mean over {plural(design.samples, 'sample')}. "
        f"{100 * design.confidence:g} % bootstrap intervals over {resampled}. An interval without width says that "
        f"{'every seed' if several else 'it'} won (or lost, or tied) on every item, which few of them cannot tell from "
        "doing so often.",
    )


def _reward_models(material: Material) -> Section | None:
    models = _by_name(material.reward_models)
    if not models:
        return None
    drawing = figures.reward_models([_panels(name, fitted) for name, fitted in models.items()])
    caption = (
        "Pairs of tasks that were kept apart from fitting, all seeds together. Left: how often the model is right at "
        "each confidence (dot area: pairs; dashed: perfect calibration). Middle: margins; left of 0 the model "
        "prefers the loser. Right: its score against the task reward of each response. A tie counts as wrong."
    )
    alt = "Reward model quality. " + "; ".join(
        f"{name} accuracy {percent(a)}" for name, a in _accuracies(material.reward_models).items()
    )
    figure = material.figure("reward_models", drawing, alt, caption)
    table = ("Held-out quality by seed", _quality(material.reward_models))
    return Section("reward-models", "Reward models", figures=[figure], tables=[table])


def _panels(name: str, fitted: Sequence[RewardModel]) -> figures.RewardModelPanels:
    margins = np.concatenate([model.margins for model in fitted])
    held_out = pd.concat([model.held_out for model in fitted])
    scores, rewards = (
        np.concatenate([held_out[f"{side}_{what}"].to_numpy(dtype=float) for side in ("winner", "loser")])
        for what in ("score", "reward")
    )
    each = ", ".join(percent(calibration.accuracy(model.margins)) for model in fitted)
    title = (
        f"{name}: accuracy {percent(calibration.accuracy(margins))}"
        + (f" (seeds {each})" if len(fitted) > 1 else "")
        + f" on {plural(len(margins), 'pair')}; rank correlation with the task reward "
        f"{number(rank_correlation(scores, rewards))}"
    )
    return figures.RewardModelPanels(title, calibration.reliability(margins, bins=5), margins, scores, rewards)


def _quality(models: Iterable[RewardModel]) -> Table:
    names = {
        "held_out_accuracy": "accuracy",
        "held_out_ties": "ties",
        "held_out_loss": "loss",
        "held_out_margin": "mean margin",
        "held_out_brier": "Brier",
        "held_out_ece": "calibration error",
        "held_out_spearman": "rank correlation",
        "training_accuracy": "training accuracy",
    }
    rows = [
        [
            model.name,
            _blank(model.seed),
            number(model.quality.get("before", {}).get("held_out_accuracy")),
            *(number(model.quality.get("after", {}).get(key)) for key in names),
            f"{len(model.margins):,}",
        ]
        for fitted in _by_name(models).values()
        for model in fitted
    ]
    return Table(["reward model", "seed", "accuracy untrained", *names.values(), "held-out pairs"], rows)


def _responses(material: Material) -> Section:
    rows, methods = material.eval_rows, material.design.methods
    unfolded = agent_values(rows, "tokens", "finish_reasons")
    per_agent = len(unfolded) // max(len(methods) * unfolded["agent"].nunique(), 1)
    figure = material.figure(
        "lengths",
        figures.lengths(unfolded, methods),
        "Response lengths. "
        + "; ".join(
            f"{method} agent_{agent} {number(float(own.mean()), 1)} tokens"
            for (method, agent), own in unfolded.groupby(["method", "agent"], sort=False)["tokens"]
        ),
        f"Tokens of each eval response, end-of-text token included, by method and agent; about {per_agent:,} responses "
        "in each panel, all seeds together. Black (white on a dark page): cut at the length limit.",
    )
    return Section("responses", "Responses", figures=[figure])


def _cost(material: Material) -> Section | None:
    """What training and sampling took, as far as it is the same on every machine; the rest is on the page of costs."""
    if not material.records:
        return None
    tokens: dict[str, int] = {}
    for record in material.records:
        tokens[record.stage] = tokens.get(record.stage, 0) + record.tokens
    counted = sorted(((stage, n) for stage, n in tokens.items() if n), key=lambda row: -row[1])
    shown = []
    if counted:
        figure = material.figure(
            "tokens",
            figures.bars([(stage, n, f"{n:,}") for stage, n in counted], "tokens"),
            "Tokens by stage. " + "; ".join(f"{stage} {n:,}" for stage, n in counted),
            f"Tokens by stage, summed over {plural(len(records.runs(material.records)), 'run')}. Shared stages count "
            "once.",
        )
        shown.append(figure)
    lead = (
        "Tokens and environment steps. Wall times, memory and hosts differ between runs of equal results, so they "
        "stand on a page of their own, which the report's manifest does not list:"
    )
    table = (
        "Training, summed over seeds and rounds (env steps: joint responses evaluated)",
        _training(material.summary),
    )
    return Section(
        "cost", "Cost", lead, figures=shown, tables=[table], link=(f"{cost.FOLDER}/{cost.NAME}", "what the stages took")
    )


def _training(summary: pd.DataFrame) -> Table:
    sums = summary.groupby("method", sort=False)[["env_steps", "tokens_trained"]].sum()
    head = ["method", "env steps", "tokens trained on"]
    return Table(head, [[method, f"{row.env_steps:,}", f"{row.tokens_trained:,}"] for method, row in sums.iterrows()])


def _pipeline(material: Material) -> Section | None:
    graph = records.pipeline(material.records)
    if not graph.nodes:
        return None
    figure = material.figure(
        "pipeline",
        diagram.pipeline(graph, material.design.methods),
        "Pipeline. " + "; ".join(f"{n.lane} {n.stage}" for n in graph.nodes.values()),
        "The stages that ran, read from the provenance of the artifacts; an arrow leads from the stage that wrote an "
        "artifact to one that read it (arrows that a longer way implies are left out). × counts runs over seeds and "
        "rounds. What is shared stands in a row of its own.",
    )
    return Section("pipeline", "Pipeline", figures=[figure])


def _dropped(material: Material) -> Section | None:
    if not material.records:
        return None
    rows = [[stage, owner, reason, f"{count:,}"] for stage, owner, reason, count in records.dropped(material.records)]
    if not rows:
        return Section("dropped", "Dropped", "No stage dropped anything: every item, pair and sample was used.")
    table = (
        "Dropped, summed over seeds and rounds",
        Table(["stage", "of", "reason", "count"], rows, frozenset({0, 1, 2})),
    )
    return Section("dropped", "Dropped", "What was left out, and why.", tables=[table])


def _seeds(material: Material) -> Section:
    table = material.summary
    rows = list(zip(*(written(name, table[name]) for name in table.columns), strict=True))
    lead = (
        "One row per method and seed, as in summary.csv and summary.parquet. The intervals here redraw items, then "
        "samples of each drawn item: they speak of one trained team, not of the method."
    )
    head = [name.replace("_", " ") for name in table.columns]
    return Section("seeds", "Every seed", lead, tables=[("Methods and seeds", Table(head, rows))])


def _provenance(material: Material) -> Section | None:
    if not material.records:
        return None
    head = ["artifact", "stage", "seed", "rows", "SHA-256", "settings", "code", "libraries", "resolved"]
    rows = [
        [
            record.name,
            record.stage,
            _blank(record.owner.seed),
            MISSING if record.rows is None else f"{record.rows:,}",
            record.digest,
            record.settings_digest,
            record.code,
            ", ".join(f"{name} {version}" for name, version in record.versions.items()),
            ", ".join(f"{name} {_plain(value)}" for name, value in record.resolved.items()),
        ]
        for record in material.records
    ]
    text = frozenset({0, 1, 4, 5, 6, 7, 8})
    lead = "Beside each artifact lie its full provenance (settings, inputs, versions) and the SHA-256 of every file."
    table = (f"{plural(len(rows), 'artifact')}", Table(head, rows, text))
    return Section("provenance", "Provenance", lead, tables=[table], folded=True)


# --- cells --------------------------------------------------------------------------------------------------------


def _by_name(models: Iterable[RewardModel]) -> dict[str, list[RewardModel]]:
    grouped: dict[str, list[RewardModel]] = {}
    for model in models:
        grouped.setdefault(model.name, []).append(model)
    return grouped


def _accuracies(models: Iterable[RewardModel]) -> dict[str, float]:
    return {
        name: calibration.accuracy(np.concatenate([model.margins for model in fitted]))
        for name, fitted in _by_name(models).items()
    }


def _plain(value: Any) -> str:
    return " ".join(str(part) for part in value) if isinstance(value, list) else str(value)


def _blank(value: object | None) -> str:
    return MISSING if value is None else str(value)
