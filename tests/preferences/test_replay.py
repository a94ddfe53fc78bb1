"""Replay of the pairs of several rounds."""

from collections import Counter

import numpy as np
import pytest

from comlrl_stages.errors import UserError
from comlrl_stages.preferences.replay import draw, replay_weights
from comlrl_stages.seeding import stream


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (0.0, [0, 0, 1]),
        (0.5, [0.1428571, 0.2857143, 0.5714286]),
        (0.8, [0.2622951, 0.3278689, 0.4098361]),
        (1.0, [0.3333333, 0.3333333, 0.3333333]),
    ],
)
def test_decayed_weights_worked_out_by_hand(decay, expected):
    assert replay_weights("lambda_decay", [2, 1, 0], decay=decay).tolist() == pytest.approx(expected, abs=1e-7)


def test_weights_of_the_other_modes():
    assert replay_weights("current", [2, 1, 0]).tolist() == [0, 0, 1]
    assert replay_weights("nearest_k", [3, 1, 0], k=2).tolist() == [0, 0.5, 0.5]
    assert replay_weights("nearest_k", [3, 2], k=5).tolist() == [0.5, 0.5]
    assert replay_weights("all_history", [2, 1, 0]).tolist() == pytest.approx([1 / 3] * 3)


def test_decay_zero_takes_the_youngest_round_that_has_pairs():
    assert replay_weights("lambda_decay", [3, 1], decay=0.0).tolist() == [0, 1]


def test_rounds_without_pairs_are_errors_that_say_so():
    with pytest.raises(UserError, match="nearest_k"):
        replay_weights("current", [2, 1])
    with pytest.raises(UserError, match="no round"):
        replay_weights("all_history", [])
    with pytest.raises(ValueError, match="newest"):
        replay_weights("newest", [0])


def test_a_draw_of_the_whole_round_is_a_shuffle_of_it():
    drawn = draw([5], np.array([1.0]), 5, stream(0, "replay"))
    assert sorted(drawn) == [(0, pair) for pair in range(5)]
    assert drawn != sorted(drawn)


def test_pairs_repeat_only_after_all_were_drawn():
    counts = Counter(draw([4], np.array([1.0]), 11, stream(0, "replay")))
    assert sum(counts.values()) == 11
    assert set(counts.values()) == {2, 3}


def test_rounds_weigh_alike_whatever_their_size():
    counts = Counter(position for position, _ in draw([10, 1000], np.array([0.5, 0.5]), 4000, stream(0, "replay")))
    assert counts[0] / 4000 == pytest.approx(0.5, abs=0.05)


def test_rounds_are_mixed_and_the_stream_decides():
    weights = np.array([0.5, 0.5])
    drawn = draw([50, 50], weights, 60, stream(0, "replay"))
    assert drawn == draw([50, 50], weights, 60, stream(0, "replay"))
    assert drawn != draw([50, 50], weights, 60, stream(1, "replay"))
    assert {position for position, _ in drawn[:15]} == {0, 1}


def test_a_round_of_weight_zero_is_never_drawn_even_if_empty():
    assert {position for position, _ in draw([0, 3], np.array([0.0, 1.0]), 7, stream(0, "replay"))} == {1}
