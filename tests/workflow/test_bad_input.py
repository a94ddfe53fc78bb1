"""What users get wrong and what happens to files: each is one message on the terminal that says what to do."""

import json
import re
from pathlib import Path

import pytest

from .conftest import EXPERIMENT, Workflow, make_workflow

pytestmark = pytest.mark.slow
SMALL = ("--config", "experiments=small")
SEED = Path("results/small/seed0")

#: A task whose reward makes the mistake that its parameter names.
TASK = """
import time


def formatters(item):
    return f"Describe {item['place']}."


def reward(first, second, *, batch_items, mistake=None):
    if mistake == "raises":
        raise ValueError(f"cannot judge {batch_items[0]['place']}")
    if mistake == "hangs":
        time.sleep(3600)
    values = {"nan": [float("nan")] * len(first), "too few": [], "text": ["good"] * len(first)}
    return values.get(mistake, [float(len(text)) for text in second])
"""
PLACES = [{"place": place} for place in ("a city", "a cave", "a river", "a garden")]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """An experiment on a task of the user's own, in a folder with a space and an accent, run up to its completions."""
    workflow = make_workflow(tmp_path_factory.mktemp("bad input"))
    workflow.write("tasks/places.py", TASK)
    write_items(workflow, PLACES)
    values = {"task": {"file": "tasks/places.py", "object": None}, "items": "data/places.jsonl"}
    workflow.write_experiment({**EXPERIMENT, **values, "scoring": {"time_limit_s": 1}}, "places")
    workflow.run("results/places/seed0/collections/default/completions.parquet.manifest.json", *places())
    return workflow


def places(**sections: dict) -> tuple[str, str, str]:
    """Arguments that run the experiment with values laid over it."""
    return "--config", "experiments=places", f"override={json.dumps({'experiments': {'places': sections}})}"


def write_items(workflow: Workflow, items: list[dict]) -> None:
    workflow.write("data/places.jsonl", "".join(f"{json.dumps(item)}\n" for item in items))


def told(workflow: Workflow, target: str, *arguments: str) -> str:
    """What a run that must fail says of the mistake; nothing of the package's own code, and nothing is half made."""
    said = workflow.run(target, *arguments, check=False)
    _, found, message = said.partition("error: ")
    assert found and "Traceback (most recent" not in said.partition("error: ")[0], said
    assert not re.search(r'File "[^"]*comlrl_stages/', message), said
    assert not (workflow.folder / target).exists()
    return message


# --- rewards ------------------------------------------------------------------------------------------------------

REWARDS = "results/places/seed0/collections/default/rewards.parquet.manifest.json"
PAIRS = "results/places/seed0/preferences/default/pairs.parquet.manifest.json"


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("too few", "the reward returned 0 results for 1 joint responses. Expected a list with one entry per joint"),
        ("text", "the reward is str"),
        ("raises", r"(?s)the reward failed for \d+ of \d+ joint responses.*ValueError: cannot judge a "),
        ("hangs", r"(?s)the reward failed for \d+ of \d+ joint responses.*timeout.*longer than 1 s"),
    ],
)
def test_a_reward_that_makes_a_mistake_is_told_with_its_item(project: Workflow, mistake: str, message: str) -> None:
    said = told(project, REWARDS, *places(scoring={"parameters": {"mistake": mistake}}))
    assert re.search(message, said), said
    assert re.search(r"item \w+", said), said


def test_rewards_that_are_never_a_number_give_no_pair_and_are_counted(project: Workflow) -> None:
    said = told(project, PAIRS, *places(scoring={"parameters": {"mistake": "nan"}}))
    assert "gives no preference pair; left out: " in said and "look at the rewards" in said
    counts = json.loads((project.folder / REWARDS).read_text(encoding="utf-8"))["counts"]
    assert counts["dropped"] == {"nan": counts["rows"]}


# --- items --------------------------------------------------------------------------------------------------------

SPLIT = "results/places/split/train.parquet.manifest.json"


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"name": item["place"]} for item in PLACES], r"(?s)formatter of agent_0, item \w+ raised.*KeyError: 'place'"),
        (
            [{"task_id": "1", **item} for item in PLACES],
            "data/places.jsonl: items 1 and 2 are different, but both have the task_id 1",
        ),
        ([], "has no items for the train split"),
        ([*PLACES, {"place": "\ud800"}], r"data/places.jsonl, line 5: has half a surrogate pair \('\\ud800'\)"),
    ],
    ids=["missing field", "repeated id", "none", "lone surrogate"],
)
def test_a_mistake_in_the_items_is_told_before_anything_is_sampled(
    project: Workflow, tmp_path: Path, items: list[dict], message: str
) -> None:
    workflow = project.copy(tmp_path / "project")
    write_items(workflow, items)
    said = told(workflow, SPLIT, *places())
    assert re.search(message, said), said


def test_a_prompt_longer_than_the_context_is_told_with_item_and_agent(project: Workflow, tmp_path: Path) -> None:
    workflow = project.copy(tmp_path / "project")
    write_items(workflow, [{"place": "a long road, " * length} for length in (400, 500, 600)])
    target = "results/places/seed0/collections/default/completions.parquet.manifest.json"
    said = told(workflow, target, *places())
    assert re.search(r"item \w+: the prompt of agent_\d has \d+ tokens", said), said
    assert "sampling.overflow to drop" in said


# --- files of the results -----------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def make_older(path: Path) -> None:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**manifest, "schema": 0}), encoding="utf-8")


@pytest.mark.parametrize(
    ("path", "damage", "target", "message"),
    [
        (SEED / "collections/default/rewards.parquet", cut, SEED / "preferences/default/pairs.parquet", "has changed"),
        (
            Path("results/models/tiny/model.safetensors"),
            flip,
            SEED / "methods/madpo/round001/reference_log_probs.parquet",
            "has changed since it was written",
        ),
        (
            SEED / "collections/default/rewards.parquet.manifest.json",
            make_older,
            SEED / "preferences/default/pairs.parquet",
            "written with schema version 0, this version reads 1. Move the old results away",
        ),
    ],
    ids=["corrupt table", "edited model", "older schema"],
)
def test_a_damaged_input_is_named_and_when_it_is_mended_the_run_goes_on(
    finished: Workflow, tmp_path: Path, path: Path, damage: object, target: Path, message: str
) -> None:
    workflow = finished.copy(tmp_path / "project")
    content = (workflow.folder / path).read_bytes()
    damage(workflow.folder / path)
    said = told(workflow, f"{target}.manifest.json", "--force", *SMALL)
    assert message in said and str(path) in said, said
    (workflow.folder / path).write_bytes(content)
    workflow.run(f"{target}.manifest.json", *SMALL)
    assert workflow.manifests() == finished.manifests()
