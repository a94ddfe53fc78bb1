"""The refer stage: the reference policy's log-probabilities of the pairs' responses."""

import json

import pytest

from comlrl_stages.artifacts import artifact_digest
from comlrl_stages.files import beside
from comlrl_stages.preferences.joint_responses import SIDES
from comlrl_stages.teams.loading import load_model
from comlrl_stages.teams.log_probs import completion_log_probs

from .conftest import ARITHMETIC, counts_of, rows_of


def responses(pipeline):
    """The completions of each pair: {(pair_id, side, agent): row of completions}."""
    by_key = {(r["task_id"], r["sample"], r["agent"]): r for r in rows_of(pipeline.completions)}
    return {
        (pair["pair_id"], side, agent): by_key[pair["task_id"], pair[side]["joint"], agent]
        for pair in rows_of(pipeline.pairs)
        for side in SIDES
        for agent in range(2)
    }


def direct(pipeline, row, temperature=1.0):
    """Sum of the log-probs of one completion, scored alone."""
    loaded = load_model(pipeline.models[row["agent"]])
    scores = completion_log_probs(
        loaded.model, loaded.facts, [row["prompt_ids"]], [row["completion_ids"]], temperature=temperature
    )
    return scores.log_probs.double().sum().item()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sums_are_those_of_every_token_of_each_response_up_to_its_end(mixed, tmp_path, temperature):
    expected = responses(mixed)
    rows = rows_of(mixed.refer(tmp_path, temperature=temperature))
    assert {(row["pair_id"], row["side"], row["agent"]) for row in rows} == set(expected)
    assert len(rows) == len(expected)
    for row in rows[::5]:
        found = expected[row["pair_id"], row["side"], row["agent"]]
        assert row["tokens"] == len(found["completion_ids"])
        assert row["log_prob_sum"] == pytest.approx(direct(mixed, found, temperature), abs=1e-4)


def test_at_the_sampling_temperature_the_sums_are_those_that_were_stored_while_sampling(every_pipeline):
    expected = responses(every_pipeline)
    for row in rows_of(every_pipeline.reference_log_probs):
        stored = expected[row["pair_id"], row["side"], row["agent"]]["log_probs"]
        assert row["log_prob_sum"] == pytest.approx(sum(stored), abs=1e-4)


def test_the_end_of_a_response_is_scored(every_pipeline):
    """Also in the GPT-2 style team, whose end is its pad."""
    expected = responses(every_pipeline)
    ended = 0
    for row in rows_of(every_pipeline.reference_log_probs):
        found = expected[row["pair_id"], row["side"], row["agent"]]
        if found["finish_reason"] == "stop":
            ended += 1
            without = sum(found["log_probs"][:-1])
            assert row["log_prob_sum"] < without - 1e-3
    assert ended


def test_rows_say_which_model_gave_them(mixed):
    digests = [artifact_digest(folder) for folder in mixed.models]
    assert all(row["reference_digest"] == digests[row["agent"]] for row in rows_of(mixed.reference_log_probs))
    provenance = json.loads(beside(mixed.reference_log_probs, "provenance").read_text())
    assert provenance["resolved"] == {"compute_dtype": "float32", "device": "cpu"}


def test_the_manifest_counts_rows_and_tokens(mixed):
    rows = rows_of(mixed.reference_log_probs)
    expected = {"rows": len(rows), "tokens": sum(row["tokens"] for row in rows)}
    assert counts_of(mixed.reference_log_probs) == expected


@pytest.mark.parametrize("training_tokens", [64, 8192])
def test_sums_do_not_depend_on_the_token_budget(mixed, tmp_path, training_tokens):
    rows = rows_of(mixed.refer(tmp_path, compute={**ARITHMETIC, "training_tokens": training_tokens}))
    for row, expected in zip(rows, rows_of(mixed.reference_log_probs), strict=True):
        assert row["log_prob_sum"] == pytest.approx(expected["log_prob_sum"], abs=1e-4)


def test_weights_stored_for_sampling_in_bfloat16_are_referred_to_in_float32(mixed, tmp_path):
    """Training holds float32 masters: a reference in bfloat16 would be another policy than the one that starts."""
    rows = rows_of(mixed.refer(tmp_path, team={"weights_dtypes": ["bfloat16", "bfloat16"]}))
    for row, expected in zip(rows, rows_of(mixed.reference_log_probs), strict=True):
        assert row["log_prob_sum"] == pytest.approx(expected["log_prob_sum"], abs=1e-4)
