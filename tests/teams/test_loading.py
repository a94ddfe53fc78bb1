"""Model folders."""

import json
import shutil

import pytest
import torch
from transformers import GenerationConfig

from comlrl_stages.errors import UserError
from comlrl_stages.teams.loading import Facts, LoadedModel, facts_of, load_model, save_model


def test_end_ids_of_generation_config_config_and_tokenizer_are_united(tiny_llama):
    model, tokenizer = tiny_llama.model, tiny_llama.tokenizer
    kept = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=[5, 6])
    try:
        assert facts_of(model, tokenizer).eos_ids == (5, 6, 1)
    finally:
        model.generation_config = kept


def test_facts_of_both_families(tiny_llama, tiny_gpt2):
    assert tiny_llama.facts.eos_ids == (1, 6)
    assert (tiny_llama.facts.bos_id, tiny_llama.facts.pad_id, tiny_llama.facts.context_length) == (0, 2, 128)
    assert tiny_llama.facts.chat_template == tiny_llama.tokenizer.chat_template
    assert (tiny_gpt2.facts.eos_ids, tiny_gpt2.facts.pad_id) == ((0,), 0)
    assert (tiny_gpt2.facts.context_length, tiny_gpt2.facts.chat_template) == (128, None)


def test_facts_survive_writing_and_reading(tmp_path):
    facts = Facts((1, 6), 2, None, 77, "{{ 'ü' }}")
    facts.write(tmp_path)
    assert Facts.read(tmp_path) == facts


def test_a_saved_model_loads_bit_equal(tiny_model, tmp_path):
    save_model(tiny_model, tmp_path / "copy")
    copy = load_model(tmp_path / "copy")
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(copy.model(ids).logits, tiny_model.model(ids).logits)
    assert copy.facts == tiny_model.facts
    assert copy.tokenizer("hello fox").input_ids == tiny_model.tokenizer("hello fox").input_ids
    assert not copy.model.training


def test_sampling_advice_of_the_authors_is_not_saved(tiny_llama, tmp_path):
    kept = tiny_llama.model.generation_config
    tiny_llama.model.generation_config = GenerationConfig(temperature=0.1, top_k=3, repetition_penalty=1.3)
    save_model(tiny_llama, tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert not {"temperature", "top_k", "repetition_penalty"} & {
        key for key, value in saved.items() if value is not None
    }
    assert saved["eos_token_id"] == [1, 6]
    tiny_llama.model.generation_config = kept


@pytest.mark.parametrize("missing", ["config.json", "facts.json", "model.safetensors", "tokenizer"])
def test_a_missing_file_is_named_with_its_folder(llama_folder, tmp_path, missing):
    folder = tmp_path / "broken"
    shutil.copytree(llama_folder, folder)
    for path in folder.iterdir():
        if path.name.startswith(missing):
            path.unlink()
    with pytest.raises(UserError, match=f"{folder}.*has no {missing}"):
        load_model(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        load_model(tmp_path / "nowhere")


def test_damaged_facts_say_what_was_expected(tmp_path):
    (tmp_path / "facts.json").write_text('{"eos_ids": [1]}')
    with pytest.raises(UserError, match=r"facts\.json is damaged.*context_length"):
        Facts.read(tmp_path)


def test_pickled_weights_are_not_loaded(llama_folder, tmp_path):
    folder = tmp_path / "pickled"
    shutil.copytree(llama_folder, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load_model(folder)


def test_pad_falls_back_to_an_end_id(tiny_gpt2):
    tokenizer = tiny_gpt2.tokenizer.__class__(tokenizer_object=tiny_gpt2.tokenizer.backend_tokenizer)
    tokenizer.eos_token = "<|endoftext|>"
    assert facts_of(LoadedModel(tiny_gpt2.model, tokenizer, tiny_gpt2.facts).model, tokenizer).pad_id == 0
