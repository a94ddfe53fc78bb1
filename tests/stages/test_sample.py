"""The sample stage: which completions it draws, that nothing beside a draw changes it, and what a kill leaves."""

import math

import pyarrow as pa
import pytest

from comlrl_stages.artifacts import artifact_digest
from comlrl_stages.errors import UserError
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.loading import load_model
from comlrl_stages.teams.prompts import decode
from comlrl_stages.teams.scoring import score_completions

from .conftest import ARITHMETIC, PROMPTS, SAMPLING, counts_of, files_of, publish_table, rows_of

AGENTS, CANDIDATES = 2, 4
CPU = Compute("cpu", "float32")
TEAM = {
    "system_prompts": None,
    "prompt_formats": "auto",
    "template_arguments": {},
    "weights_dtypes": "float32",
    "attentions": "sdpa",
    "trust_remote_code": False,
}


def by_key(path):
    return {(row["task_id"], row["sample"], row["agent"]): row for row in rows_of(path)}


def assert_same_draws(found, expected):
    assert expected
    for key, row in expected.items():
        assert found[key]["completion_ids"] == row["completion_ids"], key
        assert found[key]["log_probs"] == pytest.approx(row["log_probs"], abs=1e-5), key


def items(folder, prompts):
    rows = [{"task_id": task_id, "prompt": prompt} for task_id, prompt in prompts.items()]
    return publish_table(folder / "items.parquet", pa.Table.from_pylist(rows))


def test_every_item_candidate_and_agent_is_sampled_once_in_order(pipeline):
    keys = [(row["task_id"], row["sample"], row["agent"]) for row in rows_of(pipeline.completions)]
    expected = range(len(PROMPTS["train"])), range(CANDIDATES), range(AGENTS)
    assert keys == [(f"train{i}", s, a) for i in expected[0] for s in expected[1] for a in expected[2]]


@pytest.mark.parametrize("stop_after", [1, 9, 31])
def test_a_run_stopped_between_shards_goes_on_to_the_same_bytes(pipeline, tmp_path, stop_after):
    with pytest.raises(KeyboardInterrupt):
        pipeline.sample(tmp_path, stop_after=stop_after)
    assert not (tmp_path / "completions.parquet").exists()
    shards = list((tmp_path / "completions.parquet.partial" / "shards").glob("*.parquet"))
    assert shards
    again = pipeline.sample(tmp_path)
    assert files_of(again) == files_of(pipeline.completions)
    assert counts_of(again) == counts_of(pipeline.completions)


