"""Advantages of a group: what each of K joint responses to one context earned beyond its siblings.

A group is a node: the K returns that one agent's completions got for the same prompt. Everything is computed within the
group, so neither the order of the batch nor other groups can change an advantage. A return that is not finite (the
reward failed) is left out and its siblings are kept as if it had never been drawn.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Mode = Literal["magrpo", "marloo", "maremax", "mareinforce"]
SMALLEST_STD = 1e-6


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages and what they were computed from.

    values: (nodes, K), zero where the return was left out.
    valid: (nodes, K) bool, False where the return was not finite.
    """

    values: torch.Tensor
    valid: torch.Tensor

    @property
    def group_sizes(self) -> torch.Tensor:
        """(nodes,) int64: the K of each group after leaving out returns that are not finite."""
        return self.valid.sum(dim=1)

    @property
    def empty(self) -> torch.Tensor:
        """(nodes,) bool: groups with no return left; their advantages are zero and they must not be trained on."""
        return self.group_sizes == 0


def advantages(returns: torch.Tensor, mode: Mode, normalise: bool = False) -> GroupAdvantages:
    """Return the advantages of `returns` (nodes, K); ragged groups are padded with NaN.

    magrpo: R - mean (arXiv 2508.04652); marloo: R - mean of the others (arXiv 2402.14740); maremax: R - max
    (arXiv 2310.10505); mareinforce: R. A marloo group with a single return has no others and gets zero.
    `normalise` gives (A - mean A) / max(population std of A, 1e-6), which is the same for all four modes.

    Raises ValueError for an unknown mode or a shape that is not (nodes, K).
    """
    if returns.ndim != 2:
        raise ValueError(f"returns have shape {tuple(returns.shape)}; expected (nodes, K)")
    valid = returns.isfinite()
    below_best = _below_best(returns, valid)
    if mode == "magrpo":
        values = _centred(below_best, valid)
    elif mode == "marloo":
        size = valid.sum(dim=1, keepdim=True)
        values = _centred(below_best, valid) * size / (size - 1).clamp(min=1)
    elif mode == "maremax":
        values = below_best
    elif mode == "mareinforce":
        values = returns.where(valid, 0.0)
    else:
        raise ValueError(f"unknown advantage mode {mode!r}; expected magrpo, marloo, maremax or mareinforce")
    return GroupAdvantages(standardised(values, valid) if normalise else values, valid)


def zero_variance(returns: torch.Tensor) -> torch.Tensor:
    """Return (nodes,) bool: groups whose finite returns are all equal, so that centred advantages teach nothing.

    An empty group is not among them: it has no variance at all and is reported by `GroupAdvantages.empty`.
    """
    valid = returns.isfinite()
    return (_below_best(returns, valid) == 0).all(dim=1) & valid.any(dim=1)


def standardised(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return (A - mean A) / max(population std of A, 1e-6) per row of `values`, over `valid`; both (rows, columns).

    Zero where not valid, and exactly zero where all valid values of a row are equal.
    """
    centred = _centred(_below_best(values, valid), valid)
    variance = centred.square().sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)
    return centred / variance.sqrt().clamp(min=SMALLEST_STD)


def _below_best(returns: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """R - max R of the group, zero where invalid. Equal returns give exact zeros, which R - mean R need not."""
    best = returns.where(valid, -torch.inf).amax(dim=1, keepdim=True)
    return (returns - best).where(valid, 0.0)


def _centred(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    mean = values.sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)
    return (values - mean).where(valid, 0.0)
