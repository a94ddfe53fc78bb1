"""KL divergence to the reference policy, estimated on the policy's own tokens.

The estimator is k3 = exp(r) - r - 1 with r = log pi_ref - log pi (http://joschu.net/blog/kl-approx.html): unbiased,
never negative and of low variance. It is summed over a response and taken off that response's return.
"""

from dataclasses import dataclass

import torch

LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class TokenKL:
    """k3 per token: values (rows, tokens), zero off the mask; clamped is the number of tokens whose r was cut."""

    values: torch.Tensor
    clamped: int


def k3(log_probs: torch.Tensor, reference_log_probs: torch.Tensor, mask: torch.Tensor) -> TokenKL:
    """Return k3 per token for log_probs, reference_log_probs and mask (bool) of shape (rows, tokens).

    r is clamped to [-20, 20], so that one token that the policy all but excludes cannot overflow the sum.
    """
    log_ratio = (reference_log_probs - log_probs).where(mask, 0.0)
    clamped = int((log_ratio.abs() > LARGEST_LOG_RATIO).sum())
    log_ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return TokenKL((torch.expm1(log_ratio) - log_ratio).clamp(min=0.0), clamped)


def kl_on_returns(returns: torch.Tensor, kl: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return `returns - coefficient * kl`; both (nodes, K), kl summed over the tokens of each response, no gradient."""
    return returns - coefficient * kl.detach()
