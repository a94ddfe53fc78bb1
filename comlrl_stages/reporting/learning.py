"""The sections about training: the course of every phase, of every turn, and of a learned reward against the task's."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from comlrl_stages.reporting import curves, statistics, training
from comlrl_stages.reporting.material import Material
from comlrl_stages.reporting.numbers import estimate, number, percent, plural
from comlrl_stages.reporting.page import Section, Table
from comlrl_stages.reporting.statistics import Estimate
from comlrl_stages.reporting.summary import Design, defined
from comlrl_stages.seeding import stream


def sections(material: Material) -> Iterable[Section]:
    """Return what there is to tell of training, in the order of the page."""
    for section in (_turns(material), _learning(material), _over_optimisation(material)):
        if section is not None:
            yield section


# --- every phase --------------------------------------------------------------------------------------------------


def _learning(material: Material) -> Section | None:
    logs, kept = defined(material.logs), training.kept(material.records)
    drawing = curves.learning_curves(logs, material.design.methods, training.kept_places(kept))
    if drawing is None:
        return None
    caption = (
        f"One block per phase of training. {_lines(logs)} Discs are logged steps, where there are few. Rewards are "
        "plotted against joint responses evaluated (env_step), all else against training steps; rounds are laid end to "
        "end. A learned reward has a scale of its own: compare methods by the task reward."
    )
    names = set(logs["name"])
    if "accuracy" in names:
        caption += (
            " Preference accuracy is the share of pairs whose winner is preferred; a tie counts as wrong. It begins "
            "where not every pair ties: before its first update a policy prefers neither side."
        )
    if "explained_variance" in names:
        caption += (
            " Explained variance is 1 for a critic that foretells every target, 0 for one no better than a constant."
        )
    caption += _of_validation(training.of_one_turn(training.validation(logs)), kept)
    figure = material.figure("learning_curves", drawing, _curves_alt(logs), caption)
    tables = [("Weights that were kept", _kept(kept))] if kept else []
    return Section("learning", "Learning", figures=[figure], tables=tables)


def _lines(logs: pd.DataFrame) -> str:
    seeds = logs["seed"].nunique()
    if seeds == 1:
        return "Lines are of the one seed."
    return f"Lines are means over {plural(seeds, 'seed')}, bands reach from the lowest to the highest seed."


def _of_validation(shown: pd.DataFrame, kept: Sequence[training.Kept]) -> str:
    if shown.empty:
        return ""
    filled = "; a large disc in place of one is of a step whose weights a seed kept as its policy" if kept else ""
    return f" Rings are means on the validation items while training{filled}."


def _curves_alt(logs: pd.DataFrame) -> str:
    rows = training.of_team(training.of_training(training.with_rewards_named(logs)))
    parts = [
        f"{owner} {name} from {number(float(own.iloc[0]))} to {number(float(own.iloc[-1]))}"
        for (owner, name), found in rows[rows["turn"] == 0].groupby(["owner", "name"], sort=False)
        if name in (training.TASK_REWARD, training.LEARNED_REWARD, "accuracy")
        and len(own := found.groupby("step")["value"].mean().dropna())
    ]
    return "Learning curves. " + "; ".join(parts)


def _kept(runs: Sequence[training.Kept]) -> Table:
    rows = [[run.method, str(run.seed), f"{run.step:,}", f"{run.steps:,}"] for run in runs]
    return Table(["method", "seed", "best step, kept", "steps run"], rows)


# --- every turn ---------------------------------------------------------------------------------------------------


def _turns(material: Material) -> Section | None:
    design = material.design
    if design.turns == 1:
        return None
    logs, kept, shown = material.logs, training.kept(material.records), []
    drawing = curves.turns(logs, design.methods, training.kept_places(kept))
    if drawing is not None:
        caption = (
            f"Every turn in training, against joint responses evaluated (env_step), later turns darker. {_lines(logs)} "
            "The expected return of a turn is its reward and the discounted rewards that follow, by the reward that is "
            f"trained on.{_of_validation(training.validation(logs), kept)}"
        )
        shown.append(material.figure("turns", drawing, _turns_alt(logs), caption))
    lead = (
        "Eval reward and expected return of each turn. The expected return is the turn's reward and the discounted "
        "rewards of the turns that follow. Played by: the share of episodes that came so far."
    )
    level = f"{100 * design.confidence:g} %"
    head = ["method", "turn", "played by", f"reward [{level}]", f"expected return [{level}]"]
    table = (f"Turns, over {design.size}", Table(head, list(_turn_rows(material))))
    return Section("turns", "Turns", lead, figures=shown, tables=[table], tables_first=True)


def _turn_rows(material: Material) -> Iterable[list[str]]:
    rows, design = material.eval_rows, material.design
    for method in design.methods:
        own = rows[rows["method"] == method]
        episodes = int((own["turn"] == 0).sum())
        for turn, played in own.groupby("turn"):
            found = [_estimated(played, column, design) for column in ("reward", "expected_return")]
            yield [method, str(turn + 1), percent(len(played) / max(episodes, 1)), *map(estimate, found)]


def _estimated(rows: pd.DataFrame, column: str, design: Design) -> Estimate:
    """Mean over seeds and items of one method's numbers at one turn, with the interval that redraws both."""
    means = rows.assign(value=rows[column].astype(float)).groupby(["seed", "task_id"])["value"].mean().unstack()
    cells = means.reindex(index=list(design.seeds), columns=list(design.items)).to_numpy(dtype=float)
    draws = stream(design.seed, "report", rows["method"].iloc[0], column, int(rows["turn"].iloc[0]))
    return statistics.seed_item_bootstrap(cells, draws, replicates=design.replicates, confidence=design.confidence)


