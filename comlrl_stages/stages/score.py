"""Score every joint response with the task's own reward.

Aligned: joint response j of a context is sample j of every agent, or the sections of sample j where one model wrote
all roles. A joint response with an invalid completion is not scored, one whose reward fails is marked; both are
counted. Work is kept in shards, so that a killed run repeats little.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from comlrl_stages.artifacts import COMPLETIONS, KEY_NAMES, REWARDS, Work, read_table, table_of, write_table
from comlrl_stages.errors import UserError
from comlrl_stages.rollouts.joint import JointResponse, joint_responses, reward_runner, score_joints
from comlrl_stages.settings import ScoreSettings
from comlrl_stages.tasks.scoring import JointReward, RewardRunner, Tolerance

JOINTS_PER_SHARD = 256


def run(settings: ScoreSettings, work: Work) -> None:
    """Write the table `rewards` for the completions in `completions`, whose items are in `train`, `eval`, ..."""
    joints = list(joint_responses(read_table(work.inputs["completions"], COMPLETIONS), settings.agents))
    items = _items(joints, work)
    advance = work.progress(len(joints), "joint responses")
    rows: list[pa.Table] = []
    status: Counter[str] = Counter()
    workers = int(work.runtime.get("score_workers", 1))
    with reward_runner(settings.task, settings, workers) as runner:
        runner.tolerance = Tolerance(settings.tolerate_failures, len(joints))
        for start in range(0, len(joints), JOINTS_PER_SHARD):
            shard = joints[start : start + JOINTS_PER_SHARD]
            path = work.partial / "shards" / f"joints_{start:08d}.parquet"
            kept = path.exists()
            if kept:
                scored = pq.read_table(path)
                _count_kept(runner.tolerance, shard, scored)
            else:
                scored = _score(runner, shard, items, settings.agents)
                write_table(path, scored, REWARDS)
            status.update(scored["status"].to_pylist())
            rows.append(scored)
            advance(len(shard), kept=kept)
    table = pa.concat_tables(rows) if rows else table_of([], REWARDS)
    write_table(work.output("rewards"), table, REWARDS)
    dropped = {name: count for name, count in sorted(status.items()) if name != "ok"}
    work.count("rewards", rows=table.num_rows, dropped=dropped)


def _items(joints: Sequence[JointResponse], work: Work) -> dict[str, dict[str, Any]]:
    """The items that the joint responses answer, by task id."""
    tables = [read_table(work.inputs[name]) for name in ("train", "eval", "validation") if name in work.inputs]
    items = {item["task_id"]: item for table in tables for item in table.to_pylist()}
    missing = next((joint.task_id for joint in joints if joint.task_id not in items), None)
    if missing is not None:
        raise UserError(
            f"{work.inputs['completions']}: has completions of item {missing}, which is not among the {len(items)} "
            "items of the split. Delete the completions' manifest and run the workflow again."
        )
    return items


def _score(
    runner: RewardRunner, joints: Sequence[JointResponse], items: Mapping[str, dict[str, Any]], agents: int
) -> pa.Table:
    rewards = score_joints(runner, joints, items)
    return table_of([_row(joint, reward, agents) for joint, reward in zip(joints, rewards, strict=True)], REWARDS)


def _row(joint: JointResponse, reward: JointReward, agents: int) -> dict[str, Any]:
    return {
        **dict(zip(KEY_NAMES, joint.key, strict=True)),
        "joint": joint.joint,
        "samples": [joint.sample] * agents,
        "scorer": "task",
        "raw": reward.raw,
        "reward": reward.reward,
        "agent_rewards": reward.agent_rewards,
        "parts": list(reward.parts.items()),
        "status": reward.status,
        "error": reward.error,
    }


def _count_kept(tolerance: Tolerance, joints: Sequence[JointResponse], scored: pa.Table) -> None:
    """Count what an earlier run scored, as it counted then: an invalid joint response was not scored."""
    rows = scored.select(["status", "error"]).to_pylist()
    for joint, row in zip(joints, rows, strict=True):
        if joint.invalid is None:
            tolerance.count(joint.task_id, joint.texts, row["status"], row["error"])
