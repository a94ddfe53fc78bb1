"""The joint reward model: one score for the prompts and responses of a whole team.

A value model reads one text, all agents' prompts and responses in role order. A reward model folder is a model folder
(the backbone) with two more files: head.safetensors and reward_model.json.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from comlrl_stages.errors import UserError
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.joint_text import JointInput, encode_joint
from comlrl_stages.teams.loading import Facts
from comlrl_stages.teams.value_head import load_head, new_head
from comlrl_stages.teams.value_model import ValueModel, load_value_model, save_value_model, values_of

HEAD_FILE, SETTINGS_FILE = "head.safetensors", "reward_model.json"


@dataclass
class LoadedRewardModel:
    """A reward model in memory with what turns a team's texts into its input.

    Its head is linear and has no bias: only differences of scores matter.
    """

    model: ValueModel
    tokenizer: Any
    facts: Facts
    max_length: int

    def encode(self, prompts: Sequence[str], responses: Sequence[str]) -> JointInput:
        """Encode the prompts and responses of all agents, in role order; see `encode_joint`."""
        return encode_joint(self.tokenizer, self.facts, prompts, responses, self.max_length)


def new_reward_model(
    folder: Path,
    *,
    max_length: int,
    generator: torch.Generator,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> LoadedRewardModel:
    """Put a head drawn from N(0, 0.02) by `generator` on the language model in `folder`.

    A `max_length` above the context of the model is lowered to it.

    Raises:
        UserError: the folder is no model folder, or the model has no EOS.
    """
    if not Facts.read(folder).eos_ids:
        raise UserError(f"{folder}: the model has no EOS token, and a joint text ends with one. Use another backbone.")
    model, tokenizer, facts = load_value_model(
        folder,
        lambda size: new_head(size, None, generator, bias=False),
        device=device,
        trust_remote_code=trust_remote_code,
    )
    return LoadedRewardModel(model, tokenizer, facts, min(max_length, facts.context_length))


def save_reward_model(loaded: LoadedRewardModel, folder: Path) -> None:
    """Write a reward model folder: backbone, tokenizer, facts, head and maximal length."""
    save_value_model(loaded.model, loaded.tokenizer, loaded.facts, folder, HEAD_FILE)
    (folder / SETTINGS_FILE).write_text(json.dumps({"max_length": loaded.max_length}) + "\n", encoding="utf-8")


def load_reward_model(folder: Path, device: str = "cpu", *, trust_remote_code: bool = False) -> LoadedRewardModel:
    """Load a reward model folder; its scores are bit for bit those of the model that was saved.

    Raises:
        UserError: a file is missing or damaged, or the head does not fit the backbone. A head is never made up.
    """
    max_length = _read_max_length(folder / SETTINGS_FILE)
    model, tokenizer, facts = load_value_model(
        folder,
        lambda size: load_head(folder / HEAD_FILE, size, advice="Fit the reward model again.", bias=False),
        device=device,
        trust_remote_code=trust_remote_code,
    )
    return LoadedRewardModel(model, tokenizer, facts, max_length)


def score_joint(
    loaded: LoadedRewardModel, inputs: Sequence[JointInput], compute: Compute, token_budget: int
) -> list[float]:
    """Return the score of each input, in order; batches of at most `token_budget` tokens are planned by length."""
    return values_of(loaded.model, [joint.ids for joint in inputs], compute, token_budget)


def _read_max_length(path: Path) -> int:
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["max_length"])
    except FileNotFoundError:
        raise UserError(f"{path} not found; expected a reward model folder. Fit the reward model again.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error!r}); fit the reward model again.") from error
