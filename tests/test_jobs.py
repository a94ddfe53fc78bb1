"""The jobs of a project: what is needed for its reports, in an order in which it can be made."""

import re
from pathlib import Path

import pytest

from comlrl_stages.jobs import OUTPUTS, jobs_of
from comlrl_stages.project import load_project
from comlrl_stages.settings import SETTINGS

ROOT = Path(__file__).parents[1]
EXPERIMENT = """
task: length_ratio
team: [tiny, other]
seeds: [0, 3]
collections: {used: {}, idle: {}}
preferences: {near: {collection: used}, far: {collection: used, min_gap: 0.1}, idle: {collection: idle}}
reward_models: {small: {preferences: far, model: third}, idle: {preferences: idle}}
methods:
  base: {}
  with: {algorithm: madpo, preferences: near}
  without: {algorithm: madpo, preferences: far, loss: simpo, reference: none}
  marlhf: {reward_model: small}
"""


@pytest.fixture
def project(tmp_path):
    for kind, name, text in (
        ("experiments", "mine", EXPERIMENT),
        ("experiments", "base", "task: length_ratio\nteam: tiny\nmethods: [base]\n"),
        *(("models", name, "builtin: tiny\n") for name in ("tiny", "other", "third")),
    ):
        (tmp_path / kind).mkdir(exist_ok=True)
        (tmp_path / kind / f"{name}.yaml").write_text(text)
    return load_project({"experiments": ["mine", "base"]}, [tmp_path])


def wildcards(jobs, stage):
    """The names that tell a stage's jobs of the first seed apart."""
    found = [vars(job.wildcards) for job in jobs if job.stage == stage]
    return [
        [v for k, v in one.items() if k not in ("seed", "experiment")] for one in found if one.get("seed") in (0, None)
    ]


def test_every_stage_has_a_place_for_its_results():
    assert sorted(OUTPUTS) == sorted(["optimize", *SETTINGS])


def test_no_two_jobs_make_the_same_artifact(project):
    paths = [path for job in jobs_of(project) for path in job.outputs]
    assert len(set(paths)) == len(paths) and all(path.startswith("results/") for path in paths)


def test_every_input_is_made_by_an_earlier_job(project):
    made = set()
    for job in jobs_of(project):
        assert set(job.input_paths()) <= made, job.title
        made |= set(job.outputs)


def test_what_no_method_uses_is_no_job(project):
    jobs = jobs_of(project, ["mine"])
    assert wildcards(jobs, "sample") == [["used"]]
    assert wildcards(jobs, "pair") == [["near"], ["far"]]
    assert wildcards(jobs, "reward") == [["small"]]
    assert wildcards(jobs, "replay") == [["with", "001"], ["without", "001"]]
    assert wildcards(jobs, "refer") == [["with", "001"]]


def test_a_model_serves_every_experiment_that_names_it(project):
    named = {name: wildcards(jobs_of(project, [name]), "prepare") for name in ("mine", "base")}
    assert named == {"mine": [["tiny"], ["other"], ["third"]], "base": [["tiny"]]}
    assert wildcards(jobs_of(project), "prepare") == named["mine"]


def test_agents_models_are_inputs_in_actor_order(project):
    (sample, *_) = [job for job in jobs_of(project) if job.stage == "sample"]
    assert sample.inputs["models"] == ["results/models/tiny", "results/models/other"]
    assert sample.partial == "results/mine/seed0/collections/used/completions.parquet.partial"


def test_titles_tell_the_jobs_of_a_stage_apart(project):
    jobs = jobs_of(project, ["mine"])
    titles = [job.title for job in jobs]
    assert len(set(titles)) == len(titles)
    assert {"prepare (tiny)", "split", "optimize (with, seed 3)", "report"} <= set(titles)


def test_the_folders_of_the_results_are_those_that_their_readme_draws():
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    drawn = re.findall(r"^([\w<>/]+/)  ", text, flags=re.MULTILINE)
    names = {"experiment": "<experiment>", "seed": "<s>", "collection": "<c>", "preferences": "<p>"}
    names |= {"reward_model": "<r>", "method": "<m>", "model": "<model>", "round": "<ddd>"}
    for template in (template for templates in OUTPUTS.values() for template in templates):
        path = template.format(**names).removeprefix("results/")
        assert any(path.startswith(folder.rstrip("/")) for folder in drawn), path
