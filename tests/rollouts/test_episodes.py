"""Episodes: trees and trajectories of several turns, their ends, and what the transition is given."""

import math
from types import SimpleNamespace

import pytest

from comlrl_stages.errors import UserError
from comlrl_stages.learning.returns import completion_returns, env_steps, joint_returns
from comlrl_stages.rollouts.episodes import nodes_of, roll_out, tree_of
from comlrl_stages.rollouts.single_turn import Context, joint_draws, prompt_items, sample_draws
from comlrl_stages.settings import Sampling
from comlrl_stages.tasks.protocol import TaskSource, load_task
from comlrl_stages.tasks.scoring import JointReward

from .conftest import TURNS

ITEMS = [{"task_id": f"t{i}", "prompt": prompt} for i, prompt in enumerate(["the owl", "hello"])]
CONTEXT = Context("policy", 1, 5)
SAMPLING = Sampling(max_new_tokens=6)


def numbered(answered):
    """10 * node + a0 + 2 * a1: node 0 is the root, its children count from 1, and a is each agent's sample."""
    rewards, place = [], {}
    for node, _ in answered:
        joint = place[id(node)] = place.get(id(node), -1) + 1
        first, second = node.joints[joint]
        rewards.append(10.0 * (int(node.name) + 1 if node.name else 0) + first + 2 * second)
    return [JointReward(reward, reward) for reward in rewards]


def scored(*values, then=0.0):
    """A score that gives each turn's joint responses these rewards in order, and `then` from the second turn on."""

    def score(answered):
        rewards = [values[i] if answered[0][0].turn == 0 else then for i in range(len(answered))]
        return [JointReward(one, one, status="ok" if math.isfinite(one) else "nan") for one in rewards]

    return score


def rolled_out(team, task, items=ITEMS[:1], *, turns=2, threshold=None, **given):
    prompted, _ = prompt_items(team, task, items, SAMPLING.max_new_tokens, "error")
    options = {"context": CONTEXT, "samples": 2, "branching": 2, "pairing": "aligned", "sampling": SAMPLING}
    options |= {"token_budget": 10**6, "seed": 0, "score": scored(*[0.0] * 64)}
    episode = SimpleNamespace(turns=turns, termination_threshold=threshold)
    return roll_out(team, task, prompted, episode=episode, **{**options, **given})


def ids_of(roots):
    return {
        (node.prompted.task_id, node.name, sample, agent): one.completion_ids
        for node in nodes_of(roots)
        for agent, own in enumerate(node.responses)
        for sample, one in enumerate(own)
    }


# --- trees ---


@pytest.mark.parametrize(("discount", "expected"), [(1.0, [11.5, 24.5]), (0.5, [5.75, 13.75])])
def test_an_aligned_tree_has_the_returns_worked_out_by_hand(same, turns, discount, expected):
    (root,) = rolled_out(same, turns(), score=numbered)
    tree = tree_of(root)
    assert [node.tolist() for node in joint_returns(tree, discount)] == [expected, [10, 13], [20, 23]]
    assert env_steps(tree) == 6
    assert [(node.turn, node.name) for node in nodes_of([root])] == [(0, ""), (1, "0"), (1, "1")]


def test_a_cross_tree_has_the_returns_worked_out_by_hand(same, turns):
    (root,) = rolled_out(same, turns(), score=numbered, pairing="cross")
    assert root.joints == [(0, 0), (0, 1), (1, 0), (1, 1)] and env_steps(tree_of(root)) == 20
    joint = joint_returns(tree_of(root))[0]
    assert completion_returns(joint, 2, "cross").tolist() == [[17.5, 38.5], [22, 34]]
    assert [node.name for node in nodes_of([root])] == ["", "0", "1", "2", "3"]


@pytest.mark.parametrize(("pairing", "joints"), [("aligned", 2), ("cross", 4)])
def test_three_turns_have_as_many_leaves_as_joint_responses_to_the_power_of_turns(same, turns, pairing, joints):
    (root,) = rolled_out(same, turns(), turns=3, pairing=pairing)
    last = [node for node in nodes_of([root]) if node.turn == 2]
    assert sum(len(node.joints) for node in last) == joints**3
    assert [node.name for node in last] == [f"{first}/{second}" for first in range(joints) for second in range(joints)]


