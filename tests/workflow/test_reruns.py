"""What runs again, and what does not, with the rules that ship."""

import os
import shutil
from copy import deepcopy
from pathlib import Path

import pytest

from .conftest import EXPERIMENT, Workflow

pytestmark = pytest.mark.xdist_group("workflow")
SMALL = ("--config", "experiments=small")


@pytest.fixture
def workflow(finished: Workflow, tmp_path: Path) -> Workflow:
    """A copy of the finished project with its own copy of the code, to change as a test likes."""
    code = tmp_path / "code"
    shutil.copytree(finished.code, code)
    return Workflow(finished.copy(tmp_path / "project").folder, code)


def changed(workflow: Workflow, **sections: dict) -> None:
    values = deepcopy(EXPERIMENT)
    for section, change in sections.items():
        if "default" in change:
            values.setdefault(section, {}).setdefault("default", {}).update(change["default"])
        else:
            values.setdefault(section, {}).update(change)
    workflow.write_experiment(values)


def test_a_second_run_does_nothing(finished: Workflow) -> None:
    assert finished.jobs(*SMALL) == {}


def test_touching_every_file_runs_nothing(workflow: Workflow) -> None:
    for root in (workflow.folder, workflow.code):
        for path in root.rglob("*"):
            if ".snakemake" not in path.parts:
                os.utime(path)
    assert workflow.jobs(*SMALL) == {}


def test_comments_and_docstrings_run_nothing(workflow: Workflow) -> None:
    for path in (workflow.code / "comlrl_stages").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(f"# a new comment\n{text}\n# another\n", encoding="utf-8")
    assert workflow.jobs(*SMALL) == {}


def test_pairs_per_task_runs_the_pairs_and_what_follows_and_names_the_key(workflow: Workflow) -> None:
    changed(workflow, preferences={"default": {"pairs_per_task": 2}})
    jobs = workflow.jobs(*SMALL)
    assert {"pair", "replay", "refer", "reward", "optimize", "report"} <= set(jobs)
    assert not {"prepare", "split", "sample", "score"} & set(jobs)
    assert not any("method=base" in wildcards for found in jobs.values() for wildcards in found)
    assert "pair.pairs_per_task=2" in workflow.run("-n", *SMALL)


def test_a_line_of_madpo_runs_the_madpo_branch_alone(workflow: Workflow) -> None:
    path = workflow.code / "comlrl_stages" / "learning" / "madpo.py"
    path.write_text(path.read_text(encoding="utf-8") + "\nNEW_LINE = 1\n", encoding="utf-8")
    jobs = workflow.jobs(*SMALL)
    assert {"optimize", "sample_evaluation", "evaluate", "export", "card", "report"} == set(jobs) - {"all"}
    methods = {wildcards for rule, found in jobs.items() if rule not in ("report", "all") for wildcards in found}
    assert methods and all("method=madpo" in wildcards for wildcards in methods)


def test_a_scoring_parameter_scores_again_and_samples_nothing_of_the_collection(workflow: Workflow) -> None:
    changed(workflow, scoring={"scale": 2.0})
    jobs = workflow.jobs(*SMALL)
    assert "score" in jobs and "evaluate" in jobs
    assert not {"prepare", "split", "sample"} & set(jobs)
    assert not any("method=base" in wildcards for wildcards in jobs["sample_evaluation"])


def test_evaluation_samples_run_the_evaluation_alone(workflow: Workflow) -> None:
    changed(workflow, evaluation={"samples_per_task": 2})
    assert set(workflow.jobs(*SMALL)) - {"all"} == {"sample_evaluation", "evaluate", "card", "report"}


def test_a_runtime_value_runs_nothing(workflow: Workflow) -> None:
    changed(workflow, runtime={"checkpoint_interval": 3, "score_workers": 2})
    assert workflow.jobs(*SMALL) == {}


def test_a_new_seed_runs_its_own_jobs_and_the_report(workflow: Workflow) -> None:
    workflow.write_experiment({**EXPERIMENT, "seeds": [0, 5]})
    jobs = workflow.jobs(*SMALL)
    assert all("seed=5" in wildcards for rule, found in jobs.items() if rule != "report" for wildcards in found)
    assert "report" in jobs and "sample" in jobs


def test_an_intermediate_result_that_a_failed_stage_left_missing_is_made_again(workflow: Workflow) -> None:
    pairs = workflow.folder / "results" / "small" / "seed0" / "preferences" / "default" / "pairs.parquet"
    pairs.unlink()
    pairs.with_name("pairs.parquet.manifest.json").unlink()
    assert {"pair", "replay", "refer", "reward", "optimize", "report"} <= set(workflow.jobs(*SMALL))
