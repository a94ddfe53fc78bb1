"""MADPO's margins, losses and diagnostics."""

import math

import pytest
import torch

from comlrl_stages.learning import madpo

# two agents, one pair
WINNER = torch.tensor([[-2.0], [-1.0]], dtype=torch.float64)
LOSER = torch.tensor([[-3.0], [-0.8]], dtype=torch.float64)
REFERENCE_WINNER = torch.tensor([[-2.5], [-1.5]], dtype=torch.float64)
REFERENCE_LOSER = torch.tensor([[-2.8], [-0.9]], dtype=torch.float64)
WINNER_TOKENS, LOSER_TOKENS = torch.tensor([[4], [2]]), torch.tensor([[5], [1]])


def _margins():
    return madpo.margins(WINNER, LOSER, REFERENCE_WINNER, REFERENCE_LOSER)


def _loss(margins, **options):
    losses = madpo.losses(margins, **options)
    assert losses.shape == margins.shape
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-15)
    return losses[0].item()


def test_margins_worked_out_by_hand():
    assert _margins().flatten().tolist() == pytest.approx([0.7, 0.4])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"beta": 0.1}, 0.6396589),
        ({"beta": 0.1, "label_smoothing": 0.1}, 0.6506589),
        ({"beta": 0.1, "loss": "ipo"}, 15.21),
    ],
)
def test_losses_worked_out_by_hand(options, expected):
    assert _loss(_margins(), **options) == pytest.approx(expected, abs=1e-7)


def test_loss_without_reference():
    assert _loss(madpo.margins(WINNER, LOSER), beta=0.1) == pytest.approx(0.653947, abs=1e-6)
    assert _loss(torch.tensor([[0.3], [-0.1]], dtype=torch.float64), beta=0.1) == pytest.approx(0.6831972, abs=1e-7)


def test_simpo_divides_each_agents_side_by_its_length():
    margins = madpo.length_normalised_margins(WINNER, LOSER, WINNER_TOKENS, LOSER_TOKENS)
    assert margins.sum().item() == pytest.approx(0.4)
    assert _loss(margins, loss="simpo", beta=2.0, gamma=0.5) == pytest.approx(0.5543552, abs=1e-7)


def test_simpo_of_an_empty_response_is_finite():
    zero, tokens = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    assert madpo.length_normalised_margins(zero, zero, tokens, tokens).item() == 0


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_policy_equal_to_reference_has_loss_exactly_ln_2(label_smoothing):
    generator = torch.Generator().manual_seed(0)
    winner, loser = -50 * torch.rand(3, 8, generator=generator), -50 * torch.rand(3, 8, generator=generator)
    losses = madpo.losses(madpo.margins(winner, loser, winner, loser), beta=0.1, label_smoothing=label_smoothing)
    torch.testing.assert_close(
        losses, torch.full_like(losses, math.log(2)), atol=0 if not label_smoothing else 1e-7, rtol=0
    )


def test_gradient_worked_out_by_hand():
    margins = _margins().requires_grad_()
    madpo.losses(margins, beta=0.1).sum().backward()
    assert margins.grad.flatten().tolist() == pytest.approx([-0.0472528, -0.0472528], abs=1e-7)


def test_an_agents_loss_has_no_gradient_for_the_others():
    margins = _margins().requires_grad_()
    madpo.losses(margins, beta=0.1)[0].sum().backward()
    assert margins.grad[0].item() != 0
    assert margins.grad[1].item() == 0


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.3},
        {"beta": 0.3, "label_smoothing": 0.2},
        {"beta": 0.3, "loss": "ipo"},
        {"beta": 0.3, "loss": "simpo", "gamma": 0.4},
    ],
)
def test_gradient_matches_the_naive_joint_loss(options):
    generator = torch.Generator().manual_seed(1)
    margins = torch.randn(3, 5, dtype=torch.float64, generator=generator).requires_grad_()
    madpo.losses(margins, **options).sum().backward()

    def naive(margins):
        joint, beta, smoothing = margins.sum(dim=0), options["beta"], options.get("label_smoothing", 0.0)
        if options.get("loss") == "ipo":
            return ((joint - 1 / (2 * beta)) ** 2).sum()
        logits = beta * joint - options.get("gamma", 0.0)
        win = 1 / (1 + torch.exp(-logits))
        return (-(1 - smoothing) * torch.log(win) - smoothing * torch.log(1 - win)).sum()

    leaf = margins.detach().clone().requires_grad_()
    naive(leaf).backward()
    torch.testing.assert_close(margins.grad, leaf.grad, atol=1e-8, rtol=0)
    assert torch.autograd.gradcheck(naive, leaf)


def test_pairs_do_not_see_each_other():
    generator = torch.Generator().manual_seed(2)
    margins = torch.randn(2, 6, dtype=torch.float64, generator=generator)
    order = torch.randperm(6, generator=generator)
    losses = madpo.losses(margins, beta=0.1)
    torch.testing.assert_close(madpo.losses(margins[:, order], beta=0.1), losses[:, order], atol=1e-15, rtol=0)
    parts = torch.cat([madpo.losses(part, beta=0.1) for part in margins.split(4, dim=1)], dim=1)
    torch.testing.assert_close(parts, losses, atol=1e-15, rtol=0)


def test_diagnostics_keep_ties_apart():
    margins = torch.tensor([[0.3, -0.1, 0.0, 2.0], [0.0, 0.2, 0.0, -2.0]])
    zero = torch.zeros(2, 4)
    result = madpo.diagnostics(margins, zero - 1.5, zero - 2.0)
    assert (result[0]["accuracy"], result[0]["ties"]) == (0.5, 0.25)
    assert (result[1]["accuracy"], result[1]["ties"]) == (0.25, 0.5)
    assert (result[madpo.JOINT]["accuracy"], result[madpo.JOINT]["ties"]) == (0.5, 0.5)
    assert result[0]["margin"] == pytest.approx(0.55)
    assert result[madpo.JOINT]["winner_log_prob"] == -3.0
    assert result[madpo.JOINT]["loser_log_prob"] == -4.0


def test_an_untrained_policy_has_accuracy_zero_and_ties_one():
    zero = torch.zeros(2, 3)
    result = madpo.diagnostics(zero, zero, zero)
    assert all((numbers["accuracy"], numbers["ties"]) == (0.0, 1.0) for numbers in result.values())


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="hinge"):
        madpo.losses(torch.zeros(1, 1), loss="hinge", beta=0.1)
    with pytest.raises(ValueError, match="ipo"):
        madpo.losses(torch.zeros(1, 1), loss="ipo", beta=0.1, label_smoothing=0.1)
    with pytest.raises(ValueError, match="only one"):
        madpo.margins(WINNER, LOSER, REFERENCE_WINNER)
