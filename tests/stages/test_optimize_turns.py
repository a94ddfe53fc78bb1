"""Training over several turns: what is logged, and credit that reaches the first turn through the discount."""

import math
from contextlib import contextmanager

import pytest

from comlrl_stages.artifacts import open_work
from comlrl_stages.learning.optimization import adamw
from comlrl_stages.rollouts.episodes import nodes_of
from comlrl_stages.stages.optimize_actor_critic import ActorCriticUpdates
from comlrl_stages.stages.optimize_estimators import build_estimators
from comlrl_stages.stages.optimize_group import GroupUpdates
from comlrl_stages.stages.optimize_rollouts import Rollouts
from comlrl_stages.tasks.scoring import JointReward
from comlrl_stages.teams.team import load_team

from .conftest import files_of, reinforcement_settings, rows_of

JOINT = -1
TASK = """
def reward(first, second):
    return [float(len(a) - len(b)) / 50.0 for a, b in zip(first, second)]

def transition(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
    return [f"{prompt} again"] * num_agents
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "turns.py"
    path.write_text(TASK, encoding="utf-8")
    return {"file": str(path), "object": None}


def turns_of(outputs, name):
    """Values of the team's numbers by turn, at the first step."""
    rows = rows_of(outputs["training_log"])
    return {r["turn"]: r["value"] for r in rows if (r["step"], r["agent"], r["name"]) == (1, JOINT, name)}


@pytest.mark.parametrize(
    ("options", "nodes", "env_steps"),
    [
        ({"algorithm": "magrpo", "generations": 2}, 2, 2 + 4),
        ({"algorithm": "magrpo", "generations": 2, "joint_mode": "cross"}, 4, 4 + 16),
        ({"algorithm": "maac", "generations": 3}, 3, 3 + 3),
        ({"algorithm": "iac", "generations": 1, "critic": "shared"}, 1, 1 + 1),
    ],
    ids=["aligned tree", "cross tree", "maac trajectories", "iac trajectory"],
)
def test_turns_are_counted_and_logged(mixed, tmp_path, task, options, nodes, env_steps):
    made = mixed.reinforce(tmp_path, task=task, episode={"turns": 2}, items_per_step=4, **options)
    rows = rows_of(made["training_log"])
    assert rows[-1]["env_step"] == 4 * env_steps
    assert turns_of(made, "nodes") == {1: 4, 2: 4 * nodes}
    rewards, returns = turns_of(made, "reward_mean"), turns_of(made, "expected_return")
    assert returns[2] == pytest.approx(rewards[2])
    assert returns[1] == pytest.approx(rewards[1] + rewards[2])
    assert all(math.isfinite(row["value"]) for row in rows)


def test_the_kl_of_each_turn_adds_up_to_that_of_the_step(mixed, tmp_path, task):
    made = mixed.reinforce(tmp_path, task=task, episode={"turns": 2}, epochs=2, learning_rate=1e-2, kl_coefficient=0.5)
    rows = [row for row in rows_of(made["training_log"]) if row["step"] == 2]
    nodes = {row["turn"]: row["value"] for row in rows if row["name"] == "nodes"}
    for agent in (0, 1):
        own = [{r["name"]: r["value"] for r in rows if (r["turn"], r["agent"]) == (t, agent)} for t in range(3)]
        tokens = {turn: own[turn]["length_mean"] * nodes[turn] for turn in (1, 2)}
        weighted = sum(tokens[turn] * own[turn]["kl"] for turn in (1, 2)) / sum(tokens.values())
        assert own[0]["kl"] == pytest.approx(weighted) and weighted > 0
        for numbers in own:
            assert numbers["kl_penalty"] == pytest.approx(0.5 * numbers["kl"] * numbers["length_mean"])


def test_early_termination_ends_nodes_above_the_threshold(mixed, tmp_path, task):
    episode = {"turns": 2, "termination_threshold": -100.0}
    made = mixed.reinforce(tmp_path, task=task, episode=episode, items_per_step=4)
    assert set(turns_of(made, "nodes")) == {1}


@pytest.mark.parametrize(
    "options", [{"algorithm": "maac", "critic_type": "q"}, {"algorithm": "magrpo", "joint_mode": "cross"}]
)
def test_a_killed_run_of_two_turns_goes_on_to_the_same_bytes(mixed, tmp_path, task, options):
    given = {"task": task, "episode": {"turns": 2, "discount": 0.9}, "generations": 2, "epochs": 2, **options}
    whole = mixed.reinforce(tmp_path / "whole", checkpoint_interval=50, **given)
    for stop_after in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            mixed.reinforce(tmp_path / "killed", stop_after=stop_after, checkpoint_interval=1, **given)
    resumed = mixed.reinforce(tmp_path / "killed", checkpoint_interval=1, **given)
    assert files_of(*resumed.values()) == files_of(*whole.values())


# --- credit -------------------------------------------------------------------------------------------------------


class Later:
    """A deterministic environment: what the first agent writes at first costs in that turn, and pays in the second."""

    def __call__(self, answered):
        return [
            self._reward(node, len((node.history[0].responses if node.turn else texts)[0])) for node, texts in answered
        ]

    def _reward(self, node, written):
        paid = written / 10.0 if node.turn else -0.5 * written / 10.0
        return JointReward(paid, paid)

    def close(self):
        pass


