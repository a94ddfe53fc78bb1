"""The prepare stage: every source ends in the same folder layout, and the provenance says what was found."""

import json

import pytest
import torch

from comlrl_stages.artifacts import artifact_digest, open_work
from comlrl_stages.errors import UserError
from comlrl_stages.settings import PrepareSettings
from comlrl_stages.stages import prepare
from comlrl_stages.teams.loading import Facts, load_model

LAYOUT = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "facts.json"}


def prepare_model(target, **settings):
    quick = {"pretraining_steps": 2} if "builtin" in settings else {}
    settings = PrepareSettings(**{**quick, "torch_threads": 1, **settings})
    with open_work("prepare", {}, {}, {"model": target}, {}) as work:
        prepare.run(settings, work)
    return target


def resolved(target):
    return json.loads(target.with_name(f"{target.name}.provenance.json").read_text())["resolved"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return prepare_model(tmp_path_factory.mktemp("models") / "tiny", builtin="tiny")


def test_the_builtin_model_is_a_model_folder(tiny):
    assert {path.name for path in tiny.iterdir()} >= LAYOUT
    facts = Facts.read(tiny)
    assert facts.context_length == 256 and len(facts.eos_ids) == 1 and facts.pad_id not in facts.eos_ids
    loaded = load_model(tiny)
    assert loaded.tokenizer.decode(facts.eos_ids) == "<|eos|>"


def test_the_provenance_says_how_good_the_pretraining_was(tiny):
    facts = resolved(tiny)
    assert 5 < facts["final_loss"] < 8 and facts["weights_dtype"] == "float32" and 4e5 < facts["parameters"] < 2e6


def test_the_same_settings_give_the_same_bytes(tiny, tmp_path):
    again = prepare_model(tmp_path / "again", builtin="tiny")
    assert artifact_digest(again) == artifact_digest(tiny)


def test_a_prepared_folder_prepares_to_the_same_weights(tiny, tmp_path):
    copy = prepare_model(tmp_path / "copy", path=str(tiny))
    assert Facts.read(copy) == Facts.read(tiny)
    for a, b in zip(load_model(tiny).model.parameters(), load_model(copy).model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_chat_template_of_the_config_replaces_the_own_one(tiny, tmp_path):
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    folder = prepare_model(tmp_path / "model", path=str(tiny), chat_template=template)
    assert Facts.read(folder).chat_template == template == load_model(folder).tokenizer.chat_template


def test_a_tokenizer_without_pad_pads_with_an_end_token_and_keeps_its_vocabulary(tiny, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        content = json.loads((source / name).read_text())
        content = {key: value for key, value in content.items() if key not in ("pad_token", "pad_token_id")}
        (source / name).write_text(json.dumps(content))
    facts = Facts.read(prepare_model(tmp_path / "model", path=str(source)))
    assert facts.pad_id in facts.eos_ids
    assert len(load_model(tmp_path / "model").tokenizer) == len(load_model(tiny).tokenizer)


def test_a_model_that_never_ends_is_refused(tiny, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        content = json.loads((source / name).read_text())
        content = {key: value for key, value in content.items() if key not in ("eos_token", "eos_token_id")}
        if name == "config.json":
            content["eos_token_id"] = None
        (source / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match="names no end token"):
        prepare_model(tmp_path / "model", path=str(source))
    assert not (tmp_path / "model").exists()


def test_a_missing_source_leaves_no_artifact(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        prepare_model(tmp_path / "model", path=str(tmp_path / "nowhere"))
    assert not (tmp_path / "model").exists()
