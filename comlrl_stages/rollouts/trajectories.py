"""Trajectories for evaluation: each joint response of the first turn goes on by one joint response per turn.

Nothing is scored here: which turns count is decided when rewards are known, so that a new reward samples nothing again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from comlrl_stages.rollouts.single_turn import Context, Draw, Prompted, continued
from comlrl_stages.tasks.protocol import Exchange, Task
from comlrl_stages.teams.team import Team


@dataclass(frozen=True)
class Trajectory:
    """One episode as far as it has come; it keeps its number `sample` over all turns."""

    context: Context
    prompted: Prompted
    sample: int
    greedy: bool = False
    node: str = ""
    history: tuple[Exchange, ...] = ()

    @property
    def turn(self) -> int:
        """The turn to be sampled, counted from 0."""
        return len(self.history)

    def draws(self) -> list[Draw]:
        """The completions of the turn, one per agent."""
        agents = range(len(self.prompted.prompts))
        return [
            Draw(self.context, self.prompted, self.sample, agent, self.greedy, self.turn, self.node) for agent in agents
        ]

    def after(self, team: Team, task: Task, texts: Sequence[str], sampling: Any) -> "Trajectory | None":
        """The trajectory at its next turn, once the agents wrote `texts`; None where the prompts leave no room."""
        history = (*self.history, Exchange(self.prompted.prompts, tuple(texts)))
        prompted = continued(team, task, self.prompted, history, sampling)
        if prompted is None:
            return None
        node = f"{self.node}/0" if self.node else str(self.sample)
        return Trajectory(self.context, prompted, self.sample, self.greedy, node, history)
