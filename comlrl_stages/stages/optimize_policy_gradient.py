"""Policy gradient on sampled joint responses: MARLHF, with MAGRPO on a frozen joint reward model.

One update: sample K joint responses for each item of the minibatch with the policy as it is, score them, take the
reference KL off the returns, compare each return with those of its siblings, and follow the policy gradient. The
mathematics is learning/; sampling and scoring are the same as everywhere else.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comlrl_stages.artifacts import Work, checked_directory, read_table
from comlrl_stages.learning.advantages import advantages, zero_variance
from comlrl_stages.learning.kl import k3, kl_on_returns
from comlrl_stages.learning.policy_gradient import policy_gradient_loss, row_weights
from comlrl_stages.rollouts.joint import reward_runner
from comlrl_stages.rollouts.single_turn import (
    Context,
    Draw,
    Prompted,
    joint_draws,
    plan,
    prompt_items,
    sample_batch,
    sampling_parameters,
)
from comlrl_stages.seeding import stream
from comlrl_stages.settings import MarlhfSettings
from comlrl_stages.stages.optimize import JOINT, StepNumbers
from comlrl_stages.tasks.protocol import TaskSource, load_task
from comlrl_stages.tasks.scoring import RewardRunner, Tolerance
from comlrl_stages.teams.batching import plan_batches
from comlrl_stages.teams.log_probs import completion_log_probs
from comlrl_stages.teams.reward_model import LoadedRewardModel, load_reward_model, score_joint
from comlrl_stages.teams.sampling import Sampled
from comlrl_stages.teams.scoring import score_completions
from comlrl_stages.teams.team import Team, load_team


@dataclass(frozen=True)
class Rollouts:
    """K joint responses for each item of one update, by [item][sample][agent]."""

    items: Sequence[Prompted]
    responses: Sequence[Sequence[Sequence[Sampled]]]

    def of_agent(self, agent: int) -> list[tuple[Sequence[int], Sampled]]:
        """Prompt ids and response of one agent, item by item and sample by sample."""
        return [
            (item.prompt_ids[agent], joint[agent])
            for item, joints in zip(self.items, self.responses, strict=True)
            for joint in joints
        ]

    def joint_texts(self) -> list[tuple[Prompted, tuple[str, ...]]]:
        """Item and texts of every joint response, in the same order."""
        return [
            (item, tuple(response.text for response in joint))
            for item, joints in zip(self.items, self.responses, strict=True)
            for joint in joints
        ]


def build(settings: MarlhfSettings, work: Work, team: Team) -> "PolicyGradientUpdates":
    """Read the items, the reward model and the reference team."""
    task = load_task(TaskSource(**settings.task.model_dump()))
    items = read_table(work.inputs["items"]).to_pylist()
    sampling = settings.sampling
    prompted, dropped = prompt_items(team, task, items, sampling.max_new_tokens, sampling.overflow)
    work.count("policy", dropped=dropped)
    reward_model = load_reward_model(checked_directory(work.inputs["reward_model"]), team.compute.device)
    reference = load_team(work.inputs["models"], work.digest("models"), settings.team, settings.compute, masters=True)
    runner = reward_runner(settings.task, settings.scoring, int(work.runtime.get("score_workers", 1)))
    runner.tolerance = Tolerance(
        settings.scoring.tolerate_failures, settings.epochs * len(prompted) * settings.generations
    )
    return PolicyGradientUpdates(settings, team, prompted, reward_model, reference, runner)


class PolicyGradientUpdates:
    """The updates of one run: `epochs` passes over the items, each in its own seeded order."""

    def __init__(
        self,
        settings: MarlhfSettings,
        team: Team,
        items: Sequence[Prompted],
        reward_model: LoadedRewardModel,
        reference: Team,
        task_reward: RewardRunner,
    ) -> None:
        self._settings = settings
        self._team = team
        self._items = items
        self._reward_model = reward_model
        self._reference = reference
        self._task_reward = task_reward
        self._per_epoch = -(-len(items) // settings.items_per_step)
        self.total_steps = settings.epochs * self._per_epoch

    def close(self) -> None:
        """End the reward function's processes."""
        self._task_reward.__exit__(None, None, None)

    def backward(self, step: int) -> StepNumbers:
        """Gradients of the policy-gradient loss of one minibatch of items."""
        rollouts = self._sample(step)
        learned = self._learned_rewards(rollouts)
        numbers = StepNumbers(env_steps=learned.numel(), values={JOINT: self._reward_numbers(rollouts, learned)})
        losses, kls = [], []
        for agent in range(len(self._team.agents)):
            own, loss, tokens = self._agent_backward(rollouts, learned, agent)
            numbers.values[agent] = own
            numbers.tokens += tokens
            losses.append(loss)
            kls.append(own["kl"])
        numbers.values[JOINT] |= {"loss": sum(losses), "kl": sum(kls) / len(kls)}
        return numbers

    # --- sampling and rewards ---

    def _sample(self, step: int) -> Rollouts:
        settings = self._settings
        epoch, position = divmod(step, self._per_epoch)
        generator = stream(settings.seed, "optimize", settings.method, settings.round, "order", epoch)
        order = generator.permutation(len(self._items))
        items = [self._items[i] for i in order[position * settings.items_per_step :][: settings.items_per_step]]
        context = Context("policy", settings.round, step + 1)
        draws = joint_draws(context, items, settings.generations, len(self._team.agents))
        return self._arranged(items, self._sample_draws(draws))

    def _sample_draws(self, draws: Sequence[Draw]) -> list[Sampled]:
        settings = self._settings
        parameters = sampling_parameters(settings.sampling)
        budget = settings.compute.sampling_tokens
        found: dict[int, Sampled] = {}
        for batch in plan(self._team, draws, parameters.max_new_tokens, budget):
            sampled = sample_batch(self._team, draws, batch, parameters, budget, settings.seed)
            found |= dict(zip(batch.positions, sampled, strict=True))
        return [found[position] for position in range(len(draws))]

    def _arranged(self, items: Sequence[Prompted], sampled: Sequence[Sampled]) -> Rollouts:
        agents, generations = len(self._team.agents), self._settings.generations
        joints = [sampled[start : start + agents] for start in range(0, len(sampled), agents)]
        return Rollouts(items, [joints[i * generations : (i + 1) * generations] for i in range(len(items))])

    def _learned_rewards(self, rollouts: Rollouts) -> torch.Tensor:
        """Scores of the frozen reward model, (items, K); each distinct joint response is scored once."""
        texts = [(tuple(item.prompts), responses) for item, responses in rollouts.joint_texts()]
        distinct = list(dict.fromkeys(texts))
        inputs = [self._reward_model.encode(prompts, responses) for prompts, responses in distinct]
        budget = self._settings.compute.sampling_tokens
        scores = score_joint(self._reward_model, inputs, self._team.compute, budget)
        by_text = dict(zip(distinct, scores, strict=True))
        return torch.tensor([by_text[text] for text in texts], dtype=torch.float64).view(len(rollouts.items), -1)

    def _reward_numbers(self, rollouts: Rollouts, learned: torch.Tensor) -> dict[str, float]:
        joint = rollouts.joint_texts()
        scored = self._task_reward.score([item.item for item, _ in joint], [texts for _, texts in joint])
        task_rewards = [one.reward for one in scored if math.isfinite(one.reward)]
        finite = learned[learned.isfinite()]
        numbers = {
            "reward_mean": finite.mean().item(),
            "reward_std": finite.std(correction=0).item(),
            "reward_failed_share": 1.0 - finite.numel() / learned.numel(),
            "zero_variance_share": zero_variance(learned).double().mean().item(),
            "task_reward_failed_share": 1.0 - len(task_rewards) / len(scored),
        }
        if task_rewards:
            numbers["task_reward_mean"] = sum(task_rewards) / len(task_rewards)
        return numbers

    # --- one agent's gradient ---

    def _agent_backward(
        self, rollouts: Rollouts, learned: torch.Tensor, agent: int
    ) -> tuple[dict[str, float], float, int]:
        """Gradients of one agent; returns its numbers, its loss and the tokens trained on."""
        settings = self._settings
        rows = rollouts.of_agent(agent)
        kl, clamped = self._reference_kl(rows, agent)
        returns = kl_on_returns(learned, kl.view_as(learned), settings.kl_coefficient)
        group = advantages(returns, settings.backend, settings.normalise_advantages)
        valid = group.valid.flatten()
        lengths = torch.tensor([len(sampled.completion_ids) for _, sampled in rows])
        sizes = group.group_sizes.repeat_interleave(learned.shape[1])
        weights = torch.zeros(len(rows), dtype=torch.float64)
        weights[valid] = row_weights(sizes[valid], lengths[valid], settings.loss_reduction)
        loss, entropy = self._accumulate(rows, agent, group.values.flatten(), weights)
        reasons = Counter(sampled.finish_reason for _, sampled in rows)
        tokens = int(lengths.sum())
        numbers = {
            "loss": loss,
            "kl": kl.sum().item() / tokens,
            "kl_penalty": settings.kl_coefficient * kl.mean().item(),
            "kl_clamped_tokens": clamped,
            "entropy": entropy / tokens,
            "length_mean": tokens / len(rows),
            "truncated_share": reasons["length"] / len(rows),
            "advantage_std": group.values.std(correction=0).item(),
        }
        return numbers, loss, tokens

    def _reference_kl(self, rows: Sequence[tuple[Sequence[int], Sampled]], agent: int) -> tuple[torch.Tensor, int]:
        """k3 to the reference summed over each response, (rows,) float64, and how many tokens were clamped.

        The policy's side are the behaviour log-probs: the policy that sampled is the one that is updated.
        """
        reference = score_completions(
            self._reference.agents[agent],
            self._reference.compute,
            [prompt for prompt, _ in rows],
            [sampled.completion_ids for _, sampled in rows],
            temperature=self._settings.sampling.temperature,
            token_budget=self._settings.compute.training_tokens,
        )
        sums, clamped = [], 0
        for values, (_, sampled) in zip(reference, rows, strict=True):
            own = torch.tensor(sampled.log_probs, dtype=torch.float64)
            tokens = k3(own, torch.tensor(values, dtype=torch.float64), torch.ones(len(values), dtype=torch.bool))
            sums.append(tokens.values.sum())
            clamped += tokens.clamped
        return torch.stack(sums), clamped

    def _accumulate(
        self,
        rows: Sequence[tuple[Sequence[int], Sampled]],
        agent: int,
        advantage: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[float, float]:
        """Backward in micro-batches; returns the loss and the summed entropy."""
        loaded, device = self._team.agents[agent], self._team.compute.device
        costs = [len(prompt) + len(sampled.completion_ids) for prompt, sampled in rows]
        loss, entropy = 0.0, 0.0
        for batch in plan_batches(costs, self._settings.compute.training_tokens):
            with self._team.compute.autocast():
                scores = completion_log_probs(
                    loaded.model,
                    loaded.facts,
                    [rows[i][0] for i in batch],
                    [rows[i][1].completion_ids for i in batch],
                    temperature=self._settings.sampling.temperature,
                    entropy=True,
                )
            part = policy_gradient_loss(
                scores.log_probs, scores.mask, advantage[batch].to(device), weights[batch].to(device)
            )
            part.loss.backward()
            loss += part.loss.item()
            entropy += scores.entropy.detach().sum().item()
        return loss, entropy
