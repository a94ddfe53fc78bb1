"""Sampling for evaluation: which decodings and splits there are, and the log-probabilities of the base team."""

import shutil

import pyarrow as pa
import pytest
import torch

from comlrl_stages.artifacts import digest_of_part
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.loading import load_model
from comlrl_stages.teams.scoring import score_completions

from .conftest import PROMPTS, SAMPLING, counts_of, files_of, publish, publish_table, rows_of

SAMPLED, GREEDY = "evaluation", "evaluation/greedy"


def policy_like_base(pipeline, folder):
    """A policy with the base team's own weights."""

    def copy(place):
        for agent, model in enumerate(pipeline.models):
            shutil.copytree(model, place / f"agent_{agent}")

    return publish(folder / "policy", copy)


@pytest.fixture(scope="module")
def base(mixed, tmp_path_factory):
    return mixed.sample_evaluation(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trained(mixed, tmp_path_factory):
    return mixed.sample_evaluation(tmp_path_factory.mktemp("trained"), policy=mixed.trained["policy"])


def test_each_eval_item_has_its_samples_and_one_greedy_joint_response(base):
    keys = [(r["source"], r["task_id"], r["sample"], r["agent"]) for r in rows_of(base)]
    items = range(len(PROMPTS["eval"]))
    sampled = [(SAMPLED, f"eval{i}", s, a) for i in items for s in range(3) for a in range(2)]
    assert keys == sampled + [(GREEDY, f"eval{i}", 0, a) for i in items for a in range(2)]


def test_greedy_is_the_same_for_any_seed_and_sampled_is_not(mixed, base, tmp_path):
    other = rows_of(mixed.sample_evaluation(tmp_path, seed=7))
    for source, equal in ((GREEDY, True), (SAMPLED, False)):
        ids = [[r["completion_ids"] for r in rows if r["source"] == source] for rows in (other, rows_of(base))]
        assert (ids[0] == ids[1]) is equal


def test_greedy_can_be_left_out(mixed, tmp_path):
    rows = rows_of(mixed.sample_evaluation(tmp_path, greedy=False))
    assert {row["source"] for row in rows} == {SAMPLED}


def test_the_greedy_tokens_are_the_most_probable(mixed, base):
    loaded = [load_model(folder) for folder in mixed.models]
    for row in rows_of(base):
        if row["source"] == GREEDY:
            ids = torch.tensor([[*row["prompt_ids"], *row["completion_ids"]]])
            logits = loaded[row["agent"]].model(input_ids=ids).logits[0]
            best = logits.argmax(-1).tolist()[len(row["prompt_ids"]) - 1 : -1]
            assert best == row["completion_ids"]


def test_training_items_are_sampled_where_asked_and_eval_draws_stay(mixed, base, tmp_path):
    rows = rows_of(mixed.sample_evaluation(tmp_path, train_samples_per_task=1))
    eval_rows = [row for row in rows if row["task_id"].startswith("eval")]
    train_rows = [row for row in rows if row["task_id"].startswith("train")]
    ids = {(r["source"], r["task_id"], r["sample"], r["agent"]): r["completion_ids"] for r in rows_of(base)}
    assert {(r["source"], r["task_id"], r["sample"], r["agent"]): r["completion_ids"] for r in eval_rows} == ids
    assert len(train_rows) == 2 * 2 * len(PROMPTS["train"])  # one sampled and one greedy, two agents


def test_evaluation_draws_differ_from_those_of_the_collection(mixed, tmp_path):
    found = rows_of(mixed.sample_evaluation(tmp_path, train_samples_per_task=4, greedy=False))
    collected = {(r["task_id"], r["sample"], r["agent"]): r["completion_ids"] for r in rows_of(mixed.completions)}
    found = [row for row in found if row["task_id"].startswith("train")]
    equal = [collected[row["task_id"], row["sample"], row["agent"]] == row["completion_ids"] for row in found]
    assert sum(equal) < len(equal) / 4


def test_the_untrained_team_has_no_reference_log_probs(base):
    assert {row["reference_log_probs"] for row in rows_of(base)} == {None}


def test_a_trained_teams_samples_have_the_log_probs_of_the_base_team(mixed, trained):
    for agent, folder in enumerate(mixed.models):
        rows = [row for row in rows_of(trained) if row["agent"] == agent and row["source"] == SAMPLED]
        scores = score_completions(
            load_model(folder),
            Compute("cpu", "float32"),
            [row["prompt_ids"] for row in rows],
            [row["completion_ids"] for row in rows],
            temperature=1.0,
            token_budget=256,
        )
        for row, values in zip(rows, scores, strict=True):
            assert row["reference_log_probs"] == pytest.approx(values, abs=1e-5)
            assert row["reference_log_probs"] != pytest.approx(row["log_probs"], abs=1e-3)


def test_greedy_rows_have_no_reference_log_probs(trained):
    greedy = [row for row in rows_of(trained) if row["source"] == GREEDY]
    assert greedy and {row["reference_log_probs"] for row in greedy} == {None}


def test_rows_name_the_model_that_wrote_them(mixed, trained):
    digests = [digest_of_part(mixed.trained["policy"], f"agent_{agent}") for agent in range(2)]
    assert all(row["model_digest"] == digests[row["agent"]] for row in rows_of(trained))


def test_the_kl_can_be_left_out(mixed, tmp_path):
    rows = rows_of(mixed.sample_evaluation(tmp_path, policy=mixed.trained["policy"], kl=False))
    assert {row["reference_log_probs"] for row in rows} == {None}


def test_a_policy_with_the_base_weights_writes_the_same_at_kl_zero(mixed, base, tmp_path):
    same = rows_of(mixed.sample_evaluation(tmp_path, policy=policy_like_base(mixed, tmp_path)))
    assert [row["completion_ids"] for row in same] == [row["completion_ids"] for row in rows_of(base)]
    for row in same:
        if row["source"] == SAMPLED:
            assert row["reference_log_probs"] == pytest.approx(row["log_probs"], abs=1e-5)


def test_the_same_settings_give_the_same_bytes(mixed, trained, tmp_path):
    again = mixed.sample_evaluation(tmp_path, policy=mixed.trained["policy"])
    assert files_of(again) == files_of(trained)


def test_dropped_items_are_counted_by_split(mixed, tmp_path):
    rows = [{"task_id": "long", "prompt": "zq " * 60}, {"task_id": "short", "prompt": "the owl"}]
    items = publish_table(tmp_path / "items.parquet", pa.Table.from_pylist(rows))
    sampling = {**SAMPLING, "overflow": "drop"}
    path = mixed.sample_evaluation(tmp_path, inputs={"eval": items}, sampling=sampling, train_samples_per_task=1)
    assert counts_of(path)["dropped"] == {"eval_prompt_too_long": 1}
