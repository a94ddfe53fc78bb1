"""Advantages of a group of returns."""

import math

import pytest
import torch

from comlrl_stages.learning.advantages import advantages, zero_variance

MODES = ("magrpo", "marloo", "maremax", "mareinforce")
NAN = math.nan


def _values(returns, mode, normalise=False):
    return advantages(torch.tensor([returns], dtype=torch.float64), mode, normalise).values[0]


@pytest.mark.parametrize(
    ("returns", "mode", "normalise", "expected"),
    [
        ([1, 2, 4, 9], "magrpo", False, [-3, -2, 0, 5]),
        ([1, 2, 4, 9], "maremax", False, [-8, -7, -5, 0]),
        ([1, 2, 4, 9], "marloo", False, [-4, -2.6666667, 0, 6.6666667]),
        ([1, 2, 4, 9], "mareinforce", False, [1, 2, 4, 9]),
        ([1, 2, 4, 9], "magrpo", True, [-0.9733285, -0.6488857, 0, 1.6222142]),
        ([2, 2, 2], "magrpo", True, [0, 0, 0]),
        ([2.0, 0.5], "marloo", False, [1.5, -1.5]),
    ],
)
def test_values_worked_out_by_hand(returns, mode, normalise, expected):
    torch.testing.assert_close(
        _values(returns, mode, normalise), torch.tensor(expected, dtype=torch.float64), atol=1e-7, rtol=0
    )


@pytest.mark.parametrize("mode", ["magrpo", "marloo", "maremax"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(mode, normalise, dtype):
    returns = torch.full((1, 7), 0.1, dtype=dtype)
    assert (advantages(returns, mode, normalise).values == 0).all()


def test_normalised_advantages_are_the_same_for_all_modes():
    returns = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, *others = (advantages(returns, mode, True).values for mode in MODES)
    for other in others:
        torch.testing.assert_close(other, first, atol=1e-12, rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalise", [False, True])
def test_a_failed_reward_counts_as_never_drawn(mode, normalise):
    with_failures = _values([NAN, 1, 2, math.inf, 4, 9], mode, normalise)
    assert with_failures[[0, 3]].tolist() == [0, 0]
    torch.testing.assert_close(with_failures[[1, 2, 4, 5]], _values([1, 2, 4, 9], mode, normalise), atol=1e-12, rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalise", [False, True])
def test_a_group_without_returns_is_zero_and_reported(mode, normalise):
    result = advantages(torch.tensor([[NAN, NAN], [1.0, 3.0]]), mode, normalise)
    assert result.values[0].tolist() == [0, 0]
    assert result.empty.tolist() == [True, False]
    assert result.group_sizes.tolist() == [0, 2]


@pytest.mark.parametrize(("mode", "expected"), [("magrpo", 0), ("marloo", 0), ("maremax", 0), ("mareinforce", 3)])
def test_a_group_with_one_return_left(mode, expected):
    assert _values([NAN, 3.0], mode).tolist() == [0, expected]


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_the_batch_and_of_the_group_changes_nothing(mode):
    generator = torch.Generator().manual_seed(1)
    returns = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    rows, columns = torch.randperm(6, generator=generator), torch.randperm(5, generator=generator)
    shuffled = advantages(returns[rows][:, columns], mode).values
    torch.testing.assert_close(shuffled, advantages(returns, mode).values[rows][:, columns], atol=1e-12, rtol=0)


def test_zero_variance_groups_are_found_despite_failures():
    returns = torch.tensor([[1.0, 1.0, 1.0], [1.0, NAN, 1.0], [1.0, 2.0, 1.0], [NAN, NAN, NAN]])
    assert zero_variance(returns).tolist() == [True, True, False, False]


def test_unknown_mode_and_flat_returns_are_refused():
    with pytest.raises(ValueError, match="grpo2"):
        advantages(torch.zeros(1, 2), "grpo2")
    with pytest.raises(ValueError, match="nodes, K"):
        advantages(torch.zeros(2), "magrpo")
