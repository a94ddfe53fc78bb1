"""Training by MADPO: the gradient of an update, what is logged, and that a kill changes nothing."""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl_stages.artifacts import COMPLETIONS, REFERENCE_LOG_PROBS, TRAINING_PAIRS, open_work, table_of
from comlrl_stages.errors import UserError
from comlrl_stages.preferences.joint_responses import SIDES
from comlrl_stages.stages import optimize_madpo
from comlrl_stages.teams.loading import load_model
from comlrl_stages.teams.team import load_team

from .conftest import counts_of, files_of, log_of, madpo_settings, publish_table, rows_of

WHOLE = 100  # a minibatch that holds every pair
JOINT = -1
TEAM_NAMES = {
    "accuracy",
    "gradient_norm",
    "kl",
    "learning_rate",
    "loser_log_prob",
    "loss",
    "margin",
    "ties",
    "winner_log_prob",
}
AGENT_NAMES = TEAM_NAMES - {"loss", "learning_rate"} | {"entropy", "length_mean"}


@contextmanager
def updates(pipeline, folder, settings, inputs=None, noise=0.0):
    """The team and the updates of a run, without the loop; `noise` moves the policy away from its reference."""
    inputs = {**pipeline.madpo_inputs(), **(inputs or {})}
    with pytest.raises(_Unpublished), open_work("optimize", {}, inputs, {"policy": folder / "policy"}) as work:
        team = load_team(inputs["models"], work.digest("models"), settings.team, settings.compute, trainable=True)
        generator = torch.Generator().manual_seed(0)
        for parameter in (p for agent in team.agents for p in agent.model.parameters()):
            parameter.data += noise * torch.randn(parameter.shape, generator=generator)
        yield team, optimize_madpo.build(settings, work, team)
        raise _Unpublished


class _Unpublished(Exception):
    pass


def gradients(pipeline, folder, settings, **given):
    """Gradients of the first update by agent and parameter name, and its numbers."""
    with updates(pipeline, folder, settings, **given) as (team, algorithm):
        numbers = algorithm.train(0, lambda: None)
        found = [{n: p.grad for n, p in agent.model.named_parameters() if p.grad is not None} for agent in team.agents]
    return found, numbers


def naive_gradients(pipeline, settings, noise):
    """The formula as it is written, in float64: each response alone, the others' margins as constants."""
    by_key = {(r["task_id"], r["sample"], r["agent"]): r for r in rows_of(pipeline.completions)}
    pairs = rows_of(pipeline.pairs)
    agents = range(2)
    policy = [load_model(folder).model for folder in pipeline.models]
    generator = torch.Generator().manual_seed(0)
    for parameter in (p for model in policy for p in model.parameters()):
        parameter.data += noise * torch.randn(parameter.shape, generator=generator)
    policy = [model.double() for model in policy]
    reference = [load_model(folder).model.double() for folder in pipeline.models]

    def log_prob(model, row):
        ids = torch.tensor([[*row["prompt_ids"], *row["completion_ids"]]])
        log_probs = (model(input_ids=ids).logits[0] / settings.temperature).log_softmax(-1)
        start = len(row["prompt_ids"])
        return sum(log_probs[start - 1 + place, token] for place, token in enumerate(row["completion_ids"]))

    loss = 0.0
    for pair in pairs:
        margins = []
        for agent in agents:
            winner, loser = (by_key[pair["task_id"], pair[side]["joint"], agent] for side in SIDES)
            values = [log_prob(policy[agent], row) for row in (winner, loser)]
            if settings.loss == "simpo":
                values = [v / len(row["completion_ids"]) for v, row in zip(values, (winner, loser), strict=True)]
            margin = values[0] - values[1]
            if settings.reference != "none":
                margin = margin - (log_prob(reference[agent], winner) - log_prob(reference[agent], loser)).detach()
            margins.append(margin)
        for agent in agents:
            others = sum(margins[other].detach() for other in agents if other != agent)
            loss = loss + naive_loss(settings, margins[agent] + others) / len(pairs)
    loss.backward()
    return [{n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in policy], loss.item() / 2


def naive_loss(settings, joint):
    if settings.loss == "ipo":
        return (joint - 1 / (2 * settings.beta)) ** 2
    if settings.loss == "simpo":
        return -F.logsigmoid(settings.beta * joint - settings.gamma)
    flipped = settings.label_smoothing
    logits = settings.beta * joint
    return -(1 - flipped) * F.logsigmoid(logits) - flipped * F.logsigmoid(-logits)


def assert_same_gradients(found, expected, tolerance=1e-5):
    for mine, theirs in zip(found, expected, strict=True):
        assert set(mine) == set(theirs)
        scale = max(gradient.abs().max().item() for gradient in theirs.values())
        assert scale > 0
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name].double(), gradient.double(), atol=tolerance * scale, rtol=1e-4)


