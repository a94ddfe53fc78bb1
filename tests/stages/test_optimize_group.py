"""Training by policy gradient on a reward model: the gradient of an update, what is logged, failures, and kills."""

import math
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl_stages.artifacts import open_work
from comlrl_stages.rollouts.single_turn import Context, joint_draws, prompt_items, sampling_parameters
from comlrl_stages.stages import optimize_group
from comlrl_stages.tasks.protocol import TaskSource, load_task
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.loading import load_model
from comlrl_stages.teams.reward_model import load_reward_model, score_joint
from comlrl_stages.teams.sampling import sample
from comlrl_stages.teams.team import load_team

from .conftest import PROMPTS, SAMPLING, counts_of, files_of, log_of, reinforcement_settings, rows_of

ITEMS = len(PROMPTS["train"])
WHOLE = 100  # items per step: all of them
JOINT = -1
CPU = Compute("cpu", "float32")
TEAM_NAMES = {
    "kl",
    "learning_rate",
    "loss",
    "reward_failed_share",
    "reward_mean",
    "reward_std",
    "task_reward_failed_share",
    "task_reward_mean",
    "zero_variance_share",
}
AGENT_NAMES = {
    "advantage_std",
    "entropy",
    "gradient_norm",
    "kl",
    "kl_clamped_tokens",
    "kl_penalty",
    "length_mean",
    "loss",
    "truncated_share",
}


class _Unpublished(Exception):
    pass


@contextmanager
def updates(pipeline, folder, settings, inputs=None, noise=0.0):
    """The team and the updates of a run, without the loop; `noise` moves the policy away from its reference."""
    inputs = {**pipeline.marlhf_inputs(), **(inputs or {})}
    with pytest.raises(_Unpublished), open_work("optimize", {}, inputs, {"policy": folder / "policy"}) as work:
        team = load_team(inputs["models"], work.digest("models"), settings.team, settings.compute, trainable=True)
        move(team, noise)
        algorithm = optimize_group.build(settings, work, team)
        try:
            yield team, algorithm
        finally:
            algorithm.close()
        raise _Unpublished


def move(team, noise):
    generator = torch.Generator().manual_seed(0)
    for parameter in (p for agent in team.agents for p in agent.model.parameters()):
        parameter.data += noise * torch.randn(parameter.shape, generator=generator)


def gradients(pipeline, folder, settings, **given):
    """Gradients of the first update by agent and parameter name, and its numbers."""
    with updates(pipeline, folder, settings, **given) as (team, algorithm):
        numbers = algorithm.train(0, lambda: None)
        found = [{n: p.grad for n, p in agent.model.named_parameters() if p.grad is not None} for agent in team.agents]
    return found, numbers


def assert_same_gradients(found, expected, tolerance=1e-5):
    for mine, theirs in zip(found, expected, strict=True):
        assert set(mine) == set(theirs)
        scale = max(gradient.abs().max().item() for gradient in theirs.values())
        assert scale > 0
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name].double(), gradient.double(), atol=tolerance * scale, rtol=1e-4)


