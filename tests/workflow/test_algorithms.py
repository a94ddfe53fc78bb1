"""Several algorithms in one experiment: turns, a central critic, adapters, a learned reward, validation, extension."""

import json
from copy import deepcopy
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from .conftest import Workflow, make_workflow, planned_jobs

pytestmark = pytest.mark.slow
ALL = ("--config", "experiments=algorithms")
METHODS = Path("results/algorithms/seed0/methods")
RETURN = "eval/turn_2/expected_return"
STEADY = {"learning_rate": 1e-4, "generations": 2, "items_per_step": 4, "decay": "constant", "warmup_fraction": 0.0}
EXPERIMENT = {
    "task": "length_ratio_feedback",
    "episode": {"turns": 2, "discount": 0.9},
    "items": {"limit": 10, "validation_fraction": 0.3},
    "team": "tiny",
    "sampling": {"max_new_tokens": 12},
    "collections": {"default": {"candidates": 4}},
    "preferences": {"default": {"pairs_per_task": 3}},
    "reward_models": {"default": {"epochs": 1, "batch_size": 8, "max_length": 250}},
    "methods": {
        "base": {},
        "cross": {
            **STEADY,
            "algorithm": "magrpo",
            "joint_mode": "cross",
            "epochs": 2,
            "eval_interval": 40,
            "eval_num_samples": 2,
            "eval_generations": 2,
            "keep_best": RETURN,
        },
        "maac": {**STEADY, "epochs": 2, "critic_type": "q", "keep_checkpoints": True},
        "adapters": {**STEADY, "algorithm": "magrpo", "epochs": 1, "lora": {"rank": 2, "dropout": 0.1}},
        "marlhf": {**STEADY, "backend": "iac", "critic": "shared", "epochs": 1},
    },
    "evaluation": {"samples_per_task": 2, "bootstrap_replicates": 200},
    "compute": {"sampling_tokens": 4096},
    "runtime": {"checkpoint_interval": 1, "log_seconds": 0},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """The experiment, run from nothing to its report."""
    workflow = make_workflow(tmp_path_factory.mktemp("algorithms"))
    workflow.write_experiment(EXPERIMENT, "algorithms")
    workflow.run(*ALL)
    return workflow


@pytest.fixture
def workflow(project: Workflow, tmp_path: Path) -> Workflow:
    """A copy to change."""
    return project.copy(tmp_path / "project")


def changed(workflow: Workflow, method: str, **keys: object) -> None:
    values = deepcopy(EXPERIMENT)
    values["methods"][method].update(keys)
    workflow.write_experiment(values, "algorithms")


def log_of(workflow: Workflow, method: str) -> list[dict]:
    return pq.read_table(workflow.folder / METHODS / method / "round001/training_log.parquet").to_pylist()


def manifest_of(workflow: Workflow, path: Path) -> dict:
    return json.loads((workflow.folder / f"{path}.manifest.json").read_text(encoding="utf-8"))


def test_every_method_is_trained_evaluated_and_reported(project: Workflow) -> None:
    report = (project.folder / "results/algorithms/report/report.html").read_text(encoding="utf-8")
    for method in EXPERIMENT["methods"]:
        metrics = json.loads((project.folder / METHODS / method / "evaluation/metrics.json").read_text())
        assert metrics and method in report
    for method in ("cross", "maac", "adapters", "marlhf"):
        assert {row["turn"] for row in log_of(project, method)} == {0, 1, 2}
        assert (project.folder / METHODS / method / "export/agent_1/config.json").is_file()


def test_each_method_leaves_what_is_its_own(project: Workflow) -> None:
    def files(method: str, place: str = "round001/policy") -> set[str]:
        folder = project.folder / METHODS / method / place
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors")}

    whole = {f"agent_{agent}/model.safetensors" for agent in (0, 1)}
    heads = {f"agent_{agent}/value_head.safetensors" for agent in (0, 1)}
    critic = {"critics/critic/model.safetensors", "critics/critic/value_head.safetensors"}
    assert files("cross") == whole
    assert files("maac") == files("maac", "export") == whole | critic
    assert files("adapters") == {f"agent_{agent}/adapter_model.safetensors" for agent in (0, 1)}
    assert files("adapters", "export") == whole
    assert files("marlhf") == files("marlhf", "export") == whole | heads


def test_cross_counts_every_combination_of_every_turn(project: Workflow) -> None:
    items = pq.read_table(project.folder / "results/algorithms/split/train.parquet").num_rows
    assert log_of(project, "cross")[-1]["env_step"] == 2 * items * (4 + 4 * 4)


def test_the_best_of_the_validations_is_kept(project: Workflow) -> None:
    rows = [row for row in log_of(project, "cross") if row["phase"] == "validation" and row["name"] == RETURN]
    values = {row["step"]: row["value"] for row in rows}
    assert len(values) >= 3
    best = max(values, key=lambda step: (values[step], -step))
    assert manifest_of(project, METHODS / "cross/round001/policy")["counts"]["best_step"] == best


def test_the_learned_reward_trains_and_the_tasks_is_logged(project: Workflow) -> None:
    assert {"reward_mean", "task_reward_mean", "value_loss"} <= {row["name"] for row in log_of(project, "marlhf")}


def test_a_second_run_does_nothing(project: Workflow) -> None:
    assert project.jobs(*ALL) == {}


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [("maac", "value_coefficient", 0.5), ("adapters", "lora", {"rank": 3})],
)
def test_a_key_of_a_method_runs_that_method_alone(workflow: Workflow, method: str, key: str, value: object) -> None:
    changed(workflow, method, **{key: value})
    said = workflow.run("-n", *ALL)
    jobs = planned_jobs(said)
    assert set(jobs) - {"all"} == {"optimize", "sample_evaluation", "evaluate", "export", "card", "report"}
    of_methods = {wildcards for rule, found in jobs.items() if rule not in ("report", "all") for wildcards in found}
    assert all(f"method={method}" in wildcards for wildcards in of_methods)
    assert f"optimize.{key}" in said