@contextmanager
def training(pipeline, folder, settings, rewards):
    """The algorithm with rewards of a test's own, and its rollouts."""
    inputs = pipeline.task_inputs()
    work = open_work("optimize", {}, inputs, {"policy": folder / "policy"})
    try:
        with work as opened:
            team = load_team(inputs["models"], opened.digest("models"), settings.team, settings.compute, trainable=True)
            grouped = settings.algorithm not in ("iac", "maac")
            rollouts = Rollouts(settings, opened, team, rewards, branching=settings.generations if grouped else 1)
            if grouped:
                yield GroupUpdates(settings, team, rollouts), rollouts
            else:
                estimators = build_estimators(settings, opened, team)
                yield ActorCriticUpdates(settings, team, rollouts, estimators), rollouts
            raise InterruptedError
    except InterruptedError:
        pass


@pytest.mark.parametrize(("discount", "longer"), [(1.0, True), (0.1, False)])
def test_credit_reaches_the_first_turn_through_the_discount(pipeline, tmp_path, task, discount, longer):
    settings = reinforcement_settings(
        task=task,
        episode={"turns": 2, "discount": discount},
        generations=4,
        items_per_step=4,
        epochs=12,
        kl_coefficient=0.0,
        learning_rate=3e-3,
    )
    with training(pipeline, tmp_path, settings, Later()) as (updates, rollouts):
        optimizers = [
            adamw(part.module.named_parameters(), learning_rate=3e-3, weight_decay=0.0, betas=(0.9, 0.99))
            for part in updates.parts.values()
        ]

        def update():
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        def written(step):
            """Mean length of what the first agent writes in the first turn."""
            roots = [node for node in nodes_of(rollouts.sample(step)) if node.turn == 0]
            texts = [one.text for node in roots for one in node.responses[0]]
            return sum(map(len, texts)) / len(texts)

        before = written(0)
        for step in range(updates.total_steps):
            updates.train(step, update)
        gained = written(updates.total_steps - 1) - before
    assert abs(gained) > 3 and (gained > 0) == longer, f"the first answers grew by {gained:.1f} characters"


# --- rewards that fail in a turn ----------------------------------------------------------------------------------


class FailsInTurn:
    """An environment whose rewards are numbers in all turns but one."""

    def __init__(self, turn):
        self._turn = turn

    def __call__(self, answered):
        return [self._reward(node, float(len(texts[0]))) for node, texts in answered]

    def _reward(self, node, written):
        if node.turn == self._turn:
            return JointReward(math.nan, math.nan, status="nan", error="no number")
        return JointReward(written, written)

    def close(self):
        pass


KINDS = [{"algorithm": "magrpo"}, {"algorithm": "mareinforce"}, {"algorithm": "iac"}, {"algorithm": "maac"}]


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["algorithm"])
def test_a_turn_whose_rewards_all_fail_is_left_out(mixed, tmp_path, task, kind, fails):
    """A critic bootstraps the turn before; a return that holds no number of the turn after is none."""
    settings = reinforcement_settings(task=task, episode={"turns": 2}, generations=2, items_per_step=4, **kind)
    with training(mixed, tmp_path, settings, FailsInTurn(fails)) as (algorithm, _):
        numbers = algorithm.train(0, lambda: None)
        parts = [part for name, part in algorithm.parts.items() if name.startswith("agent_")]
        trained = [any(p.grad is not None and p.grad.norm() > 0 for p in part.trainable()) for part in parts]
    by_turn = {turn: numbers.values[turn, JOINT] for turn in (1, 2)}
    failed, other = by_turn[fails + 1], by_turn[2 - fails]
    assert failed["reward_failed_share"] == 1.0 and not {"reward_mean", "expected_return"} & set(failed)
    assert other["reward_failed_share"] == 0.0 and other["reward_mean"] > 0
    assert all(math.isfinite(value) for own in numbers.values.values() for value in own.values())
    bootstraps = kind["algorithm"] in ("iac", "maac")
    assert trained == [fails == 0 or bootstraps] * 2


# --- what is logged by turn ---------------------------------------------------------------------------------------


def test_the_kl_of_the_turns_averages_to_that_of_the_whole(mixed, tmp_path, task):
    given = {"task": task, "episode": {"turns": 2}, "generations": 2, "items_per_step": 4, "epochs": 2}
    made = mixed.reinforce(tmp_path, algorithm="maac", **given)
    rows = [row for row in rows_of(made["training_log"]) if row["step"] == 2 and row["name"] == "kl"]
    found = {(row["turn"], row["agent"]): row["value"] for row in rows}
    assert set(found) == {(turn, agent) for turn in (0, 1, 2) for agent in (JOINT, 0, 1)}
    for agent in (JOINT, 0, 1):
        turns = sorted(found[turn, agent] for turn in (1, 2))
        assert 0 < turns[0] < found[0, agent] < turns[1]


def test_next_prompts_without_room_are_counted_and_end_their_branch(mixed, tmp_path):
    longer = TASK.replace(
        '[f"{prompt} again"]', '[prompt + len(agent_completions[0]) % 2 * " and a very long story" * 4]'
    )
    (tmp_path / "longer.py").write_text(longer, encoding="utf-8")
    sampling = {"max_new_tokens": 80, "overflow": "drop"}
    given = {
        "task": {"file": str(tmp_path / "longer.py"), "object": None},
        "episode": {"turns": 2},
        "items_per_step": 4,
        "sampling": sampling,
    }
    made = mixed.reinforce(tmp_path, algorithm="maac", **given)
    counted = turns_of(made, "prompt_too_long")[0]
    nodes = turns_of(made, "nodes")
    assert 0 < counted < 3 * nodes[1] and nodes[2] == 3 * nodes[1] - counted
