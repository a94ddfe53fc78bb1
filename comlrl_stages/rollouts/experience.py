"""What learners see of rollouts: the completions of one agent, and trajectories of joint responses."""

from collections.abc import Sequence
from dataclasses import dataclass

from comlrl_stages.rollouts.episodes import Node
from comlrl_stages.teams.sampling import Sampled


@dataclass(frozen=True)
class Completion:
    """One sampled completion of one agent, and the prompt that it answers."""

    prompt_ids: Sequence[int]
    sampled: Sampled
    turn: int

    @property
    def tokens(self) -> int:
        return len(self.sampled.completion_ids)


@dataclass(frozen=True)
class Response:
    """One joint response of a trajectory."""

    trajectory: int
    turn: int
    node: Node
    joint: int

    def completion(self, agent: int) -> Completion:
        """What an agent was asked and answered."""
        sampled = self.node.responses[agent][self.node.joints[self.joint][agent]]
        return Completion(self.node.prompted.prompt_ids[agent], sampled, self.turn)

    def child(self) -> Node | None:
        """The node that goes on from here, None at the end."""
        return self.node.children[self.joint] if self.node.children else None

    @property
    def place(self) -> tuple[int, int]:
        """Row and column in tensors of shape (trajectories, turns)."""
        return self.trajectory, self.turn


def trajectories_of(roots: Sequence[Node]) -> list[list[Response]]:
    """The trajectories of rollouts with one joint response per node after the first turn."""
    found: list[list[Response]] = []
    for root in roots:
        for joint in range(len(root.joints)):
            node, responses = root, [Response(len(found), 0, root, joint)]
            while node.children and (node := node.children[responses[-1].joint]):
                responses.append(Response(len(found), len(responses), node, 0))
            found.append(responses)
    return found


def completions_of(nodes: Sequence[Node], agent: int) -> list[Completion]:
    """The completions of one agent, node by node and sample by sample."""
    return [
        Completion(node.prompted.prompt_ids[agent], sampled, node.turn)
        for node in nodes
        for sampled in node.responses[agent]
    ]