def test_nodes_come_in_the_order_of_the_returns(same, turns):
    roots = rolled_out(same, turns(), ITEMS, turns=3, samples=3)
    for root in roots:
        shapes = [len(node.joints) for node in nodes_of([root])]
        assert [len(node) for node in joint_returns(tree_of(root))] == shapes
    assert [node.name for node in nodes_of(roots)][:5] == ["", "0", "0/0", "0/1", "1"]


def test_a_joint_response_is_made_of_the_samples_that_it_names(same, turns):
    (root,) = rolled_out(same, turns(), turns=1, samples=3, pairing="cross")
    written = [[one.text for one in own] for own in root.responses]
    assert [root.texts(joint) for joint in range(9)] == [(a, b) for a in written[0] for b in written[1]]


# --- the same draws ---


def test_one_turn_is_what_the_draws_of_one_turn_give(mixed, turns):
    task = turns()
    prompted, _ = prompt_items(mixed, task, ITEMS, SAMPLING.max_new_tokens, "error")
    plain = sample_draws(mixed, joint_draws(CONTEXT, prompted, 3, 2), SAMPLING, 10**6, seed=0)
    roots = rolled_out(mixed, task, ITEMS, turns=1, samples=3)
    found = [root.responses[agent][sample] for root in roots for sample in range(3) for agent in range(2)]
    assert found == plain and all(root.children == [] for root in roots)


def test_more_turns_leave_the_first_one_alone(same, turns):
    one, two = (ids_of(rolled_out(same, turns(), turns=count)) for count in (1, 2))
    assert len(two) == len(one) + 8 and {key: two[key] for key in one} == one


@pytest.mark.parametrize("budget", [40, 10**6])
def test_items_and_batches_beside_a_node_change_nothing(mixed, turns, budget):
    together = ids_of(rolled_out(mixed, turns(), ITEMS, token_budget=budget))
    apart = [ids_of(rolled_out(mixed, turns(), [item])) for item in ITEMS]
    assert together == apart[0] | apart[1]


def test_siblings_and_their_children_draw_different_tokens(same, turns):
    (root,) = rolled_out(same, turns("def reward(a, b):\n    return [0.0]\n\n" + CONSTANT), turns=2)
    first, second = (child.responses[0][0] for child in root.children)
    assert root.children[0].prompted.prompts == root.children[1].prompted.prompts
    assert first.completion_ids != second.completion_ids


CONSTANT = """\
def transition(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
    return (prompt,) * num_agents
"""


def test_all_nodes_of_a_turn_are_scored_together(same, turns):
    calls = []

    def score(answered):
        calls.append([(node.prompted.task_id, node.name, texts) for node, texts in answered])
        return [JointReward(0.0, 0.0)] * len(answered)

    roots = rolled_out(same, turns(), ITEMS, score=score)
    assert [len(call) for call in calls] == [4, 8]
    assert calls[1][2] == ("t0", "1", roots[0].children[1].texts(0))


# --- ends ---


def test_only_a_mean_strictly_above_the_threshold_ends_a_node(same, turns):
    roots = rolled_out(same, turns(), ITEMS, threshold=1.5, score=scored(1.0, 2.0, 1.0, 2.5))
    assert [len(root.children) for root in roots] == [2, 0]


def test_trajectories_end_by_their_own_reward(same, turns):
    (root,) = rolled_out(
        same, turns(), turns=3, samples=3, branching=1, threshold=0.5, score=scored(0.0, 1.0, 0.5, then=0.5)
    )
    assert [child and child.name for child in root.children] == ["0", None, "2"]
    assert [node.joints for node in nodes_of([root.children[0]])] == [[(0, 0)]] * 2
    assert joint_returns(tree_of(root))[0].tolist() == [1.0, 1.0, 1.5]


def test_a_trajectory_above_the_threshold_everywhere_has_no_children(same, turns):
    (root,) = rolled_out(same, turns(), branching=1, threshold=0.5, score=scored(1.0, 1.0))
    assert root.children == []


