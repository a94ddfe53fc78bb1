"""A team in memory: one language model per agent, in actor order."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl_stages.teams.compute import Compute, resolve_compute, set_up_torch
from comlrl_stages.teams.loading import LoadedModel, load_model
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
) -> Team:
    """Load a team.

    Agents with equal weights share one model, unless `trainable`: then each has its own float32 copy.

    Args:
        folders: model folder of each agent.
        digests: digest of each agent's weights.
        settings: a stage's team settings (prompt formats, weight dtypes, attention).
        arithmetic: a stage's numeric settings (threads, compute dtype, device).
        masters: float32 weights whatever the settings say, as a trained team has them: a reference in another dtype
            would not be the policy that training starts from.
    """
    set_up_torch(arithmetic.torch_threads)
    compute: Compute | None = None
    loaded: dict[Any, LoadedModel] = {}
    agents = []
    for agent, folder in enumerate(folders):
        dtype = "float32" if trainable or masters else settings.weights_dtypes[agent]
        attention = settings.attentions[agent]
        key = agent if trainable else (digests[agent], dtype, attention)
        if key not in loaded:
            loaded[key] = load_model(
                folder,
                dtype=dtype,
                attention=attention,
                trust_remote_code=settings.trust_remote_code[agent],
            )
        agents.append(loaded[key])
        hidden_size = loaded[key].model.config.get_text_config().hidden_size
        compute = compute or resolve_compute(arithmetic.compute_dtype, arithmetic.device, hidden_size)
    for model in {id(one): one.model for one in agents}.values():
        model.to(compute.device)
    formats = [
        PromptFormat(kind, system, arguments)
        for kind, system, arguments in zip(
            settings.prompt_formats, settings.system_prompts, settings.template_arguments, strict=True
        )
    ]
    return Team(agents, list(digests), formats, compute)
