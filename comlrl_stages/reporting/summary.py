"""From evaluation tables to the numbers of the report: one row per method and seed, one result per method.

The score of an episode is the reward of the last turn that it played, be it the only one. A cell (seed, item) is the
mean over the samples drawn there. Everything is about the task reward of the eval items at the sampling temperature;
greedy decoding and the train items are columns of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from comlrl_stages.errors import UserError
from comlrl_stages.reporting import statistics
from comlrl_stages.reporting.numbers import alike, estimate, percent
from comlrl_stages.reporting.statistics import Estimate
from comlrl_stages.seeding import stream

BASE = "base"
TRUNCATED = "length"


@dataclass(frozen=True)
class Design:
    """What is compared on what: the axes of every score array."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    items: tuple[str, ...]
    samples: int
    decoding: str
    turns: int
    seed: int
    replicates: int
    confidence: float

    @property
    def base(self) -> str | None:
        """Return the method that all others are compared with, if the experiment has it."""
        return BASE if BASE in self.methods else None

    @property
    def size(self) -> str:
        """Return what stands behind every number, in words."""
        parts = [(len(self.items), "eval item"), (self.samples, "sample"), (len(self.seeds), "seed")]
        return " × ".join(f"{count:,} {noun}{'' if count == 1 else 's'}" for count, noun in parts)


@dataclass(frozen=True)
class Result:
    """One method over all seeds. `cells`: (seeds, items) mean scores, NaN where there are none."""

    method: str
    cells: np.ndarray
    mean: Estimate
    iqm: Estimate
    difference: Estimate | None
    improvement: Estimate | None

    @property
    def seed_means(self) -> np.ndarray:
        """Return the mean over items of each seed, (seeds,)."""
        return statistics.mean(self.cells)


def design_of(evaluation: pd.DataFrame, settings: Any) -> Design:
    """Read the axes of the comparison off the settings and the evaluation rows."""
    rows = evaluation[evaluation["split"] == "eval"]
    if rows.empty:
        raise UserError(
            "The evaluation tables hold no row with split 'eval' "
            f"(splits found: {sorted(set(evaluation['split']))}). Give the experiment eval items and run it again."
        )
    decoding = "sampled" if (rows["decoding"] == "sampled").any() else rows["decoding"].iloc[0]
    rows = rows[rows["decoding"] == decoding]
    return Design(
        methods=tuple(settings.methods),
        seeds=tuple(settings.seeds),
        items=tuple(dict.fromkeys(rows["task_id"])),
        samples=int(scored(rows).groupby(["method", "seed", "task_id"]).size().max()),
        decoding=decoding,
        turns=int(rows["turn"].nunique()),
        seed=settings.seed,
        replicates=settings.bootstrap_replicates,
        confidence=settings.confidence,
    )


def scored(evaluation: pd.DataFrame) -> pd.DataFrame:
    """Return the row of each episode's last turn with its `score`, the reward there: its expected return."""
    episode = ["method", "seed", "split", "decoding", "task_id", "sample"]
    last = evaluation[evaluation["turn"] == evaluation.groupby(episode)["turn"].transform("max")]
    return last.assign(score=last["expected_return"].fillna(last["reward"]).astype(float))


def reported(evaluation: pd.DataFrame, design: Design) -> pd.DataFrame:
    """Return the rows behind the reported numbers: the eval items at the reported decoding."""
    return evaluation[(evaluation["split"] == "eval") & (evaluation["decoding"] == design.decoding)]


def results(evaluation: pd.DataFrame, design: Design) -> list[Result]:
    """Return the aggregate of each method over seeds and items, in the order of the design."""
    cells = {method: _cells(evaluation, design, method) for method in design.methods}
    return [_result(method, cells, design) for method in design.methods]


def difference(result: Result, other: Result, design: Design) -> Estimate:
    """Return the paired difference of two methods over the same seeds and items."""
    return statistics.paired_difference(
        result.cells,
        other.cells,
        stream(design.seed, "report", result.method, "difference", other.method),
        replicates=design.replicates,
        confidence=design.confidence,
    )


