"""Score a team's evaluation responses by the task's own reward, and compute its metrics.

Reads the items and the completions. Writes the table `evaluation` (one row per joint response) and metrics.json: the
means with their intervals, the distance from the base team, and the metrics of the task's own functions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from comlrl_stages.artifacts import (
    COMPLETIONS,
    EVALUATION,
    KEY_NAMES,
    Work,
    read_table,
    table_of,
    write_json,
    write_table,
)
from comlrl_stages.errors import UserError
from comlrl_stages.reporting import statistics
from comlrl_stages.rollouts.joint import JointResponse, joint_responses, reward_runner, score_joints
from comlrl_stages.settings import EvaluateSettings
from comlrl_stages.tasks.protocol import Task, TaskSource, load_task, user_traceback
from comlrl_stages.tasks.scoring import JointReward, Tolerance

GREEDY_SUFFIX = "/greedy"
PREFIXES = {
    ("eval", "sampled"): "eval",
    ("eval", "greedy"): "eval/greedy",
    ("train", "sampled"): "train",
    ("train", "greedy"): "train/greedy",
}


@dataclass(frozen=True)
class Rollout:
    """One agent's response as a task's `metrics_callback` reads it; `metadata` has its item, turn, sample, reward."""

    agent_idx: int
    prompt: str
    completion: str
    metadata: dict[str, Any]


def run(settings: EvaluateSettings, work: Work) -> None:
    """Write the table `evaluation` and the file `metrics`."""
    splits = {name: {i["task_id"]: i for i in read_table(work.inputs[name]).to_pylist()} for name in ("eval", "train")}
    joints = list(joint_responses(read_table(work.inputs["completions"], COMPLETIONS), settings.agents))
    items = {joint.task_id: _item(splits, joint.task_id) for joint in joints}
    with reward_runner(settings.task, settings, int(work.runtime.get("score_workers", 1))) as runner:
        runner.tolerance = Tolerance(settings.tolerate_failures, len(joints))
        rewards = score_joints(runner, joints, items)
    rows = [_row(settings, splits, joint, reward) for joint, reward in zip(joints, rewards, strict=True)]
    table = table_of(rows, EVALUATION)
    write_table(work.output("evaluation"), table, EVALUATION)
    failed = {status: count for status in ("nan", "exception", "timeout", "invalid") if (count := _count(rows, status))}
    work.count("evaluation", rows=table.num_rows, dropped=failed)
    task = load_task(TaskSource(**settings.task.model_dump()))
    metrics: dict[str, Any] = {}
    for (split, decoding), prefix in PREFIXES.items():
        chosen = [row for row in rows if row["split"] == split and row["decoding"] == decoding]
        if chosen:
            metrics |= {f"{prefix}/{name}": value for name, value in _metrics(settings, task, chosen, splits).items()}
    write_json(work.output("metrics"), metrics)
    work.track([{"name": name, "value": value} for name, value in metrics.items() if value is not None])


def _item(splits: Mapping[str, Mapping[str, Any]], task_id: str) -> Mapping[str, Any]:
    for items in splits.values():
        if task_id in items:
            return items[task_id]
    raise UserError(f"item {task_id} of the completions is in no split. Run the evaluation's sampling again.")


def _row(
    settings: EvaluateSettings,
    splits: Mapping[str, Mapping[str, Any]],
    joint: JointResponse,
    reward: JointReward,
) -> dict[str, Any]:
    return {
        **dict(zip(KEY_NAMES, joint.key, strict=True)),
        "method": settings.method,
        "seed": settings.seed,
        "split": "eval" if joint.task_id in splits["eval"] else "train",
        "prompt": _item(splits, joint.task_id).get("prompt"),
        "decoding": "greedy" if joint.source.endswith(GREEDY_SUFFIX) else "sampled",
        "sample": joint.sample,
        "raw": reward.raw,
        "reward": reward.reward,
        "expected_return": reward.reward,
        "texts": list(joint.texts),
        "finish_reasons": [row["finish_reason"] for row in joint.completions],
        "tokens": [len(row["completion_ids"]) for row in joint.completions],
        "kl": _kl(joint),
        "parts": list(reward.parts.items()),
        "status": reward.status,
    }


def _kl(joint: JointResponse) -> list[float] | None:
    """Mean over tokens of log pi - log ref per agent: an unbiased estimate on the policy's own samples."""
    if any(row["reference_log_probs"] is None for row in joint.completions):
        return None
    return [
        sum(p - r for p, r in zip(row["log_probs"], row["reference_log_probs"], strict=True))
        / max(len(row["log_probs"]), 1)
        for row in joint.completions
    ]


