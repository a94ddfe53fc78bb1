from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from comlrl_stages.errors import UserError
from comlrl_stages.reporting import findings, summary

SETTINGS = SimpleNamespace(methods=["base", "madpo"], seeds=[0, 1], seed=0, bootstrap_replicates=200, confidence=0.95)
NO_LOGS = pd.DataFrame(
    columns=["kind", "owner", "seed", "round", "step", "env_step", "tokens", "agent", "name", "value", "phase"]
)


def row(method: str, seed: int, item: str, sample: int, reward: float, **other: object) -> dict[str, object]:
    return {
        "method": method,
        "seed": seed,
        "task_id": item,
        "sample": sample,
        "turn": 0,
        "node": "",
        "split": "eval",
        "decoding": "sampled",
        "reward": reward,
        "expected_return": reward,
        "learned_reward": None,
        "texts": ["a", "b"],
        "finish_reasons": ["stop", "length"],
        "tokens": [1, 3],
        "kl": [1.0, 0.2],
        "parts": [("good", 2 * reward)],
        "status": "ok",
    } | other


def evaluation(**levels: float) -> pd.DataFrame:
    """Two seeds, two items that differ by 0.2, two samples that differ by 0.02."""
    return pd.DataFrame(
        [
            row(method, seed, item, sample, level + 0.2 * place + 0.02 * sample + 0.02 * seed)
            for method, level in levels.items()
            for seed in (0, 1)
            for place, item in enumerate(("x", "y"))
            for sample in (0, 1)
        ]
    )


def test_there_is_one_row_per_method_and_seed():
    rows = evaluation(base=0.4, madpo=0.6)
    table = summary.summary_table(rows, NO_LOGS, summary.design_of(rows, SETTINGS))
    assert list(zip(table["method"], table["seed"], strict=True)) == [
        ("base", 0),
        ("base", 1),
        ("madpo", 0),
        ("madpo", 1),
    ]
    first, last = table.iloc[0], table.iloc[3]
    assert first["eval_reward_mean"] == pytest.approx(0.51)
    assert np.isnan(first["improvement_over_base"]) and last["improvement_over_base"] == pytest.approx(0.2)
    assert (last["items"], last["samples"], last["truncated_share"]) == (2, 2, 0.5)
    assert (last["tokens_agent_0"], last["tokens_agent_1"]) == (1, 3)
    assert last["part_good"] == pytest.approx(2 * last["eval_reward_mean"])


def test_kl_weighs_every_token_alike():
    rows = evaluation(base=0.4)
    assert summary.kl_per_token(rows) == pytest.approx((1 * 1.0 + 3 * 0.2) / 4)
    assert np.isnan(summary.kl_per_token(rows.assign(kl=None)))


def test_greedy_and_train_rows_never_enter_the_reported_mean():
    rows = evaluation(base=0.4, madpo=0.6)
    other = [row("madpo", 0, "x", 0, 9.0, decoding="greedy"), row("madpo", 0, "t", 0, 7.0, split="train")]
    mixed = pd.concat([rows, pd.DataFrame(other)], ignore_index=True)
    design = summary.design_of(mixed, SETTINGS)
    table = summary.summary_table(mixed, NO_LOGS, design).set_index(["method", "seed"])
    assert table.loc[("madpo", 0), "eval_reward_mean"] == pytest.approx(0.71)
    assert table.loc[("madpo", 0), "greedy_reward_mean"] == 9.0
    assert table.loc[("madpo", 0), "train_reward_mean"] == 7.0
    assert design.items == ("x", "y")


def test_a_failed_reward_is_left_out_and_counted():
    rows = evaluation(base=0.4, madpo=0.6)
    rows.loc[(rows["method"] == "madpo") & (rows["sample"] == 1), ["reward", "expected_return"]] = float("nan")
    rows.loc[rows["reward"].isna(), "status"] = "timeout"
    design = summary.design_of(rows, SETTINGS)
    table = summary.summary_table(rows, NO_LOGS, design).set_index(["method", "seed"])
    assert table.loc[("madpo", 0), "eval_reward_mean"] == pytest.approx(0.7)
    assert table.loc[("madpo", 0), "unscored"] == 2
    warned = findings.warnings(rows, NO_LOGS, {}, summary.results(rows, design), design)
    assert any("4 of 8 evaluated joint responses have no reward (4 timeout)" in line for line in warned)