def summary_table(evaluation: pd.DataFrame, logs: pd.DataFrame, design: Design) -> pd.DataFrame:
    """Return one row per method and seed that was evaluated; columns as the report documents them."""
    totals = training_totals(logs)
    base = _cells(evaluation, design, design.base) if design.base else None
    rows = []
    for method in design.methods:
        for index, seed in enumerate(design.seeds):
            own = evaluation[(evaluation["method"] == method) & (evaluation["seed"] == seed)]
            if len(own):
                row = _summary_row(own, design, method, seed, None if base is None else base[index])
                rows.append(row | totals.get((method, seed), {"env_steps": 0, "tokens_trained": 0}))
    return _ordered(pd.DataFrame(rows))


def training_totals(logs: pd.DataFrame) -> dict[tuple[str, int], dict[str, int]]:
    """Return joint responses evaluated and tokens trained on per (method, seed); rounds are laid end to end."""
    last = logs[logs["kind"] == "method"].groupby(["owner", "seed"])[["env_step", "tokens"]].max()
    return {key: {"env_steps": int(row.env_step), "tokens_trained": int(row.tokens)} for key, row in last.iterrows()}


def end_to_end(logs: pd.DataFrame) -> pd.DataFrame:
    """Let the counts of a later round go on from where the earlier one ended; each round's log starts at nothing."""
    counted = ["step", "env_step", "tokens"]
    parts = []
    for _, own in logs.groupby(["kind", "owner", "seed"], sort=False, dropna=False):
        before = np.zeros(len(counted), dtype=np.int64)
        for _, rows in own.groupby("round"):
            parts.append(rows.assign(**{name: rows[name] + before[i] for i, name in enumerate(counted)}))
            before = parts[-1][counted].max().to_numpy()
    return pd.concat(parts) if parts else logs


