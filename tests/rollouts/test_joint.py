"""Joint responses: the completions of all agents that are scored together."""

import math

import pytest

from comlrl_stages.artifacts import COMPLETIONS, table_of
from comlrl_stages.config import Scoring, Task
from comlrl_stages.errors import UserError
from comlrl_stages.rollouts.joint import joint_responses, reward_runner, score_joints

KEY = {"source": "policy", "round": 1, "step": 0, "task_id": "t0", "turn": 0, "node": ""}
ITEMS = {"t0": {"task_id": "t0", "prompt": "p"}, "t1": {"task_id": "t1", "prompt": "q"}}


def completion(sample, agent, text, **given):
    return {**KEY, "sample": sample, "agent": agent, "text": text, "finish_reason": "stop", **given}


def joints(rows, agents=2):
    return list(joint_responses(table_of(rows, COMPLETIONS), agents))


def test_the_same_sample_of_every_agent_is_one_joint_response_in_actor_order():
    rows = [completion(1, 1, "d"), completion(0, 1, "b"), completion(1, 0, "c"), completion(0, 0, "a")]
    found = joints(rows)
    assert [(one.joint, one.sample, one.texts) for one in found] == [(0, 0, ("a", "b")), (1, 1, ("c", "d"))]
    assert [row["agent"] for row in found[0].completions] == [0, 1]


def test_joint_responses_are_numbered_within_their_context():
    rows = [completion(s, a, "x", task_id=t) for t in ("t0", "t1") for s in (4, 7) for a in (0, 1)]
    assert [(one.task_id, one.joint, one.sample) for one in joints(rows)] == [
        ("t0", 0, 4),
        ("t0", 1, 7),
        ("t1", 0, 4),
        ("t1", 1, 7),
    ]


@pytest.mark.parametrize("other", [{"source": "evaluation"}, {"round": 2}, {"step": 5}, {"turn": 1}, {"node": "0"}])
def test_contexts_are_kept_apart(other):
    rows = [completion(0, a, "x", **given) for given in ({}, other) for a in (0, 1)]
    found = joints(rows)
    assert len(found) == 2 and found[0].key != found[1].key


def test_one_model_that_wrote_all_roles_gives_its_sections():
    (found,) = joints([completion(0, -1, "<a>x</a><b>y</b>", role_texts=["x", "y"])])
    assert found.texts == ("x", "y") and found.invalid is None


def test_an_invalid_completion_has_no_texts_and_says_why():
    rows = [completion(0, 0, "x"), completion(0, 1, "y", invalid="echo")]
    (found,) = joints(rows)
    assert (found.texts, found.invalid) == ((), "agent_1: echo")
    (found,) = joints([completion(0, -1, "?", invalid="no sections")])
    assert (found.texts, found.invalid) == ((), "no sections")


@pytest.mark.parametrize("agents", [1, 3])
def test_another_number_of_agents_is_an_error_with_both_numbers(agents):
    rows = [completion(0, 0, "x"), completion(0, 1, "y")]
    with pytest.raises(UserError, match=f"item t0, sample 0: has texts of 2 agents, expected {agents}"):
        joints(rows, agents)


def test_rewards_come_in_order_and_the_invalid_are_not_scored():
    rows = [completion(s, a, "ab" * (a + 1) * (s + 1)) for s in range(3) for a in (0, 1)]
    rows[2]["invalid"] = "echo"
    scoring = Scoring(scale=2.0, shift=1.0)
    items = {name: {**item, "target_min": 2.0, "target_max": 3.0} for name, item in ITEMS.items()}
    with reward_runner(Task(name="length_ratio"), scoring, 1) as runner:
        found = score_joints(runner, joints(rows), items)
    assert [one.status for one in found] == ["ok", "invalid", "ok"]
    assert [found[0].reward, found[2].reward] == [3.0, 3.0] and math.isnan(found[1].reward)
    assert found[1].error == "agent_0: echo"
