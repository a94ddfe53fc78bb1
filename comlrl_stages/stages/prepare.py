"""Bring one language model into the layout that all later stages read.

The model comes from the hub, a local folder or a GGUF file, or is the builtin tiny model, pretrained here. This is the
only stage that may use the network. Writes one model folder: weights, tokenizer, end and pad ids, facts. An agent of an
earlier run keeps its value head; a critic of one stays a critic.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from comlrl_stages.artifacts import Work
from comlrl_stages.checkpoints import load_checkpoint, save_checkpoint
from comlrl_stages.errors import UserError
from comlrl_stages.learning.optimization import restore_training_state, training_state
from comlrl_stages.settings import PrepareSettings
from comlrl_stages.teams.compute import set_up_torch
from comlrl_stages.teams.critics import is_critic, load_critic, save_critic
from comlrl_stages.teams.loading import LoadedModel, facts_of, read_value_head, save_model
from comlrl_stages.teams.sources import from_folder, from_gguf, from_hub
from comlrl_stages.teams.tiny import build_tiny_model

CHECKPOINT_INTERVAL = 50  # steps of the pretraining, about a second


class PretrainingCheckpoints:
    """Checkpoints of a pretraining, so that one that is killed again and again comes to an end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        """Put back the last state; returns the losses of the steps up to it."""
        found = load_checkpoint(self._folder)
        if found is None:
            return []
        _, tensors, state = found
        restore_training_state(model.named_parameters(), optimizer, tensors)
        return state["losses"]

    def keep(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, losses: Sequence[float]) -> None:
        """Save the state after every `CHECKPOINT_INTERVAL` steps."""
        if len(losses) % CHECKPOINT_INTERVAL == 0:
            tensors = training_state(model.named_parameters(), optimizer)
            save_checkpoint(self._folder, len(losses), tensors, {"losses": list(losses)})


def run(settings: PrepareSettings, work: Work) -> None:
    """Write the model folder `model`."""
    set_up_torch(settings.torch_threads)
    if settings.path is not None and is_critic(settings.path):
        return _prepare_critic(settings, work)
    model, tokenizer = _fetch(settings, work)
    if settings.chat_template is not None:
        tokenizer.chat_template = settings.chat_template
    facts = facts_of(model, tokenizer)
    if not facts.eos_ids:
        raise UserError(
            "The model names no end token in its generation config, config or tokenizer, so its responses would never "
            "end. Add eos_token_id to its config.json."
        )
    loaded = LoadedModel(model, tokenizer, facts)
    if settings.path is not None:
        loaded.value_head = read_value_head(settings.path, loaded.hidden_size)
    save_model(loaded, work.output("model"))
    _describe(model, work)


def _prepare_critic(settings: PrepareSettings, work: Work) -> None:
    if settings.chat_template is not None:
        raise UserError(f"path: {settings.path} is a critic, which reads no chats. Leave out chat_template.")
    critic = load_critic(Path(settings.path), trust_remote_code=settings.trust_remote_code)
    save_critic(critic, work.output("model"))
    _describe(critic.model.backbone, work)


def _describe(model: Any, work: Work) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    work.resolved(parameters=parameters, weights_dtype=str(model.dtype).removeprefix("torch."))


def _fetch(settings: PrepareSettings, work: Work) -> tuple[Any, Any]:
    """Return (model, tokenizer) of the one source that is set; resolved facts go to the provenance."""
    if settings.hub is not None:
        model, tokenizer, commit = from_hub(settings.hub, settings.revision, settings.trust_remote_code)
        work.resolved(commit=commit)
        return model, tokenizer
    if settings.path is not None:
        return from_folder(settings.path, settings.trust_remote_code)
    if settings.gguf is not None:
        return from_gguf(settings.gguf)
    steps = settings.pretraining_steps
    model, tokenizer, loss = build_tiny_model(
        steps,
        settings.pretraining_seed,
        work.progress(steps, "pretraining"),
        PretrainingCheckpoints(work.partial / "checkpoints"),
    )
    work.resolved(final_loss=round(loss, 4))
    return model, tokenizer
