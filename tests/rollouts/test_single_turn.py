"""One turn of rollouts: prompts, draws and their streams, and the plan of batches."""

import itertools
from dataclasses import replace

import pytest

from comlrl_stages.errors import UserError
from comlrl_stages.rollouts.single_turn import (
    Context,
    Draw,
    Prompted,
    joint_draws,
    plan,
    prompt_items,
    row,
    sample_batch,
    sample_draws,
    sampling_parameters,
)
from comlrl_stages.settings import Sampling
from comlrl_stages.tasks.protocol import TaskSource, load_task
from comlrl_stages.teams.sampling import SamplingParameters

TASK = load_task(TaskSource(name="length_ratio"))
ITEMS = [{"task_id": f"t{i}", "prompt": prompt} for i, prompt in enumerate(["the owl", "hello", "zq " * 30])]
SHORT = ITEMS[:2]
CONTEXT = Context("policy")


def draws_of(team, items=SHORT, samples=3, **options):
    prompted, _ = prompt_items(team, TASK, items, 8, "drop")
    return joint_draws(CONTEXT, prompted, samples, 2, **options)


# --- prompts ---


def test_each_agent_has_its_own_prompt_in_its_own_ids(mixed):
    prompted, dropped = prompt_items(mixed, TASK, SHORT, 8, "error")
    assert dropped == {} and [one.task_id for one in prompted] == ["t0", "t1"]
    first = prompted[0]
    assert first.prompts[0].startswith("Write a short response") and first.prompts[1].startswith("Write a detailed")
    texts = [agent.tokenizer.decode(ids) for agent, ids in zip(mixed.agents, first.prompt_ids, strict=True)]
    assert all("the owl" in text for text in texts)
    assert texts[0].endswith("<|assistant|>") and texts[1] == first.prompts[1]
    assert all(type(token) is int for one in prompted for ids in one.prompt_ids for token in ids)


def test_a_prompt_is_never_cut(mixed):
    with pytest.raises(
        UserError, match=r"item t2: the prompt of agent_1 has \d+ tokens and sampling.max_new_tokens is 8"
    ):
        prompt_items(mixed, TASK, ITEMS, 8, "error")
    prompted, dropped = prompt_items(mixed, TASK, ITEMS, 8, "drop")
    assert [one.task_id for one in prompted] == ["t0", "t1"] and dropped == {"prompt_too_long": 1}


def test_a_prompt_that_fills_the_context_to_the_last_token_fits(same):
    (found,), _ = prompt_items(same, TASK, SHORT[:1], 8, "error")
    room = 128 - max(map(len, found.prompt_ids))
    assert prompt_items(same, TASK, SHORT[:1], room, "error")[1] == {}
    with pytest.raises(UserError, match="more than the model's context of 128"):
        prompt_items(same, TASK, SHORT[:1], room + 1, "error")


def test_nothing_left_to_sample_is_an_error(same):
    with pytest.raises(UserError, match="every one of the 1 items was dropped"):
        prompt_items(same, TASK, ITEMS[2:], 8, "drop")


# --- draws ---


def first_uniform(draw, seed=0):
    return draw.request(seed).stream.random()


def test_draws_come_by_item_sample_and_agent(same):
    keys = [(draw.prompted.task_id, draw.sample, draw.agent) for draw in draws_of(same)]
    assert keys == list(itertools.product(["t0", "t1"], range(3), range(2)))


def test_no_two_draws_share_a_stream():
    items = [Prompted(item, ["p"] * 3, [[5]] * 3) for item in SHORT]
    contexts = [Context(s, r, t) for s in ("policy", "evaluation") for r in (1, 2) for t in (0, 1)]
    draws = [draw for context in contexts for draw in joint_draws(context, items, 3, 3)]
    draws += [replace(draw, turn=turn, node=node) for draw in draws for turn, node in ((1, "0"), (1, "1"), (2, "1/0"))]
    uniforms = [first_uniform(draw, seed) for draw in draws for seed in (0, 1)]
    assert len(set(uniforms)) == len(uniforms) == 8 * 2 * 9 * 2 * 4


def test_a_draw_does_not_depend_on_items_samples_or_agents_beside_it():
    few = joint_draws(CONTEXT, [Prompted(SHORT[1], ["p"] * 2, [[5]] * 2)], 2, 2)
    many = joint_draws(CONTEXT, [Prompted(item, ["p"] * 4, [[5]] * 4) for item in SHORT], 5, 4)
    found = {(d.prompted.task_id, d.sample, d.agent): first_uniform(d) for d in many}
    assert all(found[d.prompted.task_id, d.sample, d.agent] == first_uniform(d) for d in few)