# --- one update ---


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "label_smoothing": 0.2},
        {"loss": "ipo"},
        {"loss": "simpo", "reference": "none", "beta": 2.0, "gamma": 0.5},
        {"reference": "none"},
    ],
    ids=["sigmoid", "smoothing at a temperature", "ipo", "simpo", "no reference"],
)
def test_the_gradient_of_an_update_is_that_of_the_formula(mixed, tmp_path, options):
    settings = madpo_settings(batch_size=WHOLE, **options)
    inputs = {}
    if settings.temperature != 1.0:
        inputs["reference_log_probs"] = mixed.refer(tmp_path / "refer", temperature=settings.temperature)
    found, numbers = gradients(mixed, tmp_path, settings, inputs=inputs, noise=0.02)
    expected, loss = naive_gradients(mixed, settings, noise=0.02)
    assert numbers.values[0, JOINT]["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("training_tokens", [64, 8192])
def test_the_gradient_does_not_depend_on_micro_batches_and_their_padding(mixed, tmp_path, training_tokens):
    usual, _ = gradients(mixed, tmp_path / "a", madpo_settings(batch_size=WHOLE), noise=0.02)
    settings = madpo_settings(batch_size=WHOLE, compute={"training_tokens": training_tokens})
    found, _ = gradients(mixed, tmp_path / "b", settings, noise=0.02)
    assert_same_gradients(found, usual)


def test_the_order_inside_a_minibatch_changes_nothing(mixed, tmp_path):
    numbers = []
    found = []
    for method in ("one", "other"):  # the name is part of the stream that shuffles
        settings = madpo_settings(batch_size=WHOLE, method=method)
        gradient, number = gradients(mixed, tmp_path / method, settings, noise=0.02)
        found.append(gradient)
        numbers.append(number.values[0, JOINT])
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)
    assert_same_gradients(*found)


def test_an_agents_gradient_weighs_by_the_margin_of_the_whole_team(mixed, tmp_path):
    """With the other agent far ahead on every pair, the pair is decided and little is left to learn."""
    rows = rows_of(mixed.reference_log_probs)
    ahead = [
        {**r, "log_prob_sum": r["log_prob_sum"] - 200.0 * (r["agent"] == 1 and r["side"] == "winner")} for r in rows
    ]
    table = publish_table(tmp_path / "ahead.parquet", table_of(ahead, REFERENCE_LOG_PROBS), REFERENCE_LOG_PROBS)
    usual, _ = gradients(mixed, tmp_path / "a", madpo_settings(batch_size=WHOLE))
    decided, _ = gradients(
        mixed, tmp_path / "b", madpo_settings(batch_size=WHOLE), inputs={"reference_log_probs": table}
    )
    for name, gradient in decided[0].items():
        assert gradient.norm() < 1e-6 * max(usual[0][name].norm(), 1e-3)


# --- what is logged ---


@pytest.fixture(scope="module")
def start(every_pipeline, tmp_path_factory):
    """The log of a run whose policy hardly leaves its reference."""
    outputs = every_pipeline.madpo(tmp_path_factory.mktemp("start"), learning_rate=1e-7)
    return log_of(outputs["training_log"])


def test_a_policy_equal_to_its_reference_has_loss_ln_2_kl_0_and_ties_only(start):
    assert start[1, JOINT, "loss"] == pytest.approx(math.log(2), abs=1e-6)
    for agent in (JOINT, 0, 1):
        assert start[1, agent, "kl"] == pytest.approx(0.0, abs=1e-6)
        assert start[1, agent, "margin"] == 0.0
        assert (start[1, agent, "ties"], start[1, agent, "accuracy"]) == (1.0, 0.0)


def test_training_raises_the_margin_and_lowers_the_loss(every_pipeline, tmp_path):
    log = log_of(every_pipeline.madpo(tmp_path, epochs=3)["training_log"])
    last = max(step for step, _, _ in log)
    assert log[last, JOINT, "loss"] < 0.3 < log[1, JOINT, "loss"]
    assert log[last, JOINT, "margin"] > 5.0
    assert log[last, JOINT, "accuracy"] == 1.0
    for agent in (0, 1):
        assert log[last, agent, "winner_log_prob"] > log[last, agent, "loser_log_prob"]
        assert log[last, agent, "changed_share"] > 0.5


