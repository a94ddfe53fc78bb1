"""Policy folders: what each kind of team leaves, and that it comes back as it was."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from comlrl_stages.artifacts import artifact_digest, digest_of_part, open_work
from comlrl_stages.errors import UserError
from comlrl_stages.settings import TeamSettings
from comlrl_stages.teams.critics import give_value_head
from comlrl_stages.teams.loading import load_model
from comlrl_stages.teams.log_probs import completion_log_probs
from comlrl_stages.teams.policies import export_merged, load_policy, save_policy
from comlrl_stages.teams.team import load_team

ARITHMETIC = SimpleNamespace(torch_threads=1, compute_dtype="float32", device="cpu")
LORA = SimpleNamespace(rank=4, alpha=8.0, dropout=0.0, target_modules="all-linear")
PROMPTS, COMPLETIONS = [[5, 40, 41], [6]], [[60, 61, 1], [70]]
TEAMS = {"one": ["gpt2"], "equal": ["llama", "llama"], "mixed": ["llama", "gpt2"], "three": ["llama", "gpt2", "llama"]}


def settings(agents, share_weights=False):
    return TeamSettings(
        agents=agents,
        share_weights=share_weights,
        system_prompts=[None] * agents,
        prompt_formats=["auto"] * agents,
        template_arguments=[{}] * agents,
        weights_dtypes=["float32"] * agents,
        attentions=["sdpa"] * agents,
        trust_remote_code=[False] * agents,
    )


@pytest.fixture(scope="module")
def bases(llama_folder, gpt2_folder, tmp_path_factory):
    """Finished model artifacts of both families."""
    made = {}
    for name, source in (("llama", llama_folder), ("gpt2", gpt2_folder)):
        made[name] = tmp_path_factory.mktemp("bases") / name
        publish(made[name], lambda place, source=source: shutil.copytree(source, place))
    return made


def publish(path, write):
    with open_work("made", {}, {}, {"made": path}) as work:
        write(work.output("made"))
    return path


def moved(team):
    """Move every trainable weight, each model's by its own amount."""
    for number, group in enumerate(team.groups()):
        generator = torch.Generator().manual_seed(number)
        for weight in team.agents[group[0]].model.parameters():
            if weight.requires_grad:
                weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
    return team


def trained(bases, names, lora=None, share_weights=False):
    folders = [bases[name] for name in names]
    digests = [artifact_digest(folder) for folder in folders]
    own = settings(len(names), share_weights)
    return moved(load_team(folders, digests, own, ARITHMETIC, trainable=True, lora=lora))


def loaded(bases, names, policy, share_weights=False):
    folders = [bases[name] for name in names]
    digests = [artifact_digest(folder) for folder in folders]
    return load_policy(policy, folders, digests, settings(len(names), share_weights), ARITHMETIC)


def log_probs(agent):
    with torch.no_grad():
        return completion_log_probs(agent.model, agent.facts, PROMPTS, COMPLETIONS).log_probs


@pytest.mark.parametrize("names", TEAMS.values(), ids=TEAMS)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_saved_team_comes_back_bit_for_bit(bases, tmp_path, names, lora):
    team = trained(bases, names, lora)
    policy = publish(tmp_path / "policy", lambda place: save_policy(team, place))
    again = loaded(bases, names, policy)
    for agent, (one, other) in enumerate(zip(again.agents, team.agents, strict=True)):
        assert torch.equal(log_probs(one), log_probs(other))
        assert again.digests[agent] == digest_of_part(policy, f"agent_{agent}")
        assert not torch.equal(log_probs(one), log_probs(load_model(bases[names[agent]])))
    assert again.groups() == team.groups() == [[agent] for agent in range(len(names))]
    is_adapter = [(policy / f"agent_{agent}" / "adapter_model.safetensors").exists() for agent in range(len(names))]
    assert is_adapter == [lora is not None] * len(names)


def test_shared_weights_are_equal_folders_and_one_model_again(bases, tmp_path):
    team = trained(bases, ["llama"] * 3, share_weights=True)
    policy = publish(tmp_path / "policy", lambda place: save_policy(team, place))
    for file in (policy / "agent_0").iterdir():
        assert all((policy / f"agent_{agent}" / file.name).read_bytes() == file.read_bytes() for agent in (1, 2))
    again = loaded(bases, ["llama"] * 3, policy, share_weights=True)
    assert again.agents[0] is again.agents[1] is again.agents[2] and again.groups() == [[0, 1, 2]]
    assert torch.equal(log_probs(again.agents[2]), log_probs(team.agents[0]))


def test_equal_policies_are_equal_bytes(bases, tmp_path):
    made = [
        publish(tmp_path / name, lambda place: save_policy(trained(bases, ["llama", "gpt2"], LORA), place))
        for name in ("one", "two")
    ]
    assert artifact_digest(made[0]) == artifact_digest(made[1])


def test_loaded_adapters_share_their_base_and_do_not_train(bases, tmp_path):
    team = trained(bases, ["llama", "llama"], LORA)
    policy = publish(tmp_path / "policy", lambda place: save_policy(team, place))
    agents = loaded(bases, ["llama", "llama"], policy).agents
    shared = [{weight.data_ptr() for weight in agent.model.parameters()} for agent in agents]
    assert len(shared[0] & shared[1]) == len(list(load_model(bases["llama"]).model.parameters()))
    assert not any(
        weight.requires_grad for agent in agents for n, weight in agent.model.named_parameters() if "lora" in n
    )


def test_value_heads_stand_beside_their_agents(bases, tmp_path):
    for lora in (None, LORA):
        team = trained(bases, ["llama", "gpt2"], lora)
        give_value_head(team.agents[1], 4, torch.Generator().manual_seed(0))
        save_policy(team, tmp_path / str(lora is None))
        found = sorted(path.parent.name for path in (tmp_path / str(lora is None)).rglob("value_head.safetensors"))
        assert found == ["agent_1"]


def test_adapters_of_another_base_are_refused(bases, tmp_path):
    team = trained(bases, ["llama", "gpt2"], LORA)
    policy = publish(tmp_path / "policy", lambda place: save_policy(team, place))
    with pytest.raises(UserError, match=r"agent_0 holds an adapter of the base model llama with digest"):
        loaded(bases, ["gpt2", "llama"], policy)


def test_a_policy_with_too_few_agents_is_refused(bases, tmp_path):
    team = trained(bases, ["llama"])
    policy = publish(tmp_path / "policy", lambda place: save_policy(team, place))
    with pytest.raises(UserError, match=r"agent_1 not found; expected a policy of 2 agents"):
        loaded(bases, ["llama", "llama"], policy)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_exported_adapters_are_whole_models_with_their_value_heads(bases, tmp_path, name):
    team = trained(bases, [name], LORA)
    head = give_value_head(team.agents[0], None, torch.Generator().manual_seed(0))
    save_policy(team, tmp_path)
    digest = artifact_digest(bases[name])
    export_merged(bases[name], digest, tmp_path / "agent_0", tmp_path / "export")
    whole = load_model(tmp_path / "export")
    torch.testing.assert_close(log_probs(whole), log_probs(team.agents[0]), atol=1e-5, rtol=0)
    again = give_value_head(whole, None, torch.Generator().manual_seed(1), tmp_path / "export")
    assert torch.equal(again.weight, head.weight)
