"""The pair stage: from scored joint responses to preference pairs, with every drop counted."""

import math

import pytest

from comlrl_stages.artifacts import COMPLETIONS, REWARDS, open_work, table_of
from comlrl_stages.errors import UserError
from comlrl_stages.settings import PairSettings
from comlrl_stages.stages import pair

from .conftest import counts_of, files_of, publish_table, rows_of

NAN = float("nan")
KEY = {"source": "policy", "round": 1, "step": 0, "turn": 0, "node": ""}
#: Rewards of six candidates: one failed, 1 and 2 tie, 3 and 4 wrote the same tokens.
REWARDS_OF = {"t0": [NAN, 1.0, 1.0, 0.0, 0.0, 3.0], "t1": [0.5, 0.25]}
TOKENS_OF = {"t0": [10, 11, 12, 13, 13, 15], "t1": [20, 21]}


def tables(folder, rewards_of=REWARDS_OF, tokens_of=TOKENS_OF, status=None):
    completions, rewards = [], []
    for task_id, values in rewards_of.items():
        for sample, value in enumerate(values):
            key = {**KEY, "task_id": task_id}
            ids = tokens_of[task_id][sample]
            completions += [{**key, "sample": sample, "agent": a, "completion_ids": [ids, a]} for a in (0, 1)]
            found = (status or {}).get((task_id, sample)) or ("nan" if math.isnan(value) else "ok")
            row = {"joint": sample, "samples": [sample] * 2, "raw": value / 10, "reward": value, "status": found}
            rewards.append({**key, **row})
    return {
        "completions": publish_table(folder / "completions.parquet", table_of(completions, COMPLETIONS), COMPLETIONS),
        "rewards": publish_table(folder / "rewards.parquet", table_of(rewards, REWARDS), REWARDS),
    }


def make_pairs(folder, inputs, **settings):
    path = folder / "pairs.parquet"
    settings = PairSettings(**{"pairs_per_task": 100, **settings})
    with open_work("pair", {}, inputs, {"pairs": path}) as work:
        pair.run(settings, work)
    return path


def sides(rows, task_id="t0"):
    return [(row["winner"]["joint"], row["loser"]["joint"]) for row in rows if row["task_id"] == task_id]


@pytest.mark.parametrize("selection", ["reward_gap", "random", "all"])
def test_every_preference_of_finite_rewards_is_a_pair_and_every_drop_is_counted(tmp_path, selection):
    path = make_pairs(tmp_path, tables(tmp_path), selection=selection)
    rows = rows_of(path)
    assert sorted(sides(rows)) == [(1, 3), (1, 4), (2, 3), (2, 4), (5, 1), (5, 2), (5, 3), (5, 4)]
    assert sides(rows, "t1") == [(0, 1)]
    assert counts_of(path) == {"rows": 9, "tasks": 2, "dropped": {"equal_tokens": 1, "nan": 1, "tie": 1}}


def test_the_limit_is_per_item_and_counted(tmp_path):
    path = make_pairs(tmp_path, tables(tmp_path), pairs_per_task=3)
    assert len(sides(rows_of(path))) == 3 and len(sides(rows_of(path), "t1")) == 1
    assert counts_of(path)["dropped"]["over_limit"] == 5
    assert sides(rows_of(path))[0][0] == 5  # largest gap first


def test_a_small_gap_is_left_out_and_counted(tmp_path):
    path = make_pairs(tmp_path, tables(tmp_path), min_gap=1.5)
    assert sorted(sides(rows_of(path))) == [(5, 1), (5, 2), (5, 3), (5, 4)]
    assert counts_of(path)["dropped"]["small_gap"] == 5


@pytest.mark.parametrize("status", ["exception", "timeout", "invalid"])
def test_a_joint_response_that_was_not_scored_is_in_no_pair(tmp_path, status):
    rows = rows_of(make_pairs(tmp_path, tables(tmp_path, status={("t0", 5): status})))
    assert all(5 not in pair for pair in sides(rows))


