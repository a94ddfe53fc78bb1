"""Critics: what actor-critic methods expect of a team, as one value per text.

A separate critic is a value model of its own and reads either one agent's prompt and response (one critic per agent) or
the joint text of the team (one central critic). A shared critic is a value head on the actor: `completion_log_probs`
reads its values from the actor's own forward pass. A V critic reads prompts only, a Q critic also the responses.

A critic folder is a model folder without output layer, with value_head.safetensors and critic.json, which marks it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from comlrl_stages.errors import UserError
from comlrl_stages.teams.joint_text import JointInput, encode_joint, encode_own
from comlrl_stages.teams.loading import CRITIC_FILE, HEAD_ADVICE, Facts, LoadedModel, read_value_head
from comlrl_stages.teams.sampling import Sampled
from comlrl_stages.teams.value_head import VALUE_HEAD_FILE, ValueHead, check_width, load_head, new_head
from comlrl_stages.teams.value_model import ValueModel, load_value_model, save_value_model


@dataclass
class Critic:
    """A separate critic in memory: `model(ids)` are its values, and the methods make its inputs."""

    model: ValueModel
    tokenizer: Any
    facts: Facts
    _vocabularies: dict[int, bool] = field(default_factory=dict, repr=False)

    def joint_input(self, prompts: Sequence[str], responses: Sequence[str] | None = None) -> JointInput:
        """The input of a central critic: the texts of all agents in role order, prompts alone where V is estimated.

        Raises:
            UserError: the critic's context does not hold the template of the joint text.
        """
        given = [""] * len(prompts) if responses is None else responses
        return encode_joint(
            self.tokenizer,
            self.facts,
            prompts,
            given,
            self.facts.context_length,
            limit="the critic's context",
            advice="Choose a critic_model with a context of at least that.",
        )

    def own_input(
        self, actor: LoadedModel, prompt: str, prompt_ids: Sequence[int], response: Sampled | None = None
    ) -> JointInput:
        """The input of one agent's critic: its prompt, and its response where Q is estimated.

        The actor's own ids where the critic has its vocabulary; else the texts, as the joint text of one agent.
        """
        if self._reads_ids_of(actor):
            completion_ids = [] if response is None else response.completion_ids
            return encode_own(prompt_ids, completion_ids, self.facts.context_length)
        return self.joint_input([prompt], None if response is None else [response.text])

    def _reads_ids_of(self, actor: LoadedModel) -> bool:
        """Whether the actor's ids stand for the same tokens here; vocabularies are large, so it is found out once."""
        key = id(actor.tokenizer)
        if key not in self._vocabularies:
            self._vocabularies[key] = actor.tokenizer.get_vocab() == self.tokenizer.get_vocab()
        return self._vocabularies[key]


def is_critic(folder: Path | str) -> bool:
    """Whether a folder holds a critic: a backbone without output layer, and its head."""
    return (Path(folder) / CRITIC_FILE).is_file()


def new_critic(
    folder: Path,
    hidden: int | None,
    generator: torch.Generator,
    device: str = "cpu",
    *,
    trust_remote_code: bool = False,
) -> Critic:
    """Make a critic of the model in `folder`, with the value head that stands there, else one drawn by `generator`.

    Args:
        hidden: units of the head's hidden layer, None for a linear head.

    Raises:
        UserError: the folder is no model folder, or its head has another hidden layer.
    """

    def head(size: int) -> ValueHead:
        restored = _own_head(folder, size) if is_critic(folder) else read_value_head(folder, size)
        if restored is None:
            return new_head(size, hidden, generator)
        check_width(restored, hidden, folder)
        return restored

    return Critic(*load_value_model(folder, head, device=device, trust_remote_code=trust_remote_code))


def save_critic(critic: Critic, folder: Path) -> None:
    """Write a critic folder: backbone, tokenizer, facts, value_head.safetensors, critic.json."""
    save_value_model(critic.model, critic.tokenizer, critic.facts, folder, VALUE_HEAD_FILE)
    described = {"value_hidden": critic.model.head.width}
    (folder / CRITIC_FILE).write_text(json.dumps(described) + "\n", encoding="utf-8")


def load_critic(folder: Path, device: str = "cpu", *, trust_remote_code: bool = False) -> Critic:
    """Load a critic folder; its values are bit for bit those of the critic that was saved.

    Raises:
        UserError: a file is missing or damaged, or the head does not fit the backbone. A head is never made up.
    """
    if not is_critic(folder):
        raise UserError(f"{folder} has no {CRITIC_FILE}, so it is no critic. Give a folder such as critics/critic_0.")
    model = load_value_model(
        folder, lambda size: _own_head(folder, size), device=device, trust_remote_code=trust_remote_code
    )
    return Critic(*model)


def give_value_head(
    actor: LoadedModel, hidden: int | None, generator: torch.Generator, folder: Path | None = None
) -> ValueHead:
    """Make an actor a critic, too: set its shared value head and return it. The head is saved with the actor.

    Args:
        hidden: units of the head's hidden layer, None for a linear head.
        generator: draws the head where none is restored.
        folder: the actor's model folder, where the head is taken from there if it has one.

    Raises:
        UserError: the folder's head is damaged, does not fit, or has another hidden layer.
    """
    restored = None if folder is None else read_value_head(folder, actor.hidden_size)
    if restored is not None:
        check_width(restored, hidden, folder)
    head = restored or new_head(actor.hidden_size, hidden, generator)
    actor.value_head = head.to(next(actor.model.parameters()).device)
    return actor.value_head


def _own_head(folder: Path, size: int) -> ValueHead:
    return load_head(folder / VALUE_HEAD_FILE, size, advice=HEAD_ADVICE)
