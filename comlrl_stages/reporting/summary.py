"""From evaluation tables to the numbers of the report: one row per method and seed, one result per method.

The score of an episode is the reward of the last turn that it played, be it the only one. A cell (seed, item) is the
mean over the samples drawn there that have a reward. Everything is about the task reward of the eval items at the
sampling temperature; greedy decoding and the train items are columns of their own. Methods are compared on cells that
both have; what is left out is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from comlrl_stages.errors import UserError
from comlrl_stages.reporting import statistics
from comlrl_stages.reporting.numbers import alike, estimate, percent, plural
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
    def quantity(self) -> str:
        """Return what a score is, in words."""
        return "reward of the last turn" if self.turns > 1 else "reward"

    @property
    def size(self) -> str:
        """Return what stands behind every number, in words."""
        parts = [(len(self.items), "eval item"), (self.samples, "sample"), (len(self.seeds), "seed")]
        return " × ".join(plural(count, noun) for count, noun in parts)

    @property
    def cells(self) -> int:
        """Return the number of cells: every seed on every eval item."""
        return len(self.seeds) * len(self.items)

    @property
    def resampled(self) -> str:
        """Return what the intervals over methods redraw, in words."""
        return "seeds and items" if len(self.seeds) > 1 else "items"


@dataclass(frozen=True)
class Scores:
    """One method over all seeds; arrays are (seeds, items).

    cells: mean scores, NaN where there are none. drawn: joint responses evaluated. scored: those with a reward.
    """

    method: str
    cells: np.ndarray
    drawn: np.ndarray
    scored: np.ndarray

    @property
    def seed_means(self) -> np.ndarray:
        """Return the mean over items of each seed, (seeds,)."""
        return statistics.mean(self.cells)

    @property
    def known(self) -> np.ndarray:
        """Return which cells have a score."""
        return ~np.isnan(self.cells)


@dataclass(frozen=True)
class Result(Scores):
    """Scores with their estimates; difference and improvement are against base, over the cells that both have."""

    mean: Estimate
    iqm: Estimate
    difference: Estimate | None
    improvement: Estimate | None


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
    return _estimated([scores(evaluation, design, method) for method in design.methods], design)


def scores(evaluation: pd.DataFrame, design: Design, method: str) -> Scores:
    """Return the scores of one method on the axes of the design."""
    rows = scored(reported(evaluation, design))
    rows = rows[rows["method"] == method]
    shape = len(design.seeds), len(design.items)
    found = Scores(method, np.full(shape, np.nan), np.zeros(shape, int), np.zeros(shape, int))
    for row, seed in enumerate(design.seeds):
        own = rows[rows["seed"] == seed]
        items, samples = samples_of(own)
        columns = [design.items.index(item) for item in items]
        found.cells[row, columns] = statistics.mean(samples)
        found.scored[row, columns] = (~np.isnan(samples)).sum(axis=-1)
        found.drawn[row, columns] = own.groupby("task_id").size().reindex(items)
    return found


def samples_of(rows: pd.DataFrame) -> tuple[list[str], np.ndarray]:
    """Return the items and scores (items, samples) of scored rows of one method and seed."""
    return statistics.samples_by_item(rows["task_id"], rows["score"])


def on_common_cells(found: Sequence[Result], design: Design) -> list[Result]:
    """Return the same results over the cells that all of them have; they are left alone where nothing is missing."""
    common = np.logical_and.reduce([result.known for result in found])
    if common.all():
        return list(found)
    return _estimated([replace(result, cells=np.where(common, result.cells, np.nan)) for result in found], design)


def difference(own: Scores, other: Scores, design: Design) -> Estimate:
    """Return the paired difference of two methods over the cells that both have.

    Both ways round it is the same interval but for the sign, as one stream belongs to the two.
    """
    return statistics.paired_difference(
        own.cells,
        other.cells,
        stream(design.seed, "report", "difference", *sorted((own.method, other.method))),
        replicates=design.replicates,
        confidence=design.confidence,
    )


def summary_table(evaluation: pd.DataFrame, logs: pd.DataFrame, design: Design) -> pd.DataFrame:
    """Return one row per method and seed that was evaluated; columns as the report documents them."""
    totals = training_totals(logs)
    base = scores(evaluation, design, design.base).cells if design.base else None
    rows = []
    for method in design.methods:
        for index, seed in enumerate(design.seeds):
            own = evaluation[(evaluation["method"] == method) & (evaluation["seed"] == seed)]
            if len(reported(own, design)):
                compared = None if base is None or method == design.base else base[index]
                row = _summary_row(own, design, method, seed, compared)
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


def defined(logs: pd.DataFrame) -> pd.DataFrame:
    """Return training logs without the accuracy of steps at which every pair ties: it would read as all wrong."""
    steps = pd.MultiIndex.from_frame(logs[["kind", "owner", "seed", "phase", "round", "step", "turn", "agent"]])
    tied = steps[(logs["name"] == "ties") & (logs["value"] == 1)]
    return logs[(logs["name"] != "accuracy") | ~steps.isin(tied)]


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
    return statistics.per_token(values["kl"], values["tokens"])


def method_table(found: Sequence[Result], design: Design) -> tuple[list[str], list[list[str]]]:
    """Write head and rows of the table of methods; a difference over fewer cells than there are says over how many."""
    level = f"{100 * design.confidence:g} %"
    head = ["method", f"mean [{level}]", f"IQM [{level}]", "difference to base", "P(improvement over base)", "seeds"]
    base = next((result for result in found if result.method == design.base), None)
    return head, [_method_row(result, base) for result in found]


def _method_row(result: Result, base: Result | None) -> list[str]:
    compared = "" if base is None else _of_cells((result.known & base.known).sum(), result.cells.size)
    return [
        result.method,
        estimate(result.mean) + _of_cells(result.known.sum(), result.cells.size),
        estimate(result.iqm),
        estimate(result.difference, signed=True) + ("" if result.difference is None else compared),
        estimate(result.improvement),
        str(int(result.known.any(axis=1).sum())),
    ]


def _of_cells(known: int, cells: int) -> str:
    return "" if known == cells else f", {known:,} of {plural(cells, 'cell')}"


def markdown(headline: Sequence[str], table: pd.DataFrame, found: Sequence[Result], design: Design) -> str:
    """Write the summary for a terminal or a pull request: the answer, methods over seeds, then every seed."""
    lines = [*headline, "", f"## Methods, over {design.size}", "", *_pipes(*method_table(found, design))]
    lines += ["", "## Methods and seeds", ""]
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


def _estimated(found: Sequence[Scores], design: Design) -> list[Result]:
    base = next((own for own in found if own.method == design.base), None)
    return [_result(own, None if own is base else base, design) for own in found]


def _result(own: Scores, base: Scores | None, design: Design) -> Result:
    options = {"replicates": design.replicates, "confidence": design.confidence}

    def draws(name: str) -> np.random.Generator:
        return stream(design.seed, "report", own.method, name)

    improvement = None
    if base is not None:
        improvement = statistics.improvement_bootstrap(own.cells, base.cells, draws("improvement"), **options)
    return Result(
        own.method,
        own.cells,
        own.drawn,
        own.scored,
        mean=statistics.seed_item_bootstrap(own.cells, draws("mean"), **options),
        iqm=statistics.seed_item_bootstrap(own.cells, draws("iqm"), statistic=statistics.iqm, **options),
        difference=None if base is None else difference(own, base, design),
        improvement=improvement,
    )


def _summary_row(own: pd.DataFrame, design: Design, method: str, seed: int, base: np.ndarray | None) -> dict[str, Any]:
    """base: scores of the base team of this seed, (items,), or None where there is nothing to compare with."""
    rows = reported(own, design)
    items, samples = samples_of(scored(rows))
    options = {"replicates": design.replicates, "confidence": design.confidence}
    found = statistics.team_bootstrap(samples, seed, "eval", design.decoding, **options)
    means = statistics.mean(samples)
    gains = np.array([]) if base is None else means - base[[design.items.index(item) for item in items]]
    return {
        "method": method,
        "seed": seed,
        "eval_reward_mean": found.value,
        "eval_reward_low": found.low,
        "eval_reward_high": found.high,
        "eval_reward_iqm": float(statistics.iqm(means)),
        "improvement_over_base": float(statistics.mean(gains)),
        "items_compared": int((~np.isnan(gains)).sum()),
        "greedy_reward_mean": _item_mean(own[(own["split"] == "eval") & (own["decoding"] == "greedy")]),
        "train_reward_mean": _item_mean(own[(own["split"] == "train") & (own["decoding"] == design.decoding)]),
        "learned_reward_mean": rows["learned_reward"].astype(float).mean(),
        **_response_numbers(rows),
        "unscored": int(scored(rows)["score"].isna().sum()),
        "items": len(items),
        "samples": design.samples,
        **_part_means(rows),
    }


def _item_mean(rows: pd.DataFrame) -> float:
    return float(statistics.mean(statistics.mean(samples_of(scored(rows))[1]))) if len(rows) else float("nan")


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
    return {f"part_{name}": float(statistics.mean(parts[name].to_numpy(dtype=float))) for name in sorted(parts.columns)}


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
