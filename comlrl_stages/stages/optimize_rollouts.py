"""What all reinforcement learners share: the rollouts of a step, their rewards, their KL to the reference.

One step samples joint responses for some items with the policy as it is, turn by turn, and scores them. What is made of
the returns is the algorithm's own business (optimize_group.py, optimize_actor_critic.py).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from comlrl_stages.artifacts import Work, checked_directory, read_table
from comlrl_stages.errors import UserError
from comlrl_stages.learning.advantages import zero_variance
from comlrl_stages.learning.kl import k3
from comlrl_stages.learning.returns import joint_returns
from comlrl_stages.rollouts.episodes import Node, nodes_of, roll_out, tree_of
from comlrl_stages.rollouts.experience import Completion
from comlrl_stages.rollouts.joint import reward_runner
from comlrl_stages.rollouts.metrics import called_back
from comlrl_stages.rollouts.rewards import TASK_REWARD, LearnedRewards, Rewards, TaskRewards
from comlrl_stages.rollouts.single_turn import Context, Prompted, prompt_items
from comlrl_stages.seeding import stream
from comlrl_stages.stages.optimize import WHOLE, StepNumbers
from comlrl_stages.tasks.protocol import TaskSource, load_task
from comlrl_stages.tasks.scoring import JointReward
from comlrl_stages.teams.lora import reference
from comlrl_stages.teams.reward_model import load_reward_model
from comlrl_stages.teams.scoring import score_completions
from comlrl_stages.teams.team import Team, load_team


@dataclass(frozen=True)
class ReferenceKL:
    """k3 to the reference summed over each completion, (completions,) float64, and how many tokens were clamped."""

    sums: torch.Tensor
    clamped: int


def rewards_of(settings: Any, work: Work, team: Team) -> Rewards:
    """The reward that a run maximises: that of its reward model, where it has one, else the task's."""
    runner = reward_runner(settings.task, settings.scoring, int(work.runtime.get("score_workers", 1)))
    task_rewards = TaskRewards(runner, settings.scoring.tolerate_failures)
    if "reward_model" not in work.inputs:
        return task_rewards
    reward_model = load_reward_model(checked_directory(work.inputs["reward_model"]), team.compute.device)
    return LearnedRewards(reward_model, team.compute, settings.compute.sampling_tokens, task_rewards)


