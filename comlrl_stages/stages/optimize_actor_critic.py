"""Actor-critic: IAC, a critic for each agent, and MAAC, one critic for the team, by one-step temporal differences.

One step: sample trajectories for each item with the policy as it is, one joint response per turn, and score them; take
the reference KL off the rewards; value every response with the critics as they are, which gives targets and
advantages; follow the policy gradient, and move the critics towards the targets. The mathematics is
`learning.actor_critic`; where a value is read is `optimize_estimators`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from comlrl_stages.artifacts import Work
from comlrl_stages.learning.actor_critic import TDTargets, td_advantages, td_targets, value_weights
from comlrl_stages.learning.policy_gradient import row_weights
from comlrl_stages.rollouts.experience import Completion, Response, trajectories_of
from comlrl_stages.settings import ActorCriticSettings
from comlrl_stages.stages.optimize import StepNumbers, Update, agent_parts
from comlrl_stages.stages.optimize_estimators import Estimator, Lessons, ValueStep, build_estimators
from comlrl_stages.stages.optimize_policy import PolicyStep, agent_reward
from comlrl_stages.stages.optimize_rollouts import ReferenceKL, Rollouts, rewards_of
from comlrl_stages.teams.team import Team


def build(settings: ActorCriticSettings, work: Work, team: Team) -> "ActorCriticUpdates":
    """Read what the rollouts need, and the critics."""
    estimators = build_estimators(settings, work, team)
    rollouts = Rollouts(settings, work, team, rewards_of(settings, work, team), branching=1)
    return ActorCriticUpdates(settings, team, rollouts, estimators)


class ActorCriticUpdates:
    """The steps of one run of IAC or MAAC."""

    def __init__(
        self, settings: ActorCriticSettings, team: Team, rollouts: Rollouts, estimators: Sequence[Estimator]
    ) -> None:
        self._settings, self._team, self._rollouts, self._estimators = settings, team, rollouts, estimators
        self.total_steps = rollouts.total_steps
        self.validation = rollouts.validation
        self.parts = agent_parts(settings, team) | {one.name: one.part for one in estimators}

    def close(self) -> None:
        """End what the rollouts started."""
        self._rollouts.close()

    def save(self, policy: Path) -> None:
        """Critics stand in folders of their own, value heads beside their agents."""
        for estimator in self._estimators:
            estimator.save(policy)

    def train(self, step: int, update: Update) -> StepNumbers:
        """Roll out, then move policies and critics, minibatch by minibatch; a critic takes one step in each."""
        roots = self._rollouts.sample(step)
        numbers = self._rollouts.numbers(roots)
        trajectories = trajectories_of(roots)
        responses = [response for trajectory in trajectories for response in trajectory]
        completions = {
            agent: [response.completion(agent) for response in responses] for agent in range(len(self._team.agents))
        }
        kls = {agent: self._rollouts.reference_kl(agent, own) for agent, own in completions.items()}
        lessons = [self._lessons(one, trajectories, responses, completions, kls) for one in self._estimators]
        policy_steps = {agent: PolicyStep() for agent in completions}
        value_steps = [ValueStep() for _ in lessons]
        for number, rows in enumerate(self._rollouts.minibatches(step, len(responses))):
            for index, (estimator, lesson) in enumerate(zip(self._estimators, lessons, strict=True)):
                policies, values = self._backward(estimator, lesson, responses, completions, rows, (step, number))
                value_steps[index] += values
                for agent, done in policies.items():
                    policy_steps[agent] += done
            update()
        self._report(numbers, completions, kls, lessons, policy_steps, value_steps)
        return numbers

    # --- what there is to learn ---

    def _lessons(
        self,
        estimator: Estimator,
        trajectories: Sequence[Sequence[Response]],
        responses: Sequence[Response],
        completions: dict[int, list[Completion]],
        kls: dict[int, ReferenceKL],
    ) -> Lessons:
        settings = self._settings
        shape = (len(trajectories), max(map(len, trajectories)))
        rewards, values = torch.full(shape, torch.nan, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        places = tuple(torch.tensor([response.place for response in responses]).T)
        old_values = estimator.values(responses).double()
        rewards[places] = self._rewards(estimator, responses, kls)
        values[places] = old_values
        lengths = torch.tensor([len(trajectory) for trajectory in trajectories])
        targets = td_targets(rewards, values, lengths, settings.episode.discount)
        advantages = td_advantages(
            targets, values, normalise=settings.normalise_advantages, clip=settings.advantage_clip
        )
        count = self._rollouts.minibatch_count(len(responses))
        return Lessons(
            old_values=old_values,
            targets=targets.values[places],
            advantages=advantages[places],
            weights=value_weights(targets.valid, count)[places],
            policy_weights={
                agent: self._policy_weights(completions[agent], targets, places, count) for agent in estimator.agents
            },
        )

    def _rewards(
        self, estimator: Estimator, responses: Sequence[Response], kls: dict[int, ReferenceKL]
    ) -> torch.Tensor:
        """(responses,): what the estimator's agents earned, less the weighted KL of all of them."""
        reward = agent_reward(estimator.agents[0]) if len(estimator.agents) == 1 else lambda joint: joint.reward
        earned = torch.tensor([reward(one.node.rewards[one.joint]) for one in responses], dtype=torch.float64)
        return earned - self._settings.kl_coefficient * sum(kls[agent].sums for agent in estimator.agents)

    def _policy_weights(
        self, completions: Sequence[Completion], targets: TDTargets, places: Any, minibatches: int
    ) -> torch.Tensor:
        valid = targets.valid[places]
        lengths = torch.tensor([one.tokens for one in completions])
        weights = torch.zeros(len(completions), dtype=torch.float64)
        alone = torch.ones(int(valid.sum()), dtype=torch.int64)
        weights[valid] = row_weights(alone, lengths[valid], self._settings.loss_reduction, minibatches)
        return weights

    # --- gradients ---

    def _backward(
        self,
        estimator: Estimator,
        lessons: Lessons,
        responses: Sequence[Response],
        completions: dict[int, list[Completion]],
        rows: Sequence[int],
        minibatch: tuple[int, int],
    ) -> tuple[dict[int, PolicyStep], ValueStep]:
        """Gradients of the estimator's value loss and of its agents' policy losses on the chosen responses."""
        rows = [row for row in rows if lessons.weights[row] > 0]
        chosen = Lessons(
            old_values=lessons.old_values[rows],
            targets=lessons.targets[rows],
            advantages=lessons.advantages[rows],
            weights=lessons.weights[rows],
            policy_weights={agent: weights[rows] for agent, weights in lessons.policy_weights.items()},
        )
        return estimator.backward(
            [responses[row] for row in rows],
            {agent: [completions[agent][row] for row in rows] for agent in estimator.agents},
            chosen,
            minibatch,
        )

    def _report(
        self,
        numbers: StepNumbers,
        completions: dict[int, list[Completion]],
        kls: dict[int, ReferenceKL],
        lessons: Sequence[Lessons],
        policy_steps: dict[int, PolicyStep],
        value_steps: Sequence[ValueStep],
    ) -> None:
        self._rollouts.report_completions(numbers, list(completions.values()), list(kls.values()))
        for agent, done in policy_steps.items():
            numbers.add(agent, **done.means())
        for estimator, lesson, done in zip(self._estimators, lessons, value_steps, strict=True):
            numbers.add(estimator.number, **_value_numbers(lesson), **done.means())
            numbers.add(estimator.number, critic_cut_share=estimator.cut_share())
        numbers.add(loss=sum(done.means()["loss"] for done in policy_steps.values()))


def _value_numbers(lessons: Lessons) -> dict[str, float]:
    """Means over the responses that count; `explained_variance` is 1 - var(target - value) / var(target)."""
    used = lessons.weights > 0
    targets, values = lessons.targets[used], lessons.old_values[used]
    variance = targets.var(correction=0).item()
    numbers = {
        "value_mean": values.mean().item(),
        "target_mean": targets.mean().item(),
        "advantage_std": lessons.advantages[used].std(correction=0).item(),
    }
    if variance > 0:
        numbers["explained_variance"] = 1.0 - (targets - values).var(correction=0).item() / variance
    return numbers
