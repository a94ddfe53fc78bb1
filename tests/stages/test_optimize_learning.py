"""Every algorithm learns: teams of two families, of one to three agents, with shared weights, and other critics."""

import json
import math

import pytest

from comlrl_stages.teams.critics import load_critic
from comlrl_stages.teams.loading import load_model

from .conftest import (
    Pipeline,
    counting_characters,
    files_of,
    log_of,
    rows_of,
    team_settings,
    weigh_words,
)

JOINT = -1
#: Eight steps, each on all items.
LEARNING = {"generations": 8, "items_per_step": 4, "epochs": 8, "learning_rate": 5e-3, "kl_coefficient": 0.0}
BACKENDS = ("magrpo", "marloo", "maremax", "mareinforce", "iac", "maac")


def assert_learned(outputs, deviations=1.0):
    """The reward of the last step is clearly above that of the first, and every agent has moved."""
    log = log_of(outputs["training_log"])
    assert all(math.isfinite(value) for value in log.values())
    last = max(step for step, _, _ in log)
    gained = log[last, JOINT, "reward_mean"] - log[1, JOINT, "reward_mean"]
    assert gained > deviations * log[1, JOINT, "reward_std"]
    assert all(value > 0.5 for (_, _, name), value in log.items() if name == "changed_share")
    return log


# --- a team of two families ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", BACKENDS)
def test_each_algorithm_learns_on_the_tasks_reward(mixed, tmp_path, algorithm):
    task = counting_characters(tmp_path)
    log = assert_learned(mixed.reinforce(tmp_path, task=task, algorithm=algorithm, **LEARNING), deviations=1.5)
    assert all(log[8, agent, "length_mean"] > log[1, agent, "length_mean"] for agent in (0, 1))


@pytest.mark.parametrize(
    "kind",
    [
        {"algorithm": "iac", "critic": "shared"},
        {"algorithm": "iac", "critic": "shared", "critic_type": "q", "value_hidden": 16, "epochs": 12},
        {"algorithm": "maac", "critic_type": "q"},
        {"algorithm": "magrpo", "joint_mode": "cross", "generations": 4},
        {"algorithm": "magrpo", "loss_reduction": "token_mean", "normalise_advantages": True},
    ],
    ids=str,
)
def test_each_kind_of_an_algorithm_learns(mixed, tmp_path, kind):
    task = counting_characters(tmp_path)
    assert_learned(mixed.reinforce(tmp_path, task=task, **{**LEARNING, **kind}))


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_learns_on_a_reward_model(mixed, tmp_path, backend):
    inputs = {"reward_model": mixed.new_reward_model(tmp_path, weigh_words)}
    log = assert_learned(mixed.marlhf(tmp_path, inputs=inputs, algorithm=backend, **LEARNING))
    assert {"task_reward_mean", "task_reward_failed_share"} <= {name for _, agent, name in log if agent == JOINT}