def naive_gradients(pipeline, settings, noise):
    """Sample the first update's responses with the sampler, and follow the formula as it is written, in float64."""
    folders, digests = pipeline.models, [str(folder) for folder in pipeline.models]
    team = load_team(folders, digests, settings.team, settings.compute, trainable=True)
    move(team, noise)
    reference = [load_model(folder).model.double() for folder in folders]
    task = load_task(TaskSource(**settings.task.model_dump()))
    items, _ = prompt_items(team, task, rows_of(pipeline.train), settings.sampling.max_new_tokens, "error")
    draws = joint_draws(Context("policy", settings.round, 1), items, settings.generations, 2)
    parameters = sampling_parameters(settings.sampling)
    sampled = [
        sample(team.agents[draw.agent], [draw.request(settings.seed)], parameters, CPU, 512)[0].completion_ids
        for draw in draws
    ]
    policy = [agent.model.double() for agent in team.agents]

    def log_probs(model, prompt, completion):
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0] / settings.sampling.temperature
        values = logits.log_softmax(-1)
        return torch.stack([values[len(prompt) - 1 + place, token] for place, token in enumerate(completion)])

    rewards = learned_rewards(pipeline.reward_model, team, draws, sampled)
    loss, kls = 0.0, [0.0, 0.0]
    for agent in range(2):
        rows = [(d, ids) for d, ids in zip(draws, sampled, strict=True) if d.agent == agent]
        tokens = sum(len(ids) for _, ids in rows)
        for item in range(len(items)):
            own = rows[item * settings.generations : (item + 1) * settings.generations]
            values, returns = [], []
            for number, (draw, ids) in enumerate(own):
                prompt = draw.prompted.prompt_ids[agent]
                values.append(log_probs(policy[agent], prompt, ids))
                ratio = (log_probs(reference[agent], prompt, ids) - values[-1]).detach()
                kl = (ratio.exp() - ratio - 1).sum()
                kls[agent] += kl.item() / tokens
                returns.append(rewards[item * settings.generations + number] - settings.kl_coefficient * kl)
            mean = sum(returns) / len(returns)
            parts = [-(r - mean) * v.sum() for r, v in zip(returns, values, strict=True)]
            if settings.loss_reduction == "token_mean":
                loss = loss + sum(parts) / tokens
            else:
                loss = loss + sum(parts) / len(own) / len(items)
    loss.backward()
    found = [{n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in policy]
    return found, loss.item(), kls


def learned_rewards(folder, team, draws, sampled):
    reward_model = load_reward_model(folder)
    texts = [
        team.agents[draw.agent].tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for draw, ids in zip(draws, sampled, strict=True)
    ]
    joints = [
        reward_model.encode(draws[i].prompted.prompts, texts[i : i + 2]) for i in range(0, len(draws), 2)
    ]  # draws come by item, sample, agent
    return [score_joint(reward_model, [joint], CPU, 512)[0] for joint in joints]


# --- one update ---


@pytest.mark.parametrize(
    "options",
    [{"kl_coefficient": 0.5}, {"loss_reduction": "token_mean", "sampling": {**SAMPLING, "temperature": 0.7}}],
    ids=["sequence sum", "token mean at a temperature"],
)
def test_the_gradient_of_an_update_is_that_of_the_formula(mixed, tmp_path, options):
    settings = reinforcement_settings(items_per_step=WHOLE, **options)
    found, numbers = gradients(mixed, tmp_path, settings, noise=0.02)
    expected, loss, kls = naive_gradients(mixed, settings, noise=0.02)
    assert numbers.values[0, JOINT]["loss"] == pytest.approx(loss, rel=1e-3, abs=1e-4)
    assert [numbers.values[0, agent]["kl"] for agent in (0, 1)] == pytest.approx(kls, rel=1e-3)
    assert_same_gradients(found, expected)


def test_the_gradient_does_not_depend_on_micro_batches_and_their_padding(mixed, tmp_path):
    found = []
    for name, tokens in (("a", 64), ("b", 512), ("c", 8192)):
        settings = reinforcement_settings(
            items_per_step=WHOLE, compute={"training_tokens": tokens, "sampling_tokens": tokens}
        )
        found.append(gradients(mixed, tmp_path / name, settings, noise=0.02)[0])
    assert_same_gradients(found[0], found[1])
    assert_same_gradients(found[2], found[1])


def test_the_order_of_the_items_of_an_update_changes_nothing(mixed, tmp_path):
    """Advantages are within an item: another order of the minibatch leaves every one of them as it was."""
    found = []
    for method in ("one", "other"):  # the name is part of the stream that shuffles, and of no other
        settings = reinforcement_settings(items_per_step=WHOLE, method=method)
        found.append(gradients(mixed, tmp_path / method, settings, noise=0.02))
    for agent in (JOINT, 0, 1):
        values = [numbers.values[0, agent] for _, numbers in found]
        assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-5)
    assert_same_gradients(found[0][0], found[1][0])


def test_the_kl_is_taken_off_the_return_of_each_response(mixed, tmp_path):
    """With a constant reward the KL alone is left to learn from."""
    reward_model = mixed.new_reward_model(tmp_path, lambda loaded: loaded.model.head.weight.data.zero_())
    settings = reinforcement_settings(items_per_step=WHOLE, kl_coefficient=2.0)
    with_kl, numbers = gradients(mixed, tmp_path, settings, inputs={"reward_model": reward_model}, noise=0.02)
    own = numbers.values[0, 0]
    assert own["kl_penalty"] == pytest.approx(2.0 * own["kl"] * own["length_mean"]) and own["kl_penalty"] > 0
    assert all(any(gradient.norm() > 0 for gradient in agent.values()) for agent in with_kl)


