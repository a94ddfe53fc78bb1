"""Joint responses: the completions of all agents that are scored together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from comlrl_stages.artifacts import KEY_NAMES
from comlrl_stages.errors import UserError
from comlrl_stages.tasks.protocol import TaskSource
from comlrl_stages.tasks.scoring import JointReward, RewardRunner

ONE_MODEL = -1  # the agent number of completions in which one model wrote all roles


@dataclass(frozen=True)
class JointResponse:
    """One sample of every agent: `texts` in actor order, or the reason why there are none."""

    key: tuple[Any, ...]  # values of KEY_NAMES
    joint: int
    sample: int
    texts: tuple[str, ...]
    invalid: str | None
    completions: tuple[Mapping[str, Any], ...]  # rows of the completions table, in actor order

    @property
    def source(self) -> str:
        return self.key[KEY_NAMES.index("source")]

    @property
    def task_id(self) -> str:
        return self.key[KEY_NAMES.index("task_id")]


def joint_responses(completions: pa.Table, agents: int) -> Iterator[JointResponse]:
    """Yield the aligned joint responses of a completions table, in order of its contexts and samples.

    Raises UserError if a sample lacks an agent.
    """
    contexts: dict[tuple[Any, ...], dict[int, dict[int, Mapping[str, Any]]]] = {}
    for row in completions.drop_columns(["prompt_ids", "model_digest"]).to_pylist():
        key = tuple(row[name] for name in KEY_NAMES)
        contexts.setdefault(key, {}).setdefault(row["sample"], {})[row["agent"]] = row
    for key, samples in contexts.items():
        for joint, (sample, by_agent) in enumerate(sorted(samples.items())):
            texts, invalid = _texts(by_agent, agents, f"completions of item {key[3]}, sample {sample}")
            rows = tuple(by_agent[agent] for agent in sorted(by_agent))
            yield JointResponse(key, joint, sample, texts, invalid, rows)


def reward_runner(task: Any, scoring: Any, workers: int) -> RewardRunner:
    """The runner of a task's reward, from a stage's `task` and scoring settings."""
    return RewardRunner(
        TaskSource(**task.model_dump()),
        parameters=scoring.parameters,
        scale=scoring.scale,
        shift=scoring.shift,
        time_limit_s=scoring.time_limit_s,
        batch_size=scoring.batch_size,
        workers=workers,
    )


def score_joints(
    runner: RewardRunner, joints: Sequence[JointResponse], items: Mapping[str, Mapping[str, Any]]
) -> list[JointReward]:
    """Rewards of joint responses, in order; `items` by task id. One that holds an invalid completion is not scored."""
    valid = [joint for joint in joints if joint.invalid is None]
    rewards = iter(runner.score([items[joint.task_id] for joint in valid], [joint.texts for joint in valid]))
    nothing = float("nan")
    return [
        next(rewards) if joint.invalid is None else JointReward(nothing, nothing, status="invalid", error=joint.invalid)
        for joint in joints
    ]


def _texts(by_agent: Mapping[int, Mapping[str, Any]], agents: int, where: str) -> tuple[tuple[str, ...], str | None]:
    invalid = [_reason(agent, row) for agent, row in sorted(by_agent.items()) if row["invalid"] is not None]
    if invalid:
        return (), "; ".join(invalid)
    if ONE_MODEL in by_agent:
        texts = by_agent[ONE_MODEL]["role_texts"] or []
    else:
        texts = [by_agent[agent]["text"] for agent in sorted(by_agent)]
    if len(texts) != agents:
        raise UserError(f"{where}: has texts of {len(texts)} agents, expected {agents}. Sample the completions again.")
    return tuple(texts), None


def _reason(agent: int, row: Mapping[str, Any]) -> str:
    return row["invalid"] if agent == ONE_MODEL else f"agent_{agent}: {row['invalid']}"