def test_a_pair_holds_both_rewards_and_the_mean_of_the_candidates(tmp_path):
    row = rows_of(make_pairs(tmp_path, tables(tmp_path)))[-1]
    assert (row["winner_reward"], row["loser_reward"]) == (0.5, 0.25)
    assert (row["winner_raw"], row["loser_raw"]) == (0.05, 0.025)
    assert (row["candidate_mean"], row["preference"], row["label"]) == (0.375, 1.0, "task")
    assert row["winner"] == {**KEY, "joint": 0}


def test_the_mean_of_the_candidates_leaves_failed_ones_out(tmp_path):
    row = rows_of(make_pairs(tmp_path, tables(tmp_path)))[0]
    assert row["candidate_mean"] == pytest.approx(1.0)


@pytest.mark.parametrize("selection", ["reward_gap", "random"])
def test_the_same_settings_give_the_same_bytes_and_another_seed_another_choice(tmp_path, selection):
    rewards = {f"t{i}": [0.0, 1.0, 1.0, 0.0, 1.0, 0.0] for i in range(4)}
    tokens = {task_id: list(range(6)) for task_id in rewards}
    inputs = tables(tmp_path, rewards, tokens)
    given = {"selection": selection, "pairs_per_task": 3}
    paths = [make_pairs(tmp_path / str(i), inputs, seed=seed, **given) for i, seed in enumerate((0, 0, 1))]
    assert files_of(paths[0]) == files_of(paths[1])
    assert files_of(paths[0]) != files_of(paths[2])


@pytest.mark.parametrize("selection", ["reward_gap", "random", "all"])
def test_other_items_change_neither_choice_nor_id_of_a_pair(tmp_path, selection):
    alone = tables(tmp_path / "alone", {"t0": REWARDS_OF["t0"]})
    more = tables(tmp_path / "more", {"new": [1.0, 2.0], **REWARDS_OF}, {"new": [1, 2], **TOKENS_OF})
    given = {"selection": selection, "pairs_per_task": 2}
    before = rows_of(make_pairs(tmp_path / "a", alone, **given))
    after = [row for row in rows_of(make_pairs(tmp_path / "b", more, **given)) if row["task_id"] == "t0"]
    assert before == after


def test_ids_are_distinct(tmp_path):
    rows = rows_of(make_pairs(tmp_path, tables(tmp_path)))
    assert len({row["pair_id"] for row in rows}) == len(rows)


def test_without_any_preference_the_stage_says_what_was_left_out_and_what_to_do(tmp_path):
    inputs = tables(tmp_path, {"t0": [1.0, 1.0, NAN]}, {"t0": [1, 2, 3]})
    with pytest.raises(UserError) as error:
        make_pairs(tmp_path, inputs)
    told = str(error.value)
    assert f"{inputs['rewards']}: gives no preference pair" in told
    assert "{'nan': 1, 'tie': 1}" in told and "sample more candidates" in told
    assert not (tmp_path / "pairs.parquet").exists()


def test_completions_of_another_run_are_refused(tmp_path):
    inputs = tables(tmp_path / "one")
    other = tables(tmp_path / "other", {"t9": [1.0, 2.0]}, {"t9": [1, 2]})
    with pytest.raises(UserError, match="which the completions table does not hold"):
        make_pairs(tmp_path, {**inputs, "completions": other["completions"]})


def test_pairs_of_a_whole_pipeline_name_its_joint_responses(mixed):
    scored = {(row["task_id"], row["joint"]): row["reward"] for row in rows_of(mixed.rewards)}
    for row in rows_of(mixed.pairs):
        winner, loser = (scored[row["task_id"], row[side]["joint"]] for side in ("winner", "loser"))
        assert (row["winner_reward"], row["loser_reward"]) == (winner, loser) and winner > loser
