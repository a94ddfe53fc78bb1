"""What the task's metrics_callback makes of the rollouts of training."""

from collections.abc import Iterable

from comlrl_stages.rollouts.callbacks import Rollout, callback_means
from comlrl_stages.rollouts.episodes import Node
from comlrl_stages.tasks.protocol import Task


def called_back(task: Task, nodes: Iterable[Node]) -> dict[str, float]:
    """Means over items of what the task's metrics_callback returns for each item's rollouts; empty without one."""
    by_item: dict[str, list[Rollout]] = {}
    for node in nodes:
        by_item.setdefault(node.prompted.task_id, []).extend(_rollouts(node))
    return callback_means(task, by_item.values())


def _rollouts(node: Node) -> list[Rollout]:
    """One rollout per joint response and agent."""
    place = {"item": node.prompted.item, "turn": node.turn, "node": node.name}
    return [
        Rollout(
            agent,
            node.prompted.prompts[agent],
            node.responses[agent][sample].text,
            {**place, "sample": sample, "reward": reward.reward},
        )
        for samples, reward in zip(node.joints, node.rewards, strict=True)
        for agent, sample in enumerate(samples)
    ]
