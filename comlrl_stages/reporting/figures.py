"""The charts of the report, drawn with Matplotlib.

Every function takes plain data and returns a `Figure`; `save` writes it as SVG and PNG and returns the SVG for the
page. The files stand alone on white. In the page the colours become CSS variables, so that figures follow the reader's
light or dark theme. Bytes are stable: no date, a fixed salt for element ids, Matplotlib's own font.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from comlrl_stages.learning.calibration import ConfidenceBin
from comlrl_stages.reporting.numbers import estimate, number, percent
from comlrl_stages.reporting.statistics import Estimate
from comlrl_stages.reporting.summary import BASE, TRUNCATED, Result

INK, MUTED, LINE, PAPER = "#1d2126", "#626a73", "#dcdfe3", "#ffffff"
BASE_COLOUR = "#8a919a"
#: Okabe and Ito's palette without its black: apart for colour-blind readers, on light and on dark paper.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "D", "^", "v", "P")
DASHES = ("-", (0, (5, 2)), (0, (1, 1)))
WIDTH = 7.6  # inches; about the text width of the page
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": PAPER,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 8.5,
    "figure.constrained_layout.use": True,
    "figure.facecolor": PAPER,
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",
    "svg.hashsalt": "comlrl_stages",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8,
}
styled = matplotlib.style.context(STYLE, after_reset=True)  # a user's matplotlibrc must not change the bytes

#: The page's name of each colour, so that a figure follows its light or dark theme.
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    LINE: "--line",
    PAPER: "--paper",
    BASE_COLOUR: "--base",
    **{colour: f"--c{index}" for index, colour in enumerate(PALETTE)},
}
_DOTS, _BINS = 1500, 24


@dataclass(frozen=True)
class RewardModelPanels:
    """What is drawn of one reward model: its held-out margins, and scores against true rewards of single responses."""

    title: str
    reliability: Sequence[ConfidenceBin]
    margins: np.ndarray
    scores: np.ndarray
    rewards: np.ndarray


def colours(methods: Sequence[str]) -> dict[str, str]:
    """Return one colour per method, the same in every figure: grey for base, then the palette in order."""
    trained = [method for method in methods if method != BASE]
    chosen = {method: PALETTE[index % len(PALETTE)] for index, method in enumerate(trained)}
    return {method: chosen.get(method, BASE_COLOUR) for method in methods}


def dashes(methods: Sequence[str]) -> dict[str, object]:
    """Return one dash per method, another where a colour comes again."""
    trained = [method for method in methods if method != BASE]
    return {method: DASHES[index // len(PALETTE) % len(DASHES)] for index, method in enumerate(trained)}


@styled
def save(figure: Figure, folder: Path, name: str) -> str:
    """Write `<name>.svg` and `<name>.png` and return the SVG element for the page, its ids made unique by `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    (folder / f"{name}.svg").write_text(text.getvalue(), encoding="utf-8")
    figure.savefig(folder / f"{name}.png", dpi=160, metadata={"Software": None})
    return inline(text.getvalue(), name)


def inline(svg: str, name: str) -> str:
    """Make a stand-alone SVG part of a page: unique ids, theme colours, no metadata, nothing that names a host."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    head = re.sub(r'\s(xmlns(:xlink)?|width|height|version)="[^"]*"', "", head)
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = body.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    return f"{head}>{body}"


@styled
def scores(results: Sequence[Result], quantity: str) -> Figure:
    """Draw each method as a row: the mean with its interval, the IQM with its interval, a dot per seed."""
    figure, axes = _rows([result.method for result in results], 0.6)
    colour = colours([result.method for result in results])
    for row, result in enumerate(results):
        shade = colour[result.method]
        axes.scatter(result.seed_means, np.full(len(result.seed_means), row - 0.27), s=15, color=shade, alpha=0.6)
        _interval(axes, row, result.mean, shade)
        _interval(axes, row + 0.24, result.iqm, shade, marker="D", bold=False)
        _beside(axes, row, estimate(result.mean))
    axes.set_xlabel(f"eval {quantity}")
    _key(figure, {"one seed": (".", INK), "mean": ("o", INK), "IQM": ("D", PAPER)})
    return figure


@styled
def improvement(results: Sequence[Result], methods: Sequence[str]) -> Figure:
    """Draw the probability of improvement over base of each trained method."""
    figure, axes = _rows([result.method for result in results], 0.4)
    colour = colours(methods)
    axes.axvline(0.5, color=MUTED, linewidth=1, linestyle=DASHES[1])
    for row, result in enumerate(results):
        _interval(axes, row, result.improvement, colour[result.method])
        _beside(axes, row, estimate(result.improvement))
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel("probability of improvement over base (0.5: no difference)")
    return figure


@styled
def reward_models(models: Sequence[RewardModelPanels]) -> Figure:
    """Draw each reward model as a row: calibration, margins of held-out pairs, scores against true rewards."""
    figure = Figure(figsize=(WIDTH, 2.2 * len(models)))
    for part, model in zip(figure.subfigures(len(models), 1, squeeze=False).ravel(), models, strict=True):
        part.suptitle(model.title, x=0.012, ha="left", fontsize=8.5)
        calibration, margins, ranks = part.subplots(1, 3)
        _calibration(calibration, model.reliability)
        _margins(margins, model.margins)
        _ranks(ranks, model)
    return figure


@styled
def lengths(responses: pd.DataFrame, methods: Sequence[str]) -> Figure:
    """Draw token counts per method (rows) and agent (columns), and in the last column why responses ended.

    responses: columns method, agent, tokens, finish_reasons, one row per response.
    """
    agents, reasons = sorted(responses["agent"].unique()), sorted(responses["finish_reasons"].unique())
    figure = Figure(figsize=(max(WIDTH, 1.9 * (len(agents) + 1)), 0.6 + 0.85 * len(methods)))
    grid = figure.subplots(len(methods), len(agents) + 1, squeeze=False, sharex="col")
    top = int(responses["tokens"].max()) + 1
    edges = np.unique(np.linspace(0, top, min(_BINS, top) + 1).round())
    colour = colours(methods)
    for row, method in zip(grid, methods, strict=True):
        own = responses[responses["method"] == method]
        for axes, agent in zip(row, agents, strict=False):
            _lengths(axes, own[own["agent"] == agent], edges, colour[method])
        _reasons(row[-1], own["finish_reasons"], reasons, colour[method])
        row[0].set_ylabel(method, rotation=0, ha="right", va="center", labelpad=8)
    for axes, agent in zip(grid[0], agents, strict=False):
        axes.set_title(f"agent_{agent}")
    for axes in grid[-1][:-1]:
        axes.set_xlabel("tokens per response")
    grid[0][-1].set_title("finish reason")
    grid[-1][-1].set_xlabel("share of responses")
    return figure


@styled
def bars(rows: Sequence[tuple[str, float, str]], label: str) -> Figure:
    """Draw named quantities as bars, the first on top; rows: (name, value, how the value is written)."""
    names, values, texts = zip(*rows, strict=True)
    figure = Figure(figsize=(WIDTH, 0.65 + 0.24 * len(names)))
    axes = figure.subplots()
    axes.barh(range(len(values)), values, color=PALETTE[0], height=0.62)
    for row, (value, text) in enumerate(zip(values, texts, strict=True)):
        axes.annotate(text, (value, row), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
    axes.set_xlim(0, max([*values, 1e-9]) * 1.2)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(label)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    return figure


# --- parts --------------------------------------------------------------------------------------------------------


def _rows(names: Sequence[str], height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, 0.8 + height * len(names)))
    axes = figure.subplots()
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.spines["left"].set_visible(False)
    return figure, axes


def _interval(axes: Axes, row: float, found: Estimate, shade: str, *, marker: str = "o", bold: bool = True) -> None:
    axes.plot([found.low, found.high], [row, row], color=shade, linewidth=2.4 if bold else 1.1, solid_capstyle="round")
    face, size = (shade, 6.5) if bold else (PAPER, 4.5)
    axes.plot(found.value, row, marker, color=shade, markerfacecolor=face, markersize=size, zorder=4)


def _beside(axes: Axes, row: float, text: str) -> None:
    axes.annotate(text, (1, row), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center")


def _key(figure: Figure, marks: dict[str, tuple[str, str]]) -> None:
    handles = [
        Line2D([], [], linestyle="", marker=mark, color=INK, markerfacecolor=face, markersize=5 if mark != "." else 7)
        for mark, face in marks.values()
    ]
    figure.legend(handles, marks.keys(), loc="outside upper left", ncols=len(marks), handletextpad=0.2)


def _calibration(axes: Axes, bins: Sequence[ConfidenceBin]) -> None:
    axes.plot([0.5, 1], [0.5, 1], color=MUTED, linewidth=1, linestyle=DASHES[1])
    pairs = np.array([b.pairs for b in bins], dtype=float)
    confidence, accuracy = [b.confidence for b in bins], [b.accuracy for b in bins]
    axes.plot(confidence, accuracy, color=PALETTE[0])
    axes.scatter(confidence, accuracy, s=8 + 60 * pairs / max(pairs.max(initial=0), 1), color=PALETTE[0])
    axes.set_xlim(0.48, 1.02)
    axes.set_xticks([0.5, 0.75, 1])
    axes.set_ylim(-0.05, 1.05)
    axes.set_xlabel("confidence")
    axes.set_ylabel("share right")


def _margins(axes: Axes, margins: np.ndarray) -> None:
    known = margins[np.isfinite(margins)]
    axes.hist(known, bins=_BINS, color=PALETTE[0], edgecolor=PAPER, linewidth=0.4)
    axes.axvline(0, color=MUTED, linewidth=1, linestyle=DASHES[1])
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("margin, winner − loser")
    axes.set_ylabel("pairs")


def _ranks(axes: Axes, model: RewardModelPanels) -> None:
    every = max(1, -(-len(model.scores) // _DOTS))
    axes.scatter(model.rewards[::every], model.scores[::every], s=7, color=PALETTE[0], alpha=0.5, linewidths=0)
    axes.set_xlabel("task reward")
    axes.set_ylabel("score")


def _lengths(axes: Axes, responses: pd.DataFrame, edges: np.ndarray, shade: str) -> None:
    cut = responses["finish_reasons"] == TRUNCATED
    parts = [responses.loc[~cut, "tokens"].to_numpy(dtype=float), responses.loc[cut, "tokens"].to_numpy(dtype=float)]
    axes.hist(parts, bins=edges, stacked=True, color=[shade, INK], edgecolor=PAPER, linewidth=0.4)
    if len(responses):
        axes.annotate(
            f"mean {number(float(responses['tokens'].mean()), 1)}",
            (0.98, 0.94),
            xycoords="axes fraction",
            ha="right",
            va="top",
            fontsize=7.5,
        )
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _reasons(axes: Axes, found: pd.Series, reasons: Sequence[str], shade: str) -> None:
    shares = [float((found == reason).mean()) if len(found) else 0.0 for reason in reasons]
    axes.barh(range(len(reasons)), shares, height=0.6, color=[INK if r == TRUNCATED else shade for r in reasons])
    for row, share in enumerate(shares):
        axes.annotate(percent(share), (share, row), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
    axes.set_yticks(range(len(reasons)), reasons)
    axes.set_ylim(len(reasons) - 0.4, -0.6)
    axes.set_xlim(0, 1.35)
    axes.set_xticks([0, 0.5, 1])
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
