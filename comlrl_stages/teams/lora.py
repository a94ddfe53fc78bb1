"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft: what trains is a small product beside frozen weights.

A policy of adapters is a folder per agent with adapter_model.safetensors and adapter_config.json, as peft names them,
and base.json: the digest of the model they belong to, and its folder's name. On another model they would be noise.
"""

import copy
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from comlrl_stages.errors import UserError
from comlrl_stages.files import write_json
from comlrl_stages.teams.loading import LoadedModel, read_value_head
from comlrl_stages.teams.value_head import VALUE_HEAD_FILE, save_head

# peft takes seconds to import, which is for those alone who use adapters: below, functions import it.
if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

WEIGHTS_FILE, CONFIG_FILE, BASE_FILE = "adapter_model.safetensors", "adapter_config.json", "base.json"
ALL_LINEAR = "all-linear"


class SeededDropout(nn.Module):
    """Dropout that draws from a given generator, and does nothing while it has none."""

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability
        self.generator: torch.Generator | None = None

    def forward(self, values: Tensor) -> Tensor:
        """Return `values` of any shape; while there is a generator some are zero, the rest scaled up."""
        if self.generator is None:
            return values
        uniform = torch.rand(values.shape, generator=self.generator, device=self.generator.device)
        kept = (uniform >= self.probability).to(values.device)
        return values * kept / (1.0 - self.probability)


def add_lora(model: nn.Module, lora: Any, generator: torch.Generator) -> "PeftModel":
    """Put a new adapter on a causal language model; it changes nothing yet, and alone has gradients.

    As in peft, A is drawn like the weights of a linear layer, U(-1/sqrt(inputs), 1/sqrt(inputs)), and B is zero.

    Args:
        lora: rank, alpha, dropout, and target_modules: "all-linear" or names of modules.
        generator: draws A, on the CPU.

    Raises:
        UserError: a name of `target_modules` is that of no linear module.
    """
    from peft import LoraConfig

    adapted = _wrap(
        model,
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=_target_names(model, lora.target_modules),
            fan_in_fan_out=_has_transposed(model),
            task_type="CAUSAL_LM",
        ),
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_A" in name:
                drawn = torch.empty(parameter.shape)
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
                parameter.copy_(drawn)
    return adapted


@contextmanager
def reference(model: "PeftModel") -> Iterator[None]:
    """Switch the adapter off: inside, the model is bit for bit the one that training started from."""
    with model.disable_adapter():
        yield


@contextmanager
def adapter_dropout(model: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Let the dropout of an adapter act, drawing from `generator`; outside, no dropout ever acts."""
    layers = [module for module in model.modules() if isinstance(module, SeededDropout)]
    for layer in layers:
        layer.generator = generator
    try:
        yield
    finally:
        for layer in layers:
            layer.generator = None


def with_frozen_weights_of(loaded: LoadedModel) -> LoadedModel:
    """Return a copy that shares the weights in memory: adapters on several copies need the base only once."""
    shared = {id(parameter): parameter for parameter in loaded.model.parameters()}
    return replace(loaded, model=copy.deepcopy(loaded.model, shared))


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, not a whole model."""
    return (folder / CONFIG_FILE).is_file()


def save_adapter(loaded: LoadedModel, folder: Path, base_digest: str) -> None:
    """Write the adapter of an agent, its value head if any, and which base they belong to. Equal weights, equal bytes.

    The tokenizer and the facts are those of the base and stay there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _state(loaded.model).items()}
    save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
    base = Path(loaded.model.get_base_model().name_or_path).name  # the whole path is only that of this machine
    config = loaded.model.active_peft_config.to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    (folder / CONFIG_FILE).write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    write_json(folder / BASE_FILE, {"digest": base_digest, "name": base})
    if loaded.value_head is not None:
        save_head(loaded.value_head, folder / VALUE_HEAD_FILE)


def load_adapter(base: LoadedModel, folder: Path, base_digest: str) -> LoadedModel:
    """Put a saved adapter on its base model, for use, not for training; a value head comes along.

    Args:
        base: gets the adapter's layers, so it is not to be used by itself any more.
        base_digest: digest of the base model, which must be the one that the adapter was trained on.

    Raises:
        UserError: it is another base, or a file is missing, damaged or does not fit.
    """
    from peft import LoraConfig, set_peft_model_state_dict

    _check_base(folder, base_digest)
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
        config = LoraConfig.from_pretrained(str(folder))
        config.base_model_name_or_path = base.model.name_or_path  # peft would warn that the base has moved
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise UserError(f"{folder} holds a damaged adapter ({error}). Train the team again.") from error
    adapted = _wrap(base.model, config)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in _state(adapted).items()}
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise UserError(
            f"{folder / WEIGHTS_FILE} does not fit its {CONFIG_FILE}: {len(wrong)} tensors are missing, too many or of "
            f"another shape ({', '.join(wrong[:3])}). Train the team again."
        )
    set_peft_model_state_dict(adapted, tensors)
    return replace(base, model=adapted.eval(), value_head=read_value_head(folder, base.hidden_size))


def merged(loaded: LoadedModel) -> LoadedModel:
    """Return the agent as an ordinary model: its adapter is added into the weights, in place."""
    return replace(loaded, model=loaded.model.merge_and_unload())


def _wrap(model: nn.Module, config: "LoraConfig") -> "PeftModel":
    """Put the layers of an adapter into a model; what peft draws for them is replaced and leaves no trace."""
    from peft import get_peft_model

    with torch.random.fork_rng(devices=[]):
        adapted = get_peft_model(model, config)
    if config.lora_dropout:
        for module in adapted.modules():
            if isinstance(dropouts := getattr(module, "lora_dropout", None), nn.ModuleDict):
                dropouts.update({name: SeededDropout(config.lora_dropout) for name in dropouts})
    return adapted.eval()


def _state(model: "PeftModel") -> Mapping[str, Tensor]:
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, save_embedding_layers=False)


def _linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Linear modules by their full names, without the output layer, whose weights may be the embedding's."""
    output = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not output
    }


def _has_transposed(model: nn.Module) -> bool:
    return any(isinstance(module, Conv1D) for module in _linear_modules(model).values())


def _target_names(model: nn.Module, asked: Any) -> list[str]:
    """The names of modules that get adapters; each stands for all modules whose full name ends with it."""
    modules = _linear_modules(model)
    known = sorted({name.rpartition(".")[2] for name in modules})
    if asked == ALL_LINEAR:
        return known
    for name in asked:
        if not any(full == name or full.endswith(f".{name}") for full in modules):
            raise UserError(
                f"lora.target_modules names {name!r}, which is no linear module of {model.name_or_path}. Name some of "
                f"{', '.join(known)}, or all-linear."
            )
    return sorted(set(asked))


def _check_base(folder: Path, digest: str) -> None:
    path = folder / BASE_FILE
    try:
        base = json.loads(path.read_text(encoding="utf-8"))
        expected, name = base["digest"], base["name"]
    except FileNotFoundError:
        raise UserError(
            f"{path} not found; without it nobody knows which model the adapter belongs to. Train the team again."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error!r}). Train the team again.") from error
    if expected != digest:
        raise UserError(
            f"{folder} holds an adapter of the base model {name} with digest {expected[:16]}, but the base model here "
            f"has digest {digest[:16]}. Give the model that it was trained on, or train the team again."
        )
