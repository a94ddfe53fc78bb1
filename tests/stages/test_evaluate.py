"""The evaluate stage: rewards of a team's eval responses, metrics, failures, and the task's own metrics."""

import json
import math

import pyarrow as pa
import pytest

from comlrl_stages.artifacts import COMPLETIONS, EVALUATION, read_json, read_table, table_of
from comlrl_stages.errors import UserError
from comlrl_stages.settings import EvaluateSettings

from .conftest import PROMPTS, TASK, counts_of, files_of, publish_table, rows_of, run_stage

KEY = {"round": 1, "step": 0, "turn": 0, "node": ""}
SAMPLED, GREEDY = "evaluation", "evaluation/greedy"
NUMBERS = """\
def reward(first, second):
    return [float(first[0])]
"""
LOGGED = (
    NUMBERS
    + """
SEEN = []

def eval_logger(*, agent_completions_turns, batch_items, prompts):
    return [
        {"first": float(agent_completions_turns[0][i][0]), "second": len(agent_completions_turns[1][i][0]),
         "shape": len(agent_completions_turns) * 100 + len(agent_completions_turns[0][i]) * 10,
         "fits": prompts[i] == batch_items[i]["prompt"] and batch_items[i]["secret"] == i}
        for i in range(len(batch_items))
    ]

def eval_aggregator(rows, *, num_turns):
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} | {"turns": num_turns}
"""
)


def completion(task_id, sample, agent, text, source=SAMPLED, **given):
    row = {**KEY, "source": source, "task_id": task_id, "sample": sample, "agent": agent, "text": text}
    ids = list(range(len(text)))
    return {**row, "finish_reason": "stop", "completion_ids": ids, "log_probs": [-1.0] * len(ids), **given}


def joint(task_id, sample, texts, **given):
    return [completion(task_id, sample, agent, text, **given) for agent, text in enumerate(texts)]


@pytest.fixture
def evaluated(tmp_path):
    """Run the stage on completions of a task file; return rows, metrics and counts."""

    def run(completions, code=NUMBERS, **settings):
        folder = tmp_path
        task = folder / "task.py"
        task.write_text(code)
        items = [{"task_id": f"eval{i}", "prompt": f"question {i}", "secret": i} for i in range(3)]
        trains = [{"task_id": "train0", "prompt": "learnt", "secret": 9}]
        inputs = {
            "completions": publish_table(
                folder / "completions.parquet", table_of(completions, COMPLETIONS), COMPLETIONS
            ),
            "eval": publish_table(folder / "eval.parquet", pa.Table.from_pylist(items)),
            "train": publish_table(folder / "train.parquet", pa.Table.from_pylist(trains)),
        }
        outputs = {"evaluation": folder / "evaluation.parquet", "metrics": folder / "metrics.json"}
        given = {"task": {"file": str(task), "object": None}, "bootstrap_replicates": 200, **settings}
        run_stage("evaluate", EvaluateSettings(**given), inputs, outputs)
        rows = read_table(outputs["evaluation"], EVALUATION).to_pylist()
        return rows, read_json(outputs["metrics"]), counts_of(outputs["evaluation"])

    return run


def two_items():
    return [
        *joint("eval0", 0, ("1", "ab")),
        *joint("eval0", 1, ("3", "abc")),
        *joint("eval1", 0, ("0", "")),
        *joint("eval1", 1, ("2", "a")),
    ]


def test_the_mean_is_over_joint_responses_with_an_interval_around_it(evaluated):
    _, metrics, _ = evaluated(two_items())
    assert metrics["eval/turn_1/reward_mean"] == metrics["eval/turn_1/expected_return"] == 1.5
    assert 0.0 <= metrics["eval/turn_1/reward_low"] <= 1.5 <= metrics["eval/turn_1/reward_high"] <= 3.0
    assert (metrics["eval/items"], metrics["eval/joint_responses"]) == (2, 4)
    assert (metrics["eval/agent_0/tokens_mean"], metrics["eval/agent_1/tokens_mean"]) == (1.0, 1.5)


def test_there_is_one_row_per_joint_response_with_what_was_written(evaluated):
    rows, _, counts = evaluated(two_items(), method="madpo", seed=3, scale=2.0, shift=-1.0)
    assert [(r["task_id"], r["sample"], r["raw"], r["reward"]) for r in rows] == [
        ("eval0", 0, 1.0, 1.0),
        ("eval0", 1, 3.0, 5.0),
        ("eval1", 0, 0.0, -1.0),
        ("eval1", 1, 2.0, 3.0),
    ]
    assert rows[1]["texts"] == ["3", "abc"] and rows[1]["tokens"] == [1, 3]
    assert rows[1]["finish_reasons"] == ["stop", "stop"] and rows[1]["prompt"] == "question 0"
    assert {(r["method"], r["seed"], r["split"], r["decoding"]) for r in rows} == {("madpo", 3, "eval", "sampled")}
    assert counts == {"rows": 4, "dropped": {}}


