"""The reward runner: what user code does to one joint response stays with that joint response."""

import math
import textwrap
import time

import pytest

from comlrl_stages.errors import UserError
from comlrl_stages.tasks.protocol import TaskSource
from comlrl_stages.tasks.scoring import RewardRunner

ITEM = {"task_id": "i1", "prompt": "Say hello", "target": 2}
OTHER = {"task_id": "i2", "prompt": "Say bye", "target": 3}


@pytest.fixture
def scored(tmp_path):
    """Score responses with the body of a reward: `def reward(first, second, *, batch_items): <body>`."""

    def score(body, responses, items=None, signature="first, second, *, batch_items", top="", **settings):
        source = written(tmp_path / "rewards.py", body, signature, top)
        with RewardRunner(source, **settings) as runner:
            return runner.score(items or [ITEM] * len(responses), responses)

    return score


def written(path, body, signature="first, second, *, batch_items", top=""):
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    path.write_text(f"{textwrap.dedent(top)}\n\ndef reward({signature}):\n{body}\n", encoding="utf-8")
    return TaskSource(file=str(path), object=None)


def calls_logged_to(path):
    return f"""
        import os
        def log(first):
            with open({str(path)!r}, "a") as stream:
                stream.write(f"{{os.getpid()}} {{'|'.join(first)}}\\n")
    """


def test_the_shipped_task_scores_in_order_with_its_parts():
    item = {"prompt": "x", "target_min": 2.0, "target_max": 3.0}
    with RewardRunner(TaskSource(name="length_ratio"), scale=2.0, shift=-1.0, workers=2) as runner:
        rewards = runner.score([item] * 3, [("Hi", "Hello"), ("", "Hello"), ("abcd", "abcd")])
    assert [r.raw for r in rewards] == [1.0, 0.0, pytest.approx(0.36787944)]
    assert [r.reward for r in rewards] == [1.0, -1.0, pytest.approx(2 * 0.36787944 - 1)]
    assert rewards[0].parts == {"ratio": 2.5, "first_chars": 2.0, "second_chars": 5.0}
    assert [r.status for r in rewards] == ["ok"] * 3


def test_an_exception_is_recorded_with_its_sample_and_ran_once(scored, tmp_path):
    body = """
        log(first)
        return [1 / int(first[0])]
    """
    rewards = scored(body, [("1", "a"), ("0", "a"), ("2", "a")], top=calls_logged_to(tmp_path / "log"))
    assert [r.status for r in rewards] == ["ok", "exception", "ok"]
    assert (rewards[0].reward, rewards[2].reward) == (1.0, 0.5)
    assert math.isnan(rewards[1].raw) and math.isnan(rewards[1].reward)
    assert "ZeroDivisionError" in rewards[1].error and "rewards.py" in rewards[1].error
    assert "reward_process.py" not in rewards[1].error
    assert [line.split()[1] for line in (tmp_path / "log").read_text().splitlines()] == ["1", "0", "2"]


def test_leaving_by_sys_exit_is_an_exception_too(scored):
    (reward,) = scored("raise SystemExit(0)", [("a", "b")])
    assert reward.status == "exception" and "SystemExit" in reward.error


def test_nan_and_infinity_keep_the_raw_value_and_never_train(scored):
    rewards = scored("return [float(first[0])]", [("nan", ""), ("inf", ""), ("3", "")])
    assert [r.status for r in rewards] == ["nan", "nan", "ok"]
    assert math.isnan(rewards[0].raw) and rewards[1].raw == math.inf
    assert math.isnan(rewards[0].reward) and math.isnan(rewards[1].reward)


def test_rewards_that_later_sums_or_differences_would_overflow_are_counted_and_never_train(scored):
    texts = [("1e308", ""), ("-1e308", ""), ("1e39", ""), ("3e38", ""), ("-3e38", "")]
    rewards = scored("return [float(first[0])]", texts)
    assert [r.status for r in rewards] == ["nan", "nan", "nan", "ok", "ok"]
    assert rewards[0].error == "the reward is 1e+308; expected at most 3.4e+38 in size, what float32 holds"
    assert rewards[0].raw == 1e308 and math.isnan(rewards[0].reward)
    values = [r.reward for r in rewards if r.status == "ok"]
    assert math.isfinite(sum(value**2 for value in values)) and math.isfinite(values[0] - values[1])


def test_a_processed_reward_that_overflows_is_told_as_such(scored):
    (scaled,) = scored("return [1e30]", [("a", "")], scale=1e300)
    assert (scaled.status, scaled.raw) == ("nan", 1e30) and math.isnan(scaled.reward)
    assert scaled.error == "the processed reward (scale * raw + shift) is inf, which is not a finite number"
    (shifted,) = scored("return [-1e30]", [("a", "")], shift=-1e300)
    assert shifted.status == "nan" and "(scale * raw + shift) is -1e+300; expected at most" in shifted.error


