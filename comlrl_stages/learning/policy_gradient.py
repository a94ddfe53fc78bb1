"""The policy-gradient loss of sampled responses, in a form that adds up exactly over micro-batches.

The loss of one agent on one node is (1/K) sum_k -A_k sum_t log pi(y_t | prompt, y_<t) and the loss of a buffer is the
mean over its nodes, of all items and turns alike (MAGRPO, arXiv 2508.04652). `row_weights` computes the scale of every
row once for the whole buffer; `policy_gradient_loss` then only adds weighted rows, so the losses of any split into
micro-batches sum to the loss of the whole, and neither padding nor order matters.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Reduction = Literal["sequence_sum", "token_mean"]
LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyGradientLoss:
    """loss: scalar with gradient. tokens: number of scored tokens. clipped: how many of them the clip silenced."""

    loss: torch.Tensor
    tokens: int
    clipped: int


def row_weights(
    group_sizes: torch.Tensor, token_counts: torch.Tensor, reduction: Reduction, minibatches: int = 1
) -> torch.Tensor:
    """Return the weight of each row's summed token losses, (rows,) float64, for all rows of one agent in a buffer.

    group_sizes: (rows,) K of the row's node, after leaving out rows that are not trained on; nodes may differ in size.
    For independent trajectories (actor-critic) every row is its own node, K = 1. token_counts: (rows,) tokens of the
    row's response, EOS included.
    sequence_sum: 1 / (K * nodes), so that every node weighs the same.
    token_mean: 1 / (all tokens of the buffer), so that long responses weigh more and are not scored more harshly.

    A buffer may be split into `minibatches` optimizer steps in any way; the weights are then multiplied by this number.
    The mean over the minibatches is the loss of the whole buffer exactly: a row weighs the same in whichever minibatch
    it falls, and a minibatch that is filled in part has a loss that is smaller in the same proportion.
    """
    if reduction == "sequence_sum":
        shares = 1.0 / group_sizes.double()
        return shares * minibatches / shares.sum()
    if reduction == "token_mean":
        tokens = token_counts.double()
        return torch.ones_like(tokens) * minibatches / tokens.sum().clamp(min=1)
    raise ValueError(f"unknown reduction {reduction!r}; expected sequence_sum or token_mean")


def policy_gradient_loss(
    log_probs: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    behaviour_log_probs: torch.Tensor | None = None,
    clip: float | None = None,
) -> PolicyGradientLoss:
    """Return this micro-batch's part of the loss: sum over rows of weight * sum_t -A * log pi(y_t).

    log_probs, mask (bool), behaviour_log_probs: (rows, tokens), mask true on every sampled token up to and including
    EOS; advantages, weights: (rows,), weights from `row_weights` over the whole buffer.

    With behaviour_log_probs (those of the policy that sampled, at the sampling temperature) each token's log pi is
    replaced by its ratio pi / pi_behaviour, which corrects an off-policy update and has the same gradient where the two
    policies are equal. `clip` then limits the ratio to [1 - clip, 1 + clip] as PPO does (arXiv 1707.06347, equation 7).
    """
    advantages = advantages.detach().unsqueeze(1).to(log_probs.dtype)
    log_probs = log_probs.where(mask, 0.0)
    if behaviour_log_probs is None:
        gains, clipped = advantages * log_probs, 0
    else:
        gains, clipped = _off_policy_gains(log_probs, behaviour_log_probs.where(mask, 0.0), mask, advantages, clip)
    rows = gains.where(mask, 0.0).sum(dim=1)
    loss = -(rows * weights.to(rows.dtype)).sum()
    return PolicyGradientLoss(loss, int(mask.sum()), clipped)


def _off_policy_gains(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    clip: float | None,
) -> tuple[torch.Tensor, int]:
    log_ratio = (log_probs - behaviour_log_probs.detach()).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    plain = log_ratio.exp() * advantages
    if clip is None:
        return plain, 0
    limited = log_ratio.exp().clamp(1.0 - clip, 1.0 + clip) * advantages
    return torch.minimum(plain, limited), int(((limited < plain) & mask).sum())
