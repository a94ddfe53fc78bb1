"""The commands that look after results, on what the rules that ship have made."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import yaml

from comlrl_stages.condition import Results, read_provenance
from comlrl_stages.jobs import as_list, jobs_of
from comlrl_stages.project import load_project
from comlrl_stages.status import conditions

from .conftest import EXPERIMENT, Workflow

pytestmark = pytest.mark.slow
SMALL = ("--config", "experiments=small")
SEED = "results/small/seed0"
POLICY = f"{SEED}/methods/madpo/round001/policy"


@pytest.fixture
def workflow(finished: Workflow, tmp_path: Path) -> Workflow:
    """A copy of the finished project with a list of its experiments, to change as a test likes."""
    workflow = finished.copy(tmp_path / "project")
    workflow.write("config/config.yaml", "experiments: [small]\n")
    return workflow


def run(workflow: Workflow, *arguments: str) -> tuple[int, str]:
    """Run the command line in the project's folder; return its exit code and output."""
    command = [sys.executable, "-m", "comlrl_stages.cli", *arguments]
    done = subprocess.run(command, **{**workflow.process(), "stderr": subprocess.DEVNULL}, check=False)
    return done.returncode, done.stdout


def results_of(workflow: Workflow) -> Results:
    project = load_project({"experiments": ["small"]}, [workflow.folder / "config"])
    return Results(project, workflow.folder, jobs_of(project))


def dry_run(workflow: Workflow, *arguments: str) -> set[tuple[str, ...]]:
    """The jobs that Snakemake would run: rule and sorted wildcards."""
    found = workflow.jobs(*(arguments or SMALL))
    found.pop("all", None)
    return {(rule, *sorted(wildcards.split(", "))) for rule, jobs in found.items() for wildcards in jobs}


def named(job: object) -> tuple[str, ...]:
    """A job as Snakemake names it."""
    wildcards = {name: value for name, value in vars(job.wildcards).items() if value is not None}
    return (job.stage, *sorted(f"{name}={value}" for name, value in wildcards.items()))


# --- the same jobs as the rules -----------------------------------------------------------------------------------


def test_the_jobs_make_and_read_what_the_rules_made_and_read(finished: Workflow) -> None:
    results = results_of(finished)
    assert {f"{path}.manifest.json" for path in results.makers} == set(finished.manifests())
    for path, job in results.makers.items():
        provenance = read_provenance(finished.folder / path)
        recorded: dict[str, list[str]] = {}
        for given in provenance["inputs"]:
            recorded.setdefault(given["name"], []).append(given["path"])
        assert recorded == {name: as_list(given) for name, given in job.inputs.items() if given}, path
        assert provenance["stage"] == job.stage and provenance["tracked"] == results.tracked(job)


def test_the_jobs_are_those_of_the_rules_for_an_experiment_with_many_names(workflow: Workflow) -> None:
    values = {
        **EXPERIMENT,
        "team": ["tiny", "other"],
        "seeds": [1, 2],
        "collections": {"used": {}, "idle": {}},
        "preferences": {"near": {"collection": "used"}, "far": {"collection": "used"}, "idle": {"collection": "idle"}},
        "reward_models": {"small": {"preferences": "far", "model": "third"}, "idle": {"preferences": "idle"}},
        "methods": {
            "with": {"algorithm": "madpo", "preferences": "near"},
            "without": {"algorithm": "madpo", "preferences": "far", "loss": "simpo", "reference": "none"},
            "marlhf": {"reward_model": "small"},
        },
    }
    workflow.write_experiment(values, "many")
    for name in ("other", "third"):
        workflow.write(f"config/models/{name}.yaml", yaml.safe_dump({"builtin": "tiny", "pretraining_steps": 11}))
    shutil.rmtree(workflow.folder / "results")
    project = load_project({"experiments": ["many"]}, [workflow.folder / "config"])
    assert dry_run(workflow, "--config", "experiments=many") == {named(job) for job in jobs_of(project)}


# --- status says what Snakemake would run -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("preferences", {"default": {"pairs_per_task": 2}}),
        ("evaluation", {"samples_per_task": 2}),
        ("seeds", [0, 5]),
    ],
)
def test_status_names_the_jobs_that_snakemake_would_run(workflow: Workflow, section: str, change: object) -> None:
    values = deepcopy(EXPERIMENT)
    values[section] = {**values[section], **change} if isinstance(change, dict) else change
    workflow.write_experiment(values)
    told = {named(one.job) for one in conditions(results_of(workflow)) if one.runs}
    assert told and told == dry_run(workflow)


