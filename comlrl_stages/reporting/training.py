"""What the training logs tell, made ready to be drawn and written.

The logs call the reward that is trained on `reward_mean`, be it the task's or a reward model's. Here the names say
which it is, so that methods stand side by side by the task's reward.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from comlrl_stages.reporting.records import Record

VALIDATION = "validation"
TASK_REWARD, LEARNED_REWARD = "task_reward_mean", "learned_reward_mean"
_TRAINED_ON = re.compile(r"(eval/turn_\d+/)?reward_mean")
_VALIDATED = re.compile(r"eval/turn_(\d+)/(.+)")
_SHARE = 5  # steps are noisy: a moving average is over such a part of the run


@dataclass(frozen=True)
class Rewards:
    """Learned and task reward of one method along its training, all (points,): means over seeds.

    smooth_learned, smooth_task: moving averages over `window` points, so that the course shows through the noise.
    """

    method: str
    steps: np.ndarray
    learned: np.ndarray
    task: np.ndarray
    smooth_learned: np.ndarray
    smooth_task: np.ndarray
    window: int


@dataclass(frozen=True)
class Kept:
    """A run that kept the weights of its best validation: after which of its steps."""

    method: str
    seed: int | None
    step: int
    steps: int


def of_team(logs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the whole team (agent -1), and for names that only single agents log, those of every agent."""
    places = pd.MultiIndex.from_frame(logs[["owner", "turn", "name"]])
    by_team = logs["agent"] == -1
    return logs[by_team | ~places.isin(places[by_team])]


def with_rewards_named(logs: pd.DataFrame) -> pd.DataFrame:
    """Return the logs with `reward_mean` called by what it is: the task's reward, or a learned one.

    A run on a learned reward logs the task's beside it.
    """
    learners = set(logs.loc[logs["name"] == TASK_REWARD, "owner"])
    return logs.assign(
        name=[_reward_name(name, owner in learners) for name, owner in zip(logs["name"], logs["owner"], strict=True)]
    )


def _reward_name(name: str, learned: bool) -> str:
    found = _TRAINED_ON.fullmatch(name)
    return f"{found[1] or ''}{LEARNED_REWARD if learned else TASK_REWARD}" if found else name


def of_training(logs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of training, without those of the validation on the way."""
    return logs[logs["phase"] != VALIDATION]


def validation(logs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the validation on the way, `eval/turn_2/x` as name `x` of turn 2."""
    rows = logs[logs["phase"] == VALIDATION]
    found = [_VALIDATED.fullmatch(name) for name in rows["name"]]
    rows = rows[np.array([match is not None for match in found], dtype=bool)]
    places = [(int(match[1]), match[2]) for match in found if match is not None]
    return rows.assign(turn=[turn for turn, _ in places], name=[name for _, name in places])


def of_one_turn(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the validation of runs with one turn: where there are several, the curves are means over all of them."""
    return rows[~rows["owner"].isin(rows.loc[rows["turn"] > 1, "owner"])]


def rewards_of(logs: pd.DataFrame, methods: Sequence[str]) -> list[Rewards]:
    """Return learned and task reward along training of each method that maximises a learned one."""
    rows = of_training(with_rewards_named(logs))
    rows = rows[(rows["agent"] == -1) & (rows["turn"] == 0) & rows["name"].isin([LEARNED_REWARD, TASK_REWARD])]
    found = []
    for method in methods:
        own = rows[rows["owner"] == method]
        table = own.pivot_table(index="step", columns="name", values="value", aggfunc="mean")
        if {LEARNED_REWARD, TASK_REWARD} <= set(table.columns):
            found.append(_rewards(method, table.dropna()))
    return found


def _rewards(method: str, table: pd.DataFrame) -> Rewards:
    window = max(1, len(table) // _SHARE)
    smooth = table.rolling(window, center=True, min_periods=1).mean()
    return Rewards(
        method,
        table.index.to_numpy(dtype=int),
        table[LEARNED_REWARD].to_numpy(),
        table[TASK_REWARD].to_numpy(),
        smooth[LEARNED_REWARD].to_numpy(),
        smooth[TASK_REWARD].to_numpy(),
        window,
    )


def kept(records: Iterable[Record]) -> list[Kept]:
    """Return the runs that kept their best weights instead of their last."""
    return [
        Kept(str(record.owner), record.owner.seed, record.best_step, record.steps)
        for record in records
        if record.best_step is not None
    ]


def kept_places(runs: Iterable[Kept]) -> Mapping[str, set[tuple[int | None, int]]]:
    """Return (seed, step) of the weights that were kept, by method."""
    places: dict[str, set[tuple[int | None, int]]] = {}
    for run in runs:
        places.setdefault(run.method, set()).add((run.seed, run.step))
    return places
