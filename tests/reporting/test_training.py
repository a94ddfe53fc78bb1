import pandas as pd
import pytest

from comlrl_stages.reporting import training


def log(name: str, values: list[float], **place: object) -> pd.DataFrame:
    row = {"owner": "m", "seed": 0, "phase": "magrpo", "agent": -1, "turn": 0, "env_step": 0} | place
    return pd.DataFrame([{**row, "step": 1 + step, "name": name, "value": value} for step, value in enumerate(values)])


def test_the_reward_trained_on_is_called_by_what_it_is():
    rows = [log("reward_mean", [1.0], owner="task"), log("reward_mean", [2.0], owner="learner")]
    rows += [log("task_reward_mean", [3.0], owner="learner"), log("parts/reward_mean", [4.0], owner="learner")]
    rows += [log(f"eval/turn_1/{name}", [5.0], owner="learner") for name in ("reward_mean", "task_reward_mean")]
    named = training.with_rewards_named(pd.concat(rows))
    assert list(zip(named["owner"], named["name"], strict=True)) == [
        ("task", "task_reward_mean"),
        ("learner", "learned_reward_mean"),
        ("learner", "task_reward_mean"),
        ("learner", "parts/reward_mean"),
        ("learner", "eval/turn_1/learned_reward_mean"),
        ("learner", "eval/turn_1/task_reward_mean"),
    ]


def test_what_one_method_logs_by_agent_and_another_for_the_team_is_kept_of_both():
    rows = pd.concat([log("value_loss", [1.0], owner="iac", agent=0), log("value_loss", [2.0], owner="maac")])
    assert training.of_team(rows)["value"].tolist() == [1.0, 2.0]


def test_validation_rows_tell_their_turn():
    rows = pd.concat([log("loss", [9.0]), log("eval/turn_2/parts/x", [0.5], phase="validation")])
    (found,) = training.validation(rows).to_dict("records")
    assert (found["turn"], found["name"], found["value"]) == (2, "parts/x", 0.5)
    assert training.of_training(rows)["value"].tolist() == [9.0]
    assert training.validation(log("loss", [9.0])).empty


def test_rewards_are_means_over_seeds_with_moving_averages():
    """Ten steps, so averages over two (a fifth): of this point and the one before."""
    rows = []
    for seed, shift in ((0, 0.0), (1, 2.0)):
        learned, task = [float(step) + shift for step in range(10)], [1.0] * 9 + [0.0]
        rows += [log("reward_mean", learned, seed=seed), log("task_reward_mean", task, seed=seed)]
    rows += [log("reward_mean", [7.0] * 10, owner="other"), log("task_reward_mean", [7.0], turn=1)]
    (found,) = training.rewards_of(pd.concat(rows), ["other", "m"])
    assert (found.method, found.window, found.steps.tolist()) == ("m", 2, list(range(1, 11)))
    assert found.learned == pytest.approx([1.0 + step for step in range(10)])
    assert found.smooth_learned == pytest.approx([1.0, *(0.5 + step for step in range(1, 10))])
    assert found.smooth_task == pytest.approx([1.0] * 9 + [0.5])


def test_a_method_on_the_tasks_reward_cannot_over_optimise_a_model():
    assert training.rewards_of(log("reward_mean", [1.0, 2.0]), ["m"]) == []
