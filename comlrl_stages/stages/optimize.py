"""Train the team: the loop that all algorithms share.

An algorithm (chosen by name) says which weights train and computes the gradients of a step; this module does the rest:
schedule, clipping, AdamW, the log, validation on the way, checkpoints, and the policy at the end. All state beside
weights, moments and the log follows from the step, so a run that was killed goes on from its last checkpoint to the
same bytes.
"""

import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from comlrl_stages.artifacts import TRAINING_LOG, Work, checked_directory, table_of, write_table
from comlrl_stages.checkpoint_places import checkpoint_folder
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
from comlrl_stages.teams.policies import save_policy
from comlrl_stages.teams.team import Team, load_team

JOINT = -1
#: Numbers of a whole update stand at turn 0 of the training log, those of one turn at 1, 2, ...
WHOLE = 0
Numbers = dict[tuple[int, int], dict[str, float]]


@dataclass(frozen=True)
class Part:
    """Weights with an optimizer of their own: an agent, a critic, a value head."""

    module: torch.nn.Module
    learning_rate: float
    agent: int = JOINT  # whose numbers its gradient norm is among

    def trainable(self) -> list[torch.nn.Parameter]:
        """The parameters that have gradients: all, or those of an adapter."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]


@dataclass
class StepNumbers:
    """What one step reports.

    Attributes:
        env_steps: joint responses evaluated for it.
        tokens: completion tokens trained on.
        values: by turn (0: the whole step) and agent (-1: the team), the named numbers of the training log.
    """

    env_steps: int = 0
    tokens: int = 0
    values: Numbers = field(default_factory=dict)

    def add(self, agent: int = JOINT, turn: int = WHOLE, **numbers: float) -> None:
        """Record numbers of an agent and turn."""
        self.values.setdefault((turn, agent), {}).update(numbers)


class Update(Protocol):
    """Applies the gradients that stand in the parts: clipping, AdamW; then they are gone."""

    def __call__(self) -> None: ...


class Validation(Protocol):
    """Measures the team on the validation items while it trains."""

    def is_due(self, before: int, after: int) -> bool:
        """Whether to measure, where env_step went from `before` to `after`."""

    def measure(self) -> dict[str, float]:
        """Metrics by name."""


class Algorithm(Protocol):
    """What the loop needs of an algorithm."""

    total_steps: int
    parts: Mapping[str, Part]
    validation: Validation | None

    def train(self, step: int, update: Update) -> StepNumbers:
        """Compute the gradients of step `step` (0 is the first), calling `update` after those of each minibatch."""

    def save(self, policy: Path) -> None:
        """Write into the policy's folder what is no agent, such as critics."""

    def close(self) -> None:
        """End what the algorithm started."""


def agent_parts(settings: Any, team: Team) -> dict[str, Part]:
    """The agents as parts; agents that share their weights are one."""
    rates = settings.learning_rates(len(team.agents))
    return {
        f"agent_{group[0]}": Part(team.agents[group[0]].model, rates[group[0]], group[0]) for group in team.groups()
    }


def run(settings: Any, work: Work) -> None:
    """Write the folder `policy` and the table `training_log`."""
    folders = [checked_directory(folder) for folder in work.inputs["models"]]
    team = load_team(
        folders,
        work.digest("models"),
        settings.team,
        settings.compute,
        trainable=True,
        lora=settings.lora,
        seed=settings.seed,
    )
    work.resolved(compute_dtype=team.compute.dtype, device=team.compute.device, engine="own decode loop")
    algorithm = importlib.import_module(ALGORITHMS[settings.algorithm]).build(settings, work, team)
    try:
        training = Training(settings, work, algorithm)
        training.run()
        save_policy(team, work.output("policy"))
        algorithm.save(work.output("policy"))
    finally:
        algorithm.close()
    table = table_of(training.log, TRAINING_LOG)
    write_table(work.output("training_log"), table, TRAINING_LOG)
    work.count("policy", **training.counts())
    work.count("training_log", rows=table.num_rows)


