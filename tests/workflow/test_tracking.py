"""The workflow with W&B turned on: nothing runs for it, no byte differs, and what runs is recorded."""

import pytest

from ..wandb_records import RunRecord
from .conftest import EXPERIMENT, Workflow

pytestmark = pytest.mark.slow
SMALL = ("--config", "experiments=small")
KEY = "fedcba9876543210fedcba9876543210fedcba98"
TRACKING = {"wandb": {"mode": "offline", "project": "the teams", "name": "mine", "tags": ["it's {one}", "two"]}}


@pytest.fixture(scope="module")
def tracked(finished: Workflow, tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """The finished experiment, tracking turned on, with training and evaluation run again."""
    workflow = finished.copy(tmp_path_factory.mktemp("tracking") / "project")
    workflow.write_experiment({**EXPERIMENT, "tracking": TRACKING})
    assert workflow.jobs(*SMALL) == {}
    process = workflow.process()
    places = {name: workflow.folder.parent / name.lower() for name in ("HOME", "TMPDIR")}
    for place in places.values():
        place.mkdir()
    environment = {**process["env"], **{name: str(place) for name, place in places.items()}, "WANDB_API_KEY": KEY}
    workflow.process = lambda: {**process, "env": environment}
    workflow.run(*SMALL, "--forcerun", "reward", "--until", "evaluate")
    return workflow


def runs_of(workflow: Workflow, stage: str) -> dict[str, RunRecord]:
    records = RunRecord.all_below(workflow.folder / "results" / "small" / "wandb")
    return {record.run.display_name: record for record in records if record.run.job_type == stage}


def test_turning_it_on_runs_nothing_and_changes_no_byte(finished: Workflow, tracked: Workflow) -> None:
    assert tracked.manifests() == finished.manifests()


def test_each_training_and_evaluation_is_a_run_in_the_group_of_the_experiment(tracked: Workflow) -> None:
    (reward,) = runs_of(tracked, "reward").items()
    (optimize,) = runs_of(tracked, "optimize").items()
    (evaluate,) = runs_of(tracked, "evaluate").items()
    named = {"reward-default": reward, "optimize-marlhf": optimize, "evaluate-marlhf": evaluate}
    for name, (found, record) in named.items():
        assert found == f"mine-{name}-seed0" and record.exit_code == 0
        assert (record.run.run_group, record.run.project) == ("small", "the teams")
        assert list(record.run.tags) == TRACKING["wandb"]["tags"]


def test_the_runs_hold_the_numbers_and_the_lineage(tracked: Workflow) -> None:
    (reward,) = runs_of(tracked, "reward").values()
    (optimize,) = runs_of(tracked, "optimize").values()
    (evaluate,) = runs_of(tracked, "evaluate").values()
    assert reward.axes == {"*": "step"} and reward.steps == list(range(len(reward.steps)))
    assert "held_out_accuracy" in reward.history[0] and "held_out_accuracy" in reward.history[-1]
    assert optimize.axes == {"*": "env_step"} and optimize.steps == list(range(1, len(optimize.steps) + 1))
    assert {"turn_1/reward_mean", "turn_1/expected_return", "agent_1/entropy"} <= set(optimize.history[0])
    assert {"eval/turn_1/reward_mean", "eval/turn_1/expected_return"} <= set(evaluate.history[0])
    made = reward.artifacts(used=False)["small-seed0-reward_models-default"]
    assert optimize.artifacts(used=True)["small-seed0-reward_models-default"] == made
    assert optimize.config["kl_coefficient"] == 0.05 and "code" in optimize.config["work"]["provenance"]


def test_the_api_key_is_in_no_file(tracked: Workflow) -> None:
    files = [path for path in tracked.folder.parent.rglob("*") if path.is_file()]
    assert len(files) > 50
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_the_client_writes_below_the_results_alone(tracked: Workflow) -> None:
    found = [path.relative_to(tracked.folder.parent).as_posix() for path in tracked.folder.parent.rglob("*wandb*")]
    assert [path for path in found if not path.startswith(f"{tracked.folder.name}/results/small/wandb")] == []
    assert f"{tracked.folder.name}/results/small/wandb" in found
