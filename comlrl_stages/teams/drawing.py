"""Drawing tokens from logits: one uniform number per row, by inverting the cumulated distribution.

The draw depends on nothing but the row's logits and its uniform, and costs a twentieth of `torch.multinomial`.
"""

import torch
from torch import Tensor
from torch.nn import functional

# Candidates looked at first for a nucleus; the whole vocabulary is sorted only if they hold too little probability.
NUCLEUS_CANDIDATES = 512
# Tokens of the vocabulary that are cumulated together when a token is drawn.
DRAW_BLOCK = 256


def relative_weights(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities up to a factor per row (the largest is 1), and the log of the softmax's denominator."""
    peaks = logits.amax(-1, keepdim=True)
    weights = (logits - peaks).exp_()
    return weights, weights.sum(-1, keepdim=True).log() + peaks


def draw_tokens(weights: Tensor, uniforms: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Draw one token per row by inverting the cumulated distribution in the order of token ids.

    Args:
        weights: (rows, vocabulary) float32, proportional to the probabilities.
        uniforms: (rows,) float64 in [0, 1).
        top_k: keep the k most probable tokens.
        top_p: then keep the fewest most probable tokens whose share of what is left reaches top_p.

    Returns:
        (rows,) int64 token ids, never one of weight 0.
    """
    if top_k is None and top_p is None:
        return _invert(weights, uniforms)
    kept, ids = _truncate(weights, top_k, top_p)
    # In the order of ids again: two nearly equal probabilities that change places must not change the draw.
    ids, order = ids.sort(-1)
    return ids.gather(1, _invert(kept.gather(1, order), uniforms)[:, None]).squeeze(1)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return per row the first index at which the cumulated weight exceeds uniform * total.

    First the block of tokens is found, then the token in it: cumulating a vocabulary of 50,000 costs far more than
    summing its blocks.
    """
    blocks = functional.pad(weights, (0, -weights.shape[-1] % DRAW_BLOCK)).unflatten(-1, (-1, DRAW_BLOCK))
    sums = blocks.sum(-1, dtype=torch.float64)
    cumulated = sums.cumsum(-1)
    targets = uniforms[:, None] * cumulated[:, -1:]
    block = _first_above(cumulated, targets)
    rest = targets - (cumulated - sums).gather(1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, DRAW_BLOCK)).squeeze(1).cumsum(-1, dtype=torch.float64)
    return (block * DRAW_BLOCK + _first_above(inside, rest)).squeeze(1)


def _first_above(cumulated: Tensor, targets: Tensor) -> Tensor:
    """Return (rows, 1): the first index whose value exceeds the target, at most the last that adds any weight."""
    last = (cumulated < cumulated[:, -1:]).sum(-1, keepdim=True)
    return torch.searchsorted(cumulated, targets, right=True).minimum(last)


def _truncate(weights: Tensor, top_k: int | None, top_p: float | None) -> tuple[Tensor, Tensor]:
    """Return weights (0 where cut) and ids, (rows, candidates), most probable first."""
    vocabulary = weights.shape[-1]
    if top_k is not None:
        values, ids = weights.topk(min(top_k, vocabulary))
        return (values if top_p is None else _nucleus(values, values.sum(-1, keepdim=True), top_p)), ids
    total = weights.sum(-1, keepdim=True)
    values, ids = weights.topk(min(NUCLEUS_CANDIDATES, vocabulary))
    if bool((values.sum(-1, keepdim=True) < top_p * total).any()):
        values, ids = weights.sort(-1, descending=True)
    return _nucleus(values, total, top_p), ids


def _nucleus(values: Tensor, total: Tensor, top_p: float) -> Tensor:
    """Set to 0 what comes after the share top_p is reached; the most probable token always stays."""
    before = values.cumsum(-1, dtype=torch.float64) - values
    return values.masked_fill(before >= top_p * total, 0.0)
