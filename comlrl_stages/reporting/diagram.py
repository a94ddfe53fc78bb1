"""The pipeline as a picture: one lane per owner, stages from left to right in the order of their needs."""

from collections.abc import Collection, Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

from comlrl_stages.reporting.figures import INK, MUTED, PAPER, WIDTH, colours, styled
from comlrl_stages.reporting.records import Node, Pipeline

_BOX = (0.76, 0.64)
_SHARED = ("data", "collection", "preferences", "reward model")

Place = tuple[int, int]


@styled
def pipeline(graph: Pipeline, methods: Sequence[str]) -> Figure:
    """Draw the stages that ran; `methods` gives the order of their lanes and their colours."""
    place = places(graph, methods)
    columns, rows = (1 + max(spot[axis] for spot in place.values()) for axis in (0, 1))
    figure = Figure(figsize=(max(WIDTH, 1.5 + 0.9 * columns), 0.3 + 0.55 * rows))
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-2.1, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    shades = colours(methods)
    for source, target in sorted(direct(graph.edges)):
        share = place[source][1] / max(rows - 1, 1)
        _arrow(axes, way(place[source], place[target], place.values(), share))
    for key, node in graph.nodes.items():
        _box(axes, place[key], node, shades.get(node.lane, MUTED))
    for lane in dict.fromkeys(node.lane for node in graph.nodes.values()):
        row = min(place[key][1] for key, node in graph.nodes.items() if node.lane == lane)
        axes.text(-2.08, row, lane, ha="left", va="center", color=shades.get(lane, INK), weight="bold", fontsize=8)
    return figure


def places(graph: Pipeline, methods: Sequence[str]) -> dict[str, Place]:
    """Return (column, row) of each box: the longest way to it, and its lane; boxes that would meet go a row lower."""
    depth = _depths(graph.nodes, graph.edges)
    reach = _depths(graph.nodes, {(target, source) for source, target in graph.edges})
    lanes = sorted({node.lane for node in graph.nodes.values()}, key=lambda lane: _lane_order(lane, methods))
    place: dict[str, Place] = {}
    row = 0
    for lane in lanes:
        own = sorted(
            (key for key, node in graph.nodes.items() if node.lane == lane),
            key=lambda key: (depth[key], -reach[key], key),
        )
        lowest = row
        for key in own:
            spot = (depth[key], row)
            while spot in place.values():
                spot = (spot[0], spot[1] + 1)
            place[key] = spot
            lowest = max(lowest, spot[1])
        row = lowest + 1
    return place


def direct(edges: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the edges that no longer way replaces (transitive reduction)."""
    edges = set(edges)
    targets: dict[str, set[str]] = {}
    for source, target in edges:
        targets.setdefault(source, set()).add(target)
    implied = {source: _beyond(source, targets) for source in targets}
    return {(source, target) for source, target in edges if target not in implied[source]}


def _beyond(start: str, targets: dict[str, set[str]]) -> set[str]:
    """Return what is reached from `start` in two steps or more."""
    found: set[str] = set()
    waiting = list(targets[start])
    while waiting:
        new = targets.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _depths(nodes: Iterable[str], edges: Iterable[tuple[str, str]]) -> dict[str, int]:
    sources: dict[str, list[str]] = {key: [] for key in nodes}
    for source, target in edges:
        sources[target].append(source)
    depth: dict[str, int] = {}
    waiting = list(sources)
    while waiting:
        ready = [key for key in waiting if all(source in depth for source in sources[key])]
        for key in ready or waiting:
            depth[key] = 1 + max((depth.get(source, -1) for source in sources[key]), default=-1)
        waiting = [key for key in waiting if key not in depth]
    return depth


def _lane_order(lane: str, methods: Sequence[str]) -> tuple[int, int, str]:
    if lane in methods:
        return (1, list(methods).index(lane), lane)
    shared = next((i for i, kind in enumerate(_SHARED) if lane.startswith(kind)), len(_SHARED))
    return (0, shared, lane)


def _arrow(axes: Axes, way: list[tuple[float, float]]) -> None:
    axes.add_patch(
        FancyArrowPatch(
            path=Path(way),
            arrowstyle="-|>",
            mutation_scale=6,
            edgecolor=MUTED,
            facecolor=MUTED,
            linewidth=0.7,
            joinstyle="round",
        )
    )


def way(source: Place, target: Place, taken: Collection[Place], share: float) -> list[tuple[float, float]]:
    """Return the corners of an arrow: it turns right of its source, or left of its target if boxes are in the way.

    `share` (0 to 1) says where in the gap it turns, so that arrows of different sources stay apart. An arrow along its
    own lane passes above the boxes between.
    """
    half, gap = _BOX[0] / 2, 1 - _BOX[0]
    start, end = (source[0] + half, source[1]), (target[0] - half, target[1])
    between = range(source[0] + 1, target[0])
    after, before = start[0] + gap * (0.2 + 0.5 * share), end[0] - gap * (0.35 + 0.3 * share)
    if source[1] == target[1]:
        if not any((column, source[1]) in taken for column in between):
            return [start, end]
        above = source[1] - 0.42
        return [start, (after, source[1]), (after, above), (before, above), (before, target[1]), end]
    turn = after if not any((column, target[1]) in taken for column in between) else before
    return [start, (turn, source[1]), (turn, target[1]), end]


def _box(axes: Axes, spot: Place, node: Node, shade: str) -> None:
    width, height = _BOX
    axes.add_patch(
        FancyBboxPatch(
            (spot[0] - width / 2, spot[1] - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=PAPER,
            edgecolor=shade,
            linewidth=1.1,
            zorder=3,
        )
    )
    lines = [*node.stage.split("_"), *([f"× {node.runs}"] if node.runs > 1 else [])]
    size = 7.5 if len(lines) < 3 else 6.5
    axes.text(*spot, "\n".join(lines), ha="center", va="center", fontsize=size, linespacing=1.05, zorder=4)
