"""Where an experiment stands: what is done, in work, out of date or missing, what would run, and why.

Snakemake's own answer is `snakemake -n`. This one needs none of its records, tells how far unfinished work is, and
notices files that were deleted while their manifest stayed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from comlrl_stages.condition import Results, progress_of, work_of, worker_on
from comlrl_stages.errors import UserError
from comlrl_stages.files import beside
from comlrl_stages.jobs import OUTPUTS, Job

DONE, PARTIAL, STALE, MISSING = STATES = ("done", "partial", "stale", "missing")


@dataclass
class Condition:
    """Where one job stands: its state, why, and whether the workflow would run it now."""

    job: Job
    state: str
    why: str
    runs: bool
    follows: bool = False  # runs only because of another


def conditions(results: Results) -> list[Condition]:
    """Where every job stands, in order of execution."""
    found = {job.outputs[0]: _condition(results, job) for job in results.jobs}
    while any([_spread(results, condition, found) for condition in found.values()]):
        pass
    return list(found.values())


def _condition(results: Results, job: Job) -> Condition:
    """Where a job stands, the others left aside."""
    absences = results.absences(job)
    try:
        differences = [] if absences else [str(one) for path in job.outputs for one in results.differences(path)]
        work = _work_in_progress(results, job)
    except UserError as error:
        return Condition(job, MISSING if absences else STALE, str(error), runs=False)
    why = "; ".join(dict.fromkeys(absences or differences))
    runs = bool(differences) or _is_asked_for(results, job)
    if work is not None and (why or work.startswith(_RUNNING)):
        return Condition(job, PARTIAL, work, runs or work.startswith(_RUNNING))
    return Condition(job, MISSING if absences else STALE if differences else DONE, why, runs)


def _is_asked_for(results: Results, job: Job) -> bool:
    """Whether Snakemake misses what `rule all` names of a job: a page, or a manifest; never that of a training log."""
    if job.stage in _PAGES:
        return not (results.root / job.outputs[0] / _PAGES[job.stage]).exists()
    manifests = [beside(results.root / path, "manifest") for path in job.outputs if not path.endswith(_TRAINING_LOG)]
    return not all(manifest.exists() for manifest in manifests)


#: Where the page of these stages lies in their first artifact.
_PAGES = {"report": "report.html", "card": ""}
_TRAINING_LOG = "training_log.parquet"
_RUNNING = "in work"


def _work_in_progress(results: Results, job: Job) -> str | None:
    """How far a job's work in progress is, or None if there is none that would go on."""
    partial = results.root / job.partial
    if (worker := worker_on(partial)) is not None:
        return f"{_RUNNING} ({worker}): {progress_of(partial)}"
    if work_of(partial) and work_of(partial) == results.work_key(job):
        return f"goes on: {progress_of(partial, results.kept_checkpoints(job))}"
    return None


def _spread(results: Results, condition: Condition, found: dict[str, Condition]) -> bool:
    """Let a job run for a job it depends on, or those that it needs run for it; returns whether anything changed."""
    needed = {results.makers[path].outputs[0]: None for path in condition.job.input_paths()}
    inputs = [found[path] for path in needed]
    changed = False
    if not condition.runs and (causes := [one for one in inputs if one.runs]):
        condition.runs = condition.follows = changed = True
        if condition.state == DONE:
            condition.state, condition.why = STALE, f"follows {causes[0].job.title}"
    for one in inputs if condition.runs else ():
        if not one.runs and one.state in (MISSING, PARTIAL):
            one.runs = changed = True
    return changed


def status_text(name: str, found: Sequence[Condition], *, every_artifact: bool) -> Iterator[str]:
    """A table of stages and states, what would run and why, and on demand a line per artifact."""
    running = sum(condition.runs for condition in found)
    yield f"{name}: {len(found)} jobs, {running} would run"
    yield f"  {'stage':<18}" + "".join(f"{state:>9}" for state in STATES)
    for stage in OUTPUTS:
        counts = Counter(condition.state for condition in found if condition.job.stage == stage)
        if counts:
            yield f"  {stage:<18}" + "".join(f"{counts[state] or '-':>9}" for state in STATES)
    yield from (f"  {line}" for line in _reasons(found))
    if every_artifact:
        for condition in found:
            why = f"  ({condition.why})" if condition.why else ""
            yield from (f"  {condition.state:<8} {path}{why}" for path in condition.job.outputs)


def _reasons(found: Sequence[Condition]) -> Iterator[str]:
    """What would run and why, each reason once."""
    because: dict[tuple[str, str], list[Job]] = {}
    for one in found:
        if one.runs and not one.follows and one.state != MISSING:
            because.setdefault((one.job.stage, one.why), []).append(one.job)
    for (stage, why), jobs in because.items():
        yield f"{jobs[0].title if len(jobs) == 1 else f'{stage}, {len(jobs)} jobs'}: {why}"
    missing = [one for one in found if one.runs and one.state == MISSING]
    yield from _counted("not made yet", missing)
    yield from _counted("because of those", [one for one in found if one.follows and one.state != MISSING])
    for one in found:
        if one.state in (MISSING, PARTIAL) and not one.runs:
            path = one.job.outputs[0]
            yield f"{path}: {one.why.rstrip('.')}; nothing needs it now (snakemake --cores all {path} makes it again)"


def _counted(title: str, found: Iterable[Condition]) -> Iterator[str]:
    counts = Counter(one.job.stage for one in found)
    if counts:
        yield f"{title}: {', '.join(f'{stage} {count}' for stage, count in counts.items())}"
