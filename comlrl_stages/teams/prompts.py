"""Text to token ids and back.

Only prompts and foreign texts are encoded; what a model sampled stays as the ids it sampled. A prompt opens with
exactly one BOS where the model has one, whether a chat template, the tokenizer or both would write it.
"""

from dataclasses import dataclass, field
from typing import Any

from comlrl_stages.errors import UserError
from comlrl_stages.teams.loading import Facts


@dataclass(frozen=True)
class PromptFormat:
    """How a prompt text becomes a model's input.

    Attributes:
        kind: "chat" (the model's chat template), "plain", or "auto": chat where the model has a template.
        system: system message of a chat, None for none.
        template_arguments: further variables of the chat template, such as `enable_thinking`.
    """

    kind: str = "auto"
    system: str | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)


def encode_prompt(tokenizer: Any, facts: Facts, text: str, format: PromptFormat) -> list[int]:
    """Return the token ids a model is given for a prompt text.

    Raises:
        UserError: a chat is asked of a model without a template, the template refuses the messages, or no token
            is left.
    """
    chat = format.kind == "chat" or (format.kind == "auto" and facts.chat_template is not None)
    rendered = _render_chat(tokenizer, facts, text, format) if chat else text
    ids = _with_one_bos(_plain_ids(tokenizer, rendered), facts.bos_id, tokenizer)
    if not ids:
        raise UserError(f"The prompt {text!r} has no token; a model needs at least one. Check the task's formatter.")
    return ids


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of token ids without special tokens, spaces left as they are."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def encode_text(tokenizer: Any, text: str, *, ended: bool, eos_id: int) -> list[int]:
    """Encode a response that this model did not sample: no BOS, and one EOS only if the response `ended` by itself."""
    ids = _plain_ids(tokenizer, text)
    if ended and ids[-1:] != [eos_id]:
        ids.append(eos_id)
    return ids


def _render_chat(tokenizer: Any, facts: Facts, text: str, format: PromptFormat) -> str:
    if facts.chat_template is None:
        raise UserError("prompt format is chat, but the model has no chat template; set the format to plain or auto.")
    system = [] if format.system is None else [{"role": "system", "content": format.system}]
    try:
        return tokenizer.apply_chat_template(
            [*system, {"role": "user", "content": text}],
            chat_template=facts.chat_template,
            add_generation_prompt=True,
            tokenize=False,
            **format.template_arguments,
        )
    except Exception as error:  # a template is code, and its arguments come from the configuration
        raise UserError(
            f"The model's chat template refused a chat of {'system and ' if system else ''}user message: {error}. "
            "Leave out the system message, look at team.template_arguments, or set the format to plain."
        ) from error


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _with_one_bos(ids: list[int], bos_id: int | None, tokenizer: Any) -> list[int]:
    """Write the BOS that the tokenizer adds by itself, and take off all but one of those that stand there."""
    if bos_id is None:
        return ids
    first = next((index for index, token in enumerate(ids) if token != bos_id), len(ids))
    written = first > 0 or tokenizer("a")["input_ids"][:1] == [bos_id]
    return [bos_id] * written + ids[first:]
