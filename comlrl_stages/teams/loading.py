"""Model folders: what stands in them, how they are read and written.

A model folder holds config.json, model.safetensors, the tokenizer's files, generation_config.json (end and pad ids
only) and facts.json: the few facts about a model that sampling and scoring need, found once when the folder is
written, so that no later stage guesses them again.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from comlrl_stages.errors import UserError
from comlrl_stages.teams.value_head import VALUE_HEAD_FILE, ValueHead, load_head, save_head

# Loading takes a second; its bars would only fill the logs of stages.
disable_progress_bar()

FACTS_FILE = "facts.json"
#: Marks a folder that is a critic: a model without output layer cannot write.
CRITIC_FILE = "critic.json"
HEAD_ADVICE = "Give a complete folder, as training and export write it."
CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
# Tokenizers without a limit of their own report a huge number.
LONGEST_BELIEVABLE_CONTEXT = 10**9


@dataclass(frozen=True)
class Facts:
    """What sampling and scoring need to know about a model.

    Attributes:
        eos_ids: every id that ends a response.
        pad_id: id that fills the short rows of a batch; it may equal an end id, since masks come from lengths.
        bos_id: id that opens a text, None where the tokenizer has none.
        context_length: longest prompt plus response in tokens.
        chat_template: Jinja template of a chat, None for plain language models.
    """

    eos_ids: tuple[int, ...]
    pad_id: int
    bos_id: int | None
    context_length: int
    chat_template: str | None

    @classmethod
    def read(cls, folder: Path | str) -> "Facts":
        """Read facts.json of a model folder.

        Raises:
            UserError: the file is missing or does not hold exactly the five facts.
        """
        path = Path(folder) / FACTS_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**values, "eos_ids": tuple(values["eos_ids"])})
        except FileNotFoundError as error:
            raise UserError(_not_a_model_folder(folder, FACTS_FILE)) from error
        except (ValueError, TypeError, KeyError) as error:
            names = ", ".join(field.name for field in fields(cls))
            raise UserError(
                f"{path} is damaged ({error}); expected a JSON object of {names}. Prepare it again."
            ) from error

    def write(self, folder: Path | str) -> None:
        """Write facts.json into an existing model folder."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        (Path(folder) / FACTS_FILE).write_text(text + "\n", encoding="utf-8")


@dataclass
class LoadedModel:
    """A causal language model in memory with its tokenizer and facts, and its value head where it is a critic, too."""

    model: Any
    tokenizer: Any
    facts: Facts
    value_head: ValueHead | None = None

    @property
    def hidden_size(self) -> int:
        """Numbers in the state of one token."""
        return self.model.config.get_text_config().hidden_size

    def to(self, device: str) -> None:
        """Move the model and its value head to a device."""
        self.model.to(device)
        if self.value_head is not None:
            self.value_head.to(device)


def facts_of(model: Any, tokenizer: Any) -> Facts:
    """Find the facts of a model and tokenizer that did not come from a model folder.

    The end ids are those of the generation config, of the config and of the tokenizer together: chat models end a turn
    with another id than a document.
    """
    config = model.config.get_text_config()
    generation_config = getattr(model, "generation_config", None)
    eos_ids = _distinct_ids(
        getattr(generation_config, "eos_token_id", None), getattr(config, "eos_token_id", None), tokenizer.eos_token_id
    )
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = eos_ids[0] if eos_ids else 0
    return Facts(
        eos_ids=eos_ids,
        pad_id=pad_id,
        bos_id=tokenizer.bos_token_id,
        context_length=_context_length(config, tokenizer),
        chat_template=tokenizer.chat_template
        if isinstance(tokenizer.chat_template, str)
        else _default_template(tokenizer),
    )


def load_model(
    folder: Path | str,
    *,
    dtype: str = "float32",
    attention: str | None = "sdpa",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model folder in evaluation mode (no dropout). Only safetensors are read.

    Args:
        dtype: dtype of the weights in memory, "float32" or "bfloat16".
        attention: attention implementation as transformers names it; None leaves the choice to transformers.

    Raises:
        UserError: the folder or one of its files is missing.
    """
    folder = Path(folder)
    facts = Facts.read(_checked_folder(folder))
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        output_loading_info=True,
        dtype=getattr(torch, dtype),
        attn_implementation=attention,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
    )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UserError(
            f"{folder}: {len(missing)} weights are missing ({', '.join(missing[:3])}), and would be made up. "
            "Prepare the model again from a complete one."
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    return LoadedModel(in_own_memory(model).to(device).eval(), tokenizer, facts)


def read_value_head(folder: Path | str, size: int) -> ValueHead | None:
    """Read the value head that was saved beside a model with states of `size` numbers, None where there is none.

    Raises:
        UserError: it is damaged or does not fit.
    """
    path = Path(folder) / VALUE_HEAD_FILE
    return load_head(path, size, advice=HEAD_ADVICE) if path.is_file() else None


def in_own_memory(model: torch.nn.Module) -> torch.nn.Module:
    """Copy each parameter out of the mapped file.

    There it lies at any alignment, and CPU matrix products round differently by alignment: equal weights in two files
    would give other last bits.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def save_model(loaded: LoadedModel, folder: Path | str) -> None:
    """Write a model folder: weights as one safetensors file, tokenizer, end and pad ids, facts, value head if any."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    facts = loaded.facts
    # What a model's authors recommend for sampling must not reach ours; only its end and pad ids are kept.
    loaded.model.generation_config = GenerationConfig(
        eos_token_id=list(facts.eos_ids) or None, pad_token_id=facts.pad_id
    )
    loaded.model.save_pretrained(folder, max_shard_size="1TB")
    loaded.tokenizer.save_pretrained(folder)
    facts.write(folder)
    if loaded.value_head is not None:
        save_head(loaded.value_head, folder / VALUE_HEAD_FILE)


def _checked_folder(folder: Path) -> Path:
    if (folder / CRITIC_FILE).is_file():
        raise UserError(
            f"{folder} is a critic, a model without output layer that cannot write. Name it as critic_model, and give "
            "the agents a language model."
        )
    required = {
        "config.json": ("config.json",),
        "model.safetensors": ("model.safetensors", "model.safetensors.index.json"),
        "tokenizer files": ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"),
    }
    for name, alternatives in required.items():
        if not any((folder / file).is_file() for file in alternatives):
            raise UserError(_not_a_model_folder(folder, name))
    return folder


def _not_a_model_folder(folder: Path | str, missing: str) -> str:
    found = "has no" if Path(folder).is_dir() else "does not exist, so it has no"
    return (
        f"Model folder {folder} {found} {missing}; expected config.json, model.safetensors, tokenizer files and "
        f"{FACTS_FILE}. Prepare the model again."
    )


def _distinct_ids(*values: int | Iterable[int] | None) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for value in values:
        if value is not None:
            ids.update(dict.fromkeys([value] if isinstance(value, int) else value))
    return tuple(ids)


def _context_length(config: Any, tokenizer: Any) -> int:
    candidates = [getattr(config, key, None) for key in CONTEXT_LENGTH_KEYS] + [tokenizer.model_max_length]
    for length in candidates:
        if isinstance(length, int) and 0 < length < LONGEST_BELIEVABLE_CONTEXT:
            return length
    raise UserError(
        f"The config of this {config.model_type} model names no context length (looked for "
        f"{', '.join(CONTEXT_LENGTH_KEYS)}); add max_position_embeddings to its config.json."
    )


def _default_template(tokenizer: Any) -> str | None:
    """Return the template called "default" where a tokenizer has several by name."""
    return (tokenizer.chat_template or {}).get("default")
