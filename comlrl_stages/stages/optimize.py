"""Train the team: the loop that all algorithms share.

An algorithm (chosen by name) says how many updates there are and computes the gradients of one; this module does the
rest: schedule, clipping, AdamW, the log, checkpoints, and the policy at the end. All state beside weights and moments
follows from the step, so a run that was killed goes on from its last checkpoint to the same bytes.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from comlrl_stages.artifacts import TRAINING_LOG, Work, checked_directory, table_of, write_table
from comlrl_stages.checkpoints import load_checkpoint, save_checkpoint
from comlrl_stages.errors import UserError
from comlrl_stages.learning.optimization import (
    adamw,
    changed_share,
    clip_gradients,
    lr_scale,
    restore_training_state,
    set_learning_rate,
    training_state,
    weight_sample,
)
from comlrl_stages.registry import ALGORITHMS
from comlrl_stages.teams.loading import save_model
from comlrl_stages.teams.team import Team, load_team

JOINT = -1


@dataclass
class StepNumbers:
    """What one update reports.

    Attributes:
        env_steps: joint responses evaluated for it.
        tokens: completion tokens trained on.
        values: by agent (-1: the team), the named numbers of the training log.
    """

    env_steps: int = 0
    tokens: int = 0
    values: dict[int, dict[str, float]] = field(default_factory=dict)


class Algorithm(Protocol):
    """What the loop needs of an algorithm."""

    total_steps: int

    def backward(self, step: int) -> StepNumbers:
        """Put the gradients of update `step` (0 is the first) into the agents' parameters."""

    def close(self) -> None:
        """End what the algorithm started."""


def run(settings: Any, work: Work) -> None:
    """Write the folder `policy` and the table `training_log`."""
    folders = [checked_directory(folder) for folder in work.inputs["models"]]
    team = load_team(folders, work.digest("models"), settings.team, settings.compute, trainable=True)
    work.resolved(compute_dtype=team.compute.dtype, device=team.compute.device, engine="own decode loop")
    algorithm = importlib.import_module(ALGORITHMS[settings.algorithm]).build(settings, work, team)
    try:
        log = _train(settings, work, team, algorithm)
    finally:
        algorithm.close()
    _save(work, team, log)


def _train(settings: Any, work: Work, team: Team, algorithm: Algorithm) -> list[dict[str, Any]]:
    """All updates from the last checkpoint on; returns the rows of the training log."""
    optimizers = [
        adamw(
            agent.model.named_parameters(),
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            betas=settings.adam_betas,
        )
        for agent in team.agents
    ]
    before = [weight_sample(agent.model.parameters()) for agent in team.agents]
    checkpoints = work.partial / "checkpoints"
    start, log = _restore(checkpoints, team, optimizers)
    work.track(log)
    interval = int(work.runtime.get("checkpoint_interval", 10))
    advance = work.progress(algorithm.total_steps, "updates")
    advance(start, kept=True)
    for step in range(start, algorithm.total_steps):
        numbers = algorithm.backward(step)
        scale = lr_scale(step, algorithm.total_steps, settings.warmup_fraction, settings.decay)
        for agent, optimizer in enumerate(optimizers):
            norm = _update(
                team.agents[agent].model, optimizer, settings.learning_rate * scale, settings.max_gradient_norm
            )
            numbers.values.setdefault(agent, {})["gradient_norm"] = norm
        numbers.values.setdefault(JOINT, {})["learning_rate"] = settings.learning_rate * scale
        rows = _log_rows(settings, step, numbers, log)
        work.track(rows)
        log += rows
        if (step + 1) % interval == 0 and step + 1 < algorithm.total_steps:
            save_checkpoint(checkpoints, step + 1, _tensors(team, optimizers), {"log": log})
        advance(note=_note(numbers))
    shares = _changed_shares(settings, team, before, log[-1])
    work.track(shares)
    return log + shares


def _update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, learning_rate: float, limit: float | None
) -> float:
    norm = clip_gradients(model.parameters(), limit)
    set_learning_rate(optimizer, learning_rate)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def _tensors(team: Team, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    return {
        f"agent_{agent}|{name}": tensor
        for agent, optimizer in enumerate(optimizers)
        for name, tensor in training_state(team.agents[agent].model.named_parameters(), optimizer).items()
    }


def _restore(
    checkpoints: Any, team: Team, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[int, list[dict[str, Any]]]:
    found = load_checkpoint(checkpoints)
    if found is None:
        return 0, []
    step, tensors, state = found
    for agent, optimizer in enumerate(optimizers):
        prefix = f"agent_{agent}|"
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        restore_training_state(team.agents[agent].model.named_parameters(), optimizer, own)
    return step, state["log"]


def _log_rows(settings: Any, step: int, numbers: StepNumbers, log: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one update; env_step and tokens count up over the run."""
    env_step = (log[-1]["env_step"] if log else 0) + numbers.env_steps
    tokens = (log[-1]["tokens"] if log else 0) + numbers.tokens
    common = {
        "phase": settings.algorithm,
        "round": settings.round,
        "step": step + 1,
        "env_step": env_step,
        "tokens": tokens,
        "turn": 0,
    }
    return [
        {**common, "agent": agent, "name": name, "value": float(value)}
        for agent, values in sorted(numbers.values.items())
        for name, value in sorted(values.items())
    ]


def _note(numbers: StepNumbers) -> str:
    joint = numbers.values.get(JOINT, {})
    shown = [name for name in ("reward_mean", "loss", "accuracy", "kl") if name in joint]
    return " ".join(f"{name} {joint[name]:.4g}" for name in shown)


def _changed_shares(
    settings: Any, team: Team, before: Sequence[torch.Tensor], last: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of the training log, at its last step: the share of weights that training changed.

    None is an error: a learning rate lost to rounding looks like success otherwise.
    """
    rows = []
    for agent, sample in enumerate(before):
        share = changed_share(sample, weight_sample(team.agents[agent].model.parameters()))
        if share == 0.0:
            raise UserError(
                f"agent_{agent}: no weight changed in training. Every gradient was zero, or the learning rate "
                f"{settings.learning_rate} is too small."
            )
        rows.append({**last, "agent": agent, "name": "changed_share", "value": share})
    return rows


def _save(work: Work, team: Team, log: Sequence[Mapping[str, Any]]) -> None:
    policy = work.output("policy")
    for agent, loaded in enumerate(team.agents):
        save_model(loaded, policy / f"agent_{agent}")
    table = table_of(log, TRAINING_LOG)
    write_table(work.output("training_log"), table, TRAINING_LOG)
    last = log[-1] if log else {"step": 0, "env_step": 0, "tokens": 0}
    work.count("policy", steps=last["step"], env_steps=last["env_step"], tokens=last["tokens"])
    work.count("training_log", rows=table.num_rows)
