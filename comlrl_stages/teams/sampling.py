"""Sample completions with an own decode loop over a model's forward pass.

Each row of a batch draws from its own stream, one uniform number per token, by inverting the cumulated distribution:
a row's completion depends on the rows beside it through nothing but the rounding of logits, and one such draw costs a
twentieth of `torch.multinomial`. Prompts that are equal are computed once and their cache is copied to the rows;
rows that have ended leave the batch; the cache grows in place, in blocks. A model's own recommendations for sampling
(temperature, top-k, repetition penalty) have no say here: only the parameters given and the model's end ids.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from comlrl_stages.errors import UserError
from comlrl_stages.teams.batching import plan_batches
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.decoding import block_cache, grouped_attention
from comlrl_stages.teams.drawing import draw_tokens, relative_weights
from comlrl_stages.teams.loading import Facts, LoadedModel
from comlrl_stages.teams.log_probs import last_logits, positions
from comlrl_stages.teams.prompts import decode

# Copying the cache pays once this share of the rows in a batch has ended.
COMPACTION_SHARE = 0.25


@dataclass(frozen=True)
class SamplingParameters:
    """How completions are drawn.

    Attributes:
        temperature: the logits are divided by it; 0 takes the most probable token (greedy).
        top_p: draw from the fewest most probable tokens that together reach this probability, None for all.
        top_k: draw from this many most probable tokens, None for all. Applied before `top_p`.
        max_new_tokens: a completion without end is cut here.
        min_new_tokens: the end ids have probability 0 before this many tokens.
        stop: a completion ends when its text contains one of these strings; the text is cut before it.
    """

    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int = 64
    min_new_tokens: int = 0
    stop: Sequence[str] = ()


@dataclass(frozen=True)
class Request:
    """One completion to sample: the prompt's ids and the row's own stream (None only for greedy)."""

    prompt_ids: Sequence[int]
    stream: np.random.Generator | None


@dataclass(frozen=True)
class Sampled:
    """One sampled completion.

    Attributes:
        completion_ids: every sampled id, the end id included.
        log_probs: float32 log-probability of each id under the policy at the sampling temperature (1 for greedy),
            before top-k, top-p and the minimal length: what `completion_log_probs` computes for the same ids.
        text: the decoded completion without special tokens, cut before a stop string.
        finish_reason: "stop" (an end id), "length" (cut) or "stop_string".
    """

    completion_ids: list[int]
    log_probs: list[float]
    text: str
    finish_reason: str


def sample(
    loaded: LoadedModel,
    requests: Sequence[Request],
    parameters: SamplingParameters,
    compute: Compute,
    token_budget: int,
) -> list[Sampled]:
    """Sample one completion per request, in the order of the requests.

    Args:
        token_budget: most tokens of a batch, rows * (longest prompt + max_new_tokens).

    Raises:
        UserError: the model's logits are not finite.
        ValueError: a parameter is out of range, a prompt is empty or leaves no room for max_new_tokens in the
            model's context, or a request to be drawn has no stream.
    """
    _check(loaded.facts, requests, parameters)
    costs = [len(request.prompt_ids) + parameters.max_new_tokens for request in requests]
    sampled: dict[int, Sampled] = {}
    with torch.no_grad(), _evaluation(loaded.model), grouped_attention(), compute.autocast():
        for batch in plan_batches(costs, token_budget):
            decoded = _Decoding(loaded, [requests[index] for index in batch], parameters).run()
            sampled.update(zip(batch, decoded, strict=True))
    return [sampled[index] for index in range(len(requests))]


class _Decoding:
    """The decode loop of one batch.

    `rows` are the places in the batch of the rows still in it; all other tensors with a leading dimension of live
    rows are kept in step with it, while `tokens`, `log_probs` and `lengths` have one row per request.
    """

    def __init__(self, loaded: LoadedModel, requests: Sequence[Request], parameters: SamplingParameters):
        self.model, self.tokenizer, self.facts = loaded.model, loaded.tokenizer, loaded.facts
        self.parameters = parameters
        self.device = next(self.model.parameters()).device
        self.eos_ids = torch.tensor(self.facts.eos_ids, dtype=torch.long, device=self.device)
        count, steps = len(requests), parameters.max_new_tokens
        self.tokens = torch.zeros(count, steps, dtype=torch.long, device=self.device)
        self.log_probs = torch.zeros(count, steps, dtype=torch.float32, device=self.device)
        self.lengths = [steps] * count
        self.reasons = ["length"] * count
        self.rows = torch.arange(count, device=self.device)
        self.uniforms = _uniforms(requests, steps).to(self.device)
        self.cache = block_cache(self.model.config)
        self._prefill([tuple(request.prompt_ids) for request in requests])

    def run(self) -> list[Sampled]:
        """Decode until every row has ended and return the completions in the order of the batch."""
        steps = self.parameters.max_new_tokens
        running = torch.ones(len(self.rows), dtype=torch.bool, device=self.device)
        for step in range(steps):
            tokens, log_probs = self._draw(step)
            self.tokens[self.rows, step], self.log_probs[self.rows, step] = tokens, log_probs
            running &= ~self._end(tokens, running, step)
            left = int(running.sum())
            if left == 0 or step == steps - 1:
                break
            if left <= (1 - COMPACTION_SHARE) * len(running):
                tokens, running = self._compact(running, tokens)
            self._forward(tokens, step)
        if not self.log_probs.isfinite().all():
            raise UserError(
                "The model's logits are not finite, so nothing can be drawn from them: its weights have diverged. "
                "Train again with a lower learning rate, or compute in float32."
            )
        return [self._sampled(row) for row in range(len(self.lengths))]

    def _prefill(self, prompts: list[tuple[int, ...]]) -> None:
        """Compute each distinct prompt once and copy its cache and logits to the rows that have it."""
        distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
        longest = max(map(len, distinct))
        ids = torch.tensor([[self.facts.pad_id] * (longest - len(prompt)) + list(prompt) for prompt in distinct])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in distinct])
        ids, mask = ids.to(self.device), mask.to(self.device)
        logits = self._logits(ids, mask, positions(mask))
        self.width = longest
        self.mask = torch.cat([mask, mask.new_ones(len(mask), self.parameters.max_new_tokens)], dim=1)
        self.prompt_lengths = mask.sum(1)
        places = torch.tensor([distinct[prompt] for prompt in prompts], device=self.device)
        self._select(places)
        self.logits = logits[places]

    def _select(self, places: Tensor) -> None:
        """Make the live rows those at `places`, which may repeat."""
        self.cache.reorder_cache(places)
        self.mask, self.prompt_lengths = self.mask[places], self.prompt_lengths[places]

    def _compact(self, running: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        places = running.nonzero().squeeze(1)
        self._select(places)
        self.rows, self.uniforms = self.rows[places], self.uniforms[places]
        return tokens[places], running[places]

    def _forward(self, tokens: Tensor, step: int) -> None:
        mask = self.mask[:, : self.width + step + 1]
        self.logits = self._logits(tokens[:, None], mask, (self.prompt_lengths + step)[:, None])

    def _logits(self, ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """Return the next-token logits (rows, vocabulary)."""
        output = last_logits(
            self.model,
            1,
            input_ids=ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _draw(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the next token of each live row and its log-probability."""
        temperature = self.parameters.temperature
        logits = self.logits.float() if temperature in (0, 1) else self.logits.float() / temperature
        weights, log_totals = relative_weights(logits)
        if step < self.parameters.min_new_tokens:
            weights, _ = relative_weights(logits.index_fill(1, self.eos_ids, -torch.inf))
        if temperature == 0:
            tokens = weights.argmax(-1)
        else:
            tokens = draw_tokens(weights, self.uniforms[:, step], self.parameters.top_k, self.parameters.top_p)
        return tokens, (logits.gather(1, tokens[:, None]) - log_totals).squeeze(1)

    def _end(self, tokens: Tensor, running: Tensor, step: int) -> Tensor:
        """Note the rows that end with this token, and return which of the live rows do."""
        ended = torch.isin(tokens, self.eos_ids) & running
        for row in self.rows[ended].tolist():
            self.lengths[row], self.reasons[row] = step + 1, "stop"
        if self.parameters.stop:
            for place in (running & ~ended).nonzero().squeeze(1).tolist():
                row = int(self.rows[place])
                text = decode(self.tokenizer, self.tokens[row, : step + 1].tolist())
                if _stop_position(text, self.parameters.stop) >= 0:
                    self.lengths[row], self.reasons[row] = step + 1, "stop_string"
                    ended[place] = True
        return ended

    def _sampled(self, row: int) -> Sampled:
        length, reason = self.lengths[row], self.reasons[row]
        ids = self.tokens[row, :length].tolist()
        text = decode(self.tokenizer, ids)
        if reason == "stop_string":
            text = text[: _stop_position(text, self.parameters.stop)]
        return Sampled(ids, self.log_probs[row, :length].tolist(), text, reason)


