"""Score a team's evaluation responses by the task's own reward, and compute its metrics.

Reads the items and the completions. Writes the table `evaluation` (one row per joint response) and metrics.json: the
means with their intervals, the distance from the base team, and the metrics of the task's own functions.

With several turns a trajectory ends after the first joint response whose reward is strictly above
`episode.termination_threshold`; later turns that were sampled are left out and counted. Each turn has its metrics
(`turn_2/reward_mean`); those without a turn are over all turns, but for `reward_mean`, the reward of the last turn that
each trajectory played, and `return_mean`, its discounted sum of rewards (`turn_1/expected_return`).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
from comlrl_stages.learning.returns import terminates
from comlrl_stages.reporting import statistics
from comlrl_stages.rollouts.callbacks import Rollout, callback_means, user_numbers
from comlrl_stages.rollouts.joint import JointResponse, joint_responses, reward_runner, score_joints
from comlrl_stages.settings import EvaluateSettings
from comlrl_stages.tasks.protocol import Task, TaskSource, load_task
from comlrl_stages.tasks.scoring import JointReward, RewardRunner, Tolerance

GREEDY_SUFFIX = "/greedy"
PREFIXES = {
    ("eval", "sampled"): "eval",
    ("eval", "greedy"): "eval/greedy",
    ("train", "sampled"): "train",
    ("train", "greedy"): "train/greedy",
}

Row = Mapping[str, Any]
Splits = Mapping[str, Mapping[str, Mapping[str, Any]]]


def run(settings: EvaluateSettings, work: Work) -> None:
    """Write the table `evaluation` and the file `metrics`."""
    splits = {name: {i["task_id"]: i for i in read_table(work.inputs[name]).to_pylist()} for name in ("eval", "train")}
    joints = list(joint_responses(read_table(work.inputs["completions"], COMPLETIONS), settings.agents))
    with reward_runner(settings.task, settings, int(work.runtime.get("score_workers", 1))) as runner:
        runner.tolerance = Tolerance(settings.tolerate_failures, len(joints))
        scored = _scored(settings, runner, joints, {joint.task_id: _item(splits, joint.task_id) for joint in joints})
    rows = [_row(settings, splits, joint, reward) for joint, reward in scored]
    _fill_in_returns(rows, settings.episode.discount)
    table = table_of(rows, EVALUATION)
    write_table(work.output("evaluation"), table, EVALUATION)
    failed = {status: count for status in ("nan", "exception", "timeout", "invalid") if (count := _count(rows, status))}
    ended = {"after_termination": len(joints) - len(rows)} if len(rows) < len(joints) else {}
    work.count("evaluation", rows=table.num_rows, dropped=failed | ended)
    task = load_task(TaskSource(**settings.task.model_dump()))
    metrics: dict[str, Any] = {}
    for (split, decoding), prefix in PREFIXES.items():
        chosen = [row for row in rows if row["split"] == split and row["decoding"] == decoding]
        if chosen:
            metrics |= {f"{prefix}/{name}": value for name, value in _metrics(settings, task, chosen, splits).items()}
    write_json(work.output("metrics"), metrics)
    work.track([{"name": name, "value": value} for name, value in metrics.items() if value is not None])


# --- scores -------------------------------------------------------------------------------------------------------


def _scored(
    settings: EvaluateSettings,
    runner: RewardRunner,
    joints: Sequence[JointResponse],
    items: Mapping[str, Mapping[str, Any]],
) -> list[tuple[JointResponse, JointReward]]:
    """Joint responses with their rewards, turn by turn, without what comes after the end of a trajectory."""
    by_turn: dict[int, list[JointResponse]] = defaultdict(list)
    for joint in joints:
        by_turn[joint.key[KEY_NAMES.index("turn")]].append(joint)
    scored: list[tuple[JointResponse, JointReward]] = []
    ended: set[tuple[Any, ...]] = set()
    for turn in sorted(by_turn):
        playing = [joint for joint in by_turn[turn] if _trajectory(joint) not in ended]
        found = list(zip(playing, score_joints(runner, playing, items), strict=True))
        threshold = settings.episode.termination_threshold
        ended |= {_trajectory(joint) for joint, reward in found if terminates([reward.reward], threshold)}
        scored += found
    return scored


def _trajectory(joint: JointResponse) -> tuple[Any, ...]:
    return joint.source, joint.task_id, joint.sample


def _fill_in_returns(rows: Sequence[dict[str, Any]], discount: float) -> None:
    """Set each row's `expected_return`: its reward and the discounted return of the trajectory's next turn, if any."""
    following: dict[tuple[Any, ...], float] = {}
    for row in reversed(rows):
        place = row["source"], row["task_id"], row["sample"]
        later = discount * following[place] if place in following else 0.0
        row["expected_return"] = following[place] = row["reward"] + later


def _item(splits: Splits, task_id: str) -> Mapping[str, Any]:
    for items in splits.values():
        if task_id in items:
            return items[task_id]
    raise UserError(f"item {task_id} of the completions is in no split. Run the evaluation's sampling again.")


def _row(settings: EvaluateSettings, splits: Splits, joint: JointResponse, reward: JointReward) -> dict[str, Any]:
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
        "prompts": _prompts(joint),
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


def _prompts(joint: JointResponse) -> list[str] | None:
    """What each agent read, for the task's metrics_callback; None where the completions do not say."""
    prompts = [row["prompt"] for row in joint.completions]
    return prompts if len(prompts) == len(joint.texts) and None not in prompts else None


