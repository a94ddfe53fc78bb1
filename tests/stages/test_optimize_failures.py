"""Rewards that fail, are no numbers, or teach nothing, in every algorithm."""

import math

import pytest

from comlrl_stages.errors import UserError
from comlrl_stages.teams.loading import load_model

from .conftest import log_of, rows_of

JOINT = -1
WHOLE = 100
ALGORITHMS = [
    pytest.param({"algorithm": name}, id=name) for name in ("magrpo", "marloo", "maremax", "mareinforce", "maac")
] + [
    pytest.param({"algorithm": "magrpo", "joint_mode": "cross"}, id="cross"),
    pytest.param({"algorithm": "magrpo", "loss_reduction": "token_mean", "train_batch_size": 5}, id="minibatches"),
    pytest.param({"algorithm": "iac"}, id="iac, separate"),
    pytest.param({"algorithm": "iac", "critic": "shared", "critic_type": "q"}, id="iac, shared, q"),
]
#: `score` is what a test writes.
TASK = """
NAN = float("nan")

def reward(first, second, *, batch_items):
    return [score(item, joint) for item, joint in zip(batch_items, zip(first, second))]

def score(item, joint):
    length = len(joint[0]) + len(joint[1])
    return {expression}
"""


def task_of(folder, expression, more=""):
    file = folder / "task.py"
    file.write_text(TASK.replace("{expression}", expression) + more, encoding="utf-8")
    return {"file": str(file), "object": None}


def assert_finite(log):
    assert all(math.isfinite(value) for value in log.values()), {k: v for k, v in log.items() if not math.isfinite(v)}


def assert_moved(log, outputs):
    last = max(step for step, _, _ in log)
    assert all(log[last, agent, "changed_share"] > 0.5 for agent in (0, 1))
    for agent in (0, 1):
        weights = load_model(outputs["policy"] / f"agent_{agent}").model.parameters()
        assert all(weight.isfinite().all() for weight in weights)


# --- no number ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_rewards_that_are_no_numbers_are_left_out_and_the_others_train(mixed, tmp_path, kind):
    made = mixed.reinforce(tmp_path, task=task_of(tmp_path, "NAN if length % 3 == 0 else length / 20"), **kind)
    log = log_of(made["training_log"])
    assert_finite(log)
    assert 0 < log[1, JOINT, "reward_failed_share"] < 1
    assert_moved(log, made)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_an_item_without_any_number_is_skipped(mixed, tmp_path, kind):
    """All rewards of a group fail, one of two in the step."""
    task = task_of(tmp_path, "NAN if item['task_id'] in ('train0', 'train2') else length / 20")
    made = mixed.reinforce(tmp_path, task=task, items_per_step=WHOLE, **kind)
    log = log_of(made["training_log"])
    assert_finite(log)
    assert log[1, JOINT, "reward_failed_share"] == 0.5
    assert_moved(log, made)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_a_step_without_any_number_is_an_error_that_shows_one(mixed, tmp_path, kind):
    task = task_of(tmp_path, "NAN")
    with pytest.raises(UserError, match=r"none of the \d+ joint responses of a step has a finite reward.*nan: the rew"):
        mixed.reinforce(tmp_path, task=task, **kind)
    assert not (tmp_path / "policy").exists()


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_a_reward_that_raises_ends_training_with_its_own_lines(mixed, tmp_path, kind):
    task = task_of(tmp_path, "1 // 0 if length % 3 == 0 else length / 20")
    with pytest.raises(UserError, match=r"(?s)the reward failed for \d+ of.*ZeroDivisionError"):
        mixed.reinforce(tmp_path, task=task, **kind)
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_failures_that_are_tolerated_are_left_out(mixed, tmp_path, kind):
    task = task_of(tmp_path, "1 // 0 if length % 3 == 0 else length / 20")
    made = mixed.reinforce(tmp_path, task=task, scoring={"tolerate_failures": 0.9}, **kind)
    log = log_of(made["training_log"])
    assert_finite(log)
    assert 0 < log[1, JOINT, "reward_failed_share"] < 1
    assert_moved(log, made)