# --- what is logged ---


@pytest.fixture(scope="module")
def outputs(every_pipeline, tmp_path_factory):
    return every_pipeline.marlhf(tmp_path_factory.mktemp("marlhf"), epochs=2, items_per_step=3)


def test_the_first_update_starts_at_the_reference(outputs):
    log = log_of(outputs["training_log"])
    for agent in (JOINT, 0, 1):
        assert 0 <= log[1, agent, "kl"] < 1e-6
    last = max(step for step, _, _ in log)
    assert log[last, 0, "kl"] > 1e-5 and log[last, 1, "kl"] > 1e-5


def test_every_name_is_logged_at_every_update(outputs):
    log = log_of(outputs["training_log"])
    last = max(step for step, _, _ in log)
    assert last == 2 * math.ceil(ITEMS / 3)
    for step in range(1, last + 1):
        names = {agent: {n for s, a, n in log if (s, a) == (step, agent)} for agent in (JOINT, 0, 1)}
        assert names[JOINT] == TEAM_NAMES
        for agent in (0, 1):
            assert names[agent] - {"changed_share"} == AGENT_NAMES
    assert all(math.isfinite(value) for value in log.values())
    assert all(log[last, agent, "changed_share"] > 0.5 for agent in (0, 1))


def test_joint_responses_are_counted_and_every_item_is_sampled_once_per_epoch(outputs):
    rows = rows_of(outputs["training_log"])
    steps = {row["step"]: row["env_step"] for row in rows}
    assert steps == {1: 9, 2: 12, 3: 21, 4: 24}  # 3 samples for 3 items, then for the one that is left, twice
    counts = counts_of(outputs["policy"])
    assert counts == {"dropped": {}, "steps": 4, "env_steps": 24, "tokens": rows[-1]["tokens"]}
    lengths = {(r["step"], r["agent"]): r["value"] for r in rows if r["name"] == "length_mean"}
    per_step = [9, 3, 9, 3]
    assert rows[-1]["tokens"] == pytest.approx(sum(lengths[s, a] * per_step[s - 1] for s, a in lengths))


def test_the_task_reward_is_logged_beside_the_learned_one(outputs):
    log = log_of(outputs["training_log"])
    assert 0 < log[1, JOINT, "task_reward_mean"] < 1
    assert log[1, JOINT, "task_reward_failed_share"] == log[1, JOINT, "reward_failed_share"] == 0
    assert log[1, JOINT, "zero_variance_share"] == 0


def test_a_failed_task_reward_is_left_out_of_its_mean_and_stops_nothing(mixed, tmp_path):
    task = tmp_path / "task.py"
    task.write_text("def reward(a, b):\n    return [float('nan') if len(a[0]) % 2 else 2.0]\n")
    settings = {"task": {"file": str(task), "object": None}, "items_per_step": WHOLE, "generations": 4}
    log = log_of(mixed.marlhf(tmp_path, **settings)["training_log"])
    assert log[1, JOINT, "task_reward_mean"] == 2.0
    assert 0 < log[1, JOINT, "task_reward_failed_share"] < 1


# --- rewards that teach nothing, or fail ---


def test_a_constant_reward_model_has_zero_variance_everywhere_and_moves_nothing(mixed, tmp_path):
    reward_model = mixed.new_reward_model(tmp_path, lambda loaded: loaded.model.head.weight.data.zero_())
    inputs = {"reward_model": reward_model}
    settings = {"kl_coefficient": 0.0}
    found, numbers = gradients(mixed, tmp_path, reinforcement_settings(**settings), inputs=inputs)
    assert numbers.values[0, JOINT]["zero_variance_share"] == 1.0
    assert all((gradient == 0).all() for agent in found for gradient in agent.values())
    log = log_of(mixed.marlhf(tmp_path / "run", inputs=inputs, **settings)["training_log"])
    assert [value for (_, _, name), value in log.items() if name == "changed_share"] == [0.0, 0.0]


def nan_for_token(pipeline, folder, token):
    """A reward model whose score is NaN for every text that holds a token."""

    def poison(loaded):
        loaded.model.backbone.get_input_embeddings().weight.data[token] = math.nan

    return pipeline.new_reward_model(folder, poison)