def test_greedy_draws_need_no_stream():
    prompted = Prompted(SHORT[0], ["p"], [[5]])
    assert Draw(CONTEXT, prompted, 0, 0, greedy=True).request(0).stream is None


# --- batches ---


def test_agents_of_one_model_are_in_one_batch_and_others_apart(same, mixed):
    (batch,) = plan(same, draws_of(same), 8, 10**6)
    assert sorted(batch.positions) == list(range(12))
    batches = plan(mixed, draws_of(mixed), 8, 10**6)
    assert [batch.agent for batch in batches] == [0, 1]
    assert [sorted(batch.positions) for batch in batches] == [list(range(0, 12, 2)), list(range(1, 12, 2))]


@pytest.mark.parametrize("budget", [64, 200, 500, 10**6])
def test_every_draw_is_planned_once_and_the_budget_is_kept(mixed, budget):
    draws = draws_of(mixed)
    batches = plan(mixed, draws, 8, budget)
    assert sorted(p for batch in batches for p in batch.positions) == list(range(len(draws)))
    for batch in batches:
        costs = [len(draws[p].prompted.prompt_ids[draws[p].agent]) + 8 for p in batch.positions]
        assert len(costs) == 1 or len(costs) * max(costs) <= budget


def test_greedy_and_sampled_draws_are_never_in_one_batch(same):
    draws = draws_of(same) + draws_of(same, greedy=True)
    batches = plan(same, draws, 8, 10**6)
    assert [batch.greedy for batch in batches] == [False, True]
    assert all(draws[p].greedy == batch.greedy for batch in batches for p in batch.positions)


def test_a_batch_is_sampled_in_the_order_of_its_positions(mixed):
    draws = draws_of(mixed)
    parameters = SamplingParameters(max_new_tokens=8)
    for batch in plan(mixed, draws, 8, 10**6):
        together = sample_batch(mixed, draws, batch, parameters, 10**6, seed=0)
        for position, found in zip(batch.positions, together, strict=True):
            (alone,) = sample_batch(
                mixed, draws, type(batch)(batch.agent, batch.greedy, [position]), parameters, 10**6, seed=0
            )
            assert alone.completion_ids == found.completion_ids


@pytest.mark.parametrize("budget", [64, 10**6])
def test_all_draws_come_back_in_their_order(mixed, budget):
    draws = draws_of(mixed)
    found = sample_draws(mixed, draws, Sampling(max_new_tokens=8), budget, seed=0)
    alone = [sample_draws(mixed, [draw], Sampling(max_new_tokens=8), budget, seed=0)[0] for draw in draws]
    assert [one.completion_ids for one in found] == [one.completion_ids for one in alone]


def test_a_greedy_batch_takes_the_most_probable_tokens_whatever_the_truncation(same):
    draws = draws_of(same, samples=1, greedy=True)
    (batch,) = plan(same, draws, 8, 10**6)
    plain = sample_batch(same, draws, batch, SamplingParameters(max_new_tokens=8), 10**6, seed=0)
    truncated = SamplingParameters(temperature=0.5, top_k=3, top_p=0.5, max_new_tokens=8)
    assert sample_batch(same, draws, batch, truncated, 10**6, seed=9) == plain


def test_a_row_holds_the_key_the_prompt_and_what_was_sampled(mixed):
    draws = draws_of(mixed, samples=1)
    (batch, _) = plan(mixed, draws, 8, 10**6)
    sampled = sample_batch(mixed, draws, batch, SamplingParameters(max_new_tokens=8), 10**6, seed=0)[0]
    draw = draws[batch.positions[0]]
    found = row(mixed, draw, sampled)
    assert [found[name] for name in ("source", "round", "step", "turn", "node")] == ["policy", 1, 0, 0, ""]
    assert (found["task_id"], found["agent"], found["model_digest"]) == (draw.prompted.task_id, 0, "llama")
    assert found["prompt_ids"] == draw.prompted.prompt_ids[0] and found["prompt"] == draw.prompted.prompts[0]
    assert found["completion_ids"] is sampled.completion_ids and found["ids_from"] == "sampled"
    later = row(mixed, replace(draw, turn=2, node="3/0"), sampled)
    assert later == {**found, "turn": 2, "node": "3/0"}


def test_parameters_are_read_field_by_field():
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_new_tokens": 9, "min_new_tokens": 2, "stop": ["\n"]}
    assert sampling_parameters(Sampling(**given)) == SamplingParameters(**{**given, "stop": ("\n",)})
