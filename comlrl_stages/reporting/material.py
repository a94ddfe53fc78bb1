"""What a page of the report is made of: the tables and records that were read, and the numbers made of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from comlrl_stages.reporting import figures
from comlrl_stages.reporting.page import Figure
from comlrl_stages.reporting.records import Record
from comlrl_stages.reporting.summary import Design, Result, reported


@dataclass(frozen=True)
class RewardModel:
    """One fitted reward model: its numbers, and the scores of the pairs that were kept apart.

    held_out: columns winner_score, loser_score, winner_reward, loser_reward.
    """

    name: str
    seed: int | None
    quality: Mapping[str, Any]
    held_out: pd.DataFrame

    @property
    def margins(self) -> np.ndarray:
        """Return score(winner) - score(loser), (pairs,)."""
        return (self.held_out["winner_score"] - self.held_out["loser_score"]).to_numpy(dtype=float)


@dataclass(frozen=True)
class Material:
    """All that the page is made of."""

    experiment: str
    description: str
    design: Design
    evaluation: pd.DataFrame
    results: Sequence[Result]
    summary: pd.DataFrame
    logs: pd.DataFrame
    reward_models: Sequence[RewardModel]
    records: Sequence[Record]
    figures: Path

    @property
    def eval_rows(self) -> pd.DataFrame:
        """Return the rows behind the reported numbers."""
        return reported(self.evaluation, self.design)

    def figure(self, name: str, drawing: Drawing, alt: str, caption: str) -> Figure:
        """Save a drawing and make it a figure of the page."""
        return Figure(name, figures.save(drawing, self.figures, name), alt, caption)