def test_every_name_is_logged_at_every_update(start):
    last = max(step for step, _, _ in start)
    for step in range(1, last + 1):
        names = {agent: {n for s, a, n in start if (s, a) == (step, agent)} for agent in (JOINT, 0, 1)}
        assert names[JOINT] == TEAM_NAMES - {"gradient_norm"}
        for agent in (0, 1):
            assert names[agent] - {"changed_share"} == AGENT_NAMES
    assert all(math.isfinite(value) for value in start.values())


def test_without_a_reference_there_is_no_kl_and_the_margin_is_that_of_the_policy(mixed, tmp_path):
    inputs = {"reference_log_probs": None}
    log = log_of(mixed.madpo(tmp_path, reference="none", learning_rate=1e-7, inputs=inputs)["training_log"])
    assert not [name for _, _, name in log if name == "kl"]
    difference = log[1, JOINT, "winner_log_prob"] - log[1, JOINT, "loser_log_prob"]
    assert log[1, JOINT, "margin"] == pytest.approx(difference, abs=1e-3)


@pytest.mark.parametrize("epochs", [1, 2])
def test_each_pair_trains_once_per_epoch(mixed, tmp_path, epochs):
    outputs = mixed.madpo(tmp_path, epochs=epochs, batch_size=5)
    pairs = len(rows_of(mixed.pairs))
    rows = rows_of(outputs["training_log"])
    assert rows[-1]["step"] == epochs * math.ceil(pairs / 5)
    assert rows[-1]["tokens"] == epochs * counts_of(mixed.reference_log_probs)["tokens"]
    assert {row["env_step"] for row in rows} == {0}
    assert counts_of(outputs["policy"]) == {"steps": rows[-1]["step"], "env_steps": 0, "tokens": rows[-1]["tokens"]}