def _turns_alt(logs: pd.DataFrame) -> str:
    rows = training.of_training(logs)
    rows = rows[(rows["turn"] > 0) & (rows["name"] == "expected_return")]
    parts = [
        f"{owner} turn {turn} expected return from {number(own.iloc[0])} to {number(own.iloc[-1])}"
        for (owner, turn), found in rows.groupby(["owner", "turn"], sort=False)
        if len(own := found.groupby("step")["value"].mean().dropna())
    ]
    return "Training by turn. " + "; ".join(parts)


# --- learned reward and task reward -------------------------------------------------------------------------------


def _over_optimisation(material: Material) -> Section | None:
    found = training.rewards_of(material.logs, material.design.methods)
    if not found:
        return None
    means = {result.method: result.mean for result in material.results}
    drawing = curves.over_optimisation(
        found, material.design.methods, {method: mean.value for method, mean in means.items()}
    )
    seeds = training.of_training(material.logs)["seed"].nunique()
    caption = (
        f"One point per training step{f', the mean over {seeds} seeds' if seeds > 1 else ''}; the line is a moving "
        "average that runs from the ring to the last arrow. Right is more of the reward that is maximised, up more of "
        "what is wanted. A curve that goes right and down is over-optimisation: the team learns what the reward model "
        "likes and not what it stands for. One that goes right and stays level gains nothing any more. Each step has "
        "other items and new samples, so short bends are noise. The dashed line is the task reward on the eval items, "
        "which are others again, at the end of training."
    )
    alt = "Learned reward and task reward along training. " + "; ".join(
        f"{one.method} learned from {number(one.smooth_learned[0])} to {number(one.smooth_learned[-1])}, "
        f"task from {number(one.smooth_task[0])} to {number(one.smooth_task[-1])}"
        for one in found
    )
    head = [
        "method",
        "learned, first",
        "learned, last",
        "task, first",
        "task, highest",
        "at step",
        "task, last",
        "task reward on eval items",
    ]
    rows = [[*_course(one), estimate(means[one.method])] for one in found]
    table = (f"Rewards in training, as moving averages over {plural(found[0].window, 'step')}", Table(head, rows))
    figure = material.figure("over_optimisation", drawing, alt, caption)
    return Section("over-optimisation", "Over-optimisation", figures=[figure], tables=[table])


def _course(one: training.Rewards) -> list[str]:
    highest = int(np.argmax(one.smooth_task))
    task = [number(one.smooth_task[place]) for place in (0, highest, -1)]
    learned = [number(one.smooth_learned[place]) for place in (0, -1)]
    return [one.method, *learned, *task[:2], f"{one.steps[highest]:,}", task[2]]
