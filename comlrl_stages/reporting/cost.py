"""The page of costs: how long the stages took, how much memory they held and where they ran.

These numbers differ between runs of equal results. The page is therefore no part of what the report's manifest lists.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from comlrl_stages.reporting import figures, records
from comlrl_stages.reporting.numbers import MISSING, duration, number, plural
from comlrl_stages.reporting.page import Figure, Page, Section, Table
from comlrl_stages.reporting.records import Record

#: Where the page lies, from the report's own page.
FOLDER, NAME = "cost", "cost.html"


def page_of(experiment: str, found: Sequence[Record], folder: Path) -> Page:
    """Return the page of an experiment's records; its figure is saved into `folder`."""
    runs = records.runs(found)
    timed = [run for run in runs if not math.isnan(run.wall_s)]
    total = sum(run.wall_s for run in timed)
    headline = [
        f"All stages together took {duration(total)}, as if one ran after the other: {plural(len(timed), 'run')}.",
        "A stage that several methods share counts once; a run that was killed and resumed counts from its last start.",
    ]
    if len(timed) < len(runs):
        headline.append(f"{plural(len(runs) - len(timed), 'further run')} left no record of the time.")
    hosts = sorted({run.host for run in timed if run.host})
    return Page(
        title=experiment,
        description="",
        headline=headline,
        facts=[("runs", f"{len(runs):,}"), ("hosts", ", ".join(hosts) or MISSING)],
        warnings=[],
        sections=[_by_stage(timed, folder), _every_run(timed)],
        kind="What the stages of an experiment took",
        start="In all",
    )


def _by_stage(timed: Sequence[Record], folder: Path) -> Section:
    lead = (
        "The report's manifest does not list this page: two runs of equal results have equal manifests, but not equal "
        "times. Results, tokens and environment steps stand in"
    )
    seconds = {stage: sum(run.wall_s for run in runs) for stage, runs in _grouped(timed, "stage").items()}
    longest_first = sorted(seconds.items(), key=lambda row: -row[1])
    shown = []
    if timed:
        drawing = figures.bars([(stage, s, duration(s)) for stage, s in longest_first], "wall time, s")
        alt = "Wall time by stage. " + "; ".join(f"{stage} {duration(s)}" for stage, s in longest_first)
        caption = f"Wall time by stage, summed over {plural(len(timed), 'run')}."
        shown.append(Figure("times", figures.save(drawing, folder / "figures", "times"), alt, caption))
    head = ["stage", "of", "runs", "wall time", "longest run", "most memory, MB"]
    rows = [
        [stage, owner, f"{len(runs):,}", *_taken(runs)]
        for stage, of_stage in _grouped(timed, "stage").items()
        for owner, runs in _grouped(of_stage, "owner").items()
    ]
    table = ("Stages, over seeds and rounds", Table(head, rows, frozenset({0, 1})))
    return Section("stages", "By stage", lead, figures=shown, tables=[table], link=("../report.html", "the report"))


def _taken(runs: Sequence[Record]) -> list[str]:
    seconds = [run.wall_s for run in runs]
    return [duration(sum(seconds)), duration(max(seconds)), number(max(run.memory_mb for run in runs), 0)]


def _every_run(timed: Sequence[Record]) -> Section:
    head = ["artifact", "stage", "wall time", "most memory, MB", "host"]
    rows = [[run.name, run.stage, duration(run.wall_s), number(run.memory_mb, 0), run.host] for run in timed]
    table = (plural(len(rows), "run"), Table(head, rows, frozenset({0, 1, 4})))
    return Section("runs", "Every run", tables=[table], folded=True)


def _grouped(runs: Sequence[Record], by: str) -> Mapping[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for run in runs:
        groups.setdefault(str(getattr(run, by)), []).append(run)
    return groups
