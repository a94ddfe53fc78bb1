"""The training loop: validation on the way, the best weights, early stopping, and runs that are extended."""

import pytest
import torch

from comlrl_stages.errors import UserError
from comlrl_stages.teams.loading import load_model

from .conftest import counting_characters, counts_of, files_of, rows_of

JOINT = -1
RETURN = "eval/turn_1/expected_return"
#: Two steps per epoch, of six joint responses each.
VALIDATED = {"eval_interval": 6, "eval_num_samples": 2, "eval_generations": 2}


def validation_of(outputs):
    """Values of the validation's metrics as {(step, name): value}."""
    rows = rows_of(outputs["training_log"])
    return {(row["step"], row["name"]): row["value"] for row in rows if row["phase"] == "validation"}


def training_of(outputs):
    return [row for row in rows_of(outputs["training_log"]) if row["phase"] != "validation"]


def weights_of(outputs):
    return load_model(outputs["policy"] / "agent_0").model.state_dict()


@pytest.fixture(scope="module")
def validated(mixed):
    """Inputs with validation items."""
    return {"validation": mixed.eval}


def test_validation_measures_before_training_and_after_every_interval(mixed, validated, tmp_path):
    made = mixed.reinforce(tmp_path, inputs=validated, epochs=2, **{**VALIDATED, "eval_interval": 12})
    measured = validation_of(made)
    assert {step for step, _ in measured} == {0, 2, 4}
    assert {name for _, name in measured} >= {"eval/turn_1/reward_mean", RETURN}


def test_validation_changes_nothing_in_training(mixed, validated, tmp_path):
    with_validation = mixed.reinforce(tmp_path / "with", inputs=validated, epochs=2, **VALIDATED)
    without = mixed.reinforce(tmp_path / "without", epochs=2)
    assert training_of(with_validation) == training_of(without)
    assert files_of(with_validation["policy"]) == files_of(without["policy"])


def test_the_best_weights_are_kept(mixed, validated, tmp_path):
    given = {**VALIDATED, "learning_rate": 3e-2, "epochs": 3}
    kept = mixed.reinforce(tmp_path / "kept", inputs=validated, keep_best=RETURN, **given)
    values = {step: value for (step, name), value in validation_of(kept).items() if name == RETURN}
    best = max(values, key=lambda step: (values[step], -step))
    assert counts_of(kept["policy"])["best_step"] == best
    assert len(set(values.values())) > 1, "nothing to choose from"
    last = mixed.reinforce(tmp_path / "last", inputs=validated, **given)
    same = all(torch.equal(one, weights_of(last)[name]) for name, one in weights_of(kept).items())
    assert same == (best == max(values))


def test_training_stops_where_nothing_improves_and_says_so(mixed, validated, tmp_path, capsys):
    given = {**VALIDATED, "learning_rate": 1e-7, "epochs": 6}
    made = mixed.reinforce(tmp_path, inputs=validated, keep_best=RETURN, patience=2, **given)
    steps = {step for step, _ in validation_of(made)}
    assert steps == {0, 1, 2}, "weights that hardly move give the same validation, so the second in a row is the last"
    assert counts_of(made["policy"])["steps"] == 2
    told = capsys.readouterr().err
    assert "stopped after step 2: 2 validations in a row" in told and "kept: the untrained team" in told


def test_an_unknown_metric_is_an_error_that_names_those_there_are(mixed, validated, tmp_path):
    with pytest.raises(UserError, match=r"keep_best: there is no metric 'eval/nothing'.*eval/turn_1/reward_mean"):
        mixed.reinforce(tmp_path, inputs=validated, keep_best="eval/nothing", **VALIDATED)