@pytest.mark.parametrize(
    ("artifact", "lost"),
    [
        (f"{SEED}/preferences/default/pairs.parquet", ("",)),
        (f"{SEED}/preferences/default/pairs.parquet", ("", ".manifest.json")),
        (f"{SEED}/reward_models/default", ("", ".manifest.json")),
        (f"{SEED}/methods/madpo/evaluation/metrics.json", (".manifest.json",)),
        (f"{SEED}/methods/madpo/round001/training_log.parquet", ("", ".manifest.json")),
        (f"{SEED}/methods/madpo/card.md", (".manifest.json",)),
        (f"{SEED}/methods/madpo/card.md", ("",)),
        ("results/small/report", ("",)),
    ],
)
def test_status_names_the_jobs_that_make_what_is_lost(workflow: Workflow, artifact: str, lost: Sequence[str]) -> None:
    for ending in lost:
        path = workflow.folder / f"{artifact}{ending}"
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert {named(one.job) for one in conditions(results_of(workflow)) if one.runs} == dry_run(workflow)


# --- the commands -------------------------------------------------------------------------------------------------


def test_unchanged_results_are_fine_without_snakemakes_records(workflow: Workflow) -> None:
    shutil.rmtree(workflow.folder / ".snakemake")
    code, said = run(workflow, "verify", "results")
    artifacts = len(workflow.manifests())
    assert (code, said) == (0, f"{artifacts} artifacts: {artifacts} fine\n")
    assert " 0 would run" in run(workflow, "status")[1]
    assert run(workflow, "prune") == (0, "nothing to delete\n")


def test_a_deleted_policy_is_told_by_status_and_made_again_when_asked_for(workflow: Workflow) -> None:
    before = workflow.manifests()
    shutil.rmtree(workflow.folder / POLICY)
    assert dry_run(workflow) == set()
    _, said = run(workflow, "status")
    assert f"nothing needs it now (snakemake --cores all {POLICY} makes it again)" in said
    workflow.run(POLICY, *SMALL)
    assert workflow.manifests() == before and dry_run(workflow) == set()
    assert run(workflow, "verify", "results")[0] == 0


def test_a_refactor_is_accepted_and_runs_nothing(workflow: Workflow, tmp_path: Path) -> None:
    workflow.code = Path(shutil.copytree(workflow.code, tmp_path / "code"))
    before = workflow.manifests()
    for module in ("learning/madpo.py", "teams/tiny.py"):
        path = workflow.code / "comlrl_stages" / module
        path.write_text(path.read_text(encoding="utf-8") + "\nNEW_LINE = 1\n", encoding="utf-8")
    assert {"prepare", "optimize", "report"} <= {job[0] for job in dry_run(workflow)}
    code, said = run(workflow, "verify", "results/small")
    assert code == 1 and f"{POLICY}: is not what the present configuration and code would make\n  code: " in said

    code, said = run(workflow, "accept", "results/small", "-s", str(workflow.code / "Snakefile"))
    assert code == 0 and f"{POLICY}: code: " in said and "results/models/tiny: code: " in said
    assert dry_run(workflow) == set() and workflow.manifests() == before
    assert run(workflow, "verify", "results")[0] == 0
    provenance = json.loads((workflow.folder / f"{POLICY}.provenance.json").read_text(encoding="utf-8"))
    (accepted,) = provenance["accepted_from"]
    assert accepted["differences"]["code"]["accepted"] == provenance["tracked"]["code"]
    assert accepted["differences"]["code"]["recorded"] not in provenance["tracked"].values()


def test_a_changed_setting_is_not_accepted(workflow: Workflow) -> None:
    values = deepcopy(EXPERIMENT)
    values["methods"]["madpo"]["learning_rate"] = 2e-4
    workflow.write_experiment(values)
    jobs = dry_run(workflow)
    assert run(workflow, "accept", "results/small", "-s", str(workflow.code / "Snakefile"))[0] == 1
    assert jobs and dry_run(workflow) == jobs
