"""Sample joint responses for the page: the same eval items, before and after training, side by side.

Nothing is picked by hand or by score: it is the greedy response of the first seed where there is one, else its first
sample, for the first items of the eval split.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from comlrl_stages.reporting.numbers import number
from comlrl_stages.reporting.summary import Design

MOST_ITEMS, MOST_TURNS = 8, 4
SHORT, LONGEST = 240, 6000


@dataclass(frozen=True)
class Text:
    """One agent's response, made safe to show."""

    agent: str
    text: str
    head: str
    long: bool
    tokens: int
    finish_reason: str


@dataclass(frozen=True)
class Turn:
    """The joint response of one turn (1 is the first) and its reward, written out."""

    turn: int
    reward: str
    texts: tuple[Text, ...]


@dataclass(frozen=True)
class Response:
    """What one method answered to one item."""

    method: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Item:
    """One eval item and the answers of all methods to it."""

    task_id: str
    prompt: str | None
    responses: tuple[Response, ...]


def sample_responses(evaluation: pd.DataFrame, design: Design) -> tuple[str, list[Item]]:
    """Return how the samples were chosen, in words, and the first items with every method's response."""
    greedy = ((evaluation["decoding"] == "greedy") & (evaluation["split"] == "eval")).any()
    decoding = "greedy" if greedy else design.decoding
    seed = design.seeds[0]
    rows = evaluation[
        (evaluation["split"] == "eval") & (evaluation["decoding"] == decoding) & (evaluation["seed"] == seed)
    ].sort_values(["turn", "node", "sample"], kind="stable")
    chosen = "greedy response" if greedy else "first sample"
    items = [_item(task_id, rows[rows["task_id"] == task_id], design) for task_id in design.items[:MOST_ITEMS]]
    return f"the {chosen} of seed {seed}", items


def _item(task_id: str, rows: pd.DataFrame, design: Design) -> Item:
    prompt = rows["prompt"].iloc[0] if len(rows) else None
    return Item(task_id, visible(prompt) if isinstance(prompt, str) else None, _responses(rows, design))


def visible(text: str) -> str:
    """Return text in which control characters and stray format characters can be seen and do no harm.

    Line breaks and tabs stay; other control characters become control pictures, direction overrides and separators that
    a page would swallow become their code point in brackets.
    """
    return "".join(_visible(character) for character in text)


def _responses(rows: pd.DataFrame, design: Design) -> tuple[Response, ...]:
    return tuple(
        Response(method, tuple(_turn(own.iloc[0]) for _, own in _turns(rows[rows["method"] == method])))
        for method in design.methods
    )


def _turns(rows: pd.DataFrame) -> Sequence[tuple[int, pd.DataFrame]]:
    """The turns of the first episode."""
    return list(rows[rows["sample"] == rows["sample"].min()].groupby("turn"))[:MOST_TURNS]


def _turn(row: pd.Series) -> Turn:
    count = len(row["texts"])
    tokens, reasons = (
        row[name] if len(row[name]) == count else [row[name][0]] * count  # one model wrote the sections of all roles
        for name in ("tokens", "finish_reasons")
    )
    texts = [
        _text(f"agent_{agent}", *written)
        for agent, written in enumerate(zip(row["texts"], tokens, reasons, strict=True))
    ]
    reward = number(row["reward"]) if not np.isnan(row["reward"]) else str(row["status"])
    return Turn(int(row["turn"]) + 1, reward, tuple(texts))


def _text(agent: str, text: str | None, tokens: int, finish_reason: str) -> Text:
    shown = visible(text or "")
    if len(shown) > LONGEST:
        shown = f"{shown[:LONGEST]} … ({len(shown) - LONGEST:,} more characters)"
    head = shown[:SHORT].rsplit(" ", 1)[0] if len(shown) > SHORT else shown
    return Text(agent, shown, head, len(shown) > SHORT, int(tokens), finish_reason)


def _visible(character: str) -> str:
    kind = unicodedata.category(character)
    if character in "\n\t" or kind not in ("Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn"):
        return character
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))
    return character if character in "\u200d\u200c" else f"[U+{ord(character):04X}]"