def test_the_score_of_an_episode_is_the_reward_of_the_last_turn_that_it_played():
    later = [row("base", seed, item, 1, 0.89, turn=1, node="1") for seed in (0, 1) for item in "xy"]
    rows = pd.concat([evaluation(base=0.4), pd.DataFrame(later)], ignore_index=True)
    rows.loc[(rows["turn"] == 0) & (rows["sample"] == 1), "expected_return"] = 1.3
    design = summary.design_of(rows, SimpleNamespace(**{**vars(SETTINGS), "methods": ["base"]}))
    assert (design.turns, design.samples) == (2, 2)
    assert summary.results(rows, design)[0].mean.value == pytest.approx((0.51 + 0.89) / 2)
    headline = findings.headline(summary.results(rows, design), design)[0]
    assert "mean eval reward of the last turn 0.70" in headline


def test_rounds_are_laid_end_to_end():
    counts = [(1, 10, 64, 100), (1, 20, 128, 200), (2, 10, 64, 100), (2, 20, 128, 200)]
    logs = pd.DataFrame(counts, columns=["round", "step", "env_step", "tokens"]).assign(
        kind="method", owner="m", seed=0
    )
    laid = summary.end_to_end(logs)
    assert laid["step"].tolist() == [10, 20, 30, 40]
    assert summary.training_totals(laid) == {("m", 0): {"env_steps": 256, "tokens_trained": 400}}


def test_an_experiment_without_eval_rows_is_refused():
    rows = evaluation(base=0.4).assign(split="train")
    with pytest.raises(UserError, match="'eval'"):
        summary.design_of(rows, SETTINGS)


def test_the_headline_names_best_base_difference_and_how_much_stands_behind_it():
    rows = evaluation(base=0.4, madpo=0.6)
    design = summary.design_of(rows, SETTINGS)
    text = " ".join(findings.headline(summary.results(rows, design), design))
    assert "madpo scores highest: mean eval reward 0.72" in text
    assert "over 2 eval items × 2 samples × 2 seeds" in text
    assert "base team scores 0.52" in text and "paired difference is +0.20 [+0.20, +0.20]" in text
    assert "only 2 seeds and 2 items" in text


def test_a_gain_that_may_be_none_is_not_claimed():
    rows = evaluation(base=0.4, madpo=0.4)
    rows.loc[(rows["method"] == "madpo") & (rows["task_id"] == "x"), "expected_return"] += 0.3
    rows.loc[(rows["method"] == "madpo") & (rows["task_id"] == "y"), "expected_return"] -= 0.2
    design = summary.design_of(rows, SETTINGS)
    found = summary.results(rows, design)
    assert any("the gain is not established" in sentence for sentence in findings.headline(found, design))
    assert any(
        "madpo: the interval of its difference" in w for w in findings.warnings(rows, NO_LOGS, {}, found, design)
    )


def test_every_sign_of_trouble_is_named():
    rows = evaluation(base=0.4, madpo=0.6)
    rows = rows[~((rows["method"] == "madpo") & (rows["seed"] == 1))]
    rows["kl"] = [[3.0, 3.0] if method == "madpo" else [0.0, 0.0] for method in rows["method"]]
    logs = pd.DataFrame([{"owner": "madpo", "name": "zero_variance_share", "value": 0.9, "kind": "method", "seed": 0}])
    design = summary.design_of(rows, SETTINGS)
    text = "\n".join(findings.warnings(rows, logs, {"default": 0.55}, summary.results(rows, design), design))
    assert "madpo: no evaluation for seed 1" in text
    assert "madpo: in 90.0 % of the training groups" in text
    assert "base: 50.0 % of its eval responses ran into the length limit" in text
    assert "reward model default: held-out accuracy 55.0 %" in text
    assert "madpo: 3.00 nats per token away" in text and "base: 0.00 nats" not in text


def test_names_cannot_break_the_markdown_table():
    rows = evaluation(base=0.4).assign(method="a|b")
    settings = SimpleNamespace(**{**vars(SETTINGS), "methods": ["a|b"]})
    design = summary.design_of(rows, settings)
    text = summary.markdown(
        ["# t"], summary.summary_table(rows, NO_LOGS, design), summary.results(rows, design), design
    )
    assert "| a\\|b | 0.52" in text
