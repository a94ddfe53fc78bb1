"""Returns in trees of turns."""

import itertools
import math

import numpy as np
import pytest

from comlrl_stages.learning.returns import Node, completion_returns, env_steps, joint_returns, terminates


def _reward(number, first, second):
    return 10 * number + first + 2 * second


def _aligned_tree():
    children = [Node([_reward(number, k, k) for k in range(2)]) for number in (1, 2)]
    return Node([_reward(0, k, k) for k in range(2)], children)


def _cross_tree():
    combinations = list(itertools.product(range(2), repeat=2))
    children = [Node([_reward(number, *c) for c in combinations]) for number in (1, 2, 3, 4)]
    return Node([_reward(0, *c) for c in combinations], children)


@pytest.mark.parametrize(("discount", "root"), [(1.0, [11.5, 24.5]), (0.5, [5.75, 13.75])])
def test_aligned_tree_worked_out_by_hand(discount, root):
    returns = [node.tolist() for node in joint_returns(_aligned_tree(), discount)]
    assert returns == [root, [10, 13], [20, 23]]
    assert env_steps(_aligned_tree()) == 6


def test_cross_tree_worked_out_by_hand():
    root = joint_returns(_cross_tree())[0]
    assert completion_returns(root, 2, "cross").tolist() == [[17.5, 38.5], [22, 34]]
    assert completion_returns(root, 2, "cross", "sum").tolist() == [[35, 77], [44, 68]]
    assert env_steps(_cross_tree()) == 20


def test_aligned_completions_share_the_joint_return():
    assert completion_returns(np.array([1.0, 2.0]), 3, "aligned").tolist() == [[1, 2]] * 3


def test_a_single_turn_returns_its_rewards():
    assert joint_returns(Node([1.0, 0.5]))[0].tolist() == [1.0, 0.5]


def test_a_failed_reward_leaves_its_siblings_alone():
    tree = Node([0.0, 3.0], [Node([10.0, math.nan]), Node([math.inf, math.nan])])
    root = joint_returns(tree)[0]
    assert root[0] == 10.0
    assert math.isnan(root[1])


def test_a_joint_response_that_ends_has_its_reward_for_a_return():
    tree = Node([1.0, 2.0], [None, Node([4.0, 8.0])])
    assert [node.tolist() for node in joint_returns(tree, 0.5)] == [[1.0, 5.0], [4.0, 8.0]]
    assert env_steps(tree) == 4


def test_a_missing_combination_counts_as_the_mean_of_the_others():
    joint = np.array([1.0, math.nan, 3.0, 5.0])
    assert completion_returns(joint, 2, "cross").tolist() == [[1.0, 4.0], [2.0, 5.0]]
    assert completion_returns(joint, 2, "cross", "sum").tolist() == [[2.0, 8.0], [4.0, 10.0]]


def test_only_a_mean_strictly_above_the_threshold_ends_a_node():
    assert terminates([1.0, 2.0], 1.4)
    assert not terminates([1.0, 2.0], 1.5)
    assert not terminates([1.0, 2.0], None)
    assert terminates([2.0, math.nan], 1.5)
    assert not terminates([math.nan], 0.0)


def test_shapes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="3 joint responses"):
        completion_returns(np.zeros(3), 2, "cross")
    with pytest.raises(ValueError, match="1 children"):
        Node([1.0, 2.0], [Node([1.0])])
