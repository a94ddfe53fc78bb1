"""The task's metrics_callback on the rollouts of training."""

import pytest

from comlrl_stages.errors import UserError
from comlrl_stages.rollouts.episodes import Node, nodes_of
from comlrl_stages.rollouts.metrics import called_back
from comlrl_stages.rollouts.single_turn import Prompted
from comlrl_stages.tasks.scoring import JointReward
from comlrl_stages.teams.sampling import Sampled

from .conftest import TURNS

CALLBACK = (
    TURNS
    + """
def metrics_callback(rollouts):
    later = [one for one in rollouts if one.metadata["turn"] == 1]
    found = {
        "rollouts": len(rollouts),
        "reward": sum(one.metadata["reward"] for one in rollouts if one.agent_idx == 0),
        "fits": all(one.prompt == f"p{one.agent_idx}" for one in rollouts),
        "item": all(one.metadata["item"]["prompt"] == "q" for one in rollouts),
    }
    return found | ({"later": len(later), "node": later[0].metadata["node"] == "1"} if later else {})
"""
)


def node(task_id, *texts, name="", **given):
    """A node whose agents wrote `texts`, (joint, agent); the reward of a joint response is its number."""
    prompted = Prompted({"task_id": task_id, "prompt": "q"}, ["p0", "p1"], [[5], [5]])
    responses = [[Sampled([1], [0.0], text, "stop") for text in own] for own in zip(*texts, strict=True)]
    joints = [(sample, sample) for sample in range(len(texts))]
    rewards = [JointReward(float(sample), float(sample)) for sample in range(len(texts))]
    return Node(prompted, name.count("/") + bool(name), name, (), responses, joints, rewards, **given)


def test_means_are_over_items_and_hold_every_turn(turns):
    later = node("t0", ("e", "f"), name="1")
    roots = [node("t0", ("a", "b"), ("c", "d"), children=[None, later]), node("t1", ("g", "h"))]
    assert called_back(turns(CALLBACK), nodes_of(roots)) == {
        "rollouts": 4.0,
        "reward": 0.5,
        "fits": 1.0,
        "item": 1.0,
        "later": 2.0,
        "node": 1.0,
    }


def test_each_combination_of_a_cross_node_is_a_rollout_of_its_own(turns):
    one = node("t0", ("a", "b"), ("c", "d"))
    one.joints, one.rewards = [(0, 0), (0, 1), (1, 0), (1, 1)], [JointReward(2.0, 2.0)] * 4
    assert called_back(turns(CALLBACK), [one])["rollouts"] == 8.0


def test_a_task_without_callback_has_no_such_numbers(turns):
    assert called_back(turns(), [node("t0", ("a", "b"))]) == {}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return [][1 + 1]", "metrics_callback failed"),
        ("raise SystemExit(3)", "metrics_callback failed"),
        ("return {'x': 'y'}", "returned {'x': 'y'}, expected a number for each name"),
        ("return {'x': None}", "returned {'x': None}, expected a number for each name"),
        ("return 'x'", "returned 'x', expected numbers by name"),
    ],
)
def test_a_faulty_callback_is_told_with_the_users_line_or_what_it_returned(turns, tmp_path, body, told):
    task = turns(TURNS + f"\ndef metrics_callback(rollouts):\n    {body}\n")
    with pytest.raises(UserError) as error:
        called_back(task, [node("t0", ("a", "b"))])
    assert f"{tmp_path / 'task.py'}: metrics_callback" in str(error.value) and told in str(error.value)
    assert body in str(error.value) or "expected" in str(error.value)
