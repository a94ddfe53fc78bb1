"""Make preference pairs from scored joint responses. No model, no torch: a new pair rule takes a second.

Reads the rewards and the completions (whose token ids say which joint responses are the same). Writes the pairs by key.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from comlrl_stages.artifacts import COMPLETIONS, KEY_NAMES, PAIRS, REWARDS, Work, read_table, table_of, write_table
from comlrl_stages.errors import UserError
from comlrl_stages.preferences.joint_responses import JointResponses
from comlrl_stages.preferences.selection import select_pairs
from comlrl_stages.seeding import stream
from comlrl_stages.settings import PairSettings


def run(settings: PairSettings, work: Work) -> None:
    """Write the table `pairs`."""
    rewards = read_table(work.inputs["rewards"], REWARDS)
    completions = read_table(work.inputs["completions"], COMPLETIONS)
    responses = JointResponses(completions, rewards, ["completion_ids"])
    rows: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    candidates = _candidates(rewards)
    advance = work.progress(len(candidates), "items")
    for task_id, joints in candidates.items():
        found, out = _pairs_of_item(settings, task_id, joints, responses)
        rows += found
        dropped.update(out)
        advance()
    if not rows:
        raise UserError(
            f"{work.inputs['rewards']}: gives no preference pair; left out: {_reasons(dropped)}. Two candidates of an "
            "item need different rewards: look at the rewards, or sample more candidates."
        )
    write_table(work.output("pairs"), table_of(rows, PAIRS), PAIRS)
    work.count("pairs", rows=len(rows), tasks=len({row["task_id"] for row in rows}), dropped=_reasons(dropped))


def _candidates(rewards: pa.Table) -> dict[str, list[dict[str, Any]]]:
    """Joint responses by item, in table order."""
    by_item: dict[str, list[dict[str, Any]]] = {}
    for row in rewards.drop_columns(["parts", "error"]).to_pylist():
        by_item.setdefault(row["task_id"], []).append(row)
    return by_item


def _pairs_of_item(
    settings: PairSettings, task_id: str, joints: Sequence[Mapping[str, Any]], responses: JointResponses
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    scores = [joint["reward"] if joint["status"] == "ok" else float("nan") for joint in joints]
    selection = select_pairs(
        scores,
        [_token_key(responses, task_id, joint) for joint in joints],
        selection=settings.selection,
        limit=settings.pairs_per_task,
        generator=stream(settings.seed, "pair", task_id),
        min_gap=settings.min_gap,
    )
    known = [score for score in scores if score == score]
    mean = sum(known) / len(known) if known else None
    rows = [_row(task_id, joints[winner], joints[loser], mean) for winner, loser in selection.pairs]
    return rows, selection.dropped


def _token_key(responses: JointResponses, task_id: str, joint: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(completion["completion_ids"]) for completion in responses.agents(task_id, joint))


def _row(
    task_id: str, winner: Mapping[str, Any], loser: Mapping[str, Any], candidate_mean: float | None
) -> dict[str, Any]:
    sides = {"winner": _joint_key(winner), "loser": _joint_key(loser)}
    return {
        "pair_id": hashlib.sha256(json.dumps([task_id, sides], sort_keys=True).encode()).hexdigest()[:16],
        "task_id": task_id,
        **sides,
        "winner_raw": winner["raw"],
        "loser_raw": loser["raw"],
        "winner_reward": winner["reward"],
        "loser_reward": loser["reward"],
        "preference": 1.0,
        "label": "task",
        "annotators": 1,
        "candidate_mean": candidate_mean,
    }


def _joint_key(joint: Mapping[str, Any]) -> dict[str, Any]:
    return {name: joint[name] for name in (*KEY_NAMES, "joint") if name != "task_id"}


def _reasons(dropped: Mapping[str, int]) -> dict[str, int]:
    return {reason: count for reason, count in sorted(dropped.items()) if count}
