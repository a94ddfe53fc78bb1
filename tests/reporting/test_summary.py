from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from comlrl_stages.errors import UserError
from comlrl_stages.reporting import answer, findings, summary

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
    (told,) = [line for line in warned if "4 of 8 evaluated joint responses have no reward (4 timeout)" in line]
    assert "4 cells (a seed on an item) rest on fewer samples" in told


def test_the_score_of_an_episode_is_the_reward_of_the_last_turn_that_it_played():
    later = [row("base", seed, item, 1, 0.89, turn=1, node="1") for seed in (0, 1) for item in "xy"]
    rows = pd.concat([evaluation(base=0.4), pd.DataFrame(later)], ignore_index=True)
    rows.loc[(rows["turn"] == 0) & (rows["sample"] == 1), "expected_return"] = 1.3
    design = summary.design_of(rows, SimpleNamespace(**{**vars(SETTINGS), "methods": ["base"]}))
    assert (design.turns, design.samples) == (2, 2)
    assert summary.results(rows, design)[0].mean.value == pytest.approx((0.51 + 0.89) / 2)
    assert "mean eval reward of the last turn 0.70" in answer.headline(summary.results(rows, design), design)[0]


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
    text = " ".join(answer.headline(summary.results(rows, design), design))
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
    text = " ".join(answer.headline(found, design))
    assert "madpo and base are not told apart: mean eval reward 0.57" in text and "highest" not in text
    assert "no gain from training is established" in text
    (told,) = [w for w in findings.warnings(rows, NO_LOGS, {}, found, design) if "holds 0" in w]
    assert told.startswith("madpo: its difference to base, +0.05 [")


def with_methods(*methods: str, seeds: tuple[int, ...] = (0, 1)) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(SETTINGS), "methods": list(methods), "seeds": list(seeds)})


def answer_of(rows: pd.DataFrame, settings: SimpleNamespace) -> str:
    design = summary.design_of(rows, settings)
    return " ".join(answer.headline(summary.results(rows, design), design))


def test_equal_means_are_a_tie():
    text = answer_of(evaluation(base=0.4, madpo=0.6, marlhf=0.6), with_methods("base", "madpo", "marlhf"))
    assert text.startswith("madpo and marlhf tie: mean eval reward 0.72 [")
    assert "highest" not in text and "The paired difference of madpo to base is +0.20 [+0.20, +0.20]." in text


def test_many_methods_that_are_not_told_apart_are_told_by_the_ends_of_their_row():
    methods = ("base", "a", "b", "c", "d", "e")
    text = answer_of(evaluation(base=0.4, **dict.fromkeys(methods[1:], 0.6)), with_methods(*methods))
    assert text.startswith("5 methods are not told apart from the one with the highest mean, a: mean eval reward from")
    assert "They are a, b, c, d and e; the lead of a over e is 0.00 [0.00, 0.00]." in text
    assert "The paired difference of a to base is +0.20" in text


def test_a_method_that_is_as_good_as_base_beats_nobody():
    text = answer_of(evaluation(base=0.4, madpo=0.4), SETTINGS)
    assert text.startswith("base and madpo tie") and "highest" not in text and "No method beats" not in text


def test_a_method_that_is_worse_than_base_is_not_the_answer():
    text = answer_of(evaluation(base=0.6, madpo=0.4), SETTINGS)
    assert text.startswith("base scores highest") and "No method beats the base team." in text


@pytest.mark.parametrize(("method", "name"), [("base", "The base team"), ("madpo", "madpo")])
def test_a_single_method_is_highest_of_nothing(method, name):
    text = answer_of(evaluation(**{method: 0.4}), with_methods(method))
    assert text.startswith(f"{name} has mean eval reward 0.52 [") and "No other method" in text
    assert "highest" not in text


def test_with_one_seed_the_intervals_are_over_items_and_say_so():
    rows = evaluation(base=0.4, madpo=0.6)
    text = answer_of(rows[rows["seed"] == 0], with_methods("base", "madpo", seeds=(0,)))
    assert "intervals over items of the one seed, and say nothing of how another seed would do" in text
    assert "intervals over seeds and items; with only" in answer_of(rows, SETTINGS)


def test_a_single_score_of_each_tells_nobody_apart():
    rows = evaluation(base=0.4, madpo=0.6)
    rows = rows[(rows["seed"] == 0) & (rows["task_id"] == "x")]
    text = answer_of(rows, with_methods("base", "madpo", seeds=(0,)))
    assert text.startswith("madpo and base cannot be told apart by a single score of each")
    assert "it has no interval" in text and "highest" not in text


def hard_item_fails(rows: pd.DataFrame) -> pd.DataFrame:
    """madpo is 0.05 worse than base on either item, but has no reward on the low item x with seed 0."""
    lost = (rows["method"] == "madpo") & (rows["task_id"] == "x") & (rows["seed"] == 0)
    return rows.assign(
        reward=rows["reward"].mask(lost),
        expected_return=rows["expected_return"].mask(lost),
        status=rows["status"].mask(lost, "timeout"),
    )