def agent_values(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Unfold columns that hold one value per agent: columns `method`, `seed`, `agent` and the given ones."""
    rows = rows[rows[list(columns)].notna().all(axis=1)]
    counts = rows[columns[0]].map(len).to_numpy(dtype=int)
    unfolded = {name: np.repeat(rows[name].to_numpy(), counts) for name in ("method", "seed")}
    unfolded["agent"] = np.concatenate([np.arange(count) for count in counts]) if len(counts) else np.array([], int)
    for name in columns:
        unfolded[name] = np.concatenate([np.asarray(value) for value in rows[name]]) if len(counts) else np.array([])
    return pd.DataFrame(unfolded)


def kl_per_token(rows: pd.DataFrame) -> float:
    """Return the KL to the reference team in nats per token over all agents, each token weighing alike."""
    values = agent_values(rows, "kl", "tokens").dropna()
    tokens = values["tokens"].sum()
    return float((values["kl"] * values["tokens"]).sum() / tokens) if tokens else float("nan")


def markdown(headline: Sequence[str], table: pd.DataFrame, found: Sequence[Result], design: Design) -> str:
    """Write the summary for a terminal or a pull request: the answer, methods over seeds, then every seed."""
    level = f"{100 * design.confidence:g} %"
    lines = [*headline, "", f"## Methods, over {design.size}", ""]
    head = ["method", f"mean [{level}]", f"IQM [{level}]", "difference to base", "P(improvement over base)"]
    body = [
        [r.method, estimate(r.mean), estimate(r.iqm), estimate(r.difference, signed=True), estimate(r.improvement)]
        for r in found
    ]
    lines += [*_pipes(head, body), "", "## Methods and seeds", ""]
    lines += _pipes(list(table.columns), list(zip(*(written(name, table[name]) for name in table), strict=True)))
    return "\n".join(lines) + "\n"


def written(name: str, column: pd.Series) -> list[str]:
    """Write the cells of a column of the summary for people; `name` says what kind of number it holds."""
    if name == "seed" or not pd.api.types.is_numeric_dtype(column):
        return [str(value) for value in column]
    if name.endswith("_share"):
        return [percent(value) for value in column]
    if pd.api.types.is_integer_dtype(column):
        return [f"{value:,}" for value in column]
    return alike(column, signed=name == "improvement_over_base")


def _result(method: str, cells: dict[str, np.ndarray], design: Design) -> Result:
    own, base = cells[method], cells.get(design.base) if method != design.base else None
    options = {"replicates": design.replicates, "confidence": design.confidence}

    def draws(name: str) -> np.random.Generator:
        return stream(design.seed, "report", method, name)

    return Result(
        method=method,
        cells=own,
        mean=statistics.seed_item_bootstrap(own, draws("mean"), **options),
        iqm=statistics.seed_item_bootstrap(own, draws("iqm"), statistic=statistics.iqm, **options),
        difference=None if base is None else statistics.paired_difference(own, base, draws("difference"), **options),
        improvement=None
        if base is None
        else statistics.improvement_bootstrap(own, base, draws("improvement"), **options),
    )


def _cells(evaluation: pd.DataFrame, design: Design, method: str) -> np.ndarray:
    rows = scored(reported(evaluation, design))
    means = rows[rows["method"] == method].groupby(["seed", "task_id"])["score"].mean().unstack("task_id")
    return means.reindex(index=list(design.seeds), columns=list(design.items)).to_numpy(dtype=float)


def _summary_row(own: pd.DataFrame, design: Design, method: str, seed: int, base: np.ndarray | None) -> dict[str, Any]:
    rows = reported(own, design)
    samples = _samples(rows, design)
    found = statistics.item_bootstrap(
        samples,
        stream(design.seed, "report", method, seed),
        replicates=design.replicates,
        confidence=design.confidence,
    )
    items = statistics.mean(samples)
    compared = base is not None and method != design.base
    return {
        "method": method,
        "seed": seed,
        "eval_reward_mean": found.value,
        "eval_reward_low": found.low,
        "eval_reward_high": found.high,
        "eval_reward_iqm": float(statistics.iqm(items)),
        "improvement_over_base": float(statistics.mean(items - base)) if compared else np.nan,
        "greedy_reward_mean": _item_mean(own[(own["split"] == "eval") & (own["decoding"] == "greedy")]),
        "train_reward_mean": _item_mean(own[(own["split"] == "train") & (own["decoding"] == design.decoding)]),
        "learned_reward_mean": rows["learned_reward"].astype(float).mean(),
        **_response_numbers(rows),
        "unscored": int(np.isnan(scored(rows)["score"]).sum()),
        "items": rows["task_id"].nunique(),
        "samples": design.samples,
        **_part_means(rows),
    }


def _samples(rows: pd.DataFrame, design: Design) -> np.ndarray:
    """Return the scores of one method and seed as (items, samples)."""
    rows = scored(rows)
    place = rows.groupby("task_id").cumcount().to_numpy()
    samples = np.full((len(design.items), max(design.samples, 1)), np.nan)
    samples[rows["task_id"].map({item: i for i, item in enumerate(design.items)}).to_numpy(), place] = rows["score"]
    return samples


def _item_mean(rows: pd.DataFrame) -> float:
    return float(scored(rows).groupby("task_id")["score"].mean().mean()) if len(rows) else float("nan")


def _response_numbers(rows: pd.DataFrame) -> dict[str, float]:
    """KL to the reference per token, tokens per agent, share of responses that ran into the length limit."""
    tokens = agent_values(rows, "tokens").groupby("agent")["tokens"].mean()
    reasons = agent_values(rows, "finish_reasons")["finish_reasons"]
    return {
        "kl_per_token": kl_per_token(rows),
        **{f"tokens_agent_{agent}": float(value) for agent, value in tokens.items()},
        "truncated_share": float((reasons == TRUNCATED).mean()),
    }


def _part_means(rows: pd.DataFrame) -> dict[str, float]:
    parts = pd.DataFrame([dict(parts) if parts is not None else {} for parts in rows["parts"]])
    return {f"part_{name}": float(parts[name].mean()) for name in sorted(parts.columns)}


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    """Put columns that only some rows have (agents, parts) beside their like."""
    columns = list(table.columns)
    tokens = sorted((c for c in columns if c.startswith("tokens_agent_")), key=lambda c: int(c.rsplit("_", 1)[1]))
    parts = sorted(c for c in columns if c.startswith("part_"))
    plain = [c for c in columns if c not in tokens and c not in parts]
    place = plain.index("truncated_share")
    return table[plain[:place] + tokens + plain[place:] + parts]


def _pipes(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [head, *body]]
    rule = "| " + " | ".join("---" for _ in head) + " |"
    rows = ["| " + " | ".join(row) + " |" for row in escaped]
    return [rows[0], rule, *rows[1:]]