def test_decodings_and_splits_have_metrics_of_their_own(evaluated):
    completions = [
        *two_items(),
        *joint("eval0", 0, ("9", ""), source=GREEDY),
        *joint("train0", 0, ("5", "")),
        *joint("train0", 0, ("7", ""), source=GREEDY),
    ]
    rows, metrics, _ = evaluated(completions)
    means = {
        prefix: metrics[f"{prefix}/turn_1/reward_mean"] for prefix in ("eval", "eval/greedy", "train", "train/greedy")
    }
    assert means == {"eval": 1.5, "eval/greedy": 9.0, "train": 5.0, "train/greedy": 7.0}
    assert [(r["split"], r["decoding"]) for r in rows[-3:]] == [
        ("eval", "greedy"),
        ("train", "sampled"),
        ("train", "greedy"),
    ]


def test_without_greedy_or_training_responses_there_are_no_such_metrics(evaluated):
    _, metrics, _ = evaluated(two_items())
    assert not [name for name in metrics if name.startswith(("eval/greedy", "train"))]


def test_cut_responses_are_counted_over_agents(evaluated):
    completions = two_items()
    completions[0]["finish_reason"] = "length"
    _, metrics, _ = evaluated(completions)
    assert metrics["eval/truncated_share"] == 1 / 8


def test_a_reward_that_is_nan_is_left_out_of_the_mean_and_counted(evaluated):
    completions = [*two_items(), *joint("eval1", 2, ("nan", ""))]
    rows, metrics, counts = evaluated(completions)
    assert metrics["eval/turn_1/reward_mean"] == 1.5 and metrics["eval/joint_responses"] == 5
    assert math.isnan(rows[-1]["reward"]) and rows[-1]["status"] == "nan"
    assert counts["dropped"] == {"nan": 1}


def test_a_team_without_any_finite_reward_has_no_mean_and_no_invented_one(evaluated):
    _, metrics, _ = evaluated(joint("eval0", 0, ("nan", "")))
    assert metrics["eval/turn_1/reward_mean"] is None and metrics["eval/turn_1/reward_low"] is None


def test_failures_beyond_the_tolerance_stop_the_stage_and_show_the_first(evaluated):
    completions = [*two_items(), *joint("eval1", 2, ("many", ""))]
    with pytest.raises(UserError, match=r"(?s)failed for 1 of 5 .*share of 0\. .*item eval1, .*'many', '': exception"):
        evaluated(completions)
    rows, metrics, counts = evaluated(completions, tolerate_failures=0.2)
    assert metrics["eval/turn_1/reward_mean"] == 1.5 and rows[-1]["status"] == "exception"
    assert counts["dropped"] == {"exception": 1}


def test_an_invalid_completion_is_neither_scored_nor_shown_to_the_tasks_metrics(evaluated):
    completions = [*two_items(), *joint("eval1", 2, ("8", ""))]
    completions[-1]["invalid"] = "no sections"
    rows, metrics, counts = evaluated(completions, LOGGED.replace(" == i}", " >= 0}"))
    assert (rows[-1]["status"], rows[-1]["texts"]) == ("invalid", [])
    assert metrics["eval/turn_1/reward_mean"] == metrics["eval/first"] == 1.5
    assert counts["dropped"] == {"invalid": 1}


def test_parts_of_the_reward_become_metrics(evaluated):
    code = "def reward(a, b):\n    return [(float(a[0]), {'chars': len(b[0])})]\n"
    rows, metrics, _ = evaluated(two_items(), code)
    assert metrics["eval/parts/chars"] == 1.5
    assert dict(rows[1]["parts"]) == {"chars": 3.0}


def test_kl_is_per_token_and_weighs_all_tokens_alike(evaluated):
    completions = [*joint("eval0", 0, ("1", "abc")), *joint("eval1", 0, ("22", ""))]
    # agent 0: tokens 1 and 2; agent 1: tokens 3 and 0
    for row, reference in zip(completions, ([-1.5], [-2.0, -1.0, -3.0], [-1.0, -1.5], []), strict=True):
        row["reference_log_probs"] = reference
    rows, metrics, _ = evaluated(completions)
    assert rows[0]["kl"] == pytest.approx([0.5, 1.0]) and rows[1]["kl"] == pytest.approx([0.25, 0.0])
    assert metrics["eval/agent_0/kl_per_token"] == pytest.approx(1.0 / 3)
    assert metrics["eval/agent_1/kl_per_token"] == pytest.approx(1.0)
    assert metrics["eval/kl_per_token"] == pytest.approx(4.0 / 6)


