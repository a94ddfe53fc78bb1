"""The card stage: a model card that says what the team is, how good it is and how to load it."""

import os
import re

import pytest
import yaml

from comlrl_stages.artifacts import artifact_digest, checked_directory, write_json
from comlrl_stages.settings import CardSettings, ExportSettings

from .conftest import SAMPLING, TASK, files_of, publish, run_stage

METRICS = {
    "eval/turn_1/reward_mean": 0.71849,
    "eval/turn_1/reward_low": 0.6,
    "eval/turn_1/reward_high": 0.8,
    "eval/items": 4,
    "eval/joint_responses": 64,
    "eval/kl_per_token": 0.1234,
}
BASE = {**METRICS, "eval/turn_1/reward_mean": 0.25, "eval/turn_1/reward_low": None}
SETTINGS = {
    "experiment": "small",
    "description": "Two agents <write> & read.",
    "method": "my-madpo",
    "method_settings": {"algorithm": "madpo", "learning_rate": 2e-5, "preferences": "close"},
    "seed": 3,
    "task": TASK,
    "models": ["builtin: tiny", "hub: owner/model"],
    "sampling": {**SAMPLING, "temperature": 0.7},
}


@pytest.fixture
def made(mixed, tmp_path):
    """Export a team and write its card; returns the folder of both."""
    export = tmp_path / "method" / "export"
    run_stage("export", ExportSettings(agents=2), {"policy": mixed.trained["policy"]}, {"export": export})
    write_card(export)
    return export.parent


def write_card(export, metrics=METRICS, base=BASE, **changes):
    def metric_file(name, content):
        return publish(export.parent / f"{name}.json", lambda place: write_json(place, content))

    inputs = {"export": export, "metrics": metric_file("metrics", metrics)}
    inputs["base_metrics"] = None if base is None else metric_file("base", base)
    run_stage("card", CardSettings(**{**SETTINGS, **changes}), inputs, {"card": export.parent / "card.md"})


def test_the_card_names_task_models_method_and_settings(made):
    text = (made / "card.md").read_text()
    for part in ("# small: my-madpo, seed 3", "Two agents <write> & read.", "**length_ratio**", "**madpo**"):
        assert part in text
    assert "**length_ratio**, from the preference pairs `close`.\nEach agent is a folder" in text
    assert "builtin: tiny; hub: owner/model" in text and "temperature 0.7, at most" in text
    settings = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    assert settings == SETTINGS["method_settings"]


def test_the_card_has_the_scores_of_team_and_base_with_their_intervals(made):
    text = (made / "card.md").read_text()
    assert "| my-madpo | 0.718 | 0.600 to 0.800 |\n| base (untrained) | 0.250 | n/a to 0.800 |\n" in text
    assert "on the eval items\n(4 items, 64 sampled joint responses" in text
    assert "Distance from the base team: 0.123 nats per token." in text


def test_the_card_begins_with_the_header_that_hubs_read(made):
    _, header, _ = (made / "card.md").read_text().split("---\n", 2)
    assert yaml.safe_load(header) == {"library_name": "transformers", "tags": ["multi-agent", "cooperative", "madpo"]}


def test_the_code_in_the_card_loads_the_team(made, monkeypatch):
    code = re.search(r"```python\n(.*?)```", (made / "card.md").read_text(), re.DOTALL)[1]
    monkeypatch.chdir(made)
    names = {}
    exec(code, names)
    assert [type(agent).__name__ for agent in names["agents"]] == ["LlamaForCausalLM", "GPT2LMHeadModel"]
    assert [len(tokenizer) for tokenizer in names["tokenizers"]] == [320, 300]


def test_the_card_lies_in_the_export_and_in_every_agents_folder(made):
    text = (made / "card.md").read_text()
    for folder in ("export", "export/agent_0", "export/agent_1"):
        assert (made / folder / "README.md").read_text() == text


def test_a_card_that_is_written_again_changes_no_weights_and_no_digest(made):
    export = made / "export"
    before = artifact_digest(export), files_of(export)
    weights = {path: (path.stat().st_mtime_ns, os.stat(path).st_ino) for path in export.rglob("*.safetensors")}
    write_card(export, metrics={**METRICS, "eval/turn_1/reward_mean": 0.9})
    assert "| 0.900 |" in (export / "agent_1" / "README.md").read_text()
    assert checked_directory(export) == export
    assert (artifact_digest(export), files_of(export)) == before
    assert len(weights) == 2
    assert all((path.stat().st_mtime_ns, path.stat().st_ino) == found for path, found in weights.items())


def test_with_several_turns_the_card_has_the_reward_of_the_last(made):
    later = {"eval/turn_2/reward_mean": 0.9, "eval/reward_mean": 0.85, "eval/reward_low": 0.7, "eval/reward_high": 0.95}
    write_card(made / "export", metrics=METRICS | later, base=None)
    text = (made / "card.md").read_text()
    assert "An episode has up to 2 turns; after each" in text
    assert "at the last of up to 2 turns" in text and "| my-madpo | 0.850 | 0.700 to 0.950 |" in text


@pytest.mark.parametrize(
    ("reward_model", "told"),
    [(None, "to maximise the task's own reward"), ("wide", "to maximise the joint reward model `wide`")],
)
def test_the_card_says_which_reward_was_maximised(made, reward_model, told):
    write_card(made / "export", method_settings={"algorithm": "maac", "reward_model": reward_model})
    assert f"trained together by **maac** on the task\n**length_ratio**, {told}.\n" in (made / "card.md").read_text()


def test_adapters_are_named_where_they_were_trained(made):
    assert "adapters" not in (made / "card.md").read_text()
    write_card(made / "export", method_settings={"algorithm": "magrpo", "lora": {"rank": 4, "alpha": 8.0}})
    text = (made / "card.md").read_text()
    assert "adapters of rank 4 (LoRA, alpha 8), which are merged into these weights.\n\n## Scores" in text


def test_a_card_without_base_description_or_kl_leaves_them_out(made):
    metrics = {name: value for name, value in METRICS.items() if "kl" not in name}
    write_card(made / "export", metrics=metrics, base=None, description="")
    text = (made / "card.md").read_text()
    assert "base (untrained)" not in text and "Distance" not in text and "None" not in text
    assert "seed 3\n\nA team of 2 agents" in text


def test_the_chat_template_is_named_where_an_agent_has_one(made, tmp_path):
    assert "and the tokenizer's chat template" in (made / "card.md").read_text()
