"""Critics: their inputs, their values, their folders."""

import shutil

import pytest
import torch

from comlrl_stages.errors import UserError
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.critics import give_value_head, is_critic, load_critic, new_critic, save_critic
from comlrl_stages.teams.loading import load_model, save_model
from comlrl_stages.teams.log_probs import completion_log_probs
from comlrl_stages.teams.sampling import Sampled
from comlrl_stages.teams.value_head import new_head, save_head
from comlrl_stages.teams.value_model import ValueModel, values_of

PROMPTS = ["the owl", "a small boat on the river", "the hill"]
RESPONSES = ["hello", "it was happy and the moon", "the fox runs"]
IDS = [[5, 40, 41, 42], [6], [7, 50, 51, 52, 53, 54, 55]]
HIDDEN = pytest.mark.parametrize("hidden", [None, 6])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sampled(ids, text="hello"):
    return Sampled(ids, [0.0] * len(ids), text, "stop")


@pytest.fixture(params=["llama", "gpt2"])
def folder(request):
    return request.getfixturevalue(f"{request.param}_folder")


@pytest.fixture
def critic(folder):
    return new_critic(folder, None, generator())


# --- values ---


@HIDDEN
def test_a_value_is_that_of_the_last_real_token_whatever_stands_beside_it(folder, hidden):
    critic = new_critic(folder, hidden, generator())
    ids = [*IDS, [7, 8, critic.facts.pad_id]]  # the last real token may look like a pad
    width = max(map(len, ids)) + 3
    pad = critic.facts.pad_id
    left = torch.tensor([[pad] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in ids])
    with torch.no_grad():
        states = [critic.model.backbone(torch.tensor([row])).last_hidden_state[0, -1] for row in ids]
        expected = torch.stack([critic.model.head(state) for state in states])
        torch.testing.assert_close(critic.model(ids), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(critic.model.score(left, mask), expected, atol=1e-5, rtol=0)
    assert values_of(critic.model, ids, Compute("cpu", "float32"), 1) == pytest.approx(expected.tolist(), abs=1e-5)


@HIDDEN
def test_gradients_reach_head_and_backbone(folder, hidden):
    critic = new_critic(folder, hidden, generator())
    critic.model(IDS).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in critic.model.head.parameters())
    assert critic.model.backbone.get_input_embeddings().weight.grad.abs().sum() > 0


def test_the_head_stays_float32_under_bfloat16(critic):
    with torch.no_grad(), Compute("cpu", "bfloat16").autocast():
        values = critic.model(IDS)
    assert values.dtype == critic.model.head.weight.dtype == torch.float32


# --- inputs ---


def test_the_central_critic_reads_all_prompts_and_for_q_all_responses(critic):
    v, q = critic.joint_input(PROMPTS), critic.joint_input(PROMPTS, RESPONSES)
    text_v, text_q = critic.tokenizer.decode(v.ids), critic.tokenizer.decode(q.ids)
    for agent, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        assert f"User {agent}:\n{prompt}\nAgent {agent}:\n{response}\n" in text_q
        assert f"User {agent}:\n{prompt}\nAgent {agent}:\n\n" in text_v
    assert v.ids[-1] == q.ids[-1] == critic.facts.eos_ids[0]


@pytest.mark.parametrize("agents", [1, 2, 3])
def test_a_central_critic_judges_teams_of_any_size(critic, agents):
    joint = critic.joint_input(PROMPTS[:agents], RESPONSES[:agents])
    assert critic.model([joint.ids]).shape == (1,) and not joint.cut


def test_texts_that_exceed_the_context_lose_prompt_tokens_first(critic):
    joint = critic.joint_input(["the river " * 100, "the owl"], RESPONSES[:2])
    assert joint.cut and len(joint.ids) == critic.facts.context_length
    text = critic.tokenizer.decode(joint.ids)
    assert all(part in text for part in [*RESPONSES[:2], "the owl"])


def test_a_context_too_short_for_the_template_is_an_error_that_says_so(llama_folder):
    critic = new_critic(llama_folder, None, generator())
    with pytest.raises(UserError, match=r"the critic's context is 128, .* Choose a critic_model with a context"):
        critic.joint_input(["the owl"] * 30)


def test_own_ids_travel_where_the_vocabulary_is_the_actors(folder, critic):
    actor = load_model(folder)
    response = sampled([60, 61, 1], text="other text than the ids say")
    assert critic.own_input(actor, "ignored", [5, 6, 7]).ids == (5, 6, 7)
    assert critic.own_input(actor, "ignored", [5, 6, 7], response).ids == (5, 6, 7, 60, 61, 1)


def test_another_vocabulary_gets_the_texts(tiny_llama, tiny_gpt2, llama_folder, gpt2_folder):
    for actor, folder in ((tiny_llama, gpt2_folder), (tiny_gpt2, llama_folder)):
        critic = new_critic(folder, None, generator())
        v, q = (critic.own_input(actor, "the owl", [9, 9], one) for one in (None, sampled([9], "the fox")))
        assert v == critic.joint_input(["the owl"]) and q == critic.joint_input(["the owl"], ["the fox"])