def test_madpo_learns_to_tell_the_winners(mixed, tmp_path):
    log = log_of(mixed.madpo(tmp_path, epochs=8, learning_rate=3e-3)["training_log"])
    last = max(step for step, _, _ in log)
    assert log[1, JOINT, "loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert log[last, JOINT, "loss"] < 0.8 * math.log(2)
    assert log[last, JOINT, "accuracy"] == 1.0


def test_both_agents_keep_their_own_architecture_and_vocabulary(mixed, tmp_path):
    made = mixed.reinforce(tmp_path, algorithm="maac")
    for agent, kind in enumerate(("llama", "gpt2")):
        folder = made["policy"] / f"agent_{agent}"
        assert json.loads((folder / "config.json").read_text())["model_type"] == kind
        assert load_model(folder).tokenizer.get_vocab() == load_model(mixed.models[agent]).tokenizer.get_vocab()


# --- critics of other models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic_type", ["v", "q"])
def test_critics_of_another_family_read_text_and_help_to_learn(mixed, tmp_path, critic_type):
    given = {**LEARNING, "task": counting_characters(tmp_path), "critic_type": critic_type}
    inputs = {"critic_models": mixed.models[::-1]}
    made = mixed.reinforce(tmp_path, algorithm="iac", inputs=inputs, critic_learning_rate=3e-3, **given)
    log = assert_learned(made)
    for agent, kind in enumerate(("gpt2", "llama")):
        critic = made["policy"] / "critics" / f"critic_{agent}"
        assert json.loads((critic / "config.json").read_text())["model_type"] == kind
        actor, loaded = load_model(mixed.models[agent]), load_critic(critic)
        prompt = actor.tokenizer("the owl")["input_ids"]
        read = loaded.tokenizer.decode(loaded.own_input(actor, "the owl", prompt).ids)
        assert "User 0:\nthe owl" in read, "its own ids of the text, not the actor's ids"
        assert log[8, agent, "value_loss"] < log[1, agent, "value_loss"]


def test_the_central_critic_can_be_of_any_family(mixed, tmp_path):
    given = {**LEARNING, "task": counting_characters(tmp_path)}
    inputs = {"critic_models": [mixed.models[1]]}
    made = mixed.reinforce(tmp_path, algorithm="maac", inputs=inputs, **given)
    assert_learned(made)
    assert json.loads((made["policy"] / "critics/critic/config.json").read_text())["model_type"] == "gpt2"


# --- teams of other sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("agents", [1, 3])
@pytest.mark.parametrize("algorithm", ["magrpo", "iac", "maac"])
def test_teams_of_other_sizes_learn(mixed, tmp_path, agents, algorithm):
    models = [mixed.models[agent % 2] for agent in range(agents)]
    pipeline = Pipeline(tmp_path / "pipeline", models)
    given = {**LEARNING, "epochs": 7, "task": counting_characters(tmp_path, agents), "team": team_settings(agents)}
    made = pipeline.reinforce(tmp_path, algorithm=algorithm, **given)
    log = assert_learned(made)
    assert {agent for _, agent, name in log if name == "length_mean"} == set(range(agents))
    found = {path.name for path in made["policy"].glob("agent_*")}
    assert found == {f"agent_{agent}" for agent in range(agents)}
    critics = {"magrpo": set(), "iac": {f"critic_{agent}" for agent in range(agents)}, "maac": {"critic"}}
    assert {path.name for path in (made["policy"] / "critics").glob("*")} == critics[algorithm]


def test_three_agents_of_two_families_in_cross_have_every_combination(mixed, tmp_path):
    pipeline = Pipeline(tmp_path / "pipeline", [*mixed.models, mixed.models[0]])
    given = {"task": counting_characters(tmp_path, 3), "team": team_settings(3), "items_per_step": 4}
    made = pipeline.reinforce(tmp_path, generations=2, joint_mode="cross", **given)
    assert rows_of(made["training_log"])[-1]["env_step"] == 4 * 2**3


# --- shared weights and rates of each agent -----------------------------------------------------------------------


SHARED = {"team": team_settings(2, share_weights=True)}


@pytest.mark.parametrize(
    "kind",
    [{"algorithm": "magrpo"}, {"algorithm": "iac", "critic": "shared"}, {"algorithm": "maac"}],
    ids=str,
)
def test_agents_that_share_weights_learn_as_one_model(pipeline, tmp_path, kind):
    task = counting_characters(tmp_path)
    made = pipeline.reinforce(tmp_path, task=task, **LEARNING, **SHARED, **kind)
    log = assert_learned(made)
    assert {agent for _, agent, name in log if name == "gradient_norm"} == {0}, "one model, one optimizer"
    files = {agent: sorted((made["policy"] / f"agent_{agent}").iterdir()) for agent in (0, 1)}
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(files[0], files[1], strict=True))


def test_the_gradient_of_shared_weights_is_the_sum_of_the_agents(pipeline, tmp_path):
    """A step of plain descent would show it; AdamW's first step only shows the sign, so gradient norms are compared."""
    given = {"task": counting_characters(tmp_path), "max_gradient_norm": None, "generations": 4}
    together = log_of(pipeline.reinforce(tmp_path / "together", **given, **SHARED)["training_log"])
    apart = log_of(pipeline.reinforce(tmp_path / "apart", **given)["training_log"])
    assert together[1, JOINT, "loss"] == pytest.approx(apart[1, JOINT, "loss"], rel=1e-5)
    norms = [apart[1, agent, "gradient_norm"] for agent in (0, 1)]
    assert abs(norms[0] - norms[1]) < together[1, 0, "gradient_norm"] <= sum(norms) + 1e-5


def test_each_agent_has_its_own_learning_rate(mixed, tmp_path):
    made = mixed.reinforce(tmp_path, learning_rate=[1e-3, 1e-6], algorithm="iac", critic_learning_rate=1e-4)
    moved = []
    for agent, folder in enumerate(mixed.models):
        before, after = load_model(folder).model, load_model(made["policy"] / f"agent_{agent}").model
        changes = [
            (one - other).abs().max().item() for one, other in zip(before.parameters(), after.parameters(), strict=True)
        ]
        moved.append(max(changes))
    steps = 2
    assert moved[0] == pytest.approx(1e-3 * steps, rel=0.3), "AdamW moves by about its rate in each of its first steps"
    assert moved[1] == pytest.approx(1e-6 * steps, rel=0.3)


def test_the_same_settings_give_the_same_bytes(mixed, tmp_path):
    made = [mixed.reinforce(tmp_path / name, algorithm="maac", critic_type="q") for name in ("a", "b")]
    assert files_of(*made[0].values()) == files_of(*made[1].values())
