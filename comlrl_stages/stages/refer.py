"""Compute the reference policy's log-probabilities of the pairs' responses, once.

Reads the pairs, the completions and rewards that they name, and the base models. Writes one sum per pair, side and
agent, with the digest of the model that gave it. Training then holds no reference model in memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comlrl_stages.artifacts import (
    COMPLETIONS,
    PAIRS,
    REFERENCE_LOG_PROBS,
    REWARDS,
    Work,
    checked_directory,
    read_table,
    table_of,
    write_table,
)
from comlrl_stages.preferences.joint_responses import SIDES, JointResponses
from comlrl_stages.settings import ReferSettings
from comlrl_stages.teams.scoring import score_completions
from comlrl_stages.teams.team import load_team


def run(settings: ReferSettings, work: Work) -> None:
    """Write the table `reference_log_probs`."""
    pairs = read_table(work.inputs["pairs"], PAIRS).to_pylist()
    completions = read_table(work.inputs["completions"], COMPLETIONS)
    rewards = read_table(work.inputs["rewards"], REWARDS)
    responses = JointResponses(completions, rewards, ["prompt_ids", "completion_ids"])
    folders: Sequence[Path] = [checked_directory(folder) for folder in work.inputs["models"]]
    team = load_team(folders, work.digest("models"), settings.team, settings.compute, masters=True)
    advance = work.progress(len(team.agents), "agents")
    rows: list[dict[str, Any]] = []
    for agent, loaded in enumerate(team.agents):
        found = [
            (pair["pair_id"], side, responses.agents(pair["task_id"], pair[side])[agent])
            for pair in pairs
            for side in SIDES
        ]
        scores = score_completions(
            loaded,
            team.compute,
            [completion["prompt_ids"] for _, _, completion in found],
            [completion["completion_ids"] for _, _, completion in found],
            temperature=settings.temperature,
            token_budget=settings.compute.training_tokens,
        )
        rows += [
            {
                "pair_id": pair_id,
                "side": side,
                "agent": agent,
                "log_prob_sum": sum(values),
                "tokens": len(values),
                "reference_digest": team.digests[agent],
            }
            for (pair_id, side, _), values in zip(found, scores, strict=True)
        ]
        advance()
    work.resolved(compute_dtype=team.compute.dtype, device=team.compute.device)
    write_table(work.output("reference_log_probs"), table_of(rows, REFERENCE_LOG_PROBS), REFERENCE_LOG_PROBS)
    work.count("reference_log_probs", rows=len(rows), tokens=sum(row["tokens"] for row in rows))
