"""The charts of training: what was logged step by step, by phase, by turn, and one reward against the other."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from comlrl_stages.reporting.figures import INK, MUTED, PAPER, WIDTH, colours, dashes, styled
from comlrl_stages.reporting.numbers import number
from comlrl_stages.reporting.training import (
    LEARNED_REWARD,
    TASK_REWARD,
    Rewards,
    of_one_turn,
    of_team,
    of_training,
    validation,
    with_rewards_named,
)

#: What is drawn of training on rewards, in this order.
_OF_REWARDS = {
    TASK_REWARD: "task reward",
    LEARNED_REWARD: "learned reward",
    "kl": "KL to reference, nats/token",
    "value_loss": "value loss",
    "explained_variance": "explained variance",
    "clipped_share": "share of tokens clipped",
}
#: What is drawn of training on pairs; at most a row.
_OF_PAIRS = {"accuracy": "preference accuracy", "margin": "margin", "loss": "loss", "kl": "KL to reference, nats/token"}
#: What is drawn of each turn.
_OF_TURNS = {
    TASK_REWARD: "task reward",
    LEARNED_REWARD: "learned reward",
    "expected_return": "expected return",
    "kl": "KL to reference, nats/token",
}
_ACROSS, _POINTS = 3, 200
_MARKED = 10  # a curve of no more points shows each as a disc; a single one would be invisible without
_LEAST_EXPLAINED = -1.0  # a critic that is only beginning explains less than nothing, without bounds

Kept = Mapping[str, set[tuple[int | None, int]]]


@styled
def learning_curves(logs: pd.DataFrame, methods: Sequence[str], kept: Kept | None = None) -> Figure | None:
    """Draw each phase as a block of panels: the mean over seeds and the range from the lowest to the highest seed.

    logs: columns owner, seed, phase, step, env_step, turn, agent, name, value, with rounds laid end to end. Validation
    on the way is drawn as rings over the curves, as discs where `kept` says that a run kept these weights.
    """
    named = with_rewards_named(logs)
    joint = of_team(of_training(named))
    joint = joint[joint["turn"] == 0]
    by_methods = joint["owner"].isin(list(methods))
    phases = list(dict.fromkeys([*joint.loc[by_methods, "phase"], *joint["phase"]]))
    if not phases:
        return None
    owners = list(dict.fromkeys([*methods, *joint["owner"]]))
    style = {owner: {"color": colours(owners)[owner], "linestyle": dash} for owner, dash in dashes(owners).items()}
    blocks = {phase: _names(joint[joint["phase"] == phase]) for phase in phases}
    lines = [-(-len(names) // _ACROSS) for names in blocks.values()]
    figure = Figure(figsize=(WIDTH, sum(0.3 + 1.65 * count for count in lines)))
    parts = figure.subfigures(len(phases), 1, squeeze=False, height_ratios=[0.3 + 1.65 * count for count in lines])
    validated = of_one_turn(validation(named))
    for part, (phase, names), count in zip(parts.ravel(), blocks.items(), lines, strict=True):
        rows = joint[joint["phase"] == phase]
        _head(part, phase, list(dict.fromkeys(rows["owner"])), style)
        grid = part.subplots(count, _ACROSS, squeeze=False).ravel()
        for axes, name in zip(grid, names, strict=False):
            own = rows[rows["name"] == name]
            _panel(axes, own, style)
            _validated(axes, validated[validated["name"] == name], own["owner"].unique(), style, kept or {})
            axes.set_title(_title(name))
        for axes in grid[len(names) :]:
            axes.set_axis_off()
    return figure


@styled
def turns(logs: pd.DataFrame, methods: Sequence[str], kept: Kept | None = None) -> Figure | None:
    """Draw each method as a row: reward, expected return and KL of every turn against joint responses.

    logs: as for `learning_curves`. Later turns are darker.
    """
    named = with_rewards_named(logs)
    rows, validated = of_team(of_training(named)), validation(named)
    rows = rows[(rows["turn"] > 0) & rows["name"].isin(_OF_TURNS)]
    shown = [method for method in methods if method in set(rows["owner"])]
    if not shown:
        return None
    across = max(len(set(rows.loc[rows["owner"] == method, "name"])) for method in shown)
    figure = Figure(figsize=(WIDTH, 1.95 * len(shown)))
    for part, method in zip(figure.subfigures(len(shown), 1, squeeze=False).ravel(), shown, strict=True):
        part.suptitle(method, x=0.012, ha="left", fontsize=8.5, weight="bold")
        own, own_validated = rows[rows["owner"] == method], validated[validated["owner"] == method]
        grid = part.subplots(1, across, squeeze=False).ravel()
        names = [name for name in _OF_TURNS if name in set(own["name"])]
        for axes, name in zip(grid, names, strict=False):
            chosen = (frame[frame["name"] == name] for frame in (own, own_validated))
            _turns_panel(axes, *chosen, colours(methods)[method], (kept or {}).get(method, set()))
            axes.set_title(_OF_TURNS[name])
        for axes in grid[len(names) :]:
            axes.set_axis_off()
    return figure


@styled
def over_optimisation(found: Sequence[Rewards], methods: Sequence[str], evaluated: Mapping[str, float]) -> Figure:
    """Draw task reward against learned reward along the training of each method, from the ring to the arrow.

    evaluated: the task reward on the eval items by method, a dashed line.
    """
    figure = Figure(figsize=(WIDTH, 0.2 + 2.3 * -(-len(found) // _ACROSS)))
    grid = figure.subplots(-(-len(found) // _ACROSS), _ACROSS, squeeze=False, sharey=True)
    for axes, rewards in zip(grid.ravel(), found, strict=False):
        _course(axes, rewards, colours(methods)[rewards.method], evaluated.get(rewards.method, float("nan")))
    for axes in grid.ravel()[len(found) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("task reward")
    return figure


# --- blocks -------------------------------------------------------------------------------------------------------


def _names(rows: pd.DataFrame) -> list[str]:
    """What is drawn of a phase: what its rows hold that is known, else the first names that they hold."""
    logged = set(rows.loc[rows["value"].notna(), "name"])
    if TASK_REWARD in logged:
        return [name for name in _OF_REWARDS if name in logged]
    return ([name for name in _OF_PAIRS if name in logged] or sorted(logged))[:_ACROSS]


def _title(name: str) -> str:
    return {**_OF_PAIRS, **_OF_REWARDS}.get(name, name)


def _head(part: SubFigure, phase: str, owners: Sequence[str], style: Mapping[str, Mapping[str, object]]) -> None:
    """Say above a block whose curves it holds."""
    part.suptitle(phase, x=0.012, ha="left", fontsize=8.5, weight="bold")
    if list(owners) != [phase]:
        handles = [Line2D([], [], **style[owner]) for owner in owners]
        part.legend(handles, owners, loc="upper right", ncols=len(owners), borderaxespad=0.2, fontsize=8)


# --- panels -------------------------------------------------------------------------------------------------------


def _panel(axes: Axes, rows: pd.DataFrame, style: Mapping[str, Mapping[str, object]]) -> None:
    counted = "env_step" if rows["name"].iloc[0].endswith("reward_mean") and rows["env_step"].max() > 0 else "step"
    for owner, own in rows.groupby("owner", sort=False):
        _curve(axes, own, counted, **style[owner])
    axes.set_xlabel("joint responses" if counted == "env_step" else "step")
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if rows[counted].nunique() == 1:
        axes.set_xticks(rows[counted].unique())
    if rows["name"].iloc[0] == "explained_variance":
        axes.set_ylim(bottom=max(axes.get_ylim()[0], _LEAST_EXPLAINED))


def _curve(axes: Axes, rows: pd.DataFrame, counted: str, **style: object) -> None:
    """Draw one line, its mean over seeds and their range."""
    x, values = _over_seeds(rows, counted)
    known = ~np.isnan(values).all(axis=0)
    x, values = x[known], values[:, known]
    if not len(x):
        return
    if len(values) > 1:
        _range(axes, x, np.nanmin(values, axis=0), np.nanmax(values, axis=0), str(style["color"]))
    axes.plot(x, np.nanmean(values, axis=0), marker="o" if len(x) <= _MARKED else "", markersize=3.5, **style)


def _validated(
    axes: Axes,
    rows: pd.DataFrame,
    owners: Sequence[str],
    style: Mapping[str, Mapping[str, object]],
    kept: Kept,
) -> None:
    for owner in owners:
        _rings(axes, rows[rows["owner"] == owner], str(style[owner]["color"]), kept.get(owner, set()))


def _rings(axes: Axes, rows: pd.DataFrame, shade: str, kept: set[tuple[int | None, int]], **look: object) -> None:
    """Mark the means over seeds of a validation, filled where a seed kept the weights."""
    for env_step, own in rows.groupby("env_step"):
        is_kept = any(place in kept for place in zip(own["seed"], own["step"], strict=True))
        face = shade if is_kept else PAPER
        size = 5.5 if is_kept else 4
        axes.plot(env_step, own["value"].mean(), "o", color=shade, markerfacecolor=face, markersize=size, **look)


def _turns_panel(
    axes: Axes, rows: pd.DataFrame, validated: pd.DataFrame, shade: str, kept: set[tuple[int | None, int]]
) -> None:
    numbers = sorted(rows["turn"].unique())
    for turn, own in rows.groupby("turn"):
        strength = 1.0 if len(numbers) == 1 else 0.45 + 0.55 * numbers.index(turn) / (len(numbers) - 1)
        _curve(axes, own, "env_step", color=shade, alpha=strength, linestyle="-")
        _rings(axes, validated[validated["turn"] == turn], shade, kept, alpha=strength)
        last = own[own["env_step"] == own["env_step"].max()]
        place = (last["env_step"].iloc[0], last["value"].mean())
        axes.annotate(f"turn {turn}", place, (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.margins(x=0.16)
    axes.set_xlabel("joint responses")
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _course(axes: Axes, rewards: Rewards, shade: str, evaluated: float) -> None:
    x, y = rewards.smooth_learned, rewards.smooth_task
    axes.scatter(rewards.learned, rewards.task, s=8, color=shade, alpha=0.45, linewidths=0)
    axes.plot(x, y, color=shade)
    for start in _arrow_places(len(x)):
        arrow = {"arrowstyle": "-|>", "color": shade, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 10}
        axes.annotate("", (x[start + 1], y[start + 1]), (x[start], y[start]), arrowprops=arrow)
    axes.plot(x[0], y[0], "o", color=shade, markerfacecolor=PAPER, markersize=5, zorder=4)
    for place, align in ((0, "top"), (-1, "bottom")):
        offset = (0, -6 if align == "top" else 6)
        axes.annotate(
            f"step {rewards.steps[place]}",
            (x[place], y[place]),
            offset,
            textcoords="offset points",
            ha="center",
            va=align,
            fontsize=7,
        )
    if not np.isnan(evaluated):
        axes.axhline(evaluated, color=MUTED, linewidth=1, linestyle=(0, (5, 2)))
        axes.annotate(
            f"eval {number(evaluated)}",
            (0, evaluated),
            (2, 2),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            fontsize=7,
            color=INK,
        )
    axes.margins(0.14)
    axes.set_title(rewards.method)
    axes.set_xlabel("learned reward")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _arrow_places(points: int) -> list[int]:
    """Where on a course arrows begin: a third, two thirds, and its last step."""
    return sorted({max(0, round(share * (points - 1)) - 1) for share in (1 / 3, 2 / 3, 1)}) if points > 1 else []


def _range(axes: Axes, x: np.ndarray, low: np.ndarray, high: np.ndarray, shade: str) -> None:
    if len(x) > 1:
        axes.fill_between(x, low, high, color=shade, alpha=0.18, linewidth=0)
    else:
        axes.vlines(x, low, high, color=shade, alpha=0.4, linewidth=3)


def _over_seeds(rows: pd.DataFrame, counted: str) -> tuple[np.ndarray, np.ndarray]:
    """Put the curves of all seeds on one axis: x (points,) and values (seeds, points), NaN outside a seed's range."""
    curves = [own.groupby(counted)["value"].mean().dropna() for _, own in rows.groupby("seed", dropna=False)]
    places = np.unique(np.concatenate([curve.index.to_numpy(dtype=float) for curve in curves]))
    if len(places) > _POINTS:
        places = np.linspace(places[0], places[-1], _POINTS)
    values = [
        np.interp(places, curve.index.to_numpy(dtype=float), curve.to_numpy(), left=np.nan, right=np.nan)
        if len(curve)
        else np.full(len(places), np.nan)
        for curve in curves
    ]
    return places, np.array(values)
