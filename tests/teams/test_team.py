"""A team in memory: who shares a model, in which dtype, and how prompts become ids."""

from types import SimpleNamespace

import pytest
import torch

from comlrl_stages.errors import UserError
from comlrl_stages.settings import TeamSettings
from comlrl_stages.teams.team import load_team

ARITHMETIC = SimpleNamespace(torch_threads=1, compute_dtype="float32", device="cpu")
BFLOAT16 = {"weights_dtypes": ["bfloat16", "bfloat16"]}


def load(folders, digests, settings=None, **options):
    return load_team(folders, digests, TeamSettings(**(settings or {})), ARITHMETIC, **options)


def weights(loaded):
    return list(loaded.model.parameters())


def test_agents_of_equal_weights_share_one_model_and_one_group(llama_folder):
    team = load([llama_folder] * 2, ["same", "same"])
    assert team.agents[0] is team.agents[1]
    assert team.groups() == [[0, 1]]


def test_agents_of_other_weights_have_their_own(llama_folder, gpt2_folder):
    team = load([llama_folder, gpt2_folder], ["one", "other"])
    assert team.agents[0] is not team.agents[1] and team.groups() == [[0], [1]]
    assert [type(agent.model).__name__ for agent in team.agents] == ["LlamaForCausalLM", "GPT2LMHeadModel"]


def test_equal_weights_of_two_dtypes_are_not_shared(llama_folder):
    team = load([llama_folder] * 2, ["same", "same"], {"weights_dtypes": ["float32", "bfloat16"]})
    assert [agent.model.dtype for agent in team.agents] == [torch.float32, torch.bfloat16]


def test_agents_that_train_have_copies_of_their_own_in_float32(llama_folder):
    team = load([llama_folder] * 2, ["same", "same"], BFLOAT16, trainable=True)
    assert team.agents[0] is not team.agents[1] and team.groups() == [[0], [1]]
    for one, other in zip(*map(weights, team.agents), strict=True):
        assert one.dtype == torch.float32 and one.data_ptr() != other.data_ptr() and torch.equal(one, other)


def test_a_reference_has_the_float32_weights_that_training_starts_from(llama_folder):
    reference = load([llama_folder] * 2, ["same", "same"], BFLOAT16, masters=True)
    trainable = load([llama_folder] * 2, ["same", "same"], BFLOAT16, trainable=True)
    assert reference.agents[0] is reference.agents[1]
    assert all(map(torch.equal, weights(reference.agents[0]), weights(trainable.agents[0])))


@pytest.mark.parametrize("options", [{}, {"trainable": True}])
def test_models_are_in_evaluation_mode_so_that_nothing_drops_out(gpt2_folder, options):
    team = load([gpt2_folder] * 2, ["same", "same"], **options)
    assert not any(agent.model.training for agent in team.agents)


def test_prompts_are_encoded_by_each_agents_own_tokenizer_and_format(llama_folder, gpt2_folder):
    settings = {"system_prompts": ["be brief", None]}
    team = load([llama_folder, gpt2_folder], ["one", "other"], settings)
    first, second = team.encode(["the owl", "hello"])
    assert team.agents[0].tokenizer.decode(first) == "<s><|system|>be brief<|end|><|user|>the owl<|end|><|assistant|>"
    assert second == team.agents[1].tokenizer("hello")["input_ids"]
    plain = load([llama_folder] * 2, ["one", "one"], {"prompt_formats": ["plain", "chat"]})
    assert [plain.agents[0].tokenizer.decode(ids) for ids in plain.encode(["a", "a"])] == [
        "<s>a",
        "<s><|user|>a<|end|><|assistant|>",
    ]


def test_threads_are_those_of_the_settings_and_not_of_the_machine(llama_folder):
    before = torch.get_num_threads()
    try:
        load_team(
            [llama_folder], ["one"], TeamSettings(agents=1), SimpleNamespace(**{**vars(ARITHMETIC), "torch_threads": 2})
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# --- shared weights and adapters ---

LORA = SimpleNamespace(rank=4, alpha=8.0, dropout=0.0, target_modules="all-linear")


def test_agents_that_share_weights_train_one_model_and_keep_their_own_prompts(llama_folder):
    settings = {"share_weights": True, "system_prompts": ["be brief", None]}
    team = load([llama_folder] * 2, ["same", "same"], settings, trainable=True)
    assert team.agents[0] is team.agents[1] and team.groups() == [[0, 1]]
    assert all(weight.requires_grad and weight.dtype == torch.float32 for weight in weights(team.agents[0]))
    first, second = team.encode(["the owl", "the owl"])
    assert first != second and team.agents[0].tokenizer.decode(second) == "<s><|user|>the owl<|end|><|assistant|>"


def test_weights_of_two_models_cannot_be_shared(llama_folder, gpt2_folder):
    with pytest.raises(UserError, match=r"share_weights needs one model for all agents"):
        load([llama_folder, gpt2_folder], ["one", "other"], {"share_weights": True}, trainable=True)


def test_shared_training_says_nothing_about_a_team_that_only_answers(llama_folder, gpt2_folder):
    team = load([llama_folder, gpt2_folder], ["one", "other"], {"share_weights": True})
    assert team.groups() == [[0], [1]]


def test_adapters_are_each_agents_own_on_one_base_in_memory(llama_folder):
    team = load([llama_folder] * 2, ["same", "same"], BFLOAT16, trainable=True, lora=LORA, seed=3)
    assert team.groups() == [[0], [1]]
    trained, frozen = (
        [{w.data_ptr() for w in weights(agent) if w.requires_grad is kind} for agent in team.agents]
        for kind in (True, False)
    )
    assert frozen[0] == frozen[1] and not trained[0] & trained[1]
    assert all(weight.dtype == torch.float32 for agent in team.agents for weight in weights(agent))


def test_adapters_start_from_the_seed_and_differ_by_agent(llama_folder, gpt2_folder):
    def drawn(seed, folders=(llama_folder, llama_folder)):
        team = load(folders, [str(folder) for folder in folders], trainable=True, lora=LORA, seed=seed)
        return [[w for w in weights(agent) if w.requires_grad] for agent in team.agents]

    first, other = drawn(3), drawn(4)
    assert all(map(torch.equal, first[0] + first[1], [weight for agent in drawn(3) for weight in agent]))
    assert not torch.equal(first[0][0], first[1][0]) and not torch.equal(first[0][0], other[0][0])
    assert all(map(torch.equal, drawn(3, (gpt2_folder, llama_folder))[1], first[1]))


def test_a_mixed_team_of_adapters_has_each_agents_own_base(llama_folder, gpt2_folder):
    team = load([llama_folder, gpt2_folder], ["one", "other"], trainable=True, lora=LORA)
    bases = [type(agent.model.get_base_model()).__name__ for agent in team.agents]
    assert bases == ["LlamaForCausalLM", "GPT2LMHeadModel"]
