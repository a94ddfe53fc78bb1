"""One agent's policy-gradient step: the gradients of a minibatch, in micro-batches that fit the token budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from comlrl_stages.learning.policy_gradient import policy_gradient_loss
from comlrl_stages.rollouts.experience import Completion
from comlrl_stages.seeding import torch_seed
from comlrl_stages.tasks.scoring import JointReward
from comlrl_stages.teams.batching import plan_batches
from comlrl_stages.teams.log_probs import completion_log_probs
from comlrl_stages.teams.lora import adapter_dropout
from comlrl_stages.teams.team import Team


@dataclass(frozen=True)
class PolicyStep:
    """Sums over the minibatches of a step.

    `loss` is the sum of their losses, `entropy` that over tokens in nats, `clipped` the number of tokens whose
    importance ratio was clipped, None where nothing clips.
    """

    loss: float = 0.0
    entropy: float = 0.0
    tokens: int = 0
    clipped: int | None = None
    minibatches: int = 0

    def __add__(self, other: "PolicyStep") -> "PolicyStep":
        clipped = None if other.clipped is None else (self.clipped or 0) + other.clipped
        return PolicyStep(
            self.loss + other.loss,
            self.entropy + other.entropy,
            self.tokens + other.tokens,
            clipped,
            self.minibatches + other.minibatches,
        )

    def means(self) -> dict[str, float]:
        """The numbers for the log."""
        tokens = max(self.tokens, 1)
        numbers = {"loss": self.loss / max(self.minibatches, 1), "entropy": self.entropy / tokens}
        return numbers if self.clipped is None else {**numbers, "clipped_share": self.clipped / tokens}


class Addition(Protocol):
    """What the value head on an agent adds to its loss."""

    value_at: Literal["prompt", "response"]

    def __call__(self, rows: Sequence[int], values: torch.Tensor) -> torch.Tensor:
        """The value loss of the minibatch's `rows`, from their values (rows,) with gradient."""


def backward(
    settings: Any,
    team: Team,
    agent: int,
    completions: Sequence[Completion],
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    minibatch: tuple[int, int],
    addition: Addition | None = None,
) -> PolicyStep:
    """Add the gradients of one agent's loss on a minibatch to its parameters.

    Args:
        advantages, weights: (completions,), weights from `row_weights` over all of the step's completions.
        minibatch: step and number of the minibatch, which name the stream of an adapter's dropout.
        addition: what a value head adds to the loss.
    """
    loaded, device = team.agents[agent], team.compute.device
    costs = [len(one.prompt_ids) + one.tokens for one in completions]
    clipped = None if settings.clip is None else 0
    done = PolicyStep(clipped=clipped, minibatches=1)
    generator = torch.Generator().manual_seed(
        torch_seed(settings.seed, "dropout", settings.method, settings.round, *minibatch, agent)
    )
    for batch in plan_batches(costs, settings.compute.training_tokens):
        chosen = [completions[i] for i in batch]
        with team.compute.autocast(), adapter_dropout(loaded.model, generator):
            scores = completion_log_probs(
                loaded.model,
                loaded.facts,
                [one.prompt_ids for one in chosen],
                [one.sampled.completion_ids for one in chosen],
                temperature=settings.sampling.temperature,
                entropy=True,
                value_head=None if addition is None else loaded.value_head,
                value_at=addition.value_at if addition is not None else "prompt",
            )
        part = policy_gradient_loss(
            scores.log_probs,
            scores.mask,
            advantages[batch].to(device),
            weights[batch].to(device),
            behaviour_log_probs=_behaviour(chosen, scores.mask) if settings.importance_ratio else None,
            clip=settings.clip,
        )
        (part.loss if addition is None else part.loss + addition(batch, scores.values)).backward()
        done += PolicyStep(
            part.loss.item(),
            scores.entropy.detach().sum().item(),
            part.tokens,
            None if clipped is None else part.clipped,
        )
    return done


def agent_reward(agent: int) -> Callable[[JointReward], float]:
    """What an agent earned: its own reward where the task's `reward_scope` is agent, else the team's."""

    def reward(joint: JointReward) -> float:
        shared = joint.agent_rewards is None or joint.status != "ok"
        return joint.reward if shared else joint.agent_rewards[agent]

    return reward


def _behaviour(completions: Sequence[Completion], mask: torch.Tensor) -> torch.Tensor:
    """Log-probs of the policy that sampled, (completions, tokens), zero after each completion's end."""
    padded = torch.zeros(mask.shape, dtype=torch.float32)
    for row, one in enumerate(completions):
        padded[row, : one.tokens] = torch.tensor(one.sampled.log_probs)
    return padded.to(mask.device)
