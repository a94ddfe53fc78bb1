"""Sample responses on the page: whole episodes, turn by turn."""

from types import SimpleNamespace

import pandas as pd

from comlrl_stages.reporting.responses import sample_responses


def row(sample, turn, text, **given):
    """One joint response; its reward is its turn, counted from 1."""
    row = {"method": "base", "seed": 0, "task_id": "x", "split": "eval", "decoding": "sampled", "prompt": "q"}
    row |= {"sample": sample, "turn": turn, "node": str(sample) if turn else "", "reward": turn + 1.0, "status": "ok"}
    return {**row, "texts": [text, text], "tokens": [1, 1], "finish_reasons": ["stop", "stop"], **given}


def turns_of(rows):
    design = SimpleNamespace(decoding="sampled", seeds=(0,), items=("x",), methods=("base",))
    _, ((item),) = sample_responses(pd.DataFrame(rows), design)
    return [(turn.turn, turn.reward, turn.texts[0].text) for turn in item.responses[0].turns]


def test_the_turns_are_those_of_one_episode():
    rows = [row(0, 0, "a"), row(1, 0, "b"), row(0, 1, "c"), row(1, 1, "d")]
    assert turns_of(rows) == [(1, "1.00", "a"), (2, "2.00", "c")]


def test_an_episode_that_ended_is_not_continued_by_another():
    assert turns_of([row(0, 0, "a"), row(1, 0, "b"), row(1, 1, "d")]) == [(1, "1.00", "a")]