@contextmanager
def _evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Sample without dropout, and with the cache that gradient checkpointing turns off, also in midst of training."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _uniforms(requests: Sequence[Request], steps: int) -> Tensor:
    """Return (rows, steps) float64 in [0, 1), each row from its own stream, drawn before the first step."""
    rows = [np.zeros(steps) if request.stream is None else request.stream.random(steps) for request in requests]
    return torch.from_numpy(np.stack(rows))


def _stop_position(text: str, stop: Sequence[str]) -> int:
    """Return where the first stop string begins, -1 if there is none."""
    found = [position for position in map(text.find, stop) if position >= 0]
    return min(found, default=-1)


def _check(facts: Facts, requests: Sequence[Request], parameters: SamplingParameters) -> None:
    _check_parameters(parameters)
    for row, request in enumerate(requests):
        prompt = len(request.prompt_ids)
        if not prompt:
            raise ValueError(f"Prompt of request {row} is empty; a model needs at least one token.")
        if prompt + parameters.max_new_tokens > facts.context_length:
            raise ValueError(
                f"Request {row} has {prompt} prompt tokens and max_new_tokens is {parameters.max_new_tokens}: more "
                f"than the {facts.context_length} of the model's context."
            )
        if request.stream is None and parameters.temperature > 0:
            raise ValueError(f"Request {row} has no stream; only greedy sampling (temperature 0) goes without.")


def _check_parameters(parameters: SamplingParameters) -> None:
    if not 0 <= parameters.temperature < float("inf"):
        raise ValueError(f"temperature is {parameters.temperature}; expected a number >= 0.")
    if parameters.top_k is not None and parameters.top_k < 1:
        raise ValueError(f"top_k is {parameters.top_k}; expected at least 1, or None for all tokens.")
    if parameters.top_p is not None and not 0 < parameters.top_p <= 1:
        raise ValueError(f"top_p is {parameters.top_p}; expected 0 < top_p <= 1, or None for all tokens.")
    if parameters.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {parameters.max_new_tokens}; expected at least 1.")
    if "" in parameters.stop:
        raise ValueError("stop holds an empty string, which every text contains.")
