"""Where a value is read: from a critic of an agent, from a head on the agent itself, or from one critic of the team."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from comlrl_stages.artifacts import Work, checked_directory
from comlrl_stages.learning.actor_critic import value_loss
from comlrl_stages.rollouts.experience import Completion, Response
from comlrl_stages.seeding import torch_seed
from comlrl_stages.stages.optimize import JOINT, Part
from comlrl_stages.stages.optimize_policy import PolicyStep, backward
from comlrl_stages.teams.batching import plan_batches
from comlrl_stages.teams.critics import give_value_head, new_critic, save_critic
from comlrl_stages.teams.joint_text import JointInput
from comlrl_stages.teams.log_probs import completion_log_probs
from comlrl_stages.teams.team import Team
from comlrl_stages.teams.value_model import values_of


@dataclass(frozen=True)
class Lessons:
    """What one estimator and its agents learn from in a step, by response, all (responses,).

    weights are those of the value loss; policy_weights those of each agent's loss. Zero: the reward was not finite.
    """

    old_values: torch.Tensor
    targets: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    policy_weights: dict[int, torch.Tensor]


@dataclass(frozen=True)
class ValueStep:
    """Sums over the minibatches of a step: of their value losses, unweighted by the coefficient."""

    loss: float = 0.0
    minibatches: int = 0

    def __add__(self, other: "ValueStep") -> "ValueStep":
        return ValueStep(self.loss + other.loss, self.minibatches + other.minibatches)

    def means(self) -> dict[str, float]:
        """The numbers for the log."""
        return {"value_loss": self.loss / max(self.minibatches, 1)}


class Estimator(Protocol):
    """A source of values and the agents that learn from it."""

    name: str
    number: int  # the agent in the training log, -1 for the team
    agents: Sequence[int]
    part: Part

    def values(self, responses: Sequence[Response]) -> torch.Tensor:
        """Values of a step's joint responses by the critic as it is, (responses,) float32 without gradient."""

    def cut_share(self) -> float:
        """The share of them of which only a part was read, since the critic's context is too short."""

    def backward(
        self,
        responses: Sequence[Response],
        completions: Mapping[int, Sequence[Completion]],
        lessons: Lessons,
        minibatch: tuple[int, int],
    ) -> tuple[dict[int, PolicyStep], ValueStep]:
        """Add the gradients of the agents' and the value's losses on a minibatch (step and number)."""

    def save(self, policy: Path) -> None:
        """Write what was learned into the policy's folder."""


def build_estimators(settings: Any, work: Work, team: Team) -> list[Estimator]:
    """The critics of a run: new ones, or those that stand with the models that training starts from."""
    if settings.algorithm == "maac":
        return [SeparateCritic(settings, work, team, range(len(team.agents)))]
    kind = SharedHead if settings.critic == "shared" else SeparateCritic
    return [kind(settings, work, team, [agent]) for agent in range(len(team.agents))]


class SeparateCritic:
    """A critic with weights of its own: of one agent, or of the whole team."""

    def __init__(self, settings: Any, work: Work, team: Team, agents: Sequence[int]) -> None:
        self._settings, self._team, self.agents = settings, team, agents
        central = settings.algorithm == "maac"
        self._central = central
        self.number = JOINT if central else agents[0]
        self.name = "critic" if central else f"critic_{agents[0]}"
        trusted = settings.critic_trust_remote_code
        self._critic = new_critic(
            self._folder(work),
            settings.value_hidden,
            _generator(settings, self.number),
            team.compute.device,
            trust_remote_code=trusted[agents[0]] if trusted else False,
        )
        self._inputs: dict[tuple[int, int], JointInput] = {}  # what it reads of each of a step's responses
        rates = settings.critic_learning_rates(len(team.agents))
        self.part = Part(self._critic.model, rates[agents[0]], self.number)

    def _folder(self, work: Work) -> Path:
        """A critic that was saved with the team that training starts from, else a language model."""
        if self._settings.critics is not None:
            return Path(self._settings.critics) / self.name
        folders = work.inputs.get("critic_models") or work.inputs["models"]
        return checked_directory(folders[self.agents[0]])

    def values(self, responses: Sequence[Response]) -> torch.Tensor:
        self._inputs = {response.place: self._input(response) for response in responses}
        ids = [one.ids for one in self._inputs.values()]
        budget = self._settings.compute.training_tokens
        return torch.tensor(values_of(self._critic.model, ids, self._team.compute, budget))

    def cut_share(self) -> float:
        return sum(one.cut for one in self._inputs.values()) / max(len(self._inputs), 1)

    def backward(
        self,
        responses: Sequence[Response],
        completions: Mapping[int, Sequence[Completion]],
        lessons: Lessons,
        minibatch: tuple[int, int],
    ) -> tuple[dict[int, PolicyStep], ValueStep]:
        policies = {
            agent: backward(
                self._settings,
                self._team,
                agent,
                completions[agent],
                lessons.advantages,
                lessons.policy_weights[agent],
                minibatch=minibatch,
            )
            for agent in self.agents
        }
        return policies, self._learn([self._inputs[response.place].ids for response in responses], lessons)

    def save(self, policy: Path) -> None:
        save_critic(self._critic, policy / "critics" / self.name)

    def _learn(self, inputs: Sequence[tuple[int, ...]], lessons: Lessons) -> ValueStep:
        """Gradients of the value loss; a critic of its own needs no clipping."""
        rows: dict[tuple[int, ...], list[int]] = {}  # V is the same for all responses to one prompt
        for row, ids in enumerate(inputs):
            rows.setdefault(ids, []).append(row)
        distinct, done = list(rows), 0.0
        for batch in plan_batches([len(ids) for ids in distinct], self._settings.compute.training_tokens):
            chosen = [distinct[i] for i in batch]
            with self._team.compute.autocast():
                values = self._critic.model(chosen)
            values = values.repeat_interleave(torch.tensor([len(rows[ids]) for ids in chosen], device=values.device))
            loss = _value_loss(values, lessons, [row for ids in chosen for row in rows[ids]], None)
            (self._settings.value_coefficient * loss).backward()
            done += loss.item()
        return ValueStep(done, 1)

    def _input(self, response: Response) -> JointInput:
        answered = self._settings.critic_type == "q"
        prompted = response.node.prompted
        if self._central:
            return self._critic.joint_input(prompted.prompts, response.node.texts(response.joint) if answered else None)
        agent = self.agents[0]
        own = response.completion(agent)
        return self._critic.own_input(
            self._team.agents[agent], prompted.prompts[agent], own.prompt_ids, own.sampled if answered else None
        )


