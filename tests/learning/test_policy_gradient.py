"""The policy-gradient loss and its exact accumulation."""

import pytest
import torch

from comlrl_stages.learning.policy_gradient import policy_gradient_loss, row_weights

SIZES = [3, 3, 3, 2, 2]  # a node of three rows and one of two
LENGTHS = [4, 1, 2, 3, 0]


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(4) < torch.tensor(LENGTHS).unsqueeze(1)
    log_probs = -torch.rand(5, 4, dtype=torch.float64, generator=generator)
    behaviour = log_probs + 0.3 * torch.randn(5, 4, dtype=torch.float64, generator=generator)
    advantages = torch.randn(5, dtype=torch.float64, generator=generator)
    return log_probs, mask, advantages, behaviour


def _weights(reduction):
    return row_weights(torch.tensor(SIZES), torch.tensor(LENGTHS), reduction)


def _naive(log_probs, advantages, reduction):
    rows = [-advantages[i] * sum(log_probs[i, t] for t in range(LENGTHS[i])) for i in range(5)]
    if reduction == "token_mean":
        return sum(rows) / sum(LENGTHS)
    return (sum(rows[:3]) / 3 + sum(rows[3:]) / 2) / 2


def _loss_and_gradient(log_probs, mask, advantages, weights, **options):
    leaf = log_probs.clone().requires_grad_()
    loss = policy_gradient_loss(leaf, mask, advantages, weights, **options).loss
    loss.backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("reduction", ["sequence_sum", "token_mean"])
def test_matches_the_formula_and_its_gradient(batch, reduction):
    log_probs, mask, advantages, _ = batch
    loss, gradient = _loss_and_gradient(log_probs, mask, advantages, _weights(reduction))
    leaf = log_probs.clone().requires_grad_()
    expected = _naive(leaf, advantages, reduction)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient, leaf.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("reduction", ["sequence_sum", "token_mean"])
@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("parts", [[[0, 1], [2, 3], [4]], [[4, 2], [0], [1], [3]]])
def test_micro_batches_add_up_to_the_whole(batch, reduction, off_policy, parts):
    log_probs, mask, advantages, behaviour = batch
    weights = _weights(reduction)
    options = {"behaviour_log_probs": behaviour, "clip": 0.2} if off_policy else {}
    whole, whole_gradient = _loss_and_gradient(log_probs, mask, advantages, weights, **options)
    total, gradient = 0.0, torch.zeros_like(log_probs)
    for rows in parts:
        some = {"behaviour_log_probs": behaviour[rows], "clip": 0.2} if off_policy else {}
        loss, part = _loss_and_gradient(log_probs[rows], mask[rows], advantages[rows], weights[rows], **some)
        total += loss
        gradient[rows] = part
    torch.testing.assert_close(total, whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient, whole_gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize("reduction", ["sequence_sum", "token_mean"])
@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("minibatches", [[[0, 1, 2], [3, 4]], [[4, 2], [0, 3], [1]]])
def test_the_mean_over_minibatches_is_the_loss_of_the_buffer(batch, reduction, off_policy, minibatches):
    log_probs, mask, advantages, behaviour = batch
    options = {"behaviour_log_probs": behaviour, "clip": 0.2} if off_policy else {}
    whole, whole_gradient = _loss_and_gradient(log_probs, mask, advantages, _weights(reduction), **options)
    weights = row_weights(torch.tensor(SIZES), torch.tensor(LENGTHS), reduction, len(minibatches))
    losses, gradient = [], torch.zeros_like(log_probs)
    for rows in minibatches:
        some = {"behaviour_log_probs": behaviour[rows], "clip": 0.2} if off_policy else {}
        loss, part = _loss_and_gradient(log_probs[rows], mask[rows], advantages[rows], weights[rows], **some)
        losses.append(loss)
        gradient[rows] = part / len(minibatches)
    torch.testing.assert_close(sum(losses) / len(minibatches), whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient, whole_gradient, atol=1e-12, rtol=0)


def test_a_minibatch_filled_in_part_takes_a_proportionally_smaller_step():
    sizes, lengths = torch.full((5,), 5), torch.full((5,), 3)
    weights = row_weights(sizes, lengths, "sequence_sum", minibatches=3)
    assert [weights[rows].sum().item() for rows in ([0, 1], [2, 3], [4])] == pytest.approx([1.2, 1.2, 0.6])


def test_every_node_of_a_tree_weighs_the_same_whatever_its_size():
    sizes = torch.tensor([4, 4, 4, 4, 2, 2, 1])
    nodes = row_weights(sizes, torch.arange(7), "sequence_sum").split([4, 2, 1])
    assert [node.sum().item() for node in nodes] == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("reduction", ["sequence_sum", "token_mean"])
def test_padding_changes_neither_loss_nor_gradient(batch, reduction):
    log_probs, mask, advantages, _ = batch
    weights = _weights(reduction)
    loss, gradient = _loss_and_gradient(log_probs, mask, advantages, weights)
    padded = torch.cat([torch.full((5, 3), -77.0), log_probs, torch.full((5, 2), -torch.inf)], dim=1)
    padded_mask = torch.cat([torch.zeros(5, 3), mask, torch.zeros(5, 2)], dim=1).bool()
    padded_loss, padded_gradient = _loss_and_gradient(padded, padded_mask, advantages, weights)
    torch.testing.assert_close(padded_loss, loss, atol=1e-12, rtol=0)
    torch.testing.assert_close(padded_gradient[:, 3:7], gradient, atol=1e-12, rtol=0)
    assert (padded_gradient[~padded_mask] == 0).all()


def test_a_one_token_response_has_a_gradient_and_an_empty_one_none(batch):
    log_probs, mask, advantages, _ = batch
    _, gradient = _loss_and_gradient(log_probs, mask, advantages, _weights("sequence_sum"))
    assert gradient[1, 0] != 0
    assert (gradient[4] == 0).all()


def test_a_batch_of_empty_responses_has_loss_zero():
    weights = row_weights(torch.tensor([2, 2]), torch.tensor([0, 0]), "token_mean")
    loss = policy_gradient_loss(torch.zeros(2, 0), torch.zeros(2, 0).bool(), torch.ones(2), weights)
    assert loss.loss.item() == 0
    assert loss.tokens == 0


def test_ratio_of_equal_policies_has_the_gradient_of_the_plain_loss(batch):
    log_probs, mask, advantages, _ = batch
    weights = _weights("sequence_sum")
    _, plain = _loss_and_gradient(log_probs, mask, advantages, weights)
    _, ratio = _loss_and_gradient(log_probs, mask, advantages, weights, behaviour_log_probs=log_probs, clip=0.2)
    torch.testing.assert_close(ratio, plain, atol=1e-12, rtol=0)


def test_the_clip_silences_moves_that_went_far_enough_and_no_others():
    log_probs = torch.log(torch.tensor([[1.5], [1.5], [0.5], [0.5]], dtype=torch.float64)) - 2.0
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    leaf = log_probs.clone().requires_grad_()
    behaviour = torch.full((4, 1), -2.0, dtype=torch.float64)
    result = policy_gradient_loss(
        leaf, torch.ones(4, 1).bool(), advantages, torch.ones(4), behaviour_log_probs=behaviour, clip=0.2
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8))
    assert leaf.grad.flatten().tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0])
    assert result.clipped == 2


def test_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="mean_mean"):
        row_weights(torch.tensor([1]), torch.tensor([1]), "mean_mean")
