"""The export stage: a trained team as folders that load, with checksums and provenance."""

import hashlib
import json
import subprocess
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl_stages.artifacts import artifact_digest, checked_directory
from comlrl_stages.errors import UserError
from comlrl_stages.settings import ExportSettings, TeamSettings
from comlrl_stages.teams.critics import give_value_head, load_critic, new_critic, save_critic
from comlrl_stages.teams.loading import load_model, save_model
from comlrl_stages.teams.log_probs import completion_log_probs
from comlrl_stages.teams.policies import save_policy
from comlrl_stages.teams.team import load_team

from .conftest import counts_of, publish, run_stage


@pytest.fixture(scope="module")
def export(mixed, tmp_path_factory):
    path = tmp_path_factory.mktemp("method") / "export"
    run_stage("export", ExportSettings(agents=2), {"policy": mixed.trained["policy"]}, {"export": path})
    return path


def test_checksums_cover_every_file_of_every_agent_and_hold(export):
    listed = dict(reversed(line.split("  ", 1)) for line in (export / "SHA256SUMS").read_text().splitlines())
    files = {p.relative_to(export).as_posix() for p in export.glob("agent_*/*")}
    assert set(listed) == files
    for name, digest in listed.items():
        assert hashlib.sha256((export / name).read_bytes()).hexdigest() == digest
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=export, check=True)


def test_agents_load_with_from_pretrained_and_are_the_policy(mixed, export):
    for agent in ("agent_0", "agent_1"):
        model = AutoModelForCausalLM.from_pretrained(export / agent)
        trained = load_model(mixed.trained["policy"] / agent)
        for name, weight in trained.model.state_dict().items():
            assert torch.equal(model.state_dict()[name], weight)
        tokenizer = AutoTokenizer.from_pretrained(export / agent)
        assert tokenizer("the owl")["input_ids"] == trained.tokenizer("the owl")["input_ids"]


def test_an_exported_agent_can_be_a_model_again(export):
    assert load_model(export / "agent_1").facts.context_length == 128


def test_provenance_says_how_the_team_was_trained(export):
    provenance = json.loads((export / "provenance.json").read_text())
    assert provenance["stage"] == "optimize"
    assert json.loads(provenance["tracked"]["optimize.learning_rate"]) == 1e-3
    assert {one["name"] for one in provenance["inputs"]} >= {"models", "pairs", "reference_log_probs"}


def test_the_export_is_a_checked_artifact(export):
    assert checked_directory(export) == export
    assert counts_of(export)["agents"] == 2


# --- adapters, critics, value heads ---

LORA = SimpleNamespace(rank=4, alpha=8.0, dropout=0.0, target_modules="all-linear")
ARITHMETIC = SimpleNamespace(torch_threads=1, compute_dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def adapters(mixed, tmp_path_factory):
    """A policy of adapters that have moved, with a value head and a critic; in memory and as an artifact."""
    digests = [artifact_digest(folder) for folder in mixed.models]
    team = load_team(mixed.models, digests, TeamSettings(), ARITHMETIC, trainable=True, lora=LORA)
    for agent in team.agents:
        for weight in agent.model.parameters():
            if weight.requires_grad:
                weight.data += 0.05 * torch.randn(weight.shape, generator=seeded())
    give_value_head(team.agents[1], None, seeded())

    def write(place):
        save_policy(team, place)
        save_critic(new_critic(mixed.models[0], None, seeded()), place / "critics" / "critic")

    return team, publish(tmp_path_factory.mktemp("lora") / "policy", write)


@pytest.fixture(scope="module")
def merged_export(mixed, adapters, tmp_path_factory):
    path = tmp_path_factory.mktemp("method") / "export"
    inputs = {"policy": adapters[1], "models": mixed.models}
    run_stage("export", ExportSettings(lora=True), inputs, {"export": path})
    return path


def seeded():
    return torch.Generator().manual_seed(0)


def log_probs(model, facts):
    with torch.no_grad():
        return completion_log_probs(model, facts, [[5, 40, 41], [6]], [[60, 61, 1], [70]]).log_probs


def test_adapters_are_merged_into_models_that_load_with_from_pretrained(adapters, merged_export):
    for number, agent in enumerate(adapters[0].agents):
        model = AutoModelForCausalLM.from_pretrained(merged_export / f"agent_{number}")
        expected = log_probs(agent.model, agent.facts)
        torch.testing.assert_close(log_probs(model, agent.facts), expected, atol=1e-5, rtol=0)
        tokenizer = AutoTokenizer.from_pretrained(merged_export / f"agent_{number}")
        assert tokenizer.get_vocab() == agent.tokenizer.get_vocab()
        assert not (merged_export / f"agent_{number}" / "adapter_config.json").exists()


def test_critics_and_value_heads_go_along_with_their_checksums(adapters, merged_export):
    expected = load_critic(adapters[1] / "critics" / "critic")
    assert torch.equal(load_critic(merged_export / "critics" / "critic").model([[5, 6]]), expected.model([[5, 6]]))
    head = give_value_head(load_model(merged_export / "agent_1"), None, seeded(), merged_export / "agent_1")
    assert torch.equal(head.weight, adapters[0].agents[1].value_head.weight)
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=merged_export, check=True)
    listed = (merged_export / "SHA256SUMS").read_text()
    for name in ("critics/critic/value_head.safetensors", "agent_1/value_head.safetensors"):
        assert f"  {name}\n" in listed


def test_whole_models_with_critics_and_value_heads_are_copied(mixed, tmp_path):
    def write(place):
        agent = load_model(mixed.models[0])
        give_value_head(agent, None, seeded())
        save_model(agent, place / "agent_0")
        save_critic(new_critic(mixed.models[1], None, seeded()), place / "critics" / "critic_0")

    policy = publish(tmp_path / "policy", write)
    run_stage("export", ExportSettings(agents=1), {"policy": policy}, {"export": tmp_path / "export"})
    for part in ("agent_0", "critics/critic_0"):
        for file in (policy / part).iterdir():
            assert (tmp_path / "export" / part / file.name).read_bytes() == file.read_bytes()
    AutoModelForCausalLM.from_pretrained(tmp_path / "export" / "agent_0")


def test_adapters_without_their_base_models_are_refused(adapters, tmp_path):
    with pytest.raises(UserError, match=r"needs the base model of each of 2 agents, but got 0. Give --model once"):
        run_stage("export", ExportSettings(lora=True), {"policy": adapters[1]}, {"export": tmp_path / "export"})


def test_adapters_on_other_base_models_are_refused(mixed, adapters, tmp_path):
    inputs = {"policy": adapters[1], "models": mixed.models[::-1]}
    with pytest.raises(UserError, match=r"agent_0 holds an adapter of the base model llama with digest"):
        run_stage("export", ExportSettings(lora=True), inputs, {"export": tmp_path / "export"})
    assert not (tmp_path / "export").exists()
