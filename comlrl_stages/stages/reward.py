"""Fit the joint reward model on preference pairs (Bradley-Terry).

Reads pairs, the completions and rewards that they name, and the folder of the backbone. Writes the reward model folder
with quality.json and held_out.parquet (scores of the pairs that were kept apart, by task), and the training log.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from scipy.stats import spearmanr

from comlrl_stages.artifacts import (
    COMPLETIONS,
    PAIRS,
    REWARDS,
    TRAINING_LOG,
    Work,
    checked_directory,
    read_table,
    table_of,
    write_json,
    write_table,
)
from comlrl_stages.checkpoints import load_checkpoint, save_checkpoint
from comlrl_stages.errors import UserError
from comlrl_stages.learning import bradley_terry, calibration, optimization
from comlrl_stages.preferences.joint_responses import JointResponses
from comlrl_stages.seeding import stream, torch_seed
from comlrl_stages.settings import RewardSettings
from comlrl_stages.teams.batching import plan_batches
from comlrl_stages.teams.compute import Compute, resolve_compute, set_up_torch
from comlrl_stages.teams.reward_model import (
    JointInput,
    LoadedRewardModel,
    new_reward_model,
    save_reward_model,
    score_joint,
)

PHASE, ROUND, JOINT = "reward", 1, -1

HELD_OUT = pa.schema(
    [
        ("pair_id", pa.string()),
        ("task_id", pa.string()),
        ("winner_reward", pa.float64()),
        ("loser_reward", pa.float64()),
        ("winner_score_before", pa.float64()),
        ("loser_score_before", pa.float64()),
        ("winner_score", pa.float64()),
        ("loser_score", pa.float64()),
    ]
)


@dataclass(frozen=True)
class EncodedPair:
    """A row of the pairs table and its two sides as the reward model reads them."""

    row: dict[str, Any]
    winner: JointInput
    loser: JointInput

    @property
    def cost(self) -> int:
        """Padded tokens of the pair alone: two rows as long as its longer side."""
        return 2 * max(len(self.winner.ids), len(self.loser.ids))


#: Score of each distinct joint text, by its token ids.
Scores = dict[tuple[int, ...], float]


def run(settings: RewardSettings, work: Work) -> None:
    """Fit the reward model, measure it before and after on held-out tasks, and save it."""
    set_up_torch(settings.compute.torch_threads)
    loaded, compute = _new_model(settings, work)
    encoded = _encoded_pairs(loaded, work)
    pairs = [pair for pair in encoded if pair.winner.ids != pair.loser.ids]
    training, held_out = split_by_task(pairs, settings.held_out_fraction, settings.seed)

    before = _scores_before(loaded, pairs, compute, settings, work.partial / "scores_before.json")
    quality: dict[str, Any] = {"before": _quality(training, held_out, before, settings.centring)}
    work.track(_log_rows(0, 0, quality["before"]))
    initial_weights = optimization.weight_sample(_trainable(loaded))
    steps = _fit(settings, loaded, compute, training, work)
    changed_share = optimization.changed_share(initial_weights, optimization.weight_sample(_trainable(loaded)))
    if changed_share == 0:
        raise UserError(
            f"no weight of the reward model changed in {len(steps)} updates with learning_rate "
            f"{settings.learning_rate}. Raise learning_rate."
        )
    after = _scores(loaded, pairs, compute, settings)

    quality |= {
        "after": _quality(training, held_out, after, settings.centring),
        "calibration": [vars(b) for b in calibration.reliability(_margins(held_out, after))],
        "changed_share": changed_share,
        "pairs": {"training": len(training), "held_out": len(held_out)},
        "tasks": {"training": _tasks(training), "held_out": _tasks(held_out)},
        "max_length": loaded.max_length,
    }
    work.track(_final_rows(steps, quality))
    folder = work.output("reward_model")
    save_reward_model(loaded, folder)
    write_json(folder / "quality.json", quality)
    write_table(folder / "held_out.parquet", _held_out_table(held_out, before, after), HELD_OUT)
    log = _log_table(steps, quality)
    write_table(work.output("training_log"), log, TRAINING_LOG)
    work.count(
        "reward_model",
        pairs=len(pairs),
        cut=sum(side.cut for side in _distinct_sides(pairs).values()),
        dropped={"equal_text": len(encoded) - len(pairs)},
    )
    work.count("training_log", rows=log.num_rows)


# --- data ---------------------------------------------------------------------------------------------------------


def _new_model(settings: RewardSettings, work: Work) -> tuple[LoadedRewardModel, Compute]:
    loaded = new_reward_model(
        checked_directory(work.inputs["model"]),
        max_length=settings.max_length,
        generator=torch.Generator().manual_seed(torch_seed(settings.seed, "reward", "head")),
        trust_remote_code=settings.trust_remote_code,
    )
    hidden_size = loaded.model.head.in_features
    compute = resolve_compute(settings.compute.compute_dtype, settings.compute.device, hidden_size)
    work.resolved(compute_dtype=compute.dtype, device=compute.device, max_length=loaded.max_length)
    loaded.model.to(compute.device)
    loaded.model.backbone.requires_grad_(not settings.freeze_backbone)
    return loaded, compute


def _encoded_pairs(loaded: LoadedRewardModel, work: Work) -> list[EncodedPair]:
    """Read the pairs and encode both sides of each; equal texts are encoded once."""
    rows = _read(work.inputs["pairs"], PAIRS).to_pylist()
    responses = JointResponses(
        _read(work.inputs["completions"], COMPLETIONS),
        _read(work.inputs["rewards"], REWARDS),
        columns=("prompt", "text", "role_texts"),
    )
    known: dict[tuple[tuple[str, ...], tuple[str, ...]], JointInput] = {}

    def encoded(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> JointInput:
        texts = joint_texts(own, other)
        if texts not in known:
            known[texts] = loaded.encode(*texts)
        return known[texts]

    pairs = []
    for row in rows:
        winner = responses.agents(row["task_id"], row["winner"])
        loser = responses.agents(row["task_id"], row["loser"])
        pairs.append(EncodedPair(row, encoded(winner, loser), encoded(loser, winner)))
    return pairs


def joint_texts(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the agents' prompts and responses of one side of a pair.

    One model that wrote all roles was asked by another prompt. It is shown with the agents' prompts of the other side,
    so that the model compares what was answered and not how it was asked.
    """
    responses = tuple(own[0]["role_texts"] or [completion["text"] for completion in own])
    asked = own if len(own) == len(responses) else other
    prompts = [completion["prompt"] for completion in asked]
    return tuple(prompts + [""] * (len(responses) - len(prompts))), responses


