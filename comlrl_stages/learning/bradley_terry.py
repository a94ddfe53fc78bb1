"""The Bradley-Terry loss of a reward model on preference pairs: P(w beats l) = sigmoid(s_w - s_l)."""

import torch
import torch.nn.functional as F


def losses(
    winner_scores: torch.Tensor,
    loser_scores: torch.Tensor,
    *,
    preference: torch.Tensor | float = 1.0,
    centring: float = 0.0,
) -> torch.Tensor:
    """Return the loss of each pair, (pairs,), from the scores of its two sides, (pairs,) each.

    -p log sigmoid(s_w - s_l) - (1 - p) log sigmoid(s_l - s_w), with p the `preference` for the winner (1: certain;
    0.5: undecided). `centring` adds centring * (s_w + s_l)^2, which fixes the offset that the preference leaves free
    (arXiv 2312.09244). Divide by the number of pairs of the whole minibatch to accumulate its mean.
    """
    margin = winner_scores - loser_scores
    loss = -preference * F.logsigmoid(margin) - (1.0 - preference) * F.logsigmoid(-margin)
    return loss + centring * (winner_scores + loser_scores).square()
