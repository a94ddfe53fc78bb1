"""Bring one language model into the layout that all later stages read.

The model comes from the hub, a local folder or a GGUF file, or is the builtin tiny model, pretrained here. This is the
only stage that may use the network. Writes one model folder: weights, tokenizer, end and pad ids, facts.
"""

from typing import Any

from comlrl_stages.artifacts import Work
from comlrl_stages.errors import UserError
from comlrl_stages.settings import PrepareSettings
from comlrl_stages.teams.compute import set_up_torch
from comlrl_stages.teams.loading import LoadedModel, facts_of, save_model
from comlrl_stages.teams.sources import from_folder, from_gguf, from_hub
from comlrl_stages.teams.tiny import build_tiny_model


def run(settings: PrepareSettings, work: Work) -> None:
    """Write the model folder `model`."""
    set_up_torch(settings.torch_threads)
    model, tokenizer = _fetch(settings, work)
    if settings.chat_template is not None:
        tokenizer.chat_template = settings.chat_template
    facts = facts_of(model, tokenizer)
    if not facts.eos_ids:
        raise UserError(
            "The model names no end token in its generation config, config or tokenizer, so its responses would never "
            "end. Add eos_token_id to its config.json."
        )
    save_model(LoadedModel(model, tokenizer, facts), work.output("model"))
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
    model, tokenizer, loss = build_tiny_model(steps, settings.pretraining_seed, work.progress(steps, "pretraining"))
    work.resolved(final_loss=round(loss, 4))
    return model, tokenizer