def test_a_reward_that_is_not_finite_is_left_out_and_its_siblings_train(mixed, tmp_path):
    token = rare_token(mixed)
    inputs = {"reward_model": nan_for_token(mixed, tmp_path, token)}
    settings = reinforcement_settings(items_per_step=WHOLE, generations=4)
    found, numbers = gradients(mixed, tmp_path, settings, inputs=inputs, noise=0.02)
    team = numbers.values[0, JOINT]
    assert 0 < team["reward_failed_share"] < 1
    assert math.isfinite(team["reward_mean"]) and math.isfinite(team["reward_std"]) and math.isfinite(team["loss"])
    assert all(gradient.isfinite().all() for agent in found for gradient in agent.values())
    log = log_of(mixed.marlhf(tmp_path / "run", inputs=inputs, items_per_step=WHOLE, generations=4)["training_log"])
    assert all(log[1, agent, "changed_share"] > 0.5 for agent in (0, 1))


def rare_token(pipeline):
    """A token that some, but not all, of the first update's joint responses hold in the reward model's eyes."""
    tokenizer = load_model(pipeline.models[0]).tokenizer
    prompt = {token for row in rows_of(pipeline.completions) for token in tokenizer(row["prompt"])["input_ids"]}
    texts = [row["text"] for row in rows_of(pipeline.completions)]
    held = [set(tokenizer(text, add_special_tokens=False)["input_ids"]) - prompt for text in texts]
    shares = {token: sum(token in ids for ids in held) / len(held) for ids in held for token in ids}
    return max((token for token, share in shares.items() if share < 0.3), key=shares.__getitem__)


# --- the policy that comes out ---


@pytest.mark.parametrize(("stop_after", "checkpoint_interval"), [(1, 1), (3, 2)])
def test_a_killed_run_goes_on_to_the_same_bytes(mixed, outputs_of_mixed, tmp_path, stop_after, checkpoint_interval):
    given = {"epochs": 2, "items_per_step": 3, "checkpoint_interval": checkpoint_interval}
    with pytest.raises(KeyboardInterrupt):
        mixed.marlhf(tmp_path, stop_after=stop_after, **given)
    assert not (tmp_path / "policy").exists()
    resumed = mixed.marlhf(tmp_path, **given)
    assert files_of(*resumed.values()) == files_of(*outputs_of_mixed.values())


@pytest.fixture(scope="module")
def outputs_of_mixed(mixed, tmp_path_factory):
    given = {"epochs": 2, "items_per_step": 3, "checkpoint_interval": 50}
    return mixed.marlhf(tmp_path_factory.mktemp("whole"), **given)


def test_the_policy_loads_with_from_pretrained_in_float32_and_has_moved(every_pipeline, outputs):
    for agent, folder in enumerate(every_pipeline.models):
        trained = outputs["policy"] / f"agent_{agent}"
        after = AutoModelForCausalLM.from_pretrained(trained).state_dict()
        AutoTokenizer.from_pretrained(trained)
        before = load_model(folder).model.state_dict()
        assert {weight.dtype for weight in after.values()} == {torch.float32}
        assert any(not torch.equal(weight, before[name]) for name, weight in after.items())


def test_bfloat16_trains_float32_weights_without_nan(mixed, tmp_path):
    outputs = mixed.marlhf(tmp_path, compute={"compute_dtype": "bfloat16"})
    log = log_of(outputs["training_log"])
    assert all(math.isfinite(value) for value in log.values())
    assert log[1, JOINT, "kl"] < 0.01
    weights = load_model(outputs["policy"] / "agent_0").model.state_dict()
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert all(log[2, agent, "changed_share"] > 0.5 for agent in (0, 1))


def test_models_sampled_in_bfloat16_still_start_at_kl_zero(mixed, tmp_path):
    settings = reinforcement_settings(team={"weights_dtypes": ["bfloat16", "bfloat16"]})
    _, numbers = gradients(mixed, tmp_path, settings)
    assert numbers.values[0, JOINT]["kl"] < 1e-6


def test_items_without_room_are_counted(mixed, tmp_path):
    sampling = {"max_new_tokens": 90, "overflow": "drop"}
    counts = counts_of(mixed.marlhf(tmp_path, sampling=sampling)["policy"])
    assert counts["dropped"]["prompt_too_long"] > 0
    assert counts["env_steps"] == 3 * (ITEMS - counts["dropped"]["prompt_too_long"])