def test_a_validation_without_any_number_says_so(mixed, tmp_path):
    task = task_of(tmp_path, "NAN if item['task_id'].startswith('eval') else length / 20")
    given = {"inputs": {"validation": mixed.eval}, "eval_interval": 6}
    with pytest.raises(UserError, match="none of the 8 joint responses of the validation has a finite reward"):
        mixed.reinforce(tmp_path, task=task, **given)


# --- rewards of each agent ----------------------------------------------------------------------------------------

OWN = 'reward_scope = "agent"\n\ndef score(item, joint):\n    return [len(joint[0]) / 10, -len(joint[1]) / 10]\n'
LEARNING = {"generations": 8, "items_per_step": 4, "epochs": 8, "learning_rate": 5e-3, "kl_coefficient": 0.0}


@pytest.mark.parametrize(
    "kind", [{"algorithm": "magrpo"}, {"algorithm": "iac"}, {"algorithm": "iac", "critic": "shared"}], ids=str
)
def test_each_agent_follows_its_own_reward(mixed, tmp_path, kind):
    made = mixed.reinforce(tmp_path, task=task_of(tmp_path, "0", f"\n{OWN}"), **LEARNING, **kind)
    written = {agent: [] for agent in (0, 1)}
    for row in rows_of(made["training_log"]):
        if row["name"] == "length_mean":
            written[row["agent"]].append(row["value"])
    assert written[0][-1] > written[0][0] + 1 and written[1][-1] < written[1][0] - 1


def test_an_agents_reward_that_is_no_number_fails_the_joint_response(mixed, tmp_path):
    own = OWN.replace("len(joint[0]) / 10", "NAN if len(joint[0]) % 3 == 0 else len(joint[0]) / 10")
    made = mixed.reinforce(tmp_path, algorithm="iac", task=task_of(tmp_path, "0", f"\n{own}"))
    log = log_of(made["training_log"])
    assert_finite(log)
    assert 0 < log[1, JOINT, "reward_failed_share"] < 1


# --- rewards that teach nothing -----------------------------------------------------------------------------------


def test_groups_with_equal_rewards_are_counted(mixed, tmp_path):
    task = task_of(tmp_path, "1.0 if item['task_id'] in ('train0', 'train2', 'train3') else length / 20")
    made = mixed.reinforce(tmp_path, task=task, items_per_step=WHOLE, kl_coefficient=0.0)
    assert log_of(made["training_log"])[1, JOINT, "zero_variance_share"] == 0.75


@pytest.mark.parametrize("algorithm", ["magrpo", "marloo", "maremax"])
def test_a_constant_reward_teaches_nothing_where_responses_are_compared(mixed, tmp_path, algorithm, capsys):
    """The team stays as it was, so that a comparison with other methods can still be made; and this is told."""
    given = {"algorithm": algorithm, "kl_coefficient": 0.0, "task": task_of(tmp_path, "1.0")}
    made = mixed.reinforce(tmp_path, **given)
    log = log_of(made["training_log"])
    assert [value for (_, _, name), value in log.items() if name == "changed_share"] == [0.0, 0.0]
    assert "agent_1: no weight changed in training, for every gradient was zero" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [{"algorithm": "mareinforce"}, {"algorithm": "iac"}, {"algorithm": "maac"}], ids=str)
def test_a_constant_reward_still_moves_where_nothing_is_compared(mixed, tmp_path, kind):
    """And no group is called flat, since equal rewards do have a gradient here."""
    made = mixed.reinforce(tmp_path, kl_coefficient=0.0, task=task_of(tmp_path, "1.0"), **kind)
    log = log_of(made["training_log"])
    assert_moved(log, made)
    assert (1, JOINT, "zero_variance_share") not in log


def test_a_single_response_trains_mareinforce(mixed, tmp_path):
    made = mixed.reinforce(tmp_path, algorithm="mareinforce", generations=1, task=task_of(tmp_path, "length / 20"))
    assert_moved(log_of(made["training_log"]), made)


def test_without_kl_there_is_no_reference_and_nothing_of_it_in_the_log(mixed, tmp_path):
    for kind in ({"algorithm": "magrpo"}, {"algorithm": "maac"}):
        made = mixed.reinforce(tmp_path / kind["algorithm"], kl_coefficient=0.0, **kind)
        assert not {name for _, _, name in log_of(made["training_log"]) if name.startswith("kl")}
