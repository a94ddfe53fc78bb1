"""Plans of batches."""

import pytest

from comlrl_stages.teams.batching import plan_batches


def test_batches_are_filled_from_the_shortest_row_on():
    assert plan_batches([5, 1, 3, 1, 5, 3], 6) == [[1, 3], [2, 5], [0], [4]]


def test_a_row_beyond_the_budget_is_a_batch_of_its_own():
    assert plan_batches([100, 2, 200, 2], 10) == [[1, 3], [0], [2]]


def test_equal_rows_keep_their_order():
    assert plan_batches([4] * 7, 12) == [[0, 1, 2], [3, 4, 5], [6]]


def test_no_rows_are_no_batch():
    assert plan_batches([], 10) == []


@pytest.mark.parametrize("budget", [1, 7, 30, 1000])
def test_every_row_is_planned_once(budget):
    costs = [(7 * i) % 11 + 1 for i in range(40)]
    batches = plan_batches(costs, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(40))
    assert all(len(batch) == 1 or len(batch) * max(costs[i] for i in batch) <= budget for batch in batches)
