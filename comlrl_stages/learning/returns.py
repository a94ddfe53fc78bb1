"""Returns of joint responses in a tree of turns, and of each agent's completions in them.

A node is one joint context. Its joint responses are either aligned (candidate k of every agent, K of them) or cross
(all K^n combinations, the last agent varying fastest), and each may be continued by one child node. A single turn is
a tree of one node, and a trajectory one in which every node has one joint response. A reward that is not finite is
left out of every mean and its siblings are kept.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Pairing = Literal["aligned", "cross"]
CrossReduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Node:
    """rewards: one per joint response, in order. children: empty where the node ends, else one per joint response.

    A joint response that ends while its siblings go on has None for a child.
    """

    rewards: list[float]
    children: list["Node | None"] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.children and len(self.children) != len(self.rewards):
            raise ValueError(f"a node with {len(self.rewards)} joint responses has {len(self.children)} children")


def terminates(rewards: list[float], threshold: float | None) -> bool:
    """Return whether a node is not expanded: its mean finite reward is strictly above `threshold` (None: never)."""
    finite = np.asarray(rewards, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    return threshold is not None and finite.size > 0 and bool(finite.mean() > threshold)


def env_steps(root: Node) -> int:
    """Return the number of evaluated joint responses of the tree."""
    return len(root.rewards) + sum(env_steps(child) for child in root.children if child)


def joint_returns(root: Node, discount: float = 1.0) -> list[np.ndarray]:
    """Return the returns of every node's joint responses, (joint,) float64 each, root first and children in order.

    R = r + discount * mean of the child's returns; R = r without a child. NaN where r is not finite or no return of the
    child is.
    """
    own = np.asarray(root.rewards, dtype=np.float64)
    own = np.where(np.isfinite(own), own, np.nan)
    below = [joint_returns(child, discount) if child else [] for child in root.children]
    if below:
        own = own + discount * np.array([_finite_mean(child[0]) if child else 0.0 for child in below])
    return [own, *(node for child in below for node in child)]


def completion_returns(
    joint: np.ndarray, agents: int, pairing: Pairing, cross_reduction: CrossReduction = "mean"
) -> np.ndarray:
    """Return the return of each agent's completions, (agents, K), from a node's joint returns (joint,).

    aligned: completion k of every agent has the return of joint response k. cross: the mean over the K^(n-1)
    combinations that the completion takes part in, or their sum, for which a missing combination counts as the mean.
    Raises ValueError where the number of joint responses is not K^agents.
    """
    if pairing == "aligned":
        return np.tile(joint, (agents, 1))
    k = round(len(joint) ** (1.0 / agents))
    if k**agents != len(joint):
        raise ValueError(f"{len(joint)} joint responses are not all combinations of {agents} agents' completions")
    grid = joint.reshape((k,) * agents)
    by_agent = [np.moveaxis(grid, agent, 0).reshape(k, -1) for agent in range(agents)]
    scale = 1.0 if cross_reduction == "mean" else float(k ** (agents - 1))
    return scale * np.array([[_finite_mean(row) for row in rows] for rows in by_agent])


def _finite_mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")