def test_without_reference_log_probs_there_is_no_kl(evaluated):
    rows, metrics, _ = evaluated(two_items())
    assert rows[0]["kl"] is None
    assert not [name for name in metrics if "kl" in name]


def test_the_tasks_own_metrics_get_completions_by_agent_item_and_turn(evaluated):
    completions = [row for i in range(3) for row in joint(f"eval{i}", 0, (str(i), "a" * i))]
    _, metrics, _ = evaluated(completions, LOGGED)
    own = {name: metrics[f"eval/{name}"] for name in ("first", "second", "shape", "fits", "turns")}
    assert own == {"first": 1.0, "second": 1.0, "shape": 210.0, "fits": 1.0, "turns": 1.0}


CALLED_BACK = (
    NUMBERS
    + """
formatters = [lambda item: "first: " + item["prompt"], lambda item: "second: " + item["prompt"]]

def metrics_callback(rollouts):
    first = [one for one in rollouts if one.agent_idx == 0]
    return {
        "rollouts": len(rollouts),
        "fits": all(one.prompt == "first: " + one.metadata["item"]["prompt"] for one in first),
        "reward": sum(one.metadata["reward"] == float(one.completion) for one in first),
    }
"""
)


def test_a_metrics_callback_gets_the_rollouts_of_each_item(evaluated):
    _, metrics, _ = evaluated([*two_items(), *joint("eval2", 0, ("4", ""))], CALLED_BACK)
    own = {name: metrics[f"eval/{name}"] for name in ("rollouts", "fits", "reward")}
    assert own == {"rollouts": pytest.approx(10 / 3), "fits": 1.0, "reward": pytest.approx(5 / 3)}


@pytest.mark.parametrize("broken", ["eval_logger", "eval_aggregator"])
def test_an_error_in_the_tasks_own_metrics_shows_the_users_line(evaluated, tmp_path, broken):
    code = LOGGED.replace(f"def {broken}(", f"def {broken}(*_, **__):\n    return [][1 + 1]\n\ndef unused_{broken}(")
    with pytest.raises(UserError) as error:
        evaluated(two_items(), code)
    told = str(error.value)
    assert "eval_logger, eval_aggregator or metrics_callback failed" in told and "return [][1 + 1]" in told
    assert f"{tmp_path / 'task.py'}" in told and "IndexError" in told
    assert "comlrl_stages/stages" not in told


def test_completions_of_an_unknown_item_are_refused(evaluated):
    with pytest.raises(UserError, match="item eval9 of the completions is in no split"):
        evaluated(joint("eval9", 0, ("1", "")))


def test_the_same_settings_give_the_same_bytes(evaluated, tmp_path):
    files = []
    for _ in range(2):
        evaluated(two_items())
        files.append(files_of(tmp_path / "evaluation.parquet", tmp_path / "metrics.json"))
    assert files[0] == files[1]


def test_more_bootstrap_replicates_leave_the_mean_alone(evaluated):
    means = {evaluated(two_items(), bootstrap_replicates=n)[1]["eval/turn_1/reward_mean"] for n in (100, 400)}
    assert means == {1.5}


def test_a_whole_pipeline_is_evaluated_base_and_trained(mixed, tmp_path):
    base = mixed.evaluate(tmp_path / "base", mixed.sample_evaluation(tmp_path / "base"))
    policy = mixed.trained["policy"]
    trained = mixed.evaluate(
        tmp_path / "madpo", mixed.sample_evaluation(tmp_path / "madpo", policy=policy, train_samples_per_task=1)
    )
    metrics = [json.loads(outputs["metrics"].read_text()) for outputs in (base, trained)]
    items = len(PROMPTS["eval"])
    assert [(m["eval/items"], m["eval/joint_responses"]) for m in metrics] == [(items, 3 * items)] * 2
    assert "eval/kl_per_token" not in metrics[0] and metrics[1]["eval/kl_per_token"] > 0.01
    assert metrics[1]["eval/turn_1/response_chars"] > 0 and "train/turn_1/reward_mean" in metrics[1]
    rewards = [row["reward"] for row in rows_of(trained["evaluation"]) if row["decoding"] == "sampled"]
    assert all(0 <= reward <= 1 for reward in rewards)
    assert TASK["name"] == "length_ratio"
