"""Episodes: what a team writes to an item over one or more turns, as a tree of joint contexts.

The task's transition makes the prompts of the next turn out of a joint response. Each joint response of a node may be
continued by a child node: by K joint responses each time in a tree, by one in a trajectory. All nodes of one turn are
sampled in one plan of batches, across items and agents; a single turn is a tree of roots.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from comlrl_stages.learning import returns
from comlrl_stages.rollouts.single_turn import Context, Draw, Prompted, continued, sample_draws
from comlrl_stages.tasks.protocol import Exchange, Task
from comlrl_stages.tasks.scoring import JointReward
from comlrl_stages.teams.sampling import Sampled
from comlrl_stages.teams.team import Team


@dataclass
class Node:
    """One joint context of an episode, what was answered there, and how it goes on.

    Attributes:
        prompted: the item, with the prompts of this turn.
        turn: 0 is the first.
        name: "" for a root, else the numbers of the joint responses that led here, such as "3/0".
        history: what was read and written in the turns before.
        responses: by [agent][sample].
        joints: for each joint response the sample of every agent; cross: the last agent varies fastest.
        rewards: one per joint response.
        children: empty where the node ends, else one per joint response, None for one that ends here.
        overflowed: joint responses that end here, for their next prompts leave no room for a completion.
    """

    prompted: Prompted
    turn: int = 0
    name: str = ""
    history: tuple[Exchange, ...] = ()
    responses: list[list[Sampled]] = field(default_factory=list)
    joints: list[tuple[int, ...]] = field(default_factory=list)
    rewards: list[JointReward] = field(default_factory=list)
    children: list["Node | None"] = field(default_factory=list)
    overflowed: int = 0

    def texts(self, joint: int) -> tuple[str, ...]:
        """Texts of one joint response, in actor order."""
        return tuple(own[sample].text for own, sample in zip(self.responses, self.joints[joint], strict=True))


Score = Callable[[Sequence[tuple[Node, tuple[str, ...]]]], Sequence[JointReward]]


def roll_out(
    team: Team,
    task: Task,
    items: Sequence[Prompted],
    *,
    context: Context,
    samples: int,
    branching: int,
    pairing: returns.Pairing,
    episode: Any,
    sampling: Any,
    token_budget: int,
    seed: int,
    score: Score,
) -> list[Node]:
    """Sample and score the episodes of all items; returns the root of each, in order.

    A node whose mean reward is strictly above `episode.termination_threshold` ends. With a branching of 1 every joint
    response of the root begins a trajectory of its own, and ends by its own reward.

    Args:
        samples: completions of each agent at the root.
        branching: completions of each agent at every later node.
        episode: a stage's settings (turns, termination_threshold).
        sampling: a stage's settings; `overflow` also says what becomes of a later turn whose prompts leave no room
            for a completion: an error, or that branch ends and is counted.
        score: called once per turn with all its joint responses; returns their rewards in order.
    """
    roots = [Node(one) for one in items]
    level, width = roots, samples
    for turn in range(episode.turns):
        _sample(team, level, context, width, pairing, sampling, token_budget, seed)
        _score(level, score)
        if turn + 1 < episode.turns:
            for node in level:
                _expand(node, team, task, sampling, episode.termination_threshold, alone=branching == 1)
            level, width = [child for node in level for child in node.children if child], branching
    return roots


def nodes_of(roots: Sequence[Node]) -> list[Node]:
    """All nodes below and with `roots`: each before its children, and these in order."""
    return [node for root in roots for node in (root, *nodes_of([child for child in root.children if child]))]


def tree_of(root: Node, reward: Callable[[JointReward], float] = lambda one: one.reward) -> returns.Node:
    """The rewards of an episode, from which `learning.returns` computes."""
    children = [child and tree_of(child, reward) for child in root.children]
    return returns.Node([reward(one) for one in root.rewards], children)


# --- one turn -----------------------------------------------------------------------------------------------------


def _sample(
    team: Team,
    level: Sequence[Node],
    context: Context,
    width: int,
    pairing: returns.Pairing,
    sampling: Any,
    token_budget: int,
    seed: int,
) -> None:
    """Fill in the responses of all nodes of one turn."""
    agents = range(len(team.agents))
    draws = [
        Draw(context, node.prompted, sample, agent, turn=node.turn, node=node.name)
        for node in level
        for sample in range(width)
        for agent in agents
    ]
    sampled = iter(sample_draws(team, draws, sampling, token_budget, seed))
    for node in level:
        joints = [[next(sampled) for _ in agents] for _ in range(width)]
        node.responses = [list(own) for own in zip(*joints, strict=True)]
        node.joints = _joints(width, len(agents), pairing)


def _joints(width: int, agents: int, pairing: returns.Pairing) -> list[tuple[int, ...]]:
    if pairing == "cross":
        return list(itertools.product(range(width), repeat=agents))
    return [(sample,) * agents for sample in range(width)]


def _score(level: Sequence[Node], score: Score) -> None:
    """Fill in the rewards of all nodes of one turn."""
    rewards = iter(score([(node, node.texts(joint)) for node in level for joint in range(len(node.joints))]))
    for node in level:
        node.rewards = [next(rewards) for _ in node.joints]


def _expand(node: Node, team: Team, task: Task, sampling: Any, threshold: float | None, *, alone: bool) -> None:
    """Give a node its children; `alone`: each joint response ends by its own reward, not by the mean of all."""
    rewards = [one.reward for one in node.rewards]
    for joint, reward in enumerate(rewards):
        ends = returns.terminates([reward] if alone else rewards, threshold)
        node.children.append(None if ends else _child(node, joint, team, task, sampling))
    if not any(node.children):
        node.children = []


def _child(node: Node, joint: int, team: Team, task: Task, sampling: Any) -> Node | None:
    history = (*node.history, Exchange(node.prompted.prompts, node.texts(joint)))
    prompted = continued(team, task, node.prompted, history, sampling)
    if prompted is None:
        node.overflowed += 1
        return None
    return Node(prompted, node.turn + 1, f"{node.name}/{joint}" if node.name else str(joint), history)