def test_an_agents_reward_that_overflows_spoils_the_joint_one_though_the_mean_is_zero(scored):
    top = "reward_scope = 'agent'"
    (reward,) = scored("return [[1e308, -1e308]]", [("a", "b")], top=top, scale=10.0)
    assert (reward.status, reward.raw) == ("nan", 0.0) and math.isnan(reward.reward)
    assert reward.error == "the processed reward of agent_0 is inf, which is not a finite number"
    assert scored("return [[1e308, 1e308]]", [("a", "b")], top=top)[0].status == "nan"


def test_a_late_call_and_one_stuck_in_c_are_stopped_and_the_next_is_scored(scored):
    body = """
        if first[0] == "sleep":
            time.sleep(60)
        if first[0] == "regex":
            re.match(r"(a+)+$", "a" * 40 + "!")
        return [len(first[0])]
    """
    started = time.monotonic()
    responses = [("ok", ""), ("regex", ""), ("sleep", ""), ("fine", "")]
    rewards = scored(body, responses, top="import re, time", time_limit_s=0.5)
    assert [r.status for r in rewards] == ["ok", "timeout", "timeout", "ok"]
    assert "longer than 0.5 s" in rewards[1].error
    assert rewards[3].raw == 4.0
    assert time.monotonic() - started < 12


def test_loading_the_task_does_not_count_as_time_of_a_call(scored):
    (reward,) = scored("return [1.0]", [("a", "b")], top="import time; time.sleep(1.2)", time_limit_s=0.4)
    assert reward.status == "ok"


def test_a_process_that_ends_while_it_loads_the_task_is_reported(scored):
    with pytest.raises(UserError, match=r"load the task ended 3 times.*exit code 1"):
        scored("return [1.0]", [("a", "b")], top="import os; os._exit(1)")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0, 2.0]", "returned 2 results for 1 joint responses"),
        ("return []", "returned 0 results for 1 joint responses"),
        ("return 1.0", "returned float"),
        ("return None", "returned NoneType"),
        ("return [None]", "the reward is NoneType"),
        ("return ['1']", "the reward is str"),
        ("return [{'score': 1}]", r"has the keys \['score'\], but no 'reward'"),
        ("return [(1.0, {'part': 'x'})]", "part 'part' is str"),
        ("return [[1.0, 2.0]]", "the reward is list"),
    ],
)
def test_a_result_of_another_form_stops_the_run(scored, body, message):
    with pytest.raises(UserError, match=f"item i1: .*{message}.*Expected a list with one entry per joint response"):
        scored(body, [("a", "b")])


def test_a_task_that_does_not_load_is_an_error_of_the_user(scored):
    with pytest.raises(UserError, match=r"rewards.py, line 1: cannot be imported"):
        scored("return [1.0]", [("a", "b")], top="import no_such_module_here")
    with pytest.raises(UserError, match=r"scoring.parameters: .*no parameter 'weight'"):
        scored("return [1.0]", [("a", "b")], parameters={"weight": 1})


def test_items_prompts_and_parameters_reach_the_reward(scored):
    body = "return [batch_items[i]['target'] * weight + len(prompts[i]) + bonus for i in range(len(first))]"
    signature = "first, second, bonus=0.5, *, batch_items, prompts, weight=1.0"
    rewards = scored(body, [("a", "b"), ("a", "b")], [ITEM, OTHER], signature, parameters={"weight": 10.0})
    assert [r.raw for r in rewards] == [20 + 9 + 0.5, 30 + 7 + 0.5]


def test_star_completions_come_in_actor_order(scored):
    top = "agents = 3"
    (reward,) = scored("return [len(completions[0][0]) * 100 + len(completions[2][0])]", [("aaa", "bb", "c")],
                       signature="*completions", top=top)  # fmt: skip
    assert reward.raw == 301


def test_agent_rewards_and_their_mean(scored):
    rewards = scored("return [[1.0, 3.0] for _ in first]", [("a", "b")], top="reward_scope = 'agent'", scale=2.0)
    assert (rewards[0].raw, rewards[0].reward, rewards[0].agent_rewards) == (2.0, 4.0, (2.0, 6.0))
    (lone_nan,) = scored("return [([1.0, float('nan')], {'x': 1})]", [("a", "b")], top="reward_scope = 'agent'")
    assert lone_nan.status == "nan" and lone_nan.parts == {"x": 1.0}
    with pytest.raises(UserError, match=r"reward_scope is agent with 2 agents, but an entry is 1.0"):
        scored("return [1.0]", [("a", "b")], top="reward_scope = 'agent'")