def test_a_failed_reward_ends_nothing_and_its_siblings_are_kept(same, turns):
    (root,) = rolled_out(same, turns(), threshold=0.5, score=scored(math.nan, 0.5, then=1.0))
    assert len(root.children) == 2
    found = joint_returns(tree_of(root))
    assert math.isnan(found[0][0]) and found[0][1] == 1.5 and found[1].tolist() == [1.0, 1.0]


LONG = """\
def reward(first, second):
    return [0.0]

def transition(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
    LONG.append(len(LONG))
    return [prompt, "zq " * (60 if len(LONG) in TOO_LONG else 1)]
"""


@pytest.mark.parametrize(("too_long", "children"), [([2], ["0", None]), ([1, 2], [])])
def test_a_branch_whose_prompts_leave_no_room_ends_and_is_counted(same, turns, too_long, children):
    task = turns(f"LONG, TOO_LONG = [], {too_long}\n" + LONG)
    (root,) = rolled_out(same, task, sampling=Sampling(max_new_tokens=6, overflow="drop"))
    assert [child and child.name for child in root.children] == children
    assert root.overflowed == len(too_long)
    assert joint_returns(tree_of(root))[0].tolist() == [0.0, 0.0]


def test_prompts_that_leave_no_room_are_an_error_where_the_config_says_so(same, turns):
    with pytest.raises(UserError, match=r"item t0, turn 2: the prompt of agent_1 has \d+ tokens and sampling"):
        rolled_out(same, turns("LONG, TOO_LONG = [], [1]\n" + LONG))


# --- the transition ---


def test_the_transition_reads_every_turn_of_its_own_branch(same, turns):
    task = turns()
    (root,) = rolled_out(same, task, turns=3, branching=1)
    seen = task.transition.__globals__["SEEN"]
    child = root.children[1]
    assert len(seen) == 4
    prompt, completions, agents, prompts, responses = seen[1]
    assert (prompt, completions, agents) == ("the owl", list(root.texts(1)), 2)
    assert prompts == [["say the owl"], ["tell the owl"]]
    assert responses == [[root.texts(1)[0]], [root.texts(1)[1]]]
    prompt, completions, agents, prompts, responses = seen[3]
    assert (prompt, completions, agents) == ("the owl", list(child.texts(0)), 2)
    assert prompts == [["say the owl", child.prompted.prompts[0]], ["tell the owl", child.prompted.prompts[1]]]
    assert responses == [[root.texts(1)[agent], child.texts(0)[agent]] for agent in range(2)]
    assert [one.responses for one in child.children[0].history] == [root.texts(1), child.texts(0)]


def test_next_prompts_are_formatted_again_where_the_formatter_declares_them(mixed, turns):
    (root,) = rolled_out(mixed, turns())
    for joint, child in enumerate(root.children):
        lengths = [len(text) for text in root.texts(joint)]
        assert child.prompted.prompts == [f"the owl {lengths[0]}", f"tell the owl {lengths[1]}"]
        assert child.prompted.prompt_ids == mixed.encode(child.prompted.prompts)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return ['one']", "returned 1 prompts, expected a list of 2 texts"),
        ("return 'ab'", "returned str ('ab'), expected a list of 2 texts"),
        ("return ['one', 2]", "returned int (2) for agent_1, expected a list of 2 texts"),
        ("return None", "returned NoneType"),
        ("return [][1 + 1]", "return [][1 + 1]"),
        ("raise SystemExit(3)", "raise SystemExit(3)"),
    ],
)
def test_a_faulty_transition_is_told_with_file_item_and_turn(same, turns, tmp_path, body, told):
    task = turns(TURNS.replace('return [f"{prompt} {len(text)}" for text in agent_completions]', body))
    with pytest.raises(UserError) as error:
        rolled_out(same, task)
    assert f"{tmp_path / 'task.py'}: the transition to turn 2, item t0" in str(error.value)
    assert told in str(error.value) and "comlrl_stages/rollouts" not in str(error.value)


def test_a_task_without_transition_has_one_turn(same):
    with pytest.raises(UserError, match=r"task length_ratio: has no transition.*or set episode.turns to 1"):
        rolled_out(same, load_task(TaskSource(name="length_ratio")))