def _read(paths: Path | Sequence[Path], schema: pa.Schema) -> pa.Table:
    paths = paths if isinstance(paths, list | tuple) else [paths]
    return pa.concat_tables([read_table(path, schema) for path in paths])


def split_by_task(
    pairs: Sequence[EncodedPair], held_out_fraction: float, seed: int
) -> tuple[list[EncodedPair], list[EncodedPair]]:
    """Return training and held-out pairs; no task is in both, and each part has at least one.

    Every task draws its own number and the smallest are held out, so a further task hardly moves the others.
    Raises UserError where fewer than two tasks have a pair.
    """
    tasks = {pair.row["task_id"] for pair in pairs}
    if len(tasks) < 2:
        raise UserError(
            f"the pairs come from {len(tasks)} tasks, but a reward model needs two at least: some to learn from and "
            "some held out to measure it. Use more items, or sample more candidates, since equal rewards give no pair."
        )
    by_draw = sorted(tasks, key=lambda task: (stream(seed, "reward", "held_out", task).random(), task))
    held_out = set(by_draw[: min(max(round(held_out_fraction * len(tasks)), 1), len(tasks) - 1)])
    return (
        [pair for pair in pairs if pair.row["task_id"] not in held_out],
        [pair for pair in pairs if pair.row["task_id"] in held_out],
    )


# --- training -----------------------------------------------------------------------------------------------------


