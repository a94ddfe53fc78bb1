"""Sampling that survives a kill: each planned batch becomes a shard on disk, and the shards one completions table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from comlrl_stages.artifacts import COMPLETIONS, Work, table_of, write_table
from comlrl_stages.rollouts.single_turn import Batch, Draw, plan, row, sample_batch, sampling_parameters
from comlrl_stages.teams.sampling import Sampled
from comlrl_stages.teams.scoring import score_completions
from comlrl_stages.teams.team import Team

# Scoring holds the logits of all completion tokens at once, sampling those of one token per row.
SCORING_SHARE = 4


def sample_in_shards(
    settings: Any, work: Work, team: Team, draws: Sequence[Draw], *, reference: Team | None = None
) -> pa.Table:
    """Sample all draws of one turn; returns their completions, in the order of the draws.

    With a `reference` team each sampled row also gets the log-probabilities that the reference gives its tokens.
    """
    budget = settings.compute.sampling_tokens
    parameters = sampling_parameters(settings.sampling)
    batches = plan(team, draws, parameters.max_new_tokens, budget)
    turn = draws[0].turn
    advance = work.progress(len(draws), f"completions of turn {turn + 1}" if turn else "completions")
    work.resolved(engine="own decode loop", compute_dtype=team.compute.dtype, device=team.compute.device)
    shards = []
    for number, batch in enumerate(batches):
        path = work.partial / "shards" / f"turn_{turn + 1}_{number:06d}.parquet"
        kept = path.exists() and _answers(path, draws, batch)
        if not kept:
            sampled = sample_batch(team, draws, batch, parameters, budget, settings.seed)
            shard = _shard(team, draws, batch, sampled, reference, parameters.temperature, budget)
            write_table(path, shard, COMPLETIONS)
        shards.append(path)
        advance(len(batch.positions), kept=kept)
    return _in_order(shards, batches)


def write_completions(work: Work, turns: Sequence[pa.Table], dropped: Mapping[str, int]) -> None:
    """Write the table `completions`, turn after turn."""
    table = pa.concat_tables(turns).combine_chunks()
    write_table(work.output("completions"), table, COMPLETIONS)
    lengths = [len(ids) for ids in table["completion_ids"].to_pylist()]
    reasons = Counter(table["finish_reason"].to_pylist())
    work.count("completions", rows=table.num_rows, tokens=sum(lengths), finish_reasons=reasons, dropped=dict(dropped))


def _answers(path: Path, draws: Sequence[Draw], batch: Batch) -> bool:
    """Whether a shard answers the prompts of its batch: a task that makes others each time must not mix them up."""
    expected = [list(draws[i].prompted.prompt_ids[draws[i].agent]) for i in batch.positions]
    return pq.read_table(path, columns=["prompt_ids"])["prompt_ids"].to_pylist() == expected


def _shard(
    team: Team,
    draws: Sequence[Draw],
    batch: Batch,
    sampled: Sequence[Sampled],
    reference: Team | None,
    temperature: float,
    token_budget: int,
) -> pa.Table:
    rows = [row(team, draws[i], one) for i, one in zip(batch.positions, sampled, strict=True)]
    if reference is not None and not batch.greedy:
        scores = score_completions(
            reference.agents[batch.agent],
            reference.compute,
            [one["prompt_ids"] for one in rows],
            [one["completion_ids"] for one in rows],
            temperature=temperature,
            token_budget=token_budget // SCORING_SHARE,
        )
        rows = [{**one, "reference_log_probs": found} for one, found in zip(rows, scores, strict=True)]
    return table_of(rows, COMPLETIONS)


def _in_order(shards: Sequence[Path], batches: Sequence[Batch]) -> pa.Table:
    """The shards as one table, in the order of the draws."""
    positions = [position for batch in batches for position in batch.positions]
    order = sorted(range(len(positions)), key=positions.__getitem__)
    return pa.concat_tables(pq.read_table(shard) for shard in shards).take(order).combine_chunks()
