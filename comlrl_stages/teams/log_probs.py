"""Log-probabilities of given completions: the one scorer for training, references and diagnostics.

Lengths say which tokens count, never their values: an EOS is scored also where it is the pad token, and pads never are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from comlrl_stages.teams.loading import Facts
from comlrl_stages.teams.value_head import ValueHead


@dataclass(frozen=True)
class TokenScores:
    """Scores of completion tokens; rows shorter than C are zero after their end.

    Attributes:
        log_probs: (rows, C) float32, log-probability of each token given the prompt and the tokens before it.
        mask: (rows, C) bool, True for the tokens of the completion, EOS included.
        entropy: (rows, C) float32, entropy of the next-token distribution in nats, without gradient; None if not asked
            for.
        values: (rows,) float32, what the value head reads; None without one.
    """

    log_probs: Tensor
    mask: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None


def completion_log_probs(
    model: Any,
    facts: Facts,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    value_head: ValueHead | None = None,
    value_at: Literal["prompt", "response"] = "prompt",
) -> TokenScores:
    """Score each completion under its prompt; differentiable. Call it inside the autocast of a `Compute`.

    Prompts are padded on the left and completions on the right, so that the last C + 1 positions are all that the
    output layer has to compute. An empty completion has no token: its mask is False and its sum 0.

    Args:
        temperature: the logits are divided by it; 0 (greedy sampling) is scored as 1.
        value_head: reads one value per row from the state of the last layer, in the same forward pass.
        value_at: the token whose state it reads: the last of the prompt (V), or the last of the response (Q), which of
            an empty response is the prompt's, too.

    Raises:
        ValueError: the numbers of prompts and completions differ, a prompt is empty, or a row exceeds the context.
    """
    _check_rows(facts, prompts, completions)
    device = next(model.parameters()).device
    mask = _completion_mask(completions).to(device)
    if not len(prompts) or (mask.numel() == 0 and value_head is None):
        empty = torch.zeros(mask.shape, device=device, requires_grad=torch.is_grad_enabled())
        nothing = None if value_head is None else torch.zeros(0, device=device)
        return TokenScores(empty, mask, torch.zeros_like(empty) if entropy else None, nothing)
    input_ids, attention_mask = _pad(prompts, completions, facts.pad_id)
    with _last_states(model, wanted=value_head is not None) as states:
        logits = _completion_logits(model, input_ids.to(device), attention_mask.to(device), mask.shape[1])
    # Only real tokens are brought to float32: of (rows, C, vocabulary) most may be padding.
    scaled = logits[mask].float()
    if temperature not in (0, 1):
        scaled = scaled / temperature
    begin = input_ids.shape[1] - mask.shape[1]  # where the completions begin
    targets = input_ids[:, begin:].to(device)[mask]
    log_probs = -functional.cross_entropy(scaled, targets, reduction="none")
    return TokenScores(
        _spread(log_probs, mask),
        mask,
        _spread(_entropy(scaled.detach()), mask) if entropy else None,
        _values(value_head, states[0], mask, begin, value_at) if value_head is not None else None,
    )


def positions(attention_mask: Tensor) -> Tensor:
    """Return position ids (rows, length): the first real token of a row is 0 wherever it stands."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def without_adapter(model: Any) -> Any:
    """Return the language model inside a PeftModel, any other as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def last_logits(model: Any, count: int, **inputs: Any) -> Any:
    """Run a causal LM and return its output with logits (rows, count, vocabulary) of the last `count` positions.

    Models that cannot leave out logits are cut afterwards; models without position ids (ALiBi) are not given any.
    """
    known = signature(without_adapter(model).forward).parameters
    if "position_ids" not in known:
        del inputs["position_ids"]
    if "logits_to_keep" in known:
        inputs["logits_to_keep"] = count
    output = model(**inputs)
    output.logits = output.logits[:, -count:]
    return output


@contextmanager
def _last_states(model: Any, wanted: bool) -> Iterator[list[Tensor]]:
    """Collect what the backbone gives to the output layer: the states (rows, tokens, size) of the last layer alone."""
    states: list[Tensor] = []
    if not wanted:
        yield states
        return
    backbone = without_adapter(model).base_model
    hook = backbone.register_forward_hook(lambda module, inputs, output: states.append(output.last_hidden_state))
    try:
        yield states
    finally:
        hook.remove()


def _values(head: ValueHead, states: Tensor, mask: Tensor, begin: int, value_at: str) -> Tensor:
    """Return the values (rows,) at the last token of each prompt or response; responses begin at column `begin`."""
    last = mask.new_full((len(mask),), begin - 1, dtype=torch.long)
    if value_at == "response":
        last = last + mask.sum(1)
    return head(states[torch.arange(len(states), device=states.device), last])


def _completion_logits(model: Any, input_ids: Tensor, attention_mask: Tensor, length: int) -> Tensor:
    """Return (rows, length, vocabulary): the logits that predict each completion token stand one position before it."""
    output = last_logits(
        model,
        length + 1,
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=positions(attention_mask),
        use_cache=False,
    )
    return output.logits[:, :-1]


def _check_rows(facts: Facts, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> None:
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts but {len(completions)} completions.")
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if not len(prompt):
            raise ValueError(f"Prompt of row {row} is empty; the first completion token needs one to follow.")
        if len(prompt) + len(completion) > facts.context_length:
            raise ValueError(
                f"Row {row} has {len(prompt)} prompt and {len(completion)} completion tokens, more than the "
                f"{facts.context_length} of the model's context."
            )


def _completion_mask(completions: Sequence[Sequence[int]]) -> Tensor:
    lengths = torch.tensor([len(completion) for completion in completions], dtype=torch.long)
    longest = int(lengths.max()) if len(completions) else 0
    return torch.arange(longest) < lengths[:, None]


def _pad(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask (rows, longest prompt + longest completion), aligned where completions begin."""
    before, after = max(map(len, prompts)), max(map(len, completions))
    ids = torch.full((len(prompts), before + after), pad_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        real = slice(before - len(prompt), before + len(completion))
        ids[row, real] = torch.as_tensor([*prompt, *completion])
        mask[row, real] = 1
    return ids, mask


def _entropy(logits: Tensor) -> Tensor:
    log_probs = functional.log_softmax(logits, dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
