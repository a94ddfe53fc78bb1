"""What joint responses earn while a team trains: the task's reward, or the score of a frozen reward model.

The task's reward is measured in both cases, so that a report can show where a team learns to please the reward model
instead of the task.
"""

import math
from collections.abc import Sequence
from typing import Protocol

from comlrl_stages.rollouts.episodes import Node
from comlrl_stages.tasks.scoring import JointReward, RewardRunner, Tolerance
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.reward_model import LoadedRewardModel, score_joint

Answered = tuple[Node, tuple[str, ...]]
TASK_REWARD = "task_reward"


class Rewards(Protocol):
    """Scores joint responses: a node and the texts of all agents, in actor order."""

    def __call__(self, answered: Sequence[Answered]) -> list[JointReward]:
        """Rewards in the order given."""

    def close(self) -> None:
        """End what it started."""


class TaskRewards:
    """The task's own reward; of the joint responses scored at once a share of `tolerate_failures` may fail."""

    def __init__(self, runner: RewardRunner, tolerate_failures: float) -> None:
        self._runner = runner
        self._tolerate_failures = tolerate_failures

    def __call__(self, answered: Sequence[Answered]) -> list[JointReward]:
        self._runner.tolerance = Tolerance(self._tolerate_failures, len(answered))
        return self._runner.score([node.prompted.item for node, _ in answered], [texts for _, texts in answered])

    def close(self) -> None:
        """End the reward function's processes."""
        self._runner.__exit__(None, None, None)


class LearnedRewards:
    """The score of a frozen joint reward model; the task's reward is the part `task_reward` of each."""

    def __init__(
        self, reward_model: LoadedRewardModel, compute: Compute, token_budget: int, task_rewards: TaskRewards
    ) -> None:
        self._reward_model = reward_model
        self._compute = compute
        self._token_budget = token_budget
        self._task_rewards = task_rewards

    def __call__(self, answered: Sequence[Answered]) -> list[JointReward]:
        task_rewards = self._task_rewards(answered)
        scores = self._scores([(tuple(node.prompted.prompts), texts) for node, texts in answered])
        return [
            JointReward(
                raw=score,
                reward=score if math.isfinite(score) else math.nan,
                parts={TASK_REWARD: found.reward},
                status="ok" if math.isfinite(score) else "nan",
                error=None if math.isfinite(score) else f"the reward model's score is {score:g}",
            )
            for score, found in zip(scores, task_rewards, strict=True)
        ]

    def close(self) -> None:
        """End the processes of the task's reward."""
        self._task_rewards.close()

    def _scores(self, joints: Sequence[tuple[tuple[str, ...], tuple[str, ...]]]) -> list[float]:
        """Scores in order; each distinct joint text is scored once."""
        distinct = list(dict.fromkeys(joints))
        inputs = [self._reward_model.encode(prompts, responses) for prompts, responses in distinct]
        scores = score_joint(self._reward_model, inputs, self._compute, self._token_budget)
        by_joint = dict(zip(distinct, scores, strict=True))
        return [by_joint[joint] for joint in joints]