class Rollouts:
    """The rollouts of one run: `epochs` passes over the items, each in its own seeded order."""

    def __init__(
        self, settings: Any, work: Work, team: Team, rewards: Rewards, *, branching: int, pairing: str = "aligned"
    ) -> None:
        """Read task and items. `branching`: joint responses per node after the first turn."""
        self._settings, self._team, self._rewards = settings, team, rewards
        self._branching, self._pairing = branching, pairing
        self.task = load_task(TaskSource(**settings.task.model_dump()))
        self._items, dropped = self._prompted(work, "items")
        work.count("policy", dropped=dropped)
        self._reference = _reference(settings, work, team)
        self.validation = None
        if settings.eval_interval:
            items, _ = self._prompted(work, "validation")
            self.validation = Validation(settings, self, items[: settings.eval_num_samples])
        self._per_epoch = -(-len(self._items) // settings.items_per_step)
        self.total_steps = settings.epochs * self._per_epoch

    def close(self) -> None:
        """End what scores."""
        self._rewards.close()

    def sample(self, step: int) -> list[Node]:
        """The rollouts of one step, one root per item."""
        settings = self._settings
        epoch, position = divmod(step, self._per_epoch)
        generator = stream(settings.seed, "optimize", settings.method, settings.round, "order", epoch)
        order = generator.permutation(len(self._items))
        items = [self._items[i] for i in order[position * settings.items_per_step :][: settings.items_per_step]]
        context = Context("policy", settings.round, step + 1)
        return self.roll_out(items, context, settings.generations, self._branching, self._pairing)

    def roll_out(
        self, items: Sequence[Prompted], context: Context, samples: int, branching: int, pairing: str
    ) -> list[Node]:
        """Sample and score the turns of `items`."""
        settings = self._settings
        return roll_out(
            self._team,
            self.task,
            items,
            context=context,
            samples=samples,
            branching=branching,
            pairing=pairing,
            episode=settings.episode,
            sampling=settings.sampling,
            token_budget=settings.compute.sampling_tokens,
            seed=settings.seed,
            score=self._rewards,
        )

    def minibatches(self, step: int, rows: int) -> Iterator[list[int]]:
        """Which of the step's `rows` each optimizer step trains on: `buffer_epochs` passes, each in its own order."""
        settings = self._settings
        size = settings.train_batch_size or rows
        for epoch in range(settings.buffer_epochs):
            order = list(range(rows))
            if size < rows:
                names = ("optimize", settings.method, settings.round, "minibatches", step, epoch)
                order = stream(settings.seed, *names).permutation(rows).tolist()
            yield from (order[start : start + size] for start in range(0, rows, size))

    def minibatch_count(self, rows: int) -> int:
        """Minibatches of one pass over the step's `rows`."""
        return -(-rows // (self._settings.train_batch_size or rows))

    def reference_kl(self, agent: int, completions: Sequence[Completion]) -> ReferenceKL:
        """KL of an agent's completions to the reference; zero, and not computed, where it has no weight.

        The policy's side are the behaviour log-probs: the policy that sampled is the one that the return is taken from.
        """
        settings = self._settings
        if settings.kl_coefficient == 0.0:
            return ReferenceKL(torch.zeros(len(completions), dtype=torch.float64), 0)
        loaded = self._reference.agents[agent]
        with reference(loaded.model) if settings.lora is not None else nullcontext():
            found = score_completions(
                loaded,
                self._team.compute,
                [one.prompt_ids for one in completions],
                [one.sampled.completion_ids for one in completions],
                temperature=settings.sampling.temperature,
                token_budget=settings.compute.training_tokens,
            )
        sums, clamped = [], 0
        for values, one in zip(found, completions, strict=True):
            own = torch.tensor(one.sampled.log_probs, dtype=torch.float64)
            tokens = k3(own, torch.tensor(values, dtype=torch.float64), torch.ones(len(values), dtype=torch.bool))
            sums.append(tokens.values.sum())
            clamped += tokens.clamped
        return ReferenceKL(torch.stack(sums), clamped)

    def numbers(self, roots: Sequence[Node]) -> StepNumbers:
        """What the step's joint responses earned, over all turns and by turn. Raises UserError if all rewards failed.

        `prompt_too_long` counts joint responses that no turn followed, since its prompts had left no room.
        """
        settings, nodes = self._settings, nodes_of(roots)
        found = StepNumbers(env_steps=sum(len(node.rewards) for node in nodes))
        found.add(**_numbers_of_all(nodes, "a step"), **called_back(self.task, nodes))
        if settings.episode.turns > 1:
            for turn, own in _numbers_by_turn(roots, settings.episode.discount).items():
                found.add(turn=turn, **own, nodes=sum(node.turn + 1 == turn for node in nodes))
            if settings.sampling.overflow == "drop":
                found.add(prompt_too_long=sum(node.overflowed for node in nodes))
        return found

    def report_completions(
        self, numbers: StepNumbers, completions: Sequence[Sequence[Completion]], kls: Sequence[ReferenceKL]
    ) -> None:
        """Add what each agent wrote, over all turns and by turn: lengths, the share that was cut, KL to the reference.

        The KL stands there where it has a weight: in nats per token, and as what it costs a completion.
        """
        several = self._settings.episode.turns > 1
        turns = sorted({one.turn + 1 for own in completions for one in own}) if several else []
        for turn in (WHOLE, *turns):
            means = []
            for agent, (own, kl) in enumerate(zip(completions, kls, strict=True)):
                rows = [row for row, one in enumerate(own) if turn in (WHOLE, one.turn + 1)]
                chosen = [own[row] for row in rows]
                numbers.add(agent, turn, **_completion_numbers(chosen))
                if self._settings.kl_coefficient:
                    sums = kl.sums[rows]
                    means.append(sums.sum().item() / max(sum(one.tokens for one in chosen), 1))
                    penalty = self._settings.kl_coefficient * sums.mean().item()
                    numbers.add(agent, turn, kl=means[-1], kl_penalty=penalty)
            if means:
                numbers.add(turn=turn, kl=float(np.mean(means)))
        for agent, (own, kl) in enumerate(zip(completions, kls, strict=True)):
            numbers.tokens += sum(one.tokens for one in own)
            if self._settings.kl_coefficient:
                numbers.add(agent, kl_clamped_tokens=kl.clamped)

    # --- reading ---

    def _prompted(self, work: Work, name: str) -> tuple[list[Prompted], dict[str, int]]:
        sampling = self._settings.sampling
        items = read_table(work.inputs[name]).to_pylist()
        return prompt_items(self._team, self.task, items, sampling.max_new_tokens, sampling.overflow)


class Validation:
    """The team on the first validation items: the same random numbers each time, and none of those of training."""

    def __init__(self, settings: Any, rollouts: Rollouts, items: Sequence[Prompted]) -> None:
        self._settings, self._rollouts, self._items = settings, rollouts, items

    def is_due(self, before: int, after: int) -> bool:
        """Whether env_step passed a multiple of `eval_interval`."""
        interval = self._settings.eval_interval
        return after // interval > before // interval

    def measure(self) -> dict[str, float]:
        """Mean reward and expected return of each turn, by the reward that is trained on, and the task's reward."""
        context = Context("validation", self._settings.round)
        roots = self._rollouts.roll_out(self._items, context, self._settings.eval_generations, 1, "aligned")
        _numbers_of_all(nodes_of(roots), "the validation")  # only for its error where all rewards failed
        by_turn = _numbers_by_turn(roots, self._settings.episode.discount)
        return {f"eval/turn_{turn}/{name}": value for turn, own in by_turn.items() for name, value in own.items()}


def returns_by_node(
    roots: Sequence[Node], discount: float, reward: Callable[[JointReward], float]
) -> dict[int, np.ndarray]:
    """Returns of the joint responses of every node, (joint,) float64, by the node's `id`."""
    found: dict[int, np.ndarray] = {}
    for root in roots:
        found |= zip(
            (id(node) for node in nodes_of([root])), joint_returns(tree_of(root, reward), discount), strict=True
        )
    return found


def zero_variance_share(returns: Mapping[int, np.ndarray]) -> float:
    """The share of groups whose joint returns are all equal, so that comparing them teaches nothing."""
    return float(np.mean([zero_variance(torch.from_numpy(group[np.newaxis])).item() for group in returns.values()]))


def _completion_numbers(completions: Sequence[Completion]) -> dict[str, float]:
    reasons = Counter(one.sampled.finish_reason for one in completions)
    return {
        "length_mean": sum(one.tokens for one in completions) / len(completions),
        "truncated_share": reasons["length"] / len(completions),
    }


def _numbers_of_all(nodes: Sequence[Node], where: str) -> dict[str, float]:
    """Numbers of all joint responses. Raises UserError where no reward is finite: there is nothing to learn."""
    rewards = [reward for node in nodes for reward in node.rewards]
    if not any(math.isfinite(one.reward) for one in rewards):
        raise UserError(
            f"none of the {len(rewards)} joint responses of {where} has a finite reward. The first: "
            f"{rewards[0].status}: {rewards[0].error}"
        )
    return _reward_numbers(rewards)


def _numbers_by_turn(roots: Sequence[Node], discount: float) -> dict[int, dict[str, float]]:
    """Rewards and expected return of each turn, counted from 1; what no finite reward tells is left out."""
    returns = returns_by_node(roots, discount, lambda joint: joint.reward)
    by_turn: dict[int, list[Node]] = {}
    for node in nodes_of(roots):
        by_turn.setdefault(node.turn + 1, []).append(node)
    found: dict[int, dict[str, float]] = {}
    for turn, own in sorted(by_turn.items()):
        found[turn] = _reward_numbers([reward for node in own for reward in node.rewards])
        expected = np.concatenate([returns[id(node)] for node in own])
        if np.isfinite(expected).any():
            found[turn]["expected_return"] = np.nanmean(expected).item()
    return found


def _reward_numbers(rewards: Sequence[JointReward]) -> dict[str, float]:
    """Mean and deviation of the finite rewards, the share of the others, and the means of their parts."""
    finite = np.array([one.reward for one in rewards if math.isfinite(one.reward)])
    numbers = {"reward_failed_share": 1.0 - finite.size / len(rewards)}
    if finite.size:
        numbers |= {"reward_mean": finite.mean().item(), "reward_std": finite.std().item()}
    for name in dict.fromkeys(name for one in rewards for name in one.parts):
        values = np.array([one.parts[name] for one in rewards if name in one.parts])
        finite = values[np.isfinite(values)]
        if name == TASK_REWARD:
            numbers[f"{name}_failed_share"] = 1.0 - finite.size / len(values)
        if finite.size:
            numbers[f"{name}_mean" if name == TASK_REWARD else f"parts/{name}"] = finite.mean().item()
    return numbers


def _reference(settings: Any, work: Work, team: Team) -> Team | None:
    """The team that training starts from: the adapters switched off, or a copy; none where the KL has no weight."""
    if settings.kl_coefficient == 0.0:
        return None
    if settings.lora is not None:
        return team
    return load_team(work.inputs["models"], work.digest("models"), settings.team, settings.compute, masters=True)