def test_methods_are_compared_where_both_have_a_reward_and_the_rest_is_counted():
    """Means over own cells: base (0.41 + 0.61 + 0.43 + 0.63) / 4 = 0.52, madpo (0.56 + 0.38 + 0.58) / 3 = 0.5067.

    On the three cells that both have: base (0.61 + 0.43 + 0.63) / 3 = 0.5567, madpo 0.5067, difference -0.05.
    """
    rows = hard_item_fails(evaluation(base=0.4, madpo=0.35))
    design = summary.design_of(rows, SETTINGS)
    base, madpo = summary.results(rows, design)
    assert (base.mean.value, madpo.mean.value) == (pytest.approx(0.52), pytest.approx(1.52 / 3))
    assert madpo.difference.value == pytest.approx(-0.05)
    assert madpo.scored.tolist() == [[0, 2], [2, 2]] and madpo.drawn.tolist() == [[2, 2], [2, 2]]
    text = " ".join(answer.headline([base, madpo], design))
    assert text.startswith("base scores highest: mean eval reward 0.56 [")
    assert "over the 3 of 4 cells (a seed on an item) in which every method has a reward" in text
    (told,) = [w for w in findings.warnings(rows, NO_LOGS, {}, [base, madpo], design) if "comparison with base" in w]
    assert "madpo: of 4 cells (a seed on an item) 1 are left out" in told
    assert "(1 without any reward for madpo), which is over the other 3" in told
    _, (_, row) = summary.method_table([base, madpo], design)
    assert row[1].endswith(", 3 of 4 cells") and row[3].endswith(", 3 of 4 cells")


def test_an_easier_share_of_the_items_wins_no_ranking():
    """Over its own cells madpo has the higher mean, 0.5567 against 0.52; on those that both have they are equal."""
    text = answer_of(hard_item_fails(evaluation(base=0.4, madpo=0.4)), SETTINGS)
    assert text.startswith("base and madpo tie: mean eval reward 0.56 [") and "highest" not in text


def test_reasons_for_what_is_left_out_are_counted_once_each():
    rows = hard_item_fails(evaluation(base=0.4, madpo=0.6))
    rows = rows[~((rows["method"] == "base") & (rows["seed"] == 1))]
    design = summary.design_of(rows, SETTINGS)
    found = summary.results(rows, design)
    (told,) = [w for w in findings.warnings(rows, NO_LOGS, {}, found, design) if "comparison with base" in w]
    assert "3 are left out" in told and "(1 without any reward for madpo, 2 not evaluated for base)" in told
    table = summary.summary_table(rows, NO_LOGS, design).set_index(["method", "seed"])
    assert table.loc[("madpo", 0), ["improvement_over_base", "items_compared"]].tolist() == [pytest.approx(0.2), 1]
    assert table.loc[("madpo", 1), "items_compared"] == 0 and table.loc[("base", 0), "items_compared"] == 0


def test_methods_that_share_no_cell_are_not_ranked():
    rows = evaluation(base=0.4, madpo=0.6)
    rows = rows[(rows["method"] == "base") == (rows["seed"] == 0)]
    text = answer_of(rows, SETTINGS)
    assert text.startswith("The methods cannot be ranked") and "base 0.51 [" in text and "madpo 0.73 [" in text


def test_a_difference_is_the_same_both_ways_round():
    rows = evaluation(base=0.4, madpo=0.6)
    rows["expected_return"] += np.linspace(0, 0.3, len(rows)) ** 2
    design = summary.design_of(rows, SETTINGS)
    base, madpo = summary.results(rows, design)
    there, back = summary.difference(madpo, base, design), summary.difference(base, madpo, design)
    assert there == madpo.difference
    assert (back.value, back.low, back.high) == pytest.approx((-there.value, -there.high, -there.low))


def test_the_accuracy_begins_where_not_every_pair_ties():
    place = {"kind": "method", "owner": "m", "seed": 0, "phase": "madpo", "round": 1, "turn": 0, "agent": -1}
    values = [(1, "ties", 1.0), (1, "accuracy", 0.0), (1, "loss", 0.7), (2, "ties", 0.5), (2, "accuracy", 0.5)]
    logs = pd.DataFrame([{**place, "step": step, "name": name, "value": value} for step, name, value in values])
    kept = summary.defined(logs)
    assert kept.loc[kept["name"] == "accuracy", "step"].tolist() == [2]
    assert len(kept) == 4


def flat_groups(owner: str, phase: str) -> pd.DataFrame:
    row = {"kind": "method", "owner": owner, "seed": 0, "phase": phase, "name": "zero_variance_share", "value": 0.9}
    return pd.DataFrame([row])


@pytest.mark.parametrize(
    ("algorithm", "is_told"), [("magrpo", True), ("maremax", True), ("mareinforce", False), ("maac", False)]
)
def test_equal_rewards_are_a_worry_only_where_responses_are_compared_with_each_other(algorithm, is_told):
    rows = evaluation(base=0.4, madpo=0.6)
    design = summary.design_of(rows, SETTINGS)
    found = summary.results(rows, design)
    text = "\n".join(findings.warnings(rows, flat_groups("madpo", algorithm), {}, found, design))
    assert ("of the training groups" in text) is is_told


def test_every_sign_of_trouble_is_named():
    rows = evaluation(base=0.4, madpo=0.6)
    rows = rows[~((rows["method"] == "madpo") & (rows["seed"] == 1))]
    rows["kl"] = [[3.0, 3.0] if method == "madpo" else [0.0, 0.0] for method in rows["method"]]
    still = {"name": "changed_share", "agent": 1, "value": 0.0}
    logs = pd.concat([flat_groups("madpo", "magrpo"), flat_groups("madpo", "magrpo").assign(**still)])
    design = summary.design_of(rows, SETTINGS)
    text = "\n".join(findings.warnings(rows, logs, {"default": 0.55}, summary.results(rows, design), design))
    assert "madpo: no evaluation for seed 1" in text
    assert "madpo: in 90.0 % of the training groups" in text
    assert "madpo: training changed no weight of agent_1 with seed 0" in text
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