def _fit(
    settings: RewardSettings, loaded: LoadedRewardModel, compute: Compute, training: list[EncodedPair], work: Work
) -> list[dict[str, float]]:
    """Train, or continue from the last checkpoint; return the numbers of every update."""
    named = list(loaded.model.named_parameters())
    optimizer = optimization.adamw(
        named, learning_rate=settings.learning_rate, weight_decay=settings.weight_decay, betas=settings.adam_betas
    )
    plan = _minibatches(len(training), settings)
    folder, steps = work.partial / "checkpoints", []
    if (checkpoint := load_checkpoint(folder)) is not None:
        _, tensors, state = checkpoint
        optimization.restore_training_state(named, optimizer, tensors)
        steps = state["steps"]
    advance = work.progress(len(plan), "updates")
    advance(len(steps), kept=True)
    work.track(_update_rows(steps))
    for step in range(len(steps), len(plan)):
        scale = optimization.lr_scale(step, len(plan), settings.warmup_fraction, settings.decay)
        optimization.set_learning_rate(optimizer, settings.learning_rate * scale)
        numbers = update(settings, loaded, compute, optimizer, [training[i] for i in plan[step]])
        steps.append({**numbers, "learning_rate": settings.learning_rate * scale})
        work.track(_update_rows(steps, after=step))
        if (step + 1) % work.runtime.get("checkpoint_interval", 10) == 0 or step + 1 == len(plan):
            save_checkpoint(folder, step + 1, optimization.training_state(named, optimizer), {"steps": steps})
        advance(1, f"loss {numbers['loss']:.3f}")
    return steps


def _minibatches(pairs: int, settings: RewardSettings) -> list[np.ndarray]:
    """Return the pair indices of every update: all pairs once per epoch, shuffled."""
    return [
        order[start : start + settings.batch_size]
        for order in (stream(settings.seed, "reward", "shuffle", e).permutation(pairs) for e in range(settings.epochs))
        for start in range(0, pairs, settings.batch_size)
    ]


def update(
    settings: RewardSettings,
    loaded: LoadedRewardModel,
    compute: Compute,
    optimizer: torch.optim.Optimizer,
    minibatch: list[EncodedPair],
) -> dict[str, float]:
    """Make one update on a minibatch and return its numbers.

    Winner and loser of a pair share a forward pass. The token budget splits the minibatch, which changes nothing but
    rounding: every pair is divided by the size of the whole minibatch.
    """
    optimizer.zero_grad()
    loss, margins = 0.0, []
    for micro in plan_batches([pair.cost for pair in minibatch], settings.compute.training_tokens):
        part = [minibatch[i] for i in micro]
        with compute.autocast():
            scores = loaded.model([pair.winner.ids for pair in part] + [pair.loser.ids for pair in part])
        winner, loser = scores.chunk(2)
        preference = torch.tensor([pair.row["preference"] for pair in part], device=scores.device)
        losses = bradley_terry.losses(winner, loser, preference=preference, centring=settings.centring)
        part_loss = losses.sum() / len(minibatch)
        part_loss.backward()
        loss += part_loss.item()
        margins += (winner - loser).tolist()
    gradient_norm = optimization.clip_gradients(_trainable(loaded), settings.max_gradient_norm)
    optimizer.step()
    return {
        "loss": loss,
        "accuracy": calibration.accuracy(margins),
        "ties": calibration.tie_share(margins),
        "margin": float(np.mean(margins)),
        "gradient_norm": gradient_norm,
        "tokens": sum(len(pair.winner.ids) + len(pair.loser.ids) for pair in minibatch),
    }


def _trainable(loaded: LoadedRewardModel) -> list[torch.nn.Parameter]:
    return [parameter for parameter in loaded.model.parameters() if parameter.requires_grad]


# --- quality ------------------------------------------------------------------------------------------------------


def _distinct_sides(pairs: Sequence[EncodedPair]) -> dict[tuple[int, ...], JointInput]:
    return {side.ids: side for pair in pairs for side in (pair.winner, pair.loser)}


def _scores(
    loaded: LoadedRewardModel, pairs: Sequence[EncodedPair], compute: Compute, settings: RewardSettings
) -> Scores:
    """Score every distinct joint text once."""
    sides = _distinct_sides(pairs)
    scores = score_joint(loaded, list(sides.values()), compute, settings.compute.training_tokens)
    return dict(zip(sides, scores, strict=True))


def _scores_before(
    loaded: LoadedRewardModel, pairs: Sequence[EncodedPair], compute: Compute, settings: RewardSettings, path: Path
) -> Scores:
    """Score with the untrained model, or read what a killed run wrote down."""
    if path.exists():
        return dict(zip(_distinct_sides(pairs), json.loads(path.read_text(encoding="utf-8")), strict=True))
    scores = _scores(loaded, pairs, compute, settings)
    write_json(path, list(scores.values()))
    return scores


