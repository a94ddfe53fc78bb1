"""MADPO: direct preference optimisation of a team on joint preferences (MARLHF, arXiv 2609.32827).

The preference is over joint responses, so the quantity inside the loss is the joint margin, the sum of the agents' own
margins. Each agent descends its own loss, in which the margins of the others are constants: it needs their
log-probabilities, never their gradients.
"""

from typing import Literal

import torch
import torch.nn.functional as F

Loss = Literal["sigmoid", "ipo", "simpo"]
JOINT = -1


def margins(
    winner: torch.Tensor,
    loser: torch.Tensor,
    reference_winner: torch.Tensor | None = None,
    reference_loser: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the margin of each agent on each pair, (agents, pairs).

    winner, loser and their reference counterparts: (agents, pairs), log-probabilities summed over a response. The
    margin is [log pi(w) - log pi(l)] - [log ref(w) - log ref(l)]; without a reference the second bracket is left out.
    """
    if (reference_winner is None) != (reference_loser is None):
        raise ValueError("the reference log-probabilities of winner and loser go together; only one was given")
    if reference_winner is None:
        return winner - loser
    return (winner - reference_winner) - (loser - reference_loser)


def length_normalised_margins(
    winner: torch.Tensor, loser: torch.Tensor, winner_tokens: torch.Tensor, loser_tokens: torch.Tensor
) -> torch.Tensor:
    """Return log pi(w) / |w| - log pi(l) / |l| per agent and pair, all (agents, pairs): the margin of the simpo loss.

    An empty response has log-probability 0 and counts as one token.
    """
    return winner / winner_tokens.clamp(min=1) - loser / loser_tokens.clamp(min=1)


def losses(
    margins: torch.Tensor,
    *,
    loss: Loss = "sigmoid",
    beta: float,
    gamma: float = 0.0,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the loss of each agent on each pair, (agents, pairs), from margins (agents, pairs).

    With D the joint margin, in which the other agents' margins carry no gradient:
    sigmoid: -log sigmoid(beta D) (DPO, arXiv 2305.18290); ipo: (D - 1 / (2 beta))^2 (arXiv 2310.12036);
    simpo: -log sigmoid(beta D - gamma) on `length_normalised_margins` (arXiv 2405.14734).
    label_smoothing e mixes in the loss of the reversed pair, (1 - e) L(D) + e L(-D), for sigmoid and simpo.

    All agents have the same value; the sum over agents has for each agent the gradient of its own loss. Divide by the
    number of pairs of the whole minibatch to accumulate its mean over micro-batches.
    """
    joint = margins + (margins.sum(dim=0, keepdim=True) - margins).detach()
    if loss == "ipo":
        if label_smoothing:
            raise ValueError("label smoothing is not defined for the ipo loss; set it to 0 or use the sigmoid loss")
        return (joint - 1.0 / (2.0 * beta)).square()
    if loss == "sigmoid":
        logits = beta * joint
    elif loss == "simpo":
        logits = beta * joint - gamma
    else:
        raise ValueError(f"unknown loss {loss!r}; expected sigmoid, ipo or simpo")
    return -(1.0 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def diagnostics(margins: torch.Tensor, winner: torch.Tensor, loser: torch.Tensor) -> dict[int, dict[str, float]]:
    """Return the means over pairs that tell whether training goes well, per agent index and for the team (JOINT, -1).

    margins, winner, loser: (agents, pairs), the latter two log-probabilities of responses. A margin of exactly zero
    is a tie: no part of the accuracy and reported as its own share, so an untrained policy shows accuracy 0, ties 1.
    """
    result = {agent: _diagnostics(margins[agent], winner[agent], loser[agent]) for agent in range(len(margins))}
    result[JOINT] = _diagnostics(margins.sum(dim=0), winner.sum(dim=0), loser.sum(dim=0))
    return result


def _diagnostics(margin: torch.Tensor, winner: torch.Tensor, loser: torch.Tensor) -> dict[str, float]:
    values = {
        "margin": margin,
        "accuracy": margin > 0,
        "ties": margin == 0,
        "winner_log_prob": winner,
        "loser_log_prob": loser,
    }
    return {name: value.detach().double().mean().item() for name, value in values.items()}