def test_a_kept_run_with_more_epochs_trains_only_those(project: Workflow, workflow: Workflow) -> None:
    before = log_of(project, "maac")
    steps = max(row["step"] for row in before)
    changed(workflow, "maac", epochs=4)
    workflow.run(f"{METHODS}/maac/round001/policy.manifest.json", *ALL)
    log = (workflow.folder / METHODS / "maac/round001/policy.log").read_text(encoding="utf-8")
    executed = [line for line in log.splitlines() if f"/{2 * steps}" in line]
    assert f"{steps}/{2 * steps} kept" in executed[0] and len(executed) == 1 + steps
    after = log_of(workflow, "maac")
    trained = [row for row in before if row["name"] != "changed_share"]
    assert after[: len(trained)] == trained and max(row["step"] for row in after) == 2 * steps


def test_a_second_experiment_goes_on_from_the_export_and_its_critics(workflow: Workflow) -> None:
    export = METHODS / "maac" / "export"
    same = ("task", "episode", "items", "sampling", "evaluation", "compute")
    method = {**STEADY, "algorithm": "maac", "epochs": 1, "critic_type": "q"}
    second = {key: EXPERIMENT[key] for key in same} | {"team": {"model": {"path": str(export)}}}
    workflow.write_experiment({**second, "methods": {"onward": method}}, "second")
    policy = Path("results/second/seed0/methods/onward/round001/policy")
    chosen = ("--config", "experiments=second")
    workflow.run(f"{policy}.manifest.json", *chosen)
    provenance = json.loads((workflow.folder / f"{policy}.provenance.json").read_text(encoding="utf-8"))
    assert json.loads(provenance["tracked"]["optimize.critics"]) == str(export / "critics")
    rows = pq.read_table(workflow.folder / policy.with_name("training_log.parquet")).to_pylist()
    first = {row["name"]: row["value"] for row in rows if (row["step"], row["turn"], row["agent"]) == (1, 0, -1)}
    assert first["kl"] < 1e-6, "the reference is the team that it started from"
    workflow.write_experiment({**second, "methods": {"onward": {**method, "restore_critics": False}}}, "second")
    assert "optimize.critics" in workflow.run("-n", f"{policy}.manifest.json", *chosen)
    workflow.write_experiment({**second, "methods": {"onward": method}}, "second")
    (workflow.folder / export / "critics/critic/critic.json").write_text("{}", encoding="utf-8")
    jobs = workflow.jobs(f"{policy}.manifest.json", *chosen)
    assert set(jobs) == {"optimize"}, "other critics are another run, the agents are the same"
