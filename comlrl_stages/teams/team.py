"""A team in memory: one language model per agent, in actor order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from comlrl_stages.errors import UserError
from comlrl_stages.seeding import torch_seed
from comlrl_stages.teams.compute import Compute, resolve_compute, set_up_torch
from comlrl_stages.teams.loading import LoadedModel, load_model
from comlrl_stages.teams.lora import add_lora, with_frozen_weights_of
from comlrl_stages.teams.prompts import PromptFormat, encode_prompt


@dataclass(frozen=True)
class Team:
    """The agents of a team.

    Attributes:
        agents: the model of each agent; agents of equal weights may be one object.
        digests: what stands for each agent's weights, for tables and provenance.
        formats: how each agent's prompts are made.
        compute: where and in which dtype they run.
    """

    agents: Sequence[LoadedModel]
    digests: Sequence[str]
    formats: Sequence[PromptFormat]
    compute: Compute

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of one prompt per agent."""
        return [
            encode_prompt(loaded.tokenizer, loaded.facts, prompt, kind)
            for loaded, prompt, kind in zip(self.agents, prompts, self.formats, strict=True)
        ]

    def groups(self) -> list[list[int]]:
        """Agents that share one model, by the first of them: they are sampled in one batch."""
        together: dict[int, list[int]] = {}
        for agent, loaded in enumerate(self.agents):
            together.setdefault(id(loaded), []).append(agent)
        return list(together.values())


def load_team(
    folders: Sequence[Path],
    digests: Sequence[str],
    settings: Any,
    arithmetic: Any,
    *,
    trainable: bool = False,
    masters: bool = False,
    lora: Any = None,
    seed: int = 0,
) -> Team:
    """Load a team.

    Agents with equal weights share one model, unless `trainable`: then each has its own float32 copy, or all have one
    where the settings say `share_weights`. With `lora` only adapters are each agent's own; equal bases stay shared.

    Args:
        folders: model folder of each agent.
        digests: digest of each agent's weights.
        settings: a stage's team settings (prompt formats, weight dtypes, attention, shared weights).
        arithmetic: a stage's numeric settings (threads, compute dtype, device).
        masters: float32 weights whatever the settings say, as a trained team has them: a reference in another dtype
            would not be the policy that training starts from.
        lora: settings of new adapters, None to train every weight. Only with `trainable`.
        seed: of the adapters, each agent's drawn from a stream of its own.
    """
    set_up_torch(arithmetic.torch_threads)
    shared = trainable and settings.share_weights
    if shared and len(set(digests)) > 1:
        raise UserError("team.share_weights needs one model for all agents, but theirs differ. Give all the same one.")
    loaded: dict[Any, LoadedModel] = {}
    agents = []
    for agent, folder in enumerate(folders):
        dtype = "float32" if trainable or masters else settings.weights_dtypes[agent]
        attention = settings.attentions[agent]
        own = trainable and not shared and lora is None
        key = agent if own else (digests[agent], dtype, attention)
        if key not in loaded:
            loaded[key] = load_model(
                folder,
                dtype=dtype,
                attention=attention,
                trust_remote_code=settings.trust_remote_code[agent],
            )
        agents.append(loaded[key])
    if lora is not None:
        agents = _with_adapters(agents, lora, seed, shared)
    compute = resolve_compute(arithmetic.compute_dtype, arithmetic.device, agents[0].hidden_size)
    for one in agents:
        one.to(compute.device)
    formats = [
        PromptFormat(kind, system, arguments)
        for kind, system, arguments in zip(
            settings.prompt_formats, settings.system_prompts, settings.template_arguments, strict=True
        )
    ]
    return Team(agents, list(digests), formats, compute)


def _with_adapters(agents: Sequence[LoadedModel], lora: Any, seed: int, shared: bool) -> list[LoadedModel]:
    """Give each agent an adapter of its own, or all the same one."""

    def adapted(agent: int) -> LoadedModel:
        own = with_frozen_weights_of(agents[agent])
        generator = torch.Generator().manual_seed(torch_seed(seed, "lora", agent))
        return replace(own, model=add_lora(own.model, lora, generator))

    return [adapted(0)] * len(agents) if shared else [adapted(agent) for agent in range(len(agents))]