def test_a_resumed_run_takes_the_finished_shards_as_they_are(pipeline, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        pipeline.sample(tmp_path, stop_after=1)
    (shard,) = (tmp_path / "completions.parquet.partial" / "shards").glob("*.parquet")
    written = shard.stat().st_mtime_ns
    with pytest.raises(KeyboardInterrupt):
        pipeline.sample(tmp_path, stop_after=9)
    assert shard.stat().st_mtime_ns == written


def test_more_candidates_leave_the_first_as_they_were(pipeline, tmp_path):
    more = by_key(pipeline.sample(tmp_path, candidates=8))
    assert len(more) == 2 * len(by_key(pipeline.completions))
    assert_same_draws(more, by_key(pipeline.completions))


def test_other_items_change_no_draw_of_an_item(pipeline, tmp_path):
    prompts = {"new": "the river is long and the night is cold", "train2": PROMPTS["train"][2]}
    found = by_key(pipeline.sample(tmp_path, items=items(tmp_path, prompts)))
    expected = {key: row for key, row in by_key(pipeline.completions).items() if key[0] == "train2"}
    assert_same_draws(found, expected)


def test_another_token_budget_draws_the_same_ids(mixed, tmp_path):
    compute = {**ARITHMETIC, "sampling_tokens": 4096}
    assert_same_draws(by_key(mixed.sample(tmp_path, compute=compute)), by_key(mixed.completions))


def test_another_agent_changes_no_draw_of_the_others(pipeline, tmp_path):
    task = tmp_path / "task.py"
    formatter = "def formatters(item):\n    return item['prompt']\n"
    found = []
    for agents in (2, 3):
        task.write_text(f"agents = {agents}\n{formatter}def reward(*completions):\n    return [0.0]\n")
        changes = {
            "task": {"file": str(task), "object": None},
            "team": {"agents": agents, **{key: [value] * agents for key, value in TEAM.items()}},
            "models": [pipeline.models[0]] * agents,
        }
        found.append(by_key(pipeline.sample(tmp_path / str(agents), **changes)))
    assert len(found[1]) == len(found[0]) * 3 / 2
    assert_same_draws(found[1], found[0])


def test_eight_candidates_are_not_copies_of_one(every_pipeline, tmp_path):
    rows = rows_of(every_pipeline.sample(tmp_path, candidates=8))
    for task_id in {row["task_id"] for row in rows}:
        for agent in range(AGENTS):
            own = [tuple(r["completion_ids"]) for r in rows if r["task_id"] == task_id and r["agent"] == agent]
            assert len(own) == 8 and len(set(own)) >= 4


def test_agents_with_one_model_and_one_prompt_draw_apart(pipeline, tmp_path):
    task = tmp_path / "task.py"
    task.write_text("def formatters(item):\n    return item['prompt']\ndef reward(a, b):\n    return [0.0]\n")
    found = by_key(pipeline.sample(tmp_path, task={"file": str(task), "object": None}))
    prompts = {tuple(row["prompt_ids"]) for key, row in found.items() if key[0] == "train0"}
    assert len(prompts) == 1
    pairs = [(found["train0", s, 0], found["train0", s, 1]) for s in range(CANDIDATES)]
    assert any(one["completion_ids"] != other["completion_ids"] for one, other in pairs)


def test_another_seed_draws_others(pipeline, tmp_path):
    other = by_key(pipeline.sample(tmp_path, seed=1))
    equal = [other[key]["completion_ids"] == row["completion_ids"] for key, row in by_key(pipeline.completions).items()]
    assert sum(equal) < len(equal) / 4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_stored_log_probs_are_those_of_rescoring(mixed, tmp_path, temperature):
    sampling = {**SAMPLING, "temperature": temperature, "top_p": 0.9, "top_k": 100}
    rows = rows_of(mixed.sample(tmp_path, sampling=sampling))
    for agent in range(AGENTS):
        own = [row for row in rows if row["agent"] == agent]
        scores = score_completions(
            load_model(mixed.models[agent]),
            CPU,
            [row["prompt_ids"] for row in own],
            [row["completion_ids"] for row in own],
            temperature=temperature,
            token_budget=512,
        )
        for row, values in zip(own, scores, strict=True):
            assert row["log_probs"] == pytest.approx(values, abs=1e-5)


def test_a_finished_completion_has_one_end_and_a_cut_one_is_left_as_sampled(every_pipeline):
    rows = rows_of(every_pipeline.completions)
    ends = [set(load_model(folder).facts.eos_ids) for folder in every_pipeline.models]
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    for row in rows:
        found = [token in ends[row["agent"]] for token in row["completion_ids"]]
        if row["finish_reason"] == "stop":
            assert found.index(True) == len(found) - 1
        else:
            assert not any(found) and len(found) == SAMPLING["max_new_tokens"]


def test_text_and_log_probs_belong_to_the_ids(mixed):
    tokenizers = [load_model(folder).tokenizer for folder in mixed.models]
    for row in rows_of(mixed.completions):
        assert row["text"] == decode(tokenizers[row["agent"]], row["completion_ids"])
        assert len(row["log_probs"]) == len(row["completion_ids"])
        assert (row["ids_from"], row["reference_log_probs"], row["invalid"]) == ("sampled", None, None)


def test_the_manifest_counts_what_was_sampled(pipeline):
    rows = rows_of(pipeline.completions)
    counts = counts_of(pipeline.completions)
    reasons = counts["finish_reasons"]
    assert counts["rows"] == len(rows) and counts["tokens"] == sum(len(row["completion_ids"]) for row in rows)
    assert reasons == {r: sum(row["finish_reason"] == r for row in rows) for r in ("length", "stop")}
    assert counts["dropped"] == {}


def test_agents_of_two_families_have_their_own_ids_and_prompts(mixed):
    rows = rows_of(mixed.completions)
    loaded = [load_model(folder) for folder in mixed.models]
    assert [len(one.tokenizer) for one in loaded] == [320, 300]
    digests = [artifact_digest(folder) for folder in mixed.models]
    for row in rows:
        assert row["model_digest"] == digests[row["agent"]]
        assert max(row["completion_ids"]) < len(loaded[row["agent"]].tokenizer)
    bos = loaded[0].facts.bos_id
    assert all(row["prompt_ids"].count(bos) == 1 for row in rows if row["agent"] == 0)
    plain = loaded[1].tokenizer
    assert all(row["prompt_ids"] == plain(row["prompt"])["input_ids"] for row in rows if row["agent"] == 1)


def test_a_draw_is_the_same_whatever_the_other_agents_model(mixed, pipeline):
    expected = {key: row for key, row in by_key(pipeline.completions).items() if key[2] == 0}
    assert_same_draws(by_key(mixed.completions), expected)


def test_a_prompt_without_room_is_an_error_that_says_what_to_do(pipeline, tmp_path):
    with pytest.raises(UserError) as error:
        pipeline.sample(tmp_path, sampling={"max_new_tokens": 120})
    told = str(error.value)
    assert "item train0: the prompt of agent_0 has" in told and "model's context of 128" in told
    assert "sampling.overflow to drop" in told


def test_items_without_room_are_dropped_and_counted(pipeline, tmp_path):
    prompts = {"short": "the owl", "long": "zq " * 60}
    path = pipeline.sample(tmp_path, items=items(tmp_path, prompts), sampling={**SAMPLING, "overflow": "drop"})
    assert {row["task_id"] for row in rows_of(path)} == {"short"}
    assert counts_of(path)["dropped"] == {"prompt_too_long": 1}


def test_if_no_item_has_room_the_stage_stops(pipeline, tmp_path):
    with pytest.raises(UserError, match="every one of the 4 items was dropped"):
        pipeline.sample(tmp_path, sampling={"max_new_tokens": 120, "overflow": "drop"})


def test_bfloat16_samples_finite_log_probs(mixed, tmp_path):
    compute = {**ARITHMETIC, "compute_dtype": "bfloat16", "sampling_tokens": 256}
    for row in rows_of(mixed.sample(tmp_path, compute=compute)):
        assert all(map(math.isfinite, row["log_probs"])) and row["completion_ids"]


def test_an_equals_sign_in_a_folder_is_no_trouble(pipeline, tmp_path):
    assert files_of(pipeline.sample(tmp_path / "round=5")) == files_of(pipeline.completions)
