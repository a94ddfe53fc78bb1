"""Trajectories as learners see them."""

from comlrl_stages.rollouts.episodes import Node
from comlrl_stages.rollouts.experience import trajectories_of
from comlrl_stages.rollouts.single_turn import Prompted


def node(name, joints, children=()):
    prompted = Prompted({"task_id": "t0"}, ["p", "q"], [[5], [5]])
    return Node(prompted, name.count("/") + bool(name), name, joints=[(k, k) for k in range(joints)], children=children)


def test_a_trajectory_ends_where_its_branch_ends():
    root = node("", 3, [node("0", 1, [node("0/0", 1)]), None, node("2", 1)])
    found = [[(one.node.name, one.joint, one.place) for one in own] for own in trajectories_of([root, node("", 1)])]
    assert found == [
        [("", 0, (0, 0)), ("0", 0, (0, 1)), ("0/0", 0, (0, 2))],
        [("", 1, (1, 0))],
        [("", 2, (2, 0)), ("2", 0, (2, 1))],
        [("", 0, (3, 0))],
    ]
