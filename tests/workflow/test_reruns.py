"""What runs again, and what does not, with the rules that ship."""

import ast
import os
import shutil
from copy import deepcopy
from pathlib import Path

import pytest

from .conftest import EXPERIMENT, Workflow, planned_jobs

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


def plan(workflow: Workflow) -> tuple[dict[str, set[str]], str]:
    """Jobs that would run, without `all`, and what the dry run says of them."""
    said = workflow.run("-n", *SMALL)
    jobs = planned_jobs(said)
    jobs.pop("all", None)
    return jobs, said


def test_a_second_run_does_nothing(finished: Workflow) -> None:
    before = finished.manifests()
    assert "Nothing to be done" in finished.run(*SMALL)
    assert finished.manifests() == before


def test_touching_every_file_runs_nothing(workflow: Workflow) -> None:
    for root in (workflow.folder, workflow.code):
        for path in root.rglob("*"):
            if ".snakemake" not in path.parts:
                os.utime(path)
    assert workflow.jobs(*SMALL) == {}


def test_checking_every_file_out_again_runs_nothing(workflow: Workflow) -> None:
    for root in (workflow.code, workflow.folder / "config"):
        for path in (path for path in root.rglob("*") if path.is_file()):
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
    assert workflow.jobs(*SMALL) == {}


def test_comments_and_docstrings_run_nothing(workflow: Workflow) -> None:
    for path in (workflow.code / "comlrl_stages").rglob("*.py"):
        text = with_other_docstrings(path.read_text(encoding="utf-8"))
        path.write_text(f"# a new comment\n{text}\n# another\n", encoding="utf-8")
    assert workflow.jobs(*SMALL) == {}


def with_other_docstrings(text: str) -> str:
    """Python code whose docstrings, of the module and all that it defines, begin with another word."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
        if is_documented:
            first = node.body[0].lineno - 1
            lines[first] = lines[first].replace('"""', '"""Reworded: ', 1)
    assert "Reworded" in lines[0]
    return "".join(lines)


def test_a_field_of_the_configuration_and_a_line_of_tracking_run_nothing(workflow: Workflow) -> None:
    package = workflow.code / "comlrl_stages"
    text = (package / "config.py").read_text(encoding="utf-8")
    for section in ("Experiment", "Evaluation", "Preferences", "Runtime"):
        before, title, after = text.partition(f"class {section}(Strict):\n")
        docstring, end, fields = after.partition("\n\n")
        text = f'{before}{title}{docstring}{end}    novel: int = Field(3, description="a new key")\n{fields}'
    (package / "config.py").write_text(text, encoding="utf-8")
    with open(package / "tracking.py", "a", encoding="utf-8") as stream:
        stream.write("\nNEW_LINE = 1\n")
    workflow.write_experiment({**EXPERIMENT, "novel": 4, "runtime": {"novel": 5}})
    assert workflow.jobs(*SMALL) == {}


def test_pairs_per_task_runs_the_pairs_and_what_follows_and_names_the_key(workflow: Workflow) -> None:
    changed(workflow, preferences={"default": {"pairs_per_task": 2}})
    jobs, said = plan(workflow)
    assert {"pair", "replay", "refer", "reward", "optimize", "report"} <= set(jobs)
    assert not {"prepare", "split", "sample", "score"} & set(jobs)
    assert not any("method=base" in wildcards for found in jobs.values() for wildcards in found)
    assert "pair.pairs_per_task=2" in said and "pair.pairs_per_task=3" in said


def test_a_line_of_madpo_runs_the_madpo_branch_alone(workflow: Workflow) -> None:
    path = workflow.code / "comlrl_stages" / "learning" / "madpo.py"
    path.write_text(path.read_text(encoding="utf-8") + "\nNEW_LINE = 1\n", encoding="utf-8")
    jobs = workflow.jobs(*SMALL)
    assert {"optimize", "sample_evaluation", "evaluate", "export", "card", "report"} == set(jobs) - {"all"}
    methods = {wildcards for rule, found in jobs.items() if rule not in ("report", "all") for wildcards in found}
    assert methods and all("method=madpo" in wildcards for wildcards in methods)


def test_a_scoring_parameter_scores_again_and_samples_nothing_of_the_collection(workflow: Workflow) -> None:
    changed(workflow, scoring={"scale": 2.0})
    jobs, said = plan(workflow)
    assert "score" in jobs and len(jobs["evaluate"]) == 3
    assert not {"prepare", "split", "sample"} & set(jobs)
    assert not any("method=base" in wildcards for wildcards in jobs["sample_evaluation"])
    assert "score.scale=2.0" in said and "evaluate.scale=2.0" in said


def test_evaluation_samples_run_the_evaluation_alone(workflow: Workflow) -> None:
    changed(workflow, evaluation={"samples_per_task": 2})
    jobs, said = plan(workflow)
    assert set(jobs) == {"sample_evaluation", "evaluate", "card", "report"}
    assert "sample_evaluation.samples_per_task=2" in said


def test_a_runtime_value_runs_nothing(workflow: Workflow) -> None:
    changed(
        workflow,
        runtime={"checkpoint_interval": 3, "score_workers": 2, "log_seconds": 0},
        tracking={"wandb": {"mode": "offline"}},
    )
    assert workflow.jobs(*SMALL) == {}


def test_a_new_seed_runs_its_own_jobs_and_the_report(workflow: Workflow) -> None:
    workflow.write_experiment({**EXPERIMENT, "seeds": [0, 5]})
    jobs = workflow.jobs(*SMALL)
    assert all("seed=5" in wildcards for rule, found in jobs.items() if rule != "report" for wildcards in found)
    assert "report" in jobs and "sample" in jobs


def test_a_new_method_runs_its_own_jobs_and_the_report(workflow: Workflow) -> None:
    changed(workflow, methods={"ipo": {"algorithm": "madpo", "loss": "ipo", "learning_rate": 1e-4}})
    jobs, said = plan(workflow)
    assert set(jobs) == {
        "replay",
        "refer",
        "optimize",
        "sample_evaluation",
        "evaluate",
        "export",
        "card",
        "report",
    }
    assert all("method=ipo" in wildcards for rule, found in jobs.items() if rule != "report" for wildcards in found)
    assert 'report.methods=["base", "ipo", "madpo", "marlhf"]' in said


def test_an_intermediate_result_that_a_failed_stage_left_missing_is_made_again(workflow: Workflow) -> None:
    pairs = workflow.folder / "results" / "small" / "seed0" / "preferences" / "default" / "pairs.parquet"
    pairs.unlink()
    pairs.with_name("pairs.parquet.manifest.json").unlink()
    assert {"pair", "replay", "refer", "reward", "optimize", "report"} <= set(workflow.jobs(*SMALL))