class Training:
    """One run of an algorithm: where it stands, and what it has logged."""

    def __init__(self, settings: Any, work: Work, algorithm: Algorithm) -> None:
        self._settings, self._work, self._algorithm = settings, work, algorithm
        self._optimizers = {name: _optimizer(part, settings) for name, part in algorithm.parts.items()}
        self._before = {name: weight_sample(part.trainable()) for name, part in algorithm.parts.items()}
        self._folder = checkpoint_folder(work)
        self._norms: dict[str, list[float]] = {}
        self._scale = 1.0
        self.log: list[dict[str, Any]] = []
        self._best: dict[str, Any] = {}
        self._best_of_checkpoint: int | None = None
        self._stopped = False

    def run(self) -> None:
        """All steps from the last checkpoint on; in the end the parts hold the weights that the policy gets."""
        total, interval = self._algorithm.total_steps, int(self._work.runtime.get("checkpoint_interval", 10))
        start = self._restore()
        self._work.track(self.log)
        advance = self._work.progress(total, "updates")
        advance(start, kept=True)
        if start == 0:
            self._validate(step=0)
        step = start
        while step < total and not self._stopped:
            numbers = self._step(step)
            step += 1
            before, rows = self._env_step(), self._rows(step, numbers)
            self._log(rows)
            if self._is_due(before):
                self._validate(step)
            if self._keeps(step, interval):
                self._save_checkpoint(step)
            advance(note=_note(numbers))
        self._log(self._changed_shares())
        self._take_best()

    def counts(self) -> dict[str, int]:
        """Steps, evaluated joint responses and tokens, for the manifest."""
        last = self.log[-1] if self.log else {"step": 0, "env_step": 0, "tokens": 0}
        best = {"best_step": self._best["step"]} if self._best else {}
        return {"steps": last["step"], "env_steps": last["env_step"], "tokens": last["tokens"], **best}

    # --- one step ---

    def _step(self, step: int) -> StepNumbers:
        settings = self._settings
        horizon = getattr(settings, "schedule_steps", None) or self._algorithm.total_steps
        self._scale = lr_scale(min(step, horizon - 1), horizon, settings.warmup_fraction, settings.decay)
        self._norms = {name: [] for name in self._algorithm.parts}
        numbers = self._algorithm.train(step, self._update)
        for name, part in self._algorithm.parts.items():
            norms = self._norms[name]
            own = "" if name.startswith("agent_") else f"{name.rstrip('_0123456789')}_"
            if norms:
                numbers.add(part.agent, **{f"{own}gradient_norm": sum(norms) / len(norms)})
        rates = [part.learning_rate for name, part in self._algorithm.parts.items() if name.startswith("agent_")]
        numbers.add(learning_rate=max(rates) * self._scale)
        return numbers

    def _update(self) -> None:
        """AdamW on every part that got gradients."""
        for name, part in self._algorithm.parts.items():
            trained = [parameter for parameter in part.module.parameters() if parameter.grad is not None]
            if not trained:
                continue
            self._norms[name].append(clip_gradients(trained, self._settings.max_gradient_norm))
            set_learning_rate(self._optimizers[name], part.learning_rate * self._scale)
            self._optimizers[name].step()
            self._optimizers[name].zero_grad(set_to_none=True)

    # --- the log ---

    def _env_step(self) -> int:
        return self.log[-1]["env_step"] if self.log else 0

    def _rows(self, step: int, numbers: StepNumbers) -> list[dict[str, Any]]:
        """Rows of one step; env_step and tokens count up over the run."""
        tokens = self.log[-1]["tokens"] if self.log else 0
        common = {
            "phase": self._settings.algorithm,
            "round": self._settings.round,
            "step": step,
            "env_step": self._env_step() + numbers.env_steps,
            "tokens": tokens + numbers.tokens,
        }
        return [
            {**common, "turn": turn, "agent": agent, "name": name, "value": float(value)}
            for (turn, agent), values in sorted(numbers.values.items())
            for name, value in sorted(values.items())
        ]

    def _log(self, rows: list[dict[str, Any]]) -> None:
        self._work.track(rows)
        self.log += rows

    def _changed_shares(self) -> list[dict[str, Any]]:
        """Rows at the last step: the share of weights that training changed.

        None in spite of gradients is an error: a learning rate lost to rounding looks like success otherwise. None for
        want of a gradient, as where a sparse reward was never earned, is told here and by the report.
        """
        rows = []
        for name, part in self._algorithm.parts.items():
            if not name.startswith("agent_"):
                continue
            share = changed_share(self._before[name], weight_sample(part.trainable()))
            if share == 0.0 and self._had_gradients(part):
                raise UserError(
                    f"{name}: no weight changed in training, although there were gradients. The learning rate "
                    f"{part.learning_rate} is too small; raise it."
                )
            if share == 0.0:
                _say(
                    f"warning: {name}: no weight changed in training, for every gradient was zero. Rewards that differ "
                    "between the responses to a prompt would help: more generations, a higher temperature, or a finer "
                    "reward."
                )
            last = {**self.log[-1], "phase": self._settings.algorithm, "turn": WHOLE}
            rows.append({**last, "agent": part.agent, "name": "changed_share", "value": share})
        return rows

    def _had_gradients(self, part: Part) -> bool:
        return any(row["value"] > 0 for row in self.log if (row["agent"], row["name"]) == (part.agent, "gradient_norm"))

    # --- validation ---

    def _is_due(self, before: int) -> bool:
        validation = self._algorithm.validation
        return validation is not None and validation.is_due(before, self._env_step())

    def _validate(self, step: int) -> None:
        """Log the metrics of the validation items; keep the best weights, stop where nothing improves."""
        if self._algorithm.validation is None:
            return
        metrics = self._algorithm.validation.measure()
        last = self.log[-1] if self.log else {"env_step": 0, "tokens": 0}
        common = {
            "phase": "validation",
            "round": self._settings.round,
            "step": step,
            "env_step": last["env_step"],
            "tokens": last["tokens"],
            "turn": WHOLE,
            "agent": JOINT,
        }
        self._log([{**common, "name": name, "value": value} for name, value in sorted(metrics.items())])
        if self._settings.keep_best is not None:
            self._compare(step, metrics)

    def _compare(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the weights if they are the best so far; a turn that no episode reaches any more is no improvement."""
        name = self._settings.keep_best
        if name not in metrics and not self._best:
            raise UserError(
                f"keep_best: there is no metric {name!r}; the validation measures {', '.join(sorted(metrics))}"
            )
        if not self._best or metrics.get(name, -math.inf) > self._best["value"]:
            self._best = {"step": step, "value": metrics[name], "since": 0}
            # A run that is killed now goes on from its last checkpoint, with the best weights of then.
            before = [] if self._best_of_checkpoint is None else [self._best_of_checkpoint]
            save_checkpoint(self._folder / "best", step, self._weights(), {}, keep=before)
            return
        self._best["since"] += 1
        patience = self._settings.patience
        self._stopped = patience is not None and self._best["since"] >= patience
        if self._stopped:
            _say(f"stopped after step {step}: {patience} validations in a row had no better {name}")

    def _take_best(self) -> None:
        """Put the best weights into the parts, where the run keeps them."""
        if not self._best:
            return
        best = "the untrained team" if self._best["step"] == 0 else f"the weights of step {self._best['step']}"
        _say(f"kept: {best}, with {self._settings.keep_best} {self._best['value']:.4g}")
        _, tensors, _ = load_checkpoint(self._folder / "best", self._best["step"])
        for name, part in self._algorithm.parts.items():
            own = dict(part.module.named_parameters())
            with torch.no_grad():
                for key, tensor in _of_part(name, tensors).items():
                    own[key].copy_(tensor)

    def _weights(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}|{key}": parameter.detach()
            for name, part in self._algorithm.parts.items()
            for key, parameter in part.module.named_parameters()
            if parameter.requires_grad
        }

    # --- checkpoints ---

    def _keeps(self, step: int, interval: int) -> bool:
        if step == self._algorithm.total_steps or self._stopped:
            return bool(self._work.runtime.get("keep_checkpoints", False))
        return step % interval == 0

    def _save_checkpoint(self, step: int) -> None:
        tensors = {
            f"{name}|{key}": tensor
            for name, part in self._algorithm.parts.items()
            for key, tensor in training_state(part.module.named_parameters(), self._optimizers[name]).items()
        }
        save_checkpoint(self._folder, step, tensors, {"log": self.log, "best": self._best, "stopped": self._stopped})
        self._best_of_checkpoint = self._best.get("step")

    def _restore(self) -> int:
        found = load_checkpoint(self._folder, self._algorithm.total_steps)
        if found is None:
            return 0
        step, tensors, state = found
        for name, part in self._algorithm.parts.items():
            own = _of_part(name, tensors)
            restore_training_state(part.module.named_parameters(), self._optimizers[name], own)
        self.log, self._best, self._stopped = state["log"], state["best"], state["stopped"]
        self._best_of_checkpoint = self._best.get("step")
        return step


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _optimizer(part: Part, settings: Any) -> torch.optim.AdamW:
    return adamw(
        part.module.named_parameters(),
        learning_rate=part.learning_rate,
        weight_decay=settings.weight_decay,
        betas=settings.adam_betas,
    )


def _of_part(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = f"{name}|"
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _note(numbers: StepNumbers) -> str:
    joint = numbers.values.get((WHOLE, JOINT), {})
    shown = [name for name in ("reward_mean", "loss", "accuracy", "kl") if name in joint]
    return " ".join(f"{name} {joint[name]:.4g}" for name in shown)