def test_fewer_pairs_than_a_minibatch_are_one_update(mixed, tmp_path):
    rows = rows_of(mixed.training_pairs)[:2]
    table = publish_table(tmp_path / "few.parquet", table_of(rows, TRAINING_PAIRS), TRAINING_PAIRS)
    outputs = mixed.madpo(tmp_path, batch_size=16, inputs={"training_pairs": table})
    log = log_of(outputs["training_log"])
    assert {step for step, _, _ in log} == {1}
    assert log[1, JOINT, "loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_epochs_have_orders_of_their_own(mixed, tmp_path):
    with updates(mixed, tmp_path, madpo_settings(batch_size=4, epochs=2)) as (_, algorithm):
        tokens = [algorithm.train(step, lambda: None).tokens for step in range(algorithm.total_steps)]
    half = len(tokens) // 2
    assert sum(tokens[:half]) == sum(tokens[half:]) and tokens[:half] != tokens[half:]


# --- the policy that comes out ---


@pytest.mark.parametrize(("stop_after", "checkpoint_interval"), [(1, 2), (4, 1), (5, 3)])
def test_a_killed_run_goes_on_to_the_same_bytes(mixed, tmp_path, stop_after, checkpoint_interval):
    whole = mixed.madpo(tmp_path / "whole", epochs=2, decay="linear", checkpoint_interval=50)
    given = {"epochs": 2, "decay": "linear", "checkpoint_interval": checkpoint_interval}
    with pytest.raises(KeyboardInterrupt):
        mixed.madpo(tmp_path / "killed", stop_after=stop_after, **given)
    assert not (tmp_path / "killed" / "policy").exists()
    resumed = mixed.madpo(tmp_path / "killed", **given)
    assert files_of(*resumed.values()) == files_of(*whole.values())


def test_the_policy_loads_with_from_pretrained_in_float32_and_has_moved(every_pipeline):
    for agent, folder in enumerate(every_pipeline.models):
        trained = every_pipeline.trained["policy"] / f"agent_{agent}"
        model = AutoModelForCausalLM.from_pretrained(trained)
        AutoTokenizer.from_pretrained(trained)
        before = load_model(folder).model.state_dict()
        after = model.state_dict()
        assert {weight.dtype for weight in after.values()} == {torch.float32}
        assert any(not torch.equal(weight, before[name]) for name, weight in after.items())
        assert load_model(trained).facts == load_model(folder).facts


def test_agents_of_one_model_become_two_policies(pipeline):
    digests = [
        files["sha256"] for name, files in files_of(pipeline.trained["policy"])[0].items() if "safetensors" in name
    ]
    assert len(digests) == len(set(digests)) == 2


def test_a_learning_rate_lost_to_rounding_is_an_error(mixed, tmp_path):
    with pytest.raises(UserError, match=r"agent_0: no weight changed .*learning rate 1e-30 is too small"):
        mixed.madpo(tmp_path, learning_rate=1e-30)
    assert not (tmp_path / "policy").exists()


def test_bfloat16_trains_float32_weights_without_nan(mixed, tmp_path):
    outputs = mixed.madpo(tmp_path, compute={"compute_dtype": "bfloat16"})
    log = log_of(outputs["training_log"])
    assert all(math.isfinite(value) for value in log.values())
    assert log[1, JOINT, "loss"] == pytest.approx(math.log(2), abs=0.05)
    weights = load_model(outputs["policy"] / "agent_0").model.state_dict()
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert all(log[max(s for s, _, _ in log), agent, "changed_share"] > 0.5 for agent in (0, 1))


def test_models_sampled_in_bfloat16_still_start_at_loss_ln_2(mixed, tmp_path):
    team = {"weights_dtypes": ["bfloat16", "bfloat16"]}
    inputs = {"reference_log_probs": mixed.refer(tmp_path, team=team)}
    log = log_of(mixed.madpo(tmp_path, team=team, inputs=inputs)["training_log"])
    assert log[1, JOINT, "loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_an_empty_response_is_defined_as_log_prob_zero(mixed, tmp_path):
    """Foreign text may be empty; a sampled response never is."""
    pair = rows_of(mixed.pairs)[0]
    empty = pair["task_id"], pair["winner"]["joint"]
    rows = [
        {**r, "completion_ids": []} if (r["task_id"], r["sample"]) == empty else r for r in rows_of(mixed.completions)
    ]
    table = publish_table(tmp_path / "completions.parquet", table_of(rows, COMPLETIONS), COMPLETIONS)
    inputs = {"completions": table}
    inputs["reference_log_probs"] = mixed.refer(tmp_path, inputs=inputs)
    sums = [
        r["log_prob_sum"]
        for r in rows_of(inputs["reference_log_probs"])
        if (r["pair_id"], r["side"]) == (pair["pair_id"], "winner")
    ]
    assert sums == [0.0, 0.0]
    log = log_of(mixed.madpo(tmp_path, inputs=inputs, batch_size=1)["training_log"])
    assert log[1, JOINT, "loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert all(math.isfinite(value) for value in log.values())


# --- tables that do not belong together ---


def changed_reference(pipeline, folder, change):
    rows = [found for row in rows_of(pipeline.reference_log_probs) if (found := change(row))]
    return publish_table(folder / "changed.parquet", table_of(rows, REFERENCE_LOG_PROBS), REFERENCE_LOG_PROBS)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: {**r, "reference_digest": "f" * 64}, "come from another model than the one that is trained"),
        (lambda r: r if r["side"] == "winner" else None, r"tokens, but the completions have"),
        (lambda r: {**r, "tokens": r["tokens"] + 1}, "belong to other pairs or completions"),
    ],
    ids=["another model", "a side is missing", "other lengths"],
)
def test_reference_log_probs_of_something_else_are_refused(mixed, tmp_path, change, told):
    inputs = {"reference_log_probs": changed_reference(mixed, tmp_path, change)}
    with pytest.raises(UserError, match=f"{told}.*Run the refer stage again"):
        mixed.madpo(tmp_path, inputs=inputs)


def test_reference_log_probs_are_found_by_pair_and_not_by_position(mixed, tmp_path):
    rows = rows_of(mixed.reference_log_probs)[::-1]
    table = publish_table(tmp_path / "reversed.parquet", table_of(rows, REFERENCE_LOG_PROBS), REFERENCE_LOG_PROBS)
    log = log_of(mixed.madpo(tmp_path, inputs={"reference_log_probs": table})["training_log"])
    assert log[1, JOINT, "loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_a_training_pair_that_is_no_pair_is_named(mixed, tmp_path):
    rows = [{**row, "pair_id": "gone"} for row in rows_of(mixed.training_pairs)[:1]]
    table = publish_table(tmp_path / "gone.parquet", table_of(rows, TRAINING_PAIRS), TRAINING_PAIRS)
    with pytest.raises(UserError, match=r"names the pair gone, which .*pairs.parquet does not hold"):
        mixed.madpo(tmp_path, inputs={"training_pairs": table})
