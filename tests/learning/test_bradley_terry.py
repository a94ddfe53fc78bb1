"""The Bradley-Terry loss."""

import pytest
import torch

from comlrl_stages.learning import bradley_terry


def _tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("winner", "loser", "expected"), [(1.0, 0.25, 0.386871), (0.5, 0.5, 0.6931472)])
def test_values_worked_out_by_hand(winner, loser, expected):
    assert bradley_terry.losses(_tensor(winner), _tensor(loser)).item() == pytest.approx(expected, abs=1e-7)


def test_centring_adds_the_square_of_the_sum():
    assert bradley_terry.losses(_tensor(0.5), _tensor(0.5), centring=0.1).item() == pytest.approx(0.6931472 + 0.1)


def test_an_undecided_preference_is_symmetric_and_a_reversed_one_swaps_the_sides():
    winner, loser, half = _tensor(1.0), _tensor(0.25), _tensor(0.5)
    assert torch.equal(
        bradley_terry.losses(winner, loser, preference=half), bradley_terry.losses(loser, winner, preference=half)
    )
    reversed_pair = bradley_terry.losses(winner, loser, preference=_tensor(0.0))
    assert torch.equal(reversed_pair, bradley_terry.losses(loser, winner))


def test_gradient_matches_finite_differences():
    winner, loser = _tensor(1.0, -2.0).requires_grad_(), _tensor(0.3, 1.0).requires_grad_()
    preference = _tensor(1.0, 0.7)
    assert torch.autograd.gradcheck(
        lambda *scores: bradley_terry.losses(*scores, preference=preference, centring=0.3), (winner, loser)
    )


def test_a_huge_margin_is_finite():
    assert bradley_terry.losses(_tensor(-500.0), _tensor(500.0)).item() == pytest.approx(1000.0)
