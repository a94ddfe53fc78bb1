"""Group methods: MAGRPO, MARLOO, MAReMax and MAREINFORCE, on the task's reward or on a frozen reward model (MARLHF).

One step: sample K joint responses for each item with the policy as it is, turn by turn, and score them; take the
reference KL off the returns; compare each return with those of its siblings at the same node; follow the policy
gradient. The methods differ in that comparison alone: `learning.advantages`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from comlrl_stages.artifacts import Work
from comlrl_stages.learning.advantages import GroupAdvantages, advantages
from comlrl_stages.learning.kl import kl_on_returns
from comlrl_stages.learning.policy_gradient import row_weights
from comlrl_stages.learning.returns import completion_returns
from comlrl_stages.rollouts.episodes import Node, nodes_of
from comlrl_stages.rollouts.experience import Completion, completions_of
from comlrl_stages.settings import GroupSettings
from comlrl_stages.stages.optimize import StepNumbers, Update, agent_parts
from comlrl_stages.stages.optimize_policy import PolicyStep, agent_reward, backward
from comlrl_stages.stages.optimize_rollouts import Rollouts, completion_numbers, kl_numbers, returns_by_node, rewards_of
from comlrl_stages.teams.team import Team


@dataclass(frozen=True)
class Experience:
    """What one agent learns from in a step.

    completions: node by node, sample by sample. advantages, weights: (completions,) float64, of weight zero where the
    return was not finite. numbers: for the log.
    """

    completions: Sequence[Completion]
    advantages: torch.Tensor
    weights: torch.Tensor
    numbers: dict[str, float]


def build(settings: GroupSettings, work: Work, team: Team) -> "GroupUpdates":
    """Read what the rollouts need."""
    rollouts = Rollouts(
        settings,
        work,
        team,
        rewards_of(settings, work, team),
        branching=settings.generations,
        pairing=settings.joint_mode,
    )
    return GroupUpdates(settings, team, rollouts)


class GroupUpdates:
    """The steps of one run of a group method."""

    def __init__(self, settings: GroupSettings, team: Team, rollouts: Rollouts) -> None:
        self._settings, self._team, self._rollouts = settings, team, rollouts
        self.total_steps = rollouts.total_steps
        self.validation = rollouts.validation
        self.parts = agent_parts(settings, team)

    def close(self) -> None:
        """End what the rollouts started."""
        self._rollouts.close()

    def save(self, policy: Path) -> None:
        """A group method has no critic."""

    def train(self, step: int, update: Update) -> StepNumbers:
        """Roll out, then follow the policy gradient, minibatch by minibatch."""
        roots = self._rollouts.sample(step)
        numbers = self._rollouts.numbers(roots)
        experiences = [self._experience(roots, agent) for agent in range(len(self._team.agents))]
        sums = [PolicyStep() for _ in experiences]
        for number, rows in enumerate(self._rollouts.minibatches(step, len(experiences[0].completions))):
            for agent, own in enumerate(experiences):
                sums[agent] += self._backward(agent, own, rows, (step, number))
            update()
        for agent, own in enumerate(experiences):
            numbers.tokens += sum(one.tokens for one in own.completions)
            numbers.add(agent, **own.numbers, **sums[agent].means())
        numbers.add(loss=sum(values.loss for values in sums) / max(sums[0].minibatches, 1))
        if self._settings.kl_coefficient:
            numbers.add(kl=float(np.mean([own.numbers["kl"] for own in experiences])))
        return numbers

    def _experience(self, roots: Sequence[Node], agent: int) -> Experience:
        settings, nodes = self._settings, nodes_of(roots)
        completions = completions_of(nodes, agent)
        kl = self._rollouts.reference_kl(agent, completions)
        returns = self._returns(roots, nodes, agent)
        group = advantages(
            kl_on_returns(returns, kl.sums.view_as(returns), settings.kl_coefficient),
            settings.algorithm,
            settings.normalise_advantages,
        )
        numbers = completion_numbers(completions) | kl_numbers(self._settings, completions, kl)
        numbers["advantage_std"] = group.values[group.valid].std(correction=0).item()
        return Experience(completions, group.values.flatten(), self._weights(completions, group), numbers)

    def _weights(self, completions: Sequence[Completion], group: GroupAdvantages) -> torch.Tensor:
        """Weight of each completion in the loss, (completions,), zero where there is no advantage."""
        valid = group.valid.flatten()
        sizes = group.group_sizes.repeat_interleave(group.values.shape[1])
        lengths = torch.tensor([one.tokens for one in completions])
        weights = torch.zeros(len(completions), dtype=torch.float64)
        count = self._rollouts.minibatch_count(len(completions))
        weights[valid] = row_weights(sizes[valid], lengths[valid], self._settings.loss_reduction, count)
        return weights

    def _returns(self, roots: Sequence[Node], nodes: Sequence[Node], agent: int) -> torch.Tensor:
        """Returns of an agent's completions, (nodes, K)."""
        settings, agents = self._settings, len(self._team.agents)
        joint = returns_by_node(roots, settings.episode.discount, agent_reward(agent))
        own = [
            completion_returns(joint[id(node)], agents, settings.joint_mode, settings.cross_reduction or "mean")[agent]
            for node in nodes
        ]
        return torch.from_numpy(np.stack(own))

    def _backward(self, agent: int, own: Experience, rows: Sequence[int], minibatch: tuple[int, int]) -> PolicyStep:
        """Gradients of one agent's loss on the chosen rows."""
        rows = [row for row in rows if own.weights[row] > 0]
        completions = [own.completions[row] for row in rows]
        advantages, weights = own.advantages[rows], own.weights[rows]
        return backward(self._settings, self._team, agent, completions, advantages, weights, minibatch=minibatch)
