"""Sampling for evaluation: which decodings and splits there are, and the log-probabilities of the base team."""

import shutil

import pyarrow as pa
import pytest
import torch

from comlrl_stages.artifacts import digest_of_part, read_json
from comlrl_stages.errors import UserError
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


# --- several turns ---

COUNTING = """\
def reward(first, second):
    return [0.0]

def transition(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
    turn, words = len(prompt_history_per_agent[0]), " zq" * (LENGTH if agent_completions[0][:1] < "a" else 1)
    return [f"{prompt} {turn} {agent} {len(text)}{words}" for agent, text in enumerate(agent_completions)]
"""


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """A task whose transition tells each agent the turn and the length of what it wrote."""

    def write(length=1):
        file = tmp_path_factory.mktemp("task") / "task.py"
        file.write_text(f"LENGTH = {length}\n{COUNTING}")
        return {"file": str(file), "object": None}

    return write


@pytest.fixture(scope="module")
def dialogues(mixed, counting, tmp_path_factory):
    """Three turns of a trained team."""
    folder = tmp_path_factory.mktemp("dialogues")
    return mixed.sample_evaluation(folder, policy=mixed.trained["policy"], task=counting(), episode={"turns": 3})


def place(row):
    return row["source"], row["task_id"], row["sample"], row["agent"]


def test_each_joint_response_goes_on_by_one_per_turn_under_its_own_number(dialogues):
    rows = rows_of(dialogues)
    turns = [[row for row in rows if row["turn"] == turn] for turn in range(3)]
    assert rows == [row for turn in turns for row in turn]
    assert [place(row) for row in turns[0]] == [place(row) for row in turns[1]] == [place(row) for row in turns[2]]
    assert {row["source"] for row in turns[2]} == {SAMPLED, GREEDY}
    names = [{(row["node"], str(row["sample"])) for row in turn} for turn in turns]
    assert names[0] == {("", str(s)) for s in range(3)} and names[1] == {(str(s), str(s)) for s in range(3)}
    assert names[2] == {(f"{s}/0", str(s)) for s in range(3)}


def test_the_next_prompts_follow_from_what_was_written(mixed, dialogues):
    rows = {(row["turn"], *place(row)): row for row in rows_of(dialogues)}
    tokenizers = [load_model(folder).tokenizer for folder in mixed.models]
    for (turn, *where), row in rows.items():
        if turn:
            before = rows[(turn - 1, *where)]
            question = PROMPTS["eval"][int(row["task_id"].removeprefix("eval"))]
            assert row["prompt"] == f"{question} {turn} {row['agent']} {len(before['text'])} zq"
            assert row["prompt"] in tokenizers[row["agent"]].decode(row["prompt_ids"])


def test_the_first_turn_is_that_of_a_single_turn(mixed, dialogues, counting, tmp_path):
    policy = mixed.trained["policy"]
    one = rows_of(mixed.sample_evaluation(tmp_path, policy=policy, task=counting()))
    assert [row for row in rows_of(dialogues) if row["turn"] == 0] == one


def test_every_sampled_turn_has_the_log_probs_of_the_base_team(dialogues):
    for row in rows_of(dialogues):
        measured = row["reference_log_probs"] is not None
        assert measured == (row["source"] == SAMPLED)
        if measured:
            assert len(row["reference_log_probs"]) == len(row["completion_ids"])


def test_sampling_that_was_stopped_in_a_later_turn_goes_on_to_the_same_bytes(mixed, dialogues, counting, tmp_path):
    settings = {"policy": mixed.trained["policy"], "task": counting(), "episode": {"turns": 3}}
    for stopped in ("completions", "completions of turn 2", "completions of turn 3"):
        with pytest.raises(KeyboardInterrupt):
            mixed.sample_evaluation(tmp_path, stop_in=stopped, **settings)
        shards = sorted(path.name for path in (tmp_path / "completions.parquet.partial/shards").glob("*.parquet"))
    assert {name.rsplit("_", 1)[0] for name in shards} == {"turn_1", "turn_2", "turn_3"}
    assert files_of(mixed.sample_evaluation(tmp_path, **settings)) == files_of(dialogues)


def test_shards_of_other_prompts_are_not_taken(mixed, tmp_path):
    """A transition that is not the same each time must not put answers beside prompts that they do not answer."""
    task = tmp_path / "task.py"
    task.write_text(
        "import os\n\ndef reward(first, second):\n    return [0.0]\n\ndef transition(**given):\n"
        "    return [f'again {os.environ[\"TURN_TEST\"]}'] * 2\n"
    )
    settings = {"task": {"file": str(task), "object": None}, "episode": {"turns": 2}}
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURN_TEST", "one")
        with pytest.raises(KeyboardInterrupt):
            mixed.sample_evaluation(tmp_path, stop_in="completions of turn 2", **settings)
        patch.setenv("TURN_TEST", "two")
        found = rows_of(mixed.sample_evaluation(tmp_path, **settings))
    assert {row["prompt"] for row in found if row["turn"] == 1} == {"again two"}
    assert len(found) == 2 * 2 * 4 * len(PROMPTS["eval"])


def test_trajectories_whose_next_prompts_leave_no_room_end_and_are_counted(mixed, counting, tmp_path):
    sampling = {**SAMPLING, "overflow": "drop"}
    path = mixed.sample_evaluation(tmp_path, sampling=sampling, task=counting(60), episode={"turns": 2})
    rows = rows_of(path)
    texts = {place(row): row["text"] for row in rows if row["turn"] == 0}
    going_on = {place(row)[:3] for row in rows if row["turn"] == 1}
    assert going_on == {where[:3] for where, text in texts.items() if where[3] == 0 and not text[:1] < "a"}
    assert 0 < len(going_on) < len(texts) / 2
    assert counts_of(path)["dropped"] == {"turn_2_prompt_too_long": len(texts) // 2 - len(going_on)}


def test_next_prompts_that_leave_no_room_are_an_error_where_the_config_says_so(mixed, counting, tmp_path):
    with pytest.raises(UserError, match=r"item eval\d, turn 2: the prompt of agent_\d has \d+ tokens"):
        mixed.sample_evaluation(tmp_path, task=counting(60), episode={"turns": 2})


def test_two_turns_are_evaluated_from_prompts_to_metrics(mixed, counting, tmp_path):
    task = {"task": counting(), "episode": {"turns": 2, "discount": 0.5}}
    completions = mixed.sample_evaluation(
        tmp_path, policy=mixed.trained["policy"], task=task["task"], episode={"turns": 2}
    )
    outputs = mixed.evaluate(tmp_path, completions, **task)
    metrics = read_json(outputs["metrics"])
    samples = 3 * len(PROMPTS["eval"])
    assert [metrics[f"eval/turn_{turn}/joint_responses"] for turn in (1, 2)] == [samples, samples]
    assert {"eval/greedy/turn_2/expected_return", "eval/turn_2/kl_per_token", "eval/return_mean"} <= set(metrics)
    assert "eval/greedy/kl_per_token" not in metrics