def test_own_ids_beyond_the_critics_context_are_cut_from_the_prompt(folder, critic):
    joint = critic.own_input(load_model(folder), "", list(range(5, 105)) * 2, sampled([60, 61]))
    assert joint.cut and len(joint.ids) == critic.facts.context_length and joint.ids[-3:] == (104, 60, 61)


# --- folders ---


@HIDDEN
def test_save_and_load_give_the_same_bits(folder, tmp_path, hidden):
    critic = new_critic(folder, hidden, generator())
    for parameter in critic.model.parameters():
        parameter.data += 0.01
    save_critic(critic, tmp_path / "critic")
    again = load_critic(tmp_path / "critic")
    assert torch.equal(again.model(IDS), critic.model(IDS))
    assert again.facts == critic.facts and again.model.head.width == hidden
    assert again.joint_input(PROMPTS, RESPONSES) == critic.joint_input(PROMPTS, RESPONSES)
    assert is_critic(tmp_path / "critic") and not is_critic(folder)


def test_equal_critics_are_equal_bytes(folder, critic, tmp_path):
    for name in ("one", "two"):
        save_critic(critic, tmp_path / name)
    save_critic(load_critic(tmp_path / "one"), tmp_path / "three")
    for file in (tmp_path / "one").iterdir():
        assert all((tmp_path / name / file.name).read_bytes() == file.read_bytes() for name in ("two", "three"))


def test_a_new_critic_of_a_critic_starts_with_its_head(critic, tmp_path):
    save_critic(critic, tmp_path)
    again = new_critic(tmp_path, None, generator(9))
    assert torch.equal(again.model(IDS), critic.model(IDS))
    with pytest.raises(UserError, match=r"no hidden layer, but value_hidden asks for a hidden layer of 4 units"):
        new_critic(tmp_path, 4, generator())


def test_a_new_critic_of_an_actor_with_a_head_starts_with_that_head(folder, tmp_path):
    actor = load_model(folder)
    head = give_value_head(actor, None, generator(3))
    save_model(actor, tmp_path)
    assert torch.equal(new_critic(tmp_path, None, generator(4)).model.head.weight, head.weight)


def test_the_generator_alone_draws_a_new_head(folder):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = new_critic(folder, 3, generator()).model(IDS)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(new_critic(folder, 3, generator()).model(IDS), first)
    assert not torch.equal(new_critic(folder, 3, generator(1)).model(IDS), first)


@pytest.mark.parametrize("open_it", [load_critic, lambda folder: new_critic(folder, None, generator())])
def test_a_critic_without_its_head_is_an_error(critic, tmp_path, open_it):
    save_critic(critic, tmp_path)
    (tmp_path / "value_head.safetensors").unlink()
    with pytest.raises(UserError, match=r"value_head\.safetensors not found; a model without its head"):
        open_it(tmp_path)


def test_a_head_of_another_model_is_an_error(critic, tmp_path):
    save_critic(critic, tmp_path)
    save_head(new_head(7, None, generator()), tmp_path / "value_head.safetensors")
    with pytest.raises(UserError, match=r"\(1, 7\).*the model beside it needs a head of.*\(1, 64\)"):
        load_critic(tmp_path)


def test_a_language_model_is_no_critic(folder):
    with pytest.raises(UserError, match=r"has no critic\.json, so it is no critic"):
        load_critic(folder)


def test_a_critic_cannot_be_an_agent(critic, tmp_path):
    save_critic(critic, tmp_path)
    with pytest.raises(UserError, match=r"is a critic, a model without output layer that cannot write"):
        load_model(tmp_path)


# --- shared heads ---


def test_a_shared_head_is_saved_and_restored_with_its_actor(folder, tmp_path):
    actor = load_model(folder)
    head = give_value_head(actor, 6, generator())
    save_model(actor, tmp_path)
    again = load_model(tmp_path)
    assert again.value_head is None
    restored = give_value_head(again, 6, generator(5), tmp_path)
    states = torch.randn(3, actor.hidden_size, generator=generator())
    assert restored is again.value_head and torch.equal(restored(states), head(states))
    with pytest.raises(UserError, match="value_hidden asks for no hidden layer"):
        give_value_head(again, None, generator(), tmp_path)


def test_a_folder_without_a_head_gets_a_new_one(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    first, second = (give_value_head(load_model(folder), None, generator(), folder) for _ in range(2))
    assert torch.equal(first.weight, second.weight)


def test_a_shared_head_reads_what_a_separate_critic_with_these_weights_reads(tiny_model):
    head = new_head(tiny_model.hidden_size, 6, generator())
    separate = ValueModel(tiny_model.model.base_model, head, tiny_model.facts.pad_id)
    prompts, completions = [[5, 40], [6, 41, 42], [7]], [[50, 51, 1], [52], [53, 54]]
    with torch.no_grad():
        for place, ids in (
            ("prompt", prompts),
            ("response", [p + c for p, c in zip(prompts, completions, strict=True)]),
        ):
            scores = completion_log_probs(
                tiny_model.model, tiny_model.facts, prompts, completions, value_head=head, value_at=place
            )
            torch.testing.assert_close(scores.values, separate(ids), atol=1e-5, rtol=0)