class SharedHead:
    """A value head on an agent: its values come from the forward pass of the agent's own model."""

    def __init__(self, settings: Any, work: Work, team: Team, agents: Sequence[int]) -> None:
        (agent,) = agents
        self._settings, self._team, self._agent, self.agents = settings, team, agent, agents
        owner = next(group[0] for group in team.groups() if agent in group)  # agents of one model share its head, too
        self.number, self.name = agent, f"value_head_{owner}"
        generator, folder = _generator(settings, owner), checked_directory(work.inputs["models"][owner])
        head = team.agents[agent].value_head or give_value_head(
            team.agents[agent], settings.value_hidden, generator, folder
        )
        self._value_at: Literal["prompt", "response"] = "prompt" if settings.critic_type == "v" else "response"
        self.part = Part(head, settings.learning_rates(len(team.agents))[owner], owner)

    @torch.no_grad()
    def values(self, responses: Sequence[Response]) -> torch.Tensor:
        loaded, completions = self._team.agents[self._agent], [one.completion(self._agent) for one in responses]
        values = torch.zeros(len(completions))
        costs = [len(one.prompt_ids) + one.tokens for one in completions]
        for batch in plan_batches(costs, self._settings.compute.training_tokens):
            with self._team.compute.autocast():
                scores = completion_log_probs(
                    loaded.model,
                    loaded.facts,
                    [completions[i].prompt_ids for i in batch],
                    [completions[i].sampled.completion_ids for i in batch],
                    value_head=loaded.value_head,
                    value_at=self._value_at,
                )
            values[batch] = scores.values.cpu()
        return values

    def cut_share(self) -> float:
        """The agent itself has read all of it."""
        return 0.0

    def backward(
        self,
        responses: Sequence[Response],
        completions: Mapping[int, Sequence[Completion]],
        lessons: Lessons,
        minibatch: tuple[int, int],
    ) -> tuple[dict[int, PolicyStep], ValueStep]:
        addition = _HeadLoss(self._value_at, lessons, self._settings)
        policy = backward(
            self._settings,
            self._team,
            self._agent,
            completions[self._agent],
            lessons.advantages,
            lessons.policy_weights[self._agent],
            minibatch=minibatch,
            addition=addition,
        )
        return {self._agent: policy}, ValueStep(addition.total, 1)

    def save(self, policy: Path) -> None:
        """The head is saved with its agent."""


@dataclass
class _HeadLoss:
    """The value loss of a head, with clipping: head and policy share the weights that move."""

    value_at: Literal["prompt", "response"]
    lessons: Lessons
    settings: Any
    total: float = 0.0

    def __call__(self, rows: Sequence[int], values: torch.Tensor) -> torch.Tensor:
        loss = _value_loss(values, self.lessons, rows, self.settings.value_clip)
        self.total += loss.item()
        return self.settings.value_coefficient * loss


def _value_loss(values: torch.Tensor, lessons: Lessons, rows: Sequence[int], clip: float | None) -> torch.Tensor:
    old, targets, weights = (
        tensor[rows].to(values.device) for tensor in (lessons.old_values, lessons.targets, lessons.weights)
    )
    return value_loss(values, old.to(values.dtype), targets.to(values.dtype), weights, clip)


def _generator(settings: Any, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(torch_seed(settings.seed, "critic", settings.method, number))