def _count(rows: Sequence[Mapping[str, Any]], status: str) -> int:
    return sum(row["status"] == status for row in rows)


# --- metrics ------------------------------------------------------------------------------------------------------


def _metrics(
    settings: EvaluateSettings,
    task: Task,
    rows: Sequence[Mapping[str, Any]],
    splits: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Metrics of one split and decoding, without prefix."""
    items, scores = statistics.samples_by_item((row["task_id"] for row in rows), (row["reward"] for row in rows))
    place = rows[0]["split"], rows[0]["decoding"]
    reward = statistics.team_bootstrap(scores, settings.seed, *place, replicates=settings.bootstrap_replicates)
    tokens = [sum(row["tokens"][agent] for row in rows) for agent in range(settings.agents)]
    metrics = {
        "turn_1/reward_mean": reward.value,
        "turn_1/reward_low": reward.low,
        "turn_1/reward_high": reward.high,
        "turn_1/expected_return": reward.value,
        "items": len(items),
        "joint_responses": len(rows),
        "truncated_share": np.mean([reason == "length" for row in rows for reason in row["finish_reasons"]]).item(),
        **{f"agent_{agent}/tokens_mean": total / len(rows) for agent, total in enumerate(tokens)},
        **_part_means(rows),
        **_kl_means(settings, rows),
        **_task_metrics(task, rows, splits),
    }
    return {
        name: value if not isinstance(value, float) or math.isfinite(value) else None for name, value in metrics.items()
    }


def _part_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the joint responses that have the part: one whose reward failed has none."""
    parts: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row["parts"]:
            parts.setdefault(name, []).append(value)
    return {f"parts/{name}": float(statistics.mean(np.array(values))) for name, values in sorted(parts.items())}


def _kl_means(settings: EvaluateSettings, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """KL to the base team in nats per token: all tokens weigh alike."""
    measured = [row for row in rows if row["kl"] is not None]
    if not measured:
        return {}

    def per_token(agents: Sequence[int]) -> float:
        kl, tokens = ([row[name][agent] for row in measured for agent in agents] for name in ("kl", "tokens"))
        return statistics.per_token(kl, tokens)

    everyone = range(settings.agents)
    each = {f"agent_{agent}/kl_per_token": per_token([agent]) for agent in everyone}
    return {**each, "kl_per_token": per_token(everyone)}


def _task_metrics(
    task: Task, rows: Sequence[Mapping[str, Any]], splits: Mapping[str, Mapping[str, Any]]
) -> dict[str, float]:
    """What the task's own functions make of the responses; invalid ones have no texts and are left out."""
    rows = [row for row in rows if row["status"] != "invalid"]
    if not rows:
        return {}
    items = [_item(splits, row["task_id"]) for row in rows]
    try:
        found = {**_logged(task, rows, items), **_called_back(task, rows, items)}
        return {str(name): float(value) for name, value in found.items()}
    except Exception as error:
        raise UserError(
            f"{task.source}: eval_logger, eval_aggregator or metrics_callback failed:\n{user_traceback(error)}"
        ) from error


def _logged(task: Task, rows: Sequence[Mapping[str, Any]], items: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Metrics of the task's eval_logger and eval_aggregator over all joint responses."""
    if task.eval_logger is None or task.eval_aggregator is None:
        return {}
    completions = [[[row["texts"][agent]] for row in rows] for agent in range(task.agents)]
    prompts = [item.get("prompt") for item in items]
    logged = task.eval_logger(agent_completions_turns=completions, batch_items=items, prompts=prompts)
    return task.eval_aggregator(logged, num_turns=1)


def _called_back(
    task: Task, rows: Sequence[Mapping[str, Any]], items: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Means over items of what the task's metrics_callback returns for each item's responses."""
    if task.metrics_callback is None:
        return {}
    by_item: dict[str, list[Rollout]] = {}
    for row, item in zip(rows, items, strict=True):
        metadata = {"item": item, "turn": row["turn"], "sample": row["sample"], "reward": row["reward"]}
        texts = enumerate(zip(task.format(item), row["texts"], strict=True))
        rollouts = [Rollout(agent, prompt, text, metadata) for agent, (prompt, text) in texts]
        by_item.setdefault(row["task_id"], []).extend(rollouts)
    found = [task.metrics_callback(rollouts) for rollouts in by_item.values()]
    names = dict.fromkeys(name for values in found for name in values)
    return {name: np.mean([float(values[name]) for values in found if name in values]) for name in names}
