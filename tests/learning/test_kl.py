"""The k3 estimate of the KL to the reference."""

import pytest
import torch

from comlrl_stages.learning.kl import k3, kl_on_returns


def _k3(log_prob, reference):
    return k3(torch.tensor([[log_prob]]), torch.tensor([[reference]]), torch.ones(1, 1, dtype=torch.bool))


@pytest.mark.parametrize(
    ("log_prob", "reference", "expected"), [(-1.0, -1.5, 0.1065307), (-1.0, -0.5, 0.1487213), (-1.0, -1.0, 0.0)]
)
def test_values_worked_out_by_hand(log_prob, reference, expected):
    assert _k3(log_prob, reference).values.item() == pytest.approx(expected, abs=1e-7)


def test_is_never_negative_however_close_the_policies_are():
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(1000, 20, generator=generator)
    near = log_probs + torch.randn(1000, 20, generator=generator) * torch.logspace(-9, 0, 20)
    assert (k3(log_probs, near, torch.ones_like(log_probs, dtype=torch.bool)).values >= 0).all()


def test_padding_adds_nothing_and_is_not_counted_as_clamped():
    log_probs, reference = torch.tensor([[-1.0, -1.0, -torch.inf]]), torch.tensor([[-1.5, -1.0, 0.0]])
    result = k3(log_probs, reference, torch.tensor([[True, True, False]]))
    assert result.values.sum().item() == pytest.approx(0.1065307, abs=1e-7)
    assert result.clamped == 0


def test_huge_ratios_are_clamped_and_counted():
    result = k3(torch.tensor([[-90.0, -1.0, -1.0]]), torch.tensor([[-1.0, -90.0, -2.0]]), torch.ones(1, 3).bool())
    assert result.clamped == 2
    assert result.values[0, 0].item() == pytest.approx(torch.tensor(20.0).exp().item() - 21, rel=1e-6)
    assert result.values[0, 1].item() == pytest.approx(19.0, rel=1e-6)


def test_gradient_matches_finite_differences():
    log_probs = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    reference, mask = torch.tensor([[-1.3, -1.2]], dtype=torch.float64), torch.ones(1, 2).bool()
    assert torch.autograd.gradcheck(lambda x: k3(x, reference, mask).values, log_probs)


def test_kl_is_taken_off_the_return_without_gradient():
    kl = torch.tensor([[0.2, 0.4]], requires_grad=True)
    returns = kl_on_returns(torch.tensor([[1.0, 2.0]]), kl, 0.5)
    torch.testing.assert_close(returns, torch.tensor([[0.9, 1.8]]))
    assert not returns.requires_grad
