"""The text of a whole team for one model to judge: all agents' prompts and responses in role order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from comlrl_stages.errors import UserError
from comlrl_stages.teams.loading import Facts

PROMPT_HEADER = "User {agent}:\n"
RESPONSE_HEADER = "\nAgent {agent}:\n"
END_OF_AGENT = "\n"


@dataclass(frozen=True)
class JointInput:
    """Token ids of one text to be judged; `cut` says that tokens were left out to fit the maximal length."""

    ids: tuple[int, ...]
    cut: bool


def encode_joint(
    tokenizer: Any,
    facts: Facts,
    prompts: Sequence[str],
    responses: Sequence[str],
    max_length: int,
    *,
    limit: str = "the reward model's max_length",
    advice: str = "Set max_length to at least that.",
) -> JointInput:
    """Encode the prompts and responses of all agents, in role order, in at most `max_length` tokens.

    Where they do not fit, the longest prompts lose tokens from their start until all are equally long; only when no
    prompt token is left do the longest responses lose tokens from their end, and each keeps at least one. One EOS ends
    the text. Text that spells a special token is read as plain text.

    Args:
        limit: what `max_length` is called in an error, and `advice` what to do about it.

    Raises:
        UserError: `max_length` does not even hold the template and one token per response.
    """
    headers = [
        _tokens(tokenizer, template.format(agent=agent))
        for agent in range(len(prompts))
        for template in (PROMPT_HEADER, RESPONSE_HEADER)
    ]
    opening, between = _opening(tokenizer, facts), _tokens(tokenizer, END_OF_AGENT)
    prompt_ids = [_tokens(tokenizer, prompt) for prompt in prompts]
    response_ids = [_tokens(tokenizer, response) for response in responses]
    room = max_length - len(opening) - sum(map(len, headers)) - len(between) * len(prompts) - 1
    if room < len(responses):
        raise UserError(
            f"{limit} is {max_length}, but its template and one token of each of {len(responses)} responses take "
            f"{max_length - room + len(responses)}. {advice}"
        )
    response_lengths = _shortened([len(ids) for ids in response_ids], room)
    prompt_lengths = _shortened([len(ids) for ids in prompt_ids], room - sum(response_lengths))
    ids = list(opening)
    for agent, (prompt, response) in enumerate(zip(prompt_ids, response_ids, strict=True)):
        ids += headers[2 * agent] + prompt[len(prompt) - prompt_lengths[agent] :]
        ids += headers[2 * agent + 1] + response[: response_lengths[agent]] + between
    cut = sum(prompt_lengths) + sum(response_lengths) < sum(map(len, [*prompt_ids, *response_ids]))
    return JointInput((*ids, facts.eos_ids[0]), cut)


def encode_own(prompt_ids: Sequence[int], completion_ids: Sequence[int], max_length: int) -> JointInput:
    """Join one agent's own ids in at most `max_length` tokens: the start of the prompt goes first.

    Only when no prompt token is left does the completion lose tokens from its end.
    """
    completion = tuple(completion_ids[:max_length])
    prompt = tuple(prompt_ids[max(len(prompt_ids) + len(completion) - max_length, 0) :])
    ids = prompt + completion
    return JointInput(ids, len(ids) < len(prompt_ids) + len(completion_ids))


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _opening(tokenizer: Any, facts: Facts) -> list[int]:
    """Return the BOS where the tokenizer writes one by itself."""
    writes_bos = facts.bos_id is not None and list(tokenizer("a")["input_ids"])[:1] == [facts.bos_id]
    return [facts.bos_id] if writes_bos else []


def _shortened(lengths: list[int], room: int) -> list[int]:
    """Return lengths with a sum of at most `room`: the longest are cut to a common length, the first keep the rest."""
    if sum(lengths) <= room:
        return lengths
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    result = list(lengths)
    for position, i in enumerate(order):
        share = room // (len(order) - position)
        result[i] = min(lengths[i], share)
        room -= result[i]
    return result
