"""Selection of preference pairs among one item's candidates."""

import math
import time
from collections import Counter

import numpy as np
import pytest

from comlrl_stages.preferences.selection import select_pairs
from comlrl_stages.seeding import stream


def _select(rewards, selection="reward_gap", limit=None, keys=None, seed=0, **options):
    keys = range(len(rewards)) if keys is None else keys
    return select_pairs(
        rewards, list(keys), selection=selection, limit=limit, generator=stream(seed, "pairs"), **options
    )


def _without_zeros(dropped):
    return {reason: number for reason, number in dropped.items() if number}


@pytest.mark.parametrize("selection", ["reward_gap", "random", "all"])
def test_the_better_candidate_wins_and_ties_give_no_pair(selection):
    result = _select([0.5, 1.0, 0.5], selection)
    assert sorted(result.pairs) == [(1, 0), (1, 2)]
    assert _without_zeros(result.dropped) == {"tie": 1}


def test_a_failed_candidate_is_dropped_and_its_siblings_are_kept():
    result = _select([math.nan, 1, 0])
    assert result.pairs == [(1, 2)]
    assert _without_zeros(result.dropped) == {"nan": 1}


def test_pairs_of_equal_tokens_are_dropped_whatever_their_rewards():
    result = _select([1.0, 0.0, 0.5], keys=[((1, 2), (3,)), ((1, 2), (3,)), ((1,), (2, 3))])
    assert sorted(result.pairs) == [(0, 2), (2, 1)]
    assert _without_zeros(result.dropped) == {"equal_tokens": 1}


def test_largest_gaps_come_first_and_the_limit_is_counted():
    result = _select([0.0, 1.0, 3.0, 7.0], limit=3)
    assert result.pairs == [(3, 0), (3, 1), (3, 2)]
    assert _without_zeros(result.dropped) == {"over_limit": 3}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("selection", ["reward_gap", "random", "all"])
def test_gaps_beyond_the_largest_float_are_gaps_like_others(selection):
    result = _select([1e308, -1e308, 0.0, -1.2e308], selection, min_gap=1.0)
    assert sorted(result.pairs) == [(0, 1), (0, 2), (0, 3), (1, 3), (2, 1), (2, 3)]
    assert _without_zeros(result.dropped) == {}
    assert {_select([1e308, -1e308, 0.0], limit=1, seed=seed).pairs[0] for seed in range(5)} == {(0, 1)}


def test_small_gaps_are_left_out_and_counted():
    result = _select([0.0, 0.1, 1.0], min_gap=0.5)
    assert sorted(result.pairs) == [(2, 0), (2, 1)]
    assert _without_zeros(result.dropped) == {"small_gap": 1}


def test_equal_gaps_are_spread_evenly_over_winners_and_losers():
    result = _select([1.0] * 4 + [0.0] * 8, limit=8)
    assert set(Counter(winner for winner, _ in result.pairs).values()) == {2}
    assert set(Counter(loser for _, loser in result.pairs).values()) == {1}


def test_gaps_that_differ_by_rounding_count_as_equal():
    rewards = [0.3, 0.1, 0.4, 0.2]  # 0.3 - 0.1 and 0.4 - 0.2 differ in the last bit
    orders = {tuple(_select(rewards, seed=seed).pairs[1:3]) for seed in range(20)}
    assert {frozenset(order) for order in orders} == {frozenset({(0, 1), (2, 3)})}
    assert len(orders) == 2


@pytest.mark.parametrize("selection", ["reward_gap", "random"])
def test_the_stream_decides_among_equals(selection):
    rewards = [1.0] * 4 + [0.0] * 4
    assert _select(rewards, selection, 4, seed=1) == _select(rewards, selection, 4, seed=1)
    assert len({tuple(_select(rewards, selection, 4, seed=seed).pairs) for seed in range(5)}) > 1


def test_all_keeps_every_pair_in_order_and_has_no_limit():
    result = _select([2.0, 1.0, 0.0], "all", limit=1)
    assert result.pairs == [(0, 1), (0, 2), (1, 2)]
    assert not _without_zeros(result.dropped)


@pytest.mark.parametrize("rewards", [[], [1.0], [math.nan, math.inf], [2.0, 2.0]])
@pytest.mark.parametrize("selection", ["reward_gap", "random", "all"])
def test_candidates_without_a_preference_give_no_pair(rewards, selection):
    assert _select(rewards, selection, limit=4).pairs == []


@pytest.mark.parametrize("levels", [2, 1000])
@pytest.mark.parametrize("limit", [16, None])
def test_eighty_candidates_take_a_fraction_of_a_second(levels, limit):
    rewards = np.random.default_rng(0).integers(levels, size=80) / levels
    start = time.perf_counter()
    result = _select(rewards, limit=limit)
    assert time.perf_counter() - start < 0.5
    total = len(result.pairs) + sum(result.dropped.values())
    assert total == 80 * 79 // 2
    assert len(set(result.pairs)) == len(result.pairs)


def test_unknown_selection_is_refused():
    with pytest.raises(ValueError, match="best"):
        _select([1.0, 0.0], "best")