def test_numbers_of_numpy_and_parts_in_a_dict_are_read(scored):
    top = "import numpy as np"
    assert scored("return np.array([2.5])", [("a", "b")], top=top)[0].raw == 2.5
    assert scored("return [np.float32(0.5)]", [("a", "b")], top=top)[0].raw == 0.5
    (reward,) = scored("return [{'reward': np.int64(2), 'level': True}]", [("a", "b")], top=top)
    assert (reward.raw, reward.parts) == (2.0, {"level": 1.0})


def test_equal_joint_responses_to_equal_items_are_scored_once(scored, tmp_path):
    body = """
        log(first)
        return [1.0]
    """
    responses = [("a", "b"), ("a", "b"), ("a", "c"), ("a", "b")]
    rewards = scored(body, responses, [ITEM, dict(ITEM), ITEM, OTHER], top=calls_logged_to(tmp_path / "log"))
    assert [r.raw for r in rewards] == [1.0] * 4
    assert len((tmp_path / "log").read_text().splitlines()) == 3


def test_a_batch_holds_one_item_and_a_failing_batch_is_repeated_one_by_one(scored, tmp_path):
    body = """
        log(first)
        assert len({item["task_id"] for item in batch_items}) == 1
        return [1 / len(text) for text in first]
    """
    responses = [("a", ""), ("bb", ""), ("", "x"), ("cc", ""), ("d", "")]
    items = [ITEM, ITEM, ITEM, ITEM, OTHER]
    rewards = scored(body, responses, items, top=calls_logged_to(tmp_path / "log"), batch_size=2)
    assert [r.status for r in rewards] == ["ok", "ok", "exception", "ok", "ok"]
    assert [r.raw for r in rewards if r.status == "ok"] == [1.0, 0.5, 0.5, 1.0]
    calls = sorted(line.split(" ", 1)[1] for line in (tmp_path / "log").read_text().splitlines())
    assert calls == sorted(["a|bb", "|cc", "d", "", "cc"])


def test_results_do_not_depend_on_the_number_of_workers(scored):
    body = """
        time.sleep(0.02 * (len(first[0]) % 3))
        return [len(first[0])]
    """
    responses = [("x" * n, "") for n in range(24)]
    assert scored(body, responses, top="import time", workers=1) == scored(
        body, responses, top="import time", workers=3
    )


def test_workers_serve_many_calls(tmp_path):
    source = written(tmp_path / "rewards.py", "return [os.getpid()]", top="import os")
    with RewardRunner(source) as runner:
        pids = {runner.score([ITEM], [(str(n), "")])[0].raw for n in range(5)}
        assert runner.score([], []) == []
    assert len(pids) == 1


def test_a_reward_model_loaded_at_the_top_of_the_file_is_loaded_once_per_process(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, "Brief:": 2, "Detailed:": 3, "a": 4, "b": 5}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        tmp_path / "model"
    )
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=8, num_labels=1, **sizes))
    model.save_pretrained(tmp_path / "model")
    code = f"""
        import os
        import torch
        from pathlib import Path
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        reward_tokenizer = AutoTokenizer.from_pretrained({str(tmp_path / "model")!r})
        reward_model = AutoModelForSequenceClassification.from_pretrained({str(tmp_path / "model")!r}).eval()
        with open(Path({str(tmp_path)!r}) / "loads", "a") as stream:
            stream.write(f"{{os.getpid()}} {{torch.get_num_threads()}}\\n")

        @torch.no_grad()
        def model_reward(brief_completions, detailed_completions, *, batch_items):
            task = batch_items[0]["prompt"]
            texts = [
                f"{{task}}\\n\\nBrief: {{brief}}\\n\\nDetailed: {{detailed}}"
                for brief, detailed in zip(brief_completions, detailed_completions)
            ]
            inputs = reward_tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
            return reward_model(**inputs).logits[:, 0].tolist()

        class Task:
            reward = staticmethod(model_reward)
    """
    path = tmp_path / "model_task.py"
    path.write_text(textwrap.dedent(code))
    with RewardRunner(TaskSource(file=str(path))) as runner:
        rewards = [runner.score([ITEM] * 2, [("a", text), ("b", text)]) for text in ("a", "b", "a b")]
    assert all(r.status == "ok" for pair in rewards for r in pair)
    assert len({r.raw for pair in rewards for r in pair}) == 6
    ((_, threads),) = [line.split() for line in (tmp_path / "loads").read_text().splitlines()]
    assert threads == "1"