def _count(rows: Sequence[Mapping[str, Any]], status: str) -> int:
    return sum(row["status"] == status for row in rows)


# --- metrics ------------------------------------------------------------------------------------------------------


def _metrics(settings: EvaluateSettings, task: Task, rows: Sequence[Row], splits: Splits) -> dict[str, Any]:
    """Metrics of one split and decoding, without prefix."""
    turns = {turn: [row for row in rows if row["turn"] == turn] for turn in sorted({row["turn"] for row in rows})}
    several = settings.episode.turns > 1
    metrics: dict[str, Any] = {}
    for turn, own in turns.items():
        measured = {**_reward_metrics(settings, own, *([turn] if several else [])), "expected_return": _return(own)}
        if several:
            measured |= {"joint_responses": len(own), **_response_metrics(settings, own)}
        metrics |= {f"turn_{turn + 1}/{name}": value for name, value in measured.items()}
    if several:
        last = {(row["task_id"], row["sample"]): row for row in rows}
        metrics |= _reward_metrics(settings, list(last.values()))
        metrics["return_mean"] = metrics["turn_1/expected_return"]
    metrics |= {"items": len({row["task_id"] for row in rows}), "joint_responses": len(rows)}
    metrics |= {**_response_metrics(settings, rows), **_task_metrics(settings, task, rows, splits)}
    return {
        name: value if not isinstance(value, float) or math.isfinite(value) else None for name, value in metrics.items()
    }


def _reward_metrics(settings: EvaluateSettings, rows: Sequence[Row], *turn: int) -> dict[str, float]:
    """Mean reward with the ends of its interval: of one turn, or of what an episode is scored by."""
    place = rows[0]["split"], rows[0]["decoding"], *turn
    _, scores = _by_item(rows, "reward")
    reward = statistics.team_bootstrap(scores, settings.seed, *place, replicates=settings.bootstrap_replicates)
    return {"reward_mean": reward.value, "reward_low": reward.low, "reward_high": reward.high}


def _return(rows: Sequence[Row]) -> float:
    """Mean over items of the mean return of their samples."""
    _, returns = _by_item(rows, "expected_return")
    return float(statistics.mean(statistics.mean(returns)))


def _by_item(rows: Sequence[Row], column: str) -> tuple[list[str], np.ndarray]:
    return statistics.samples_by_item((row["task_id"] for row in rows), (row[column] for row in rows))


def _response_metrics(settings: EvaluateSettings, rows: Sequence[Row]) -> dict[str, float]:
    """What the responses are like: cut or not, lengths, the parts of their rewards, distance from the base team."""
    tokens = [sum(row["tokens"][agent] for row in rows) for agent in range(settings.agents)]
    return {
        "truncated_share": np.mean([reason == "length" for row in rows for reason in row["finish_reasons"]]).item(),
        **{f"agent_{agent}/tokens_mean": total / len(rows) for agent, total in enumerate(tokens)},
        **_part_means(rows),
        **_kl_means(settings, rows),
    }


def _part_means(rows: Sequence[Row]) -> dict[str, float]:
    """Means over the joint responses that have the part: one whose reward failed has none."""
    parts: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row["parts"]:
            parts.setdefault(name, []).append(value)
    return {f"parts/{name}": float(statistics.mean(np.array(values))) for name, values in sorted(parts.items())}


def _kl_means(settings: EvaluateSettings, rows: Sequence[Row]) -> dict[str, float]:
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


# --- the task's own metrics ---------------------------------------------------------------------------------------


def _task_metrics(settings: EvaluateSettings, task: Task, rows: Sequence[Row], splits: Splits) -> dict[str, float]:
    """What the task's own functions make of the responses; invalid ones have no texts and are left out."""
    trajectories: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row["status"] != "invalid":
            trajectories.setdefault((row["task_id"], row["sample"]), []).append(row)
    items = [_item(splits, task_id) for task_id, _ in trajectories]
    logged = _logged(task, list(trajectories.values()), items, settings.episode.turns)
    return logged | _called_back(task, zip(items, trajectories.values(), strict=True))


def _logged(
    task: Task, trajectories: Sequence[Sequence[Row]], items: Sequence[Mapping[str, Any]], turns: int
) -> dict[str, float]:
    """Metrics of the task's eval_logger and eval_aggregator over all trajectories, as [agent][trajectory][turn]."""
    logger, aggregator = task.eval_logger, task.eval_aggregator
    if logger is None or aggregator is None or not trajectories:
        return {}
    completions = [[[row["texts"][agent] for row in own] for own in trajectories] for agent in range(task.agents)]
    prompts = [item.get("prompt") for item in items]
    return user_numbers(
        task,
        "eval_logger or eval_aggregator",
        lambda: aggregator(
            logger(agent_completions_turns=completions, batch_items=items, prompts=prompts), num_turns=turns
        ),
    )


def _called_back(task: Task, trajectories: Iterable[tuple[Mapping[str, Any], Sequence[Row]]]) -> dict[str, float]:
    """Means over items of what the task's metrics_callback returns for each item's responses."""
    by_item: dict[str, list[Rollout]] = {}
    for item, rows in trajectories:
        for row in rows:
            metadata = {"item": item, **{name: row[name] for name in ("turn", "node", "sample", "reward")}}
            written = enumerate(zip(row["prompts"] or task.format(item), row["texts"], strict=True))
            by_item.setdefault(row["task_id"], []).extend(
                Rollout(agent, prompt, text, metadata) for agent, (prompt, text) in written
            )
    return callback_means(task, by_item.values())