def _margins(pairs: Sequence[EncodedPair], scores: Scores) -> np.ndarray:
    return np.array([scores[pair.winner.ids] - scores[pair.loser.ids] for pair in pairs])


def _quality(
    training: Sequence[EncodedPair], held_out: Sequence[EncodedPair], scores: Scores, centring: float
) -> dict[str, float | None]:
    """Return the numbers of the report; one that is not defined (a correlation of constants) is None."""
    margins, training_margins = _margins(held_out, scores), _margins(training, scores)
    numbers = {
        "held_out_accuracy": calibration.accuracy(margins),
        "held_out_ties": calibration.tie_share(margins),
        "held_out_margin": float(margins.mean()),
        "held_out_loss": _mean_loss(held_out, scores, centring),
        "held_out_brier": calibration.brier(margins),
        "held_out_ece": calibration.expected_calibration_error(margins),
        "held_out_spearman": _spearman(held_out, scores),
        "training_accuracy": calibration.accuracy(training_margins),
        "training_ties": calibration.tie_share(training_margins),
        "training_loss": _mean_loss(training, scores, centring),
    }
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def _mean_loss(pairs: Sequence[EncodedPair], scores: Scores, centring: float) -> float:
    winner = torch.tensor([scores[pair.winner.ids] for pair in pairs], dtype=torch.float64)
    loser = torch.tensor([scores[pair.loser.ids] for pair in pairs], dtype=torch.float64)
    preference = torch.tensor([pair.row["preference"] for pair in pairs], dtype=torch.float64)
    return bradley_terry.losses(winner, loser, preference=preference, centring=centring).mean().item()


def _spearman(pairs: Sequence[EncodedPair], scores: Scores) -> float:
    """Return the rank correlation of score and task reward over the distinct joint texts of the pairs."""
    rewards = {pair.winner.ids: pair.row["winner_reward"] for pair in pairs}
    rewards |= {pair.loser.ids: pair.row["loser_reward"] for pair in pairs}
    known = [(scores[ids], reward) for ids, reward in rewards.items() if reward is not None]
    columns = list(zip(*known, strict=True))
    if not columns or any(len(set(column)) < 2 for column in columns):
        return math.nan
    return float(spearmanr(*columns).statistic)


def _tasks(pairs: Sequence[EncodedPair]) -> int:
    return len({pair.row["task_id"] for pair in pairs})


# --- tables -------------------------------------------------------------------------------------------------------


def _held_out_table(pairs: Sequence[EncodedPair], before: Scores, after: Scores) -> pa.Table:
    rows = [
        {
            **pair.row,
            "winner_score_before": before[pair.winner.ids],
            "loser_score_before": before[pair.loser.ids],
            "winner_score": after[pair.winner.ids],
            "loser_score": after[pair.loser.ids],
        }
        for pair in pairs
    ]
    return table_of(rows, HELD_OUT)


def _log_table(steps: Sequence[dict[str, float]], quality: dict[str, Any]) -> pa.Table:
    """Return the training log: step 0 and the last step hold the quality, steps 1.. the numbers of each update."""
    rows = _log_rows(0, 0, quality["before"]) + _update_rows(steps) + _final_rows(steps, quality)
    return table_of(rows, TRAINING_LOG)


def _update_rows(steps: Sequence[dict[str, float]], after: int = 0) -> list[dict[str, Any]]:
    """Rows of the updates after the first `after`; tokens count up over the run."""
    tokens = _tokens(steps[:after])
    rows = []
    for step, numbers in enumerate(steps[after:], start=after + 1):
        tokens += int(numbers["tokens"])
        rows += _log_rows(step, tokens, {name: value for name, value in numbers.items() if name != "tokens"})
    return rows


def _final_rows(steps: Sequence[dict[str, float]], quality: dict[str, Any]) -> list[dict[str, Any]]:
    return _log_rows(len(steps), _tokens(steps), {**quality["after"], "changed_share": quality["changed_share"]})


def _tokens(steps: Sequence[dict[str, float]]) -> int:
    return sum(int(numbers["tokens"]) for numbers in steps)


def _log_rows(step: int, tokens: int, numbers: dict[str, float | None]) -> list[dict[str, Any]]:
    place = {"phase": PHASE, "round": ROUND, "step": step, "env_step": 0, "tokens": tokens, "turn": 0, "agent": JOINT}
    return [{**place, "name": name, "value": value} for name, value in numbers.items() if value is not None]