@pytest.mark.parametrize("stop_after", [2, 4, 5])
def test_a_killed_run_keeps_the_same_best_and_the_same_bytes(mixed, validated, tmp_path, stop_after):
    given = {**VALIDATED, "learning_rate": 3e-2, "epochs": 3, "keep_best": RETURN, "inputs": validated}
    whole = mixed.reinforce(tmp_path / "whole", checkpoint_interval=50, **given)
    with pytest.raises(KeyboardInterrupt):
        mixed.reinforce(tmp_path / "killed", stop_after=stop_after, checkpoint_interval=3, **given)
    resumed = mixed.reinforce(tmp_path / "killed", checkpoint_interval=3, **given)
    assert files_of(*resumed.values()) == files_of(*whole.values())


def test_a_finished_run_is_extended_without_training_again(mixed, tmp_path, capfd):
    kept = {"runtime": {"keep_checkpoints": True, "log_seconds": 0.0}}
    mixed.reinforce(tmp_path / "run", epochs=1, **kept)
    capfd.readouterr()
    longer = mixed.reinforce(tmp_path / "run", epochs=3, **kept)
    assert "2/6" in capfd.readouterr().err.splitlines()[0], "the two steps of the first epoch are there already"
    afresh = mixed.reinforce(tmp_path / "afresh", epochs=3)
    assert files_of(*longer.values()) == files_of(*afresh.values())


def test_a_killed_run_that_is_cut_short_keeps_the_best_of_the_steps_it_has(mixed, validated, tmp_path):
    """The best weights of a step that is not among them any more are on disk, and not taken."""
    given = {**VALIDATED, "inputs": validated, "keep_best": RETURN, "learning_rate": 5e-3, "generations": 8}
    given |= {"task": counting_characters(tmp_path), "eval_interval": 16, "kl_coefficient": 0.0}
    kept = {"runtime": {"keep_checkpoints": True}, "checkpoint_interval": 2}
    with pytest.raises(KeyboardInterrupt):
        mixed.reinforce(tmp_path / "run", epochs=3, stop_after=5, **given, **kept)
    best = {path.name for path in tmp_path.glob("run/*.checkpoints/*/best/step_*")}
    assert best == {"step_00000004", "step_00000005"}
    shorter = mixed.reinforce(tmp_path / "run", epochs=2, **given, **kept)
    afresh = mixed.reinforce(tmp_path / "afresh", epochs=2, **given)
    assert files_of(*shorter.values()) == files_of(*afresh.values())
    assert counts_of(shorter["policy"])["best_step"] == 4


def test_a_turn_that_no_episode_reaches_any_more_is_no_new_best(mixed, validated, tmp_path):
    """With a low discount the first turn is worth most, so that soon all episodes end there."""
    task = counting_characters(tmp_path)
    with open(task["file"], "a", encoding="utf-8") as file:
        file.write("\ndef transition(prompt, agent_completions, num_agents, **histories):\n")
        file.write("    return [prompt + ' again'] * num_agents\n")
    given = {
        **VALIDATED,
        "episode": {"turns": 2, "discount": 0.05, "termination_threshold": 1.4},
        "keep_best": "eval/turn_2/reward_mean",
    }
    given |= {"inputs": validated, "epochs": 8, "items_per_step": 4, "kl_coefficient": 0.0, "learning_rate": 1e-2}
    made = mixed.reinforce(tmp_path, task=task, generations=4, **given)
    measured = validation_of(made)
    reached = {step for step, name in measured if name == given["keep_best"]}
    steps = {step for step, _ in measured}
    assert reached < steps and counts_of(made["policy"])["best_step"] in reached


def test_other_settings_do_not_go_on_from_kept_checkpoints(mixed, tmp_path):
    kept = {"runtime": {"keep_checkpoints": True}}
    mixed.reinforce(tmp_path / "run", epochs=1, **kept)
    other = mixed.reinforce(tmp_path / "run", epochs=2, learning_rate=2e-3, **kept)
    afresh = mixed.reinforce(tmp_path / "afresh", epochs=2, learning_rate=2e-3)
    assert files_of(*other.values()) == files_of(*afresh.values())
