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
from comlrl_stages.stages.optimize_rollouts import (
    ReferenceKL,
    Rollouts,
    returns_by_node,
    rewards_of,
    zero_variance_share,
)
from comlrl_stages.teams.team import Team


@dataclass(frozen=True)
class Experience:
    """What one agent learns from in a step.

    completions: node by node, sample by sample, with their `kl` to the reference. advantages, weights: (completions,)
    float64, of weight zero where the return was not finite.
    """

    completions: Sequence[Completion]
    kl: ReferenceKL
    advantages: torch.Tensor
    weights: torch.Tensor


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
        self._rollouts.report_completions(
            numbers, [own.completions for own in experiences], [own.kl for own in experiences]
        )
        for agent, own in enumerate(experiences):
            numbers.add(agent, **_advantage_std(own), **sums[agent].means())
        numbers.add(loss=sum(done.means()["loss"] for done in sums))
        if self._compares():
            returns = returns_by_node(roots, self._settings.episode.discount, lambda joint: joint.reward)
            numbers.add(zero_variance_share=zero_variance_share(returns))
        return numbers

    def _compares(self) -> bool:
        """Whether advantages are differences within a group, so that equal returns have no gradient."""
        return self._settings.algorithm != "mareinforce" or self._settings.normalise_advantages

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
        return Experience(completions, kl, group.values.flatten(), self._weights(completions, group))

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


def _advantage_std(own: Experience) -> dict[str, float]:
    """Deviation of the advantages that count; nothing where none does."""
    used = own.advantages[own.weights > 0]
    return {"advantage_std": used.std(correction=0).item()} if len(used) else {}
