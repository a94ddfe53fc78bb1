"""What makes decoding fast for any causal language model: a cache that grows in place, and grouped attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Tokens by which the cache grows when it is full.
CACHE_BLOCK = 64


class _BlockLayer(DynamicLayer):
    """A growing layer of the cache that writes in place and allocates a block of tokens at a time.

    `torch.cat` copies all keys and values for every new token. Under autocast they are kept in its dtype, to which
    attention would otherwise cast all of them at every step.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (rows, heads, new, size) keys and values; return all of them so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._key_blocks = self._value_blocks = None
        end = self.get_seq_length() + key_states.shape[-2]
        self._key_blocks = _append(self._key_blocks, key_states, end)
        self._value_blocks = _append(self._value_blocks, value_states, end)
        self.keys, self.values = self._key_blocks[:, :, :end], self._value_blocks[:, :, :end]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the rows those at `beam_idx`, which may repeat."""
        self._key_blocks = self._key_blocks.index_select(0, beam_idx)
        self._value_blocks = self._value_blocks.index_select(0, beam_idx)
        end = self.keys.shape[-2]
        self.keys, self.values = self._key_blocks[:, :, :end], self._value_blocks[:, :, :end]


def _append(blocks: Tensor | None, new: Tensor, end: int) -> Tensor:
    """Write `new` (rows, heads, tokens, size) so that it ends at token `end`, in a larger tensor if it does not fit."""
    if blocks is None:
        kind = new.device.type
        return new.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else new
    start = end - new.shape[-2]
    if end > blocks.shape[-2]:
        larger = blocks.new_empty(*blocks.shape[:2], end - 1 + CACHE_BLOCK, blocks.shape[-1])
        larger[:, :, :start] = blocks[:, :, :start]
        blocks = larger
    blocks[:, :, start:end] = new
    return blocks


def block_cache(config: Any) -> DynamicCache:
    """Return the cache a model asks for (sliding windows, recurrent states), its plain layers writing in place."""
    cache = DynamicCache(config=config)
    cache.layers = [_BlockLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@contextmanager
def grouped_attention() -> Iterator[None]:
    """Let models with attention "sdpa" decode without copying keys and values for each head of a group."""
    previous = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _grouped_sdpa
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = previous


def _grouped_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with one new token per row: the heads that share keys and values stand as queries of one head.

    The usual path repeats all keys and values for every head of a group, which on CPU costs many times the attention.
    """
    rows, heads, length, size = query.shape
    shared = key.shape[1]
    per_head_mask = attention_mask is not None and attention_mask.shape[1] > 1
    if length > 1 or heads == shared or per_head_mask or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.reshape(rows, shared, heads // shared, size)
    output = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, 1, heads, -1), None
