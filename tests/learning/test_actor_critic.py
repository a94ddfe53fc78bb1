"""TD targets, advantages and the value loss."""

import math

import pytest
import torch

from comlrl_stages.learning.actor_critic import (
    TDTargets,
    td_advantages,
    td_targets,
    value_errors,
    value_loss,
    value_weights,
)

NAN = math.nan


def _tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def _targets(rewards, values, lengths, discount=1.0):
    return td_targets(_tensor(*rewards), _tensor(*values), torch.tensor(lengths), discount)


def test_two_turns_worked_out_by_hand():
    values = _tensor([0.1, 0.5])
    targets = td_targets(_tensor([0.2, 1.0]), values, torch.tensor([2]), 0.9)
    assert targets.values[0].tolist() == pytest.approx([0.65, 1.0])
    assert td_advantages(targets, values)[0].tolist() == pytest.approx([0.55, 0.5])


def test_nothing_is_bootstrapped_after_the_turn_that_ended_a_trajectory():
    targets = _targets([[1.0, 2.0, 4.0], [1.0, 2.0, NAN], [1.0, NAN, NAN]], [[10.0, 20.0, 30.0]] * 3, [3, 2, 1], 0.5)
    assert targets.values.tolist() == [[11.0, 17.0, 4.0], [11.0, 2.0, 0.0], [1.0, 0.0, 0.0]]
    assert targets.valid.tolist() == [[True] * 3, [True, True, False], [True, False, False]]


def test_what_stands_in_the_padding_is_never_read():
    plain = _targets([[1.0, 0.0], [2.0, 3.0]], [[0.5, 0.0], [0.5, 0.5]], [1, 2], 0.9)
    padded = _targets([[1.0, 7.0], [2.0, 3.0]], [[0.5, math.inf], [0.5, 0.5]], [1, 2], 0.9)
    assert torch.equal(plain.values, padded.values)
    assert torch.equal(plain.valid, padded.valid)


def test_a_failed_reward_is_left_out_and_never_counts_as_zero():
    values = _tensor([0.5, 2.0], [0.5, 2.0], [0.5, 2.0])
    targets = _targets([[1.0, NAN], [math.inf, 3.0], [1.0, 3.0]], values.tolist(), [2, 2, 2], 0.5)
    assert targets.valid.tolist() == [[True, False], [False, True], [True, True]]
    assert targets.values.tolist() == [[2.0, 0.0], [0.0, 3.0], [2.0, 3.0]]
    assert td_advantages(targets, values).tolist() == [[1.5, 0.0], [0.0, 1.0], [1.5, 1.0]]
    normalised = td_advantages(targets, values, normalise=True)
    assert normalised[targets.valid].tolist() == pytest.approx([1.0, -1.0, 1.0, -1.0])
    assert (normalised[~targets.valid] == 0).all()


def test_normalisation_has_mean_zero_and_population_std_one():
    targets = TDTargets(_tensor([1.0, 2.0, 4.0, 9.0]), torch.ones(1, 4).bool())
    advantages = td_advantages(targets, torch.zeros(1, 4, dtype=torch.float64), normalise=True)
    assert advantages[0].tolist() == pytest.approx([-0.9733285, -0.6488857, 0.0, 1.6222142], abs=1e-7)


def test_normalisation_of_equal_advantages_is_zero():
    targets = TDTargets(_tensor([0.1, 0.1, 0.1]), torch.ones(1, 3).bool())
    assert td_advantages(targets, _tensor([0.0] * 3), normalise=True).tolist() == [[0.0] * 3]


def test_the_clip_comes_after_the_normalisation():
    targets = TDTargets(_tensor([1.0, 2.0, 4.0, 9.0]), torch.ones(1, 4).bool())
    values = torch.zeros(1, 4, dtype=torch.float64)
    clipped = td_advantages(targets, values, normalise=True, clip=0.8)
    assert clipped[0].tolist() == pytest.approx([-0.8, -0.6488857, 0.0, 0.8], abs=1e-7)
    assert td_advantages(targets, values, clip=3.0).tolist() == [[1.0, 2.0, 3.0, 3.0]]


def test_neither_targets_nor_advantages_have_a_gradient():
    values = _tensor([0.1, 0.5]).requires_grad_()
    targets = td_targets(_tensor([0.2, 1.0]), values, torch.tensor([2]))
    assert not targets.values.requires_grad
    assert not td_advantages(targets, values).requires_grad


@pytest.mark.parametrize(("clip", "expected", "gradient"), [(0.2, 0.2025, 0.0), (None, 0.09, -0.6)])
def test_the_larger_of_the_clipped_and_the_plain_error(clip, expected, gradient):
    new = _tensor(0.7).requires_grad_()
    error = value_errors(new, _tensor(0.35), _tensor(1.0), clip)
    error.sum().backward()
    assert error.item() == pytest.approx(expected)
    assert new.grad.item() == pytest.approx(gradient)


def test_a_value_that_moved_away_from_its_target_keeps_its_gradient():
    new = _tensor(0.7).requires_grad_()
    value_errors(new, _tensor(0.35), _tensor(0.0), 0.2).sum().backward()
    assert new.grad.item() == pytest.approx(1.4)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("parts", [[[0, 1], [2, 3, 4]], [[3], [4, 0], [2, 1]]])
def test_micro_batches_and_minibatches_add_up_to_the_whole(clip, parts):
    generator = torch.Generator().manual_seed(0)
    values, old, targets = (torch.randn(5, dtype=torch.float64, generator=generator) for _ in range(3))
    valid = torch.tensor([True, True, False, True, True])
    weights = value_weights(valid)
    whole = value_loss(values, old, targets, weights, clip)
    naive = sum(value_errors(values[i], old[i], targets[i], clip) for i in (0, 1, 3, 4)) / 4
    torch.testing.assert_close(whole, naive, atol=1e-12, rtol=0)
    losses = [value_loss(values[rows], old[rows], targets[rows], weights[rows], clip) for rows in parts]
    torch.testing.assert_close(sum(losses), whole, atol=1e-12, rtol=0)
    scaled = value_weights(valid, len(parts))
    losses = [value_loss(values[rows], old[rows], targets[rows], scaled[rows], clip) for rows in parts]
    torch.testing.assert_close(sum(losses) / len(parts), whole, atol=1e-12, rtol=0)


def test_a_row_left_out_cannot_spoil_the_loss():
    values = _tensor(0.7, NAN).requires_grad_()
    weights = value_weights(torch.tensor([True, False]))
    loss = value_loss(values, _tensor(0.35, NAN), _tensor(1.0, NAN), weights, 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(0.2025)
    assert values.grad[1].item() == 0


def test_a_buffer_without_a_valid_response_has_loss_zero():
    loss = value_loss(_tensor(0.7), _tensor(0.3), _tensor(0.0), value_weights(torch.tensor([False])))
    assert loss.item() == 0


@pytest.mark.parametrize(
    ("lengths", "message"), [([0], "from 0 to 0"), ([3], "expected 1 to 2"), ([1, 1], "do not fit")]
)
def test_shapes_and_lengths_that_cannot_be_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        _targets([[1.0, 2.0]], [[1.0, 2.0]], lengths)
