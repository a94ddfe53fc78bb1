"""The export stage: a trained team as folders that load, with checksums and provenance."""

import hashlib
import json
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl_stages.artifacts import checked_directory
from comlrl_stages.settings import ExportSettings
from comlrl_stages.teams.loading import load_model

from .conftest import counts_of, run_stage


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
