"""The folder of a trained team: agent_0, agent_1, ..., each a whole model or the adapter of a base model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comlrl_stages.artifacts import digest_of_part
from comlrl_stages.errors import UserError
from comlrl_stages.teams.loading import LoadedModel, load_model, save_model
from comlrl_stages.teams.log_probs import without_adapter
from comlrl_stages.teams.lora import is_adapter, load_adapter, merged, save_adapter, with_frozen_weights_of
from comlrl_stages.teams.team import Team, load_team


def save_policy(team: Team, folder: Path) -> None:
    """Write a folder for every agent, also where several are one model. Value heads stand beside their agents."""
    for agent, loaded in enumerate(team.agents):
        if without_adapter(loaded.model) is loaded.model:
            save_model(loaded, folder / f"agent_{agent}")
        else:
            save_adapter(loaded, folder / f"agent_{agent}", team.digests[agent])


def load_policy(
    policy: Path, base_folders: Sequence[Path], base_digests: Sequence[str], settings: Any, arithmetic: Any
) -> Team:
    """Load a trained team, for use, not for training. Agents that were trained as one model are one again.

    Args:
        policy: a finished policy folder.
        base_folders: model folder that each agent started from; only adapters need it.
        base_digests: digest of each of these.
        settings: a stage's team settings; `share_weights` says that the agents' folders are equal.
        arithmetic: a stage's numeric settings.

    Raises:
        UserError: an agent's folder is missing, or an adapter belongs to another base model.
    """
    agents = range(len(base_folders))
    folders = [policy / f"agent_{0 if settings.share_weights else agent}" for agent in agents]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} not found; expected a policy of {len(folders)} agents. Train the team again.")
    digests = [digest_of_part(policy, folder.name) for folder in folders]
    if not any(map(is_adapter, folders)):
        return load_team(folders, digests, settings, arithmetic)
    base = load_team(base_folders, base_digests, settings, arithmetic)
    loaded: dict[str, LoadedModel] = {}
    for agent, (folder, digest) in enumerate(zip(folders, digests, strict=True)):
        if digest not in loaded:
            own = with_frozen_weights_of(base.agents[agent])
            loaded[digest] = load_adapter(own, folder, base_digests[agent])
            loaded[digest].to(base.compute.device)
    return replace(base, agents=[loaded[digest] for digest in digests], digests=digests)


def export_merged(
    base_folder: Path, base_digest: str, adapter: Path, target: Path, *, trust_remote_code: bool = False
) -> None:
    """Write an agent of adapters as a whole model, merged into float32 weights as all trained weights are.

    Raises:
        UserError: the adapter belongs to another base model, or is damaged.
    """
    base = load_model(base_folder, attention=None, trust_remote_code=trust_remote_code)
    save_model(merged(load_adapter(base, adapter, base_digest)), target)
