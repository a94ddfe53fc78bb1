"""Low-rank adapters: their draw, their gradients, the reference below them, their folders, merging."""

import copy
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from comlrl_stages.errors import UserError
from comlrl_stages.learning.optimization import adamw, restore_training_state, training_state
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.critics import give_value_head
from comlrl_stages.teams.loading import load_model, read_value_head, save_model
from comlrl_stages.teams.log_probs import completion_log_probs
from comlrl_stages.teams.lora import (
    adapter_dropout,
    add_lora,
    is_adapter,
    load_adapter,
    merged,
    reference,
    save_adapter,
    with_frozen_weights_of,
)
from comlrl_stages.teams.sampling import Request, SamplingParameters, sample
from comlrl_stages.teams.scoring import score_completions
from comlrl_stages.teams.value_head import new_head

PROMPTS = [[5, 40, 41, 42], [6], [7, 50, 51, 52]]
COMPLETIONS = [[60, 61, 1], [70], [80, 81, 82, 83]]
LORA = SimpleNamespace(rank=4, alpha=16.0, dropout=0.0, target_modules="all-linear")
DIGEST = "0123456789abcdef" * 4


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def lora(**changes):
    return SimpleNamespace(**{**vars(LORA), **changes})


@pytest.fixture(params=["llama", "gpt2"])
def folder(request):
    return request.getfixturevalue(f"{request.param}_folder")


def adapted(folder, seed=0, **changes):
    loaded = load_model(folder)
    loaded.model = add_lora(loaded.model, lora(**changes), generator(seed))
    return loaded


def trainable(loaded):
    return {name: weight for name, weight in loaded.model.named_parameters() if weight.requires_grad}


def moved(loaded):
    """Move the adapter away from zero."""
    for name, weight in trainable(loaded).items():
        if "lora_B" in name:
            weight.data.normal_(std=0.1, generator=generator(1))
    return loaded


def scores(loaded, **options):
    return completion_log_probs(loaded.model, loaded.facts, PROMPTS, COMPLETIONS, **options)


def log_probs(loaded):
    with torch.no_grad():
        return scores(loaded).log_probs


def step(loaded, optimizer):
    scores(loaded).log_probs.sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def optimizer_of(loaded):
    return adamw(loaded.model.named_parameters(), learning_rate=1e-2, weight_decay=0.0, betas=(0.9, 0.99))


# --- what is added ---


def test_a_new_adapter_changes_nothing(folder):
    assert torch.equal(log_probs(adapted(folder)), log_probs(load_model(folder)))


def test_the_generator_alone_draws_it_as_peft_does(folder):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = trainable(adapted(folder))
    assert torch.equal(torch.get_rng_state(), state)
    again, other = trainable(adapted(folder)), trainable(adapted(folder, seed=1))
    for name, weight in first.items():
        assert torch.equal(weight, again[name]) and weight.dtype == torch.float32
        if "lora_A" in name:
            bound = weight.shape[1] ** -0.5
            assert not torch.equal(weight, other[name]) and 0.9 * bound < weight.abs().max() <= bound
        else:
            assert (weight == 0).all()


def test_all_linear_is_every_linear_module_but_the_output_layer(llama_folder, gpt2_folder):
    def names(loaded):
        return {name.split(".lora_")[0].rpartition(".")[2] for name in trainable(loaded)}

    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert names(adapted(llama_folder)) == projections
    assert names(adapted(gpt2_folder)) == {"c_attn", "c_proj", "c_fc"}
    assert names(adapted(llama_folder, target_modules=["q_proj", "mlp.up_proj"])) == {"q_proj", "up_proj"}


@pytest.mark.parametrize("name", ["query", "lm_head", "embed_tokens", "proj"])
def test_a_name_of_no_linear_module_is_an_error_that_lists_them(llama_folder, name):
    with pytest.raises(UserError, match=rf"names '{name}', which is no linear module of .*llama") as error:
        adapted(llama_folder, target_modules=["q_proj", name])
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, or all-linear" in str(error.value)


def test_gradients_reach_the_adapter_and_nothing_else(folder):
    loaded = moved(adapted(folder))
    scores(loaded).log_probs.sum().backward()
    for name, weight in loaded.model.named_parameters():
        assert (weight.grad is not None) is ("lora_" in name)
        assert weight.grad is None or weight.grad.abs().sum() > 0


def test_padding_and_batch_change_nothing(folder):
    loaded = moved(adapted(folder))
    together = log_probs(loaded)
    for row in range(3):
        alone = completion_log_probs(loaded.model, loaded.facts, [PROMPTS[row]], [COMPLETIONS[row]]).log_probs[0]
        torch.testing.assert_close(together[row, : len(alone)], alone, atol=1e-5, rtol=0)


def test_bfloat16_autocast_leaves_the_adapters_weights_float32(folder):
    loaded = moved(adapted(folder))
    with Compute("cpu", "bfloat16").autocast():
        scores(loaded).log_probs.sum().backward()
    assert all(weight.dtype == weight.grad.dtype == torch.float32 for weight in trainable(loaded).values())


# --- the reference below ---


def test_switched_off_it_is_the_base_bit_for_bit(folder):
    loaded = moved(adapted(folder))
    with_adapter = log_probs(loaded)
    base = log_probs(load_model(folder))
    with reference(loaded.model):
        assert torch.equal(log_probs(loaded), base)
    assert torch.equal(log_probs(loaded), with_adapter) and not torch.equal(with_adapter, base)


def test_after_the_reference_the_same_weights_train(folder):
    loaded = moved(adapted(folder))
    before = set(trainable(loaded))
    loss = scores(loaded).log_probs.sum()
    with reference(loaded.model):
        log_probs(loaded)
    loss.backward()
    assert set(trainable(loaded)) == before == {n for n, w in loaded.model.named_parameters() if w.grad is not None}


def test_the_reference_scores_many_completions_as_the_base_does(folder):
    options = {"temperature": 1.0, "token_budget": 16}
    compute = Compute("cpu", "float32")
    loaded = moved(adapted(folder))
    expected = score_completions(load_model(folder), compute, PROMPTS, COMPLETIONS, **options)
    with reference(loaded.model):
        assert score_completions(loaded, compute, PROMPTS, COMPLETIONS, **options) == expected


# --- dropout ---


def test_dropout_acts_only_where_it_is_asked_to_and_from_its_generator(folder):
    loaded = moved(adapted(folder, dropout=0.5))
    plain = log_probs(loaded)
    torch.manual_seed(1)
    state = torch.get_rng_state()

    def dropped(seed):
        with adapter_dropout(loaded.model, generator(seed)):
            return log_probs(loaded)

    first = dropped(0)
    assert torch.equal(dropped(0), first) and not torch.equal(dropped(1), first) and not torch.equal(first, plain)
    assert torch.equal(log_probs(loaded), plain) and torch.equal(plain, log_probs(moved(adapted(folder))))
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_keeps_the_mean(folder):
    loaded = adapted(folder, dropout=0.25)
    layer = next(module for module in loaded.model.modules() if type(module).__name__ == "SeededDropout")
    with adapter_dropout(loaded.model, generator()):
        values = layer(torch.ones(200, 200))
    assert values.mean().item() == pytest.approx(1.0, abs=0.01)
    assert (values == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)


# --- sampling, values, training ---


def test_the_decode_loop_samples_from_adapted_models(folder):
    loaded = moved(adapted(folder))
    requests = [Request(prompt, np.random.default_rng(row)) for row, prompt in enumerate(PROMPTS * 2)]
    drawn = sample(loaded, requests, SamplingParameters(max_new_tokens=8), Compute("cpu", "float32"), 256)
    whole = merged(load_copy(loaded))
    requests = [Request(prompt, np.random.default_rng(row)) for row, prompt in enumerate(PROMPTS * 2)]
    expected = sample(whole, requests, SamplingParameters(max_new_tokens=8), Compute("cpu", "float32"), 256)
    assert [one.completion_ids for one in drawn] == [one.completion_ids for one in expected]
    for prompt, one in zip(PROMPTS * 2, drawn, strict=True):
        again = completion_log_probs(loaded.model, loaded.facts, [prompt], [one.completion_ids]).log_probs[0]
        torch.testing.assert_close(torch.tensor(one.log_probs), again.detach(), atol=1e-5, rtol=0)


def load_copy(loaded):
    """The same adapter on weights of its own, which merging may change."""
    return type(loaded)(copy.deepcopy(loaded.model), loaded.tokenizer, loaded.facts)


@pytest.mark.parametrize("place", ["prompt", "response"])
def test_a_value_head_reads_adapted_states(folder, place):
    loaded = moved(adapted(folder))
    head = new_head(loaded.hidden_size, None, generator())
    found = scores(loaded, value_head=head, value_at=place).values
    whole = merged(load_copy(loaded))
    torch.testing.assert_close(found, scores(whole, value_head=head, value_at=place).values, atol=1e-5, rtol=0)
    found.sum().backward()
    assert head.weight.grad.abs().sum() > 0
    assert any(weight.grad.abs().sum() > 0 for name, weight in trainable(loaded).items() if "lora_A" in name)


def test_training_state_is_the_adapter_alone_and_resumes_bit_for_bit(folder):
    undisturbed, killed, resumed = (adapted(folder) for _ in range(3))
    optimizers = [optimizer_of(one) for one in (undisturbed, killed, resumed)]
    for _ in range(2):
        step(undisturbed, optimizers[0])
        step(killed, optimizers[1])
    state = training_state(killed.model.named_parameters(), optimizers[1])
    assert {name.partition(":")[2] for name in state} == set(trainable(killed))
    restore_training_state(resumed.model.named_parameters(), optimizers[2], state)
    for _ in range(2):
        step(undisturbed, optimizers[0])
        step(resumed, optimizers[2])
    for name, weight in undisturbed.model.named_parameters():
        assert torch.equal(weight, dict(resumed.model.named_parameters())[name])


def test_copies_share_the_frozen_weights_and_nothing_else(folder):
    base = load_model(folder)
    untouched = log_probs(base)
    copies = []
    for seed in range(2):
        copies.append(with_frozen_weights_of(base))
        copies[-1].model = add_lora(copies[-1].model, LORA, generator(seed))
    weights = {weight.data_ptr() for weight in base.model.parameters()}
    for one in copies:
        frozen = {weight.data_ptr() for weight in one.model.parameters() if not weight.requires_grad}
        assert frozen == weights
    optimizer = optimizer_of(copies[0])
    for _ in range(2):
        step(copies[0], optimizer)
    assert torch.equal(log_probs(base), untouched) and torch.equal(log_probs(copies[1]), untouched)
    assert not torch.equal(log_probs(copies[0]), untouched)


# --- folders ---


def test_save_and_load_give_the_same_bits(folder, tmp_path):
    loaded = moved(adapted(folder))
    save_adapter(loaded, tmp_path / "agent_0", DIGEST)
    again = load_adapter(load_model(folder), tmp_path / "agent_0", DIGEST)
    assert torch.equal(log_probs(again), log_probs(loaded))
    assert not trainable(again) and again.value_head is None
    assert is_adapter(tmp_path / "agent_0") and not is_adapter(folder)


def test_loading_draws_nothing(folder, tmp_path):
    save_adapter(moved(adapted(folder)), tmp_path, DIGEST)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    load_adapter(load_model(folder), tmp_path, DIGEST)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_folder_is_small_equal_bytes_and_names_no_place(folder, tmp_path):
    for name in ("one", "two"):
        elsewhere = tmp_path / f"at_{name}" / "base"
        shutil.copytree(folder, elsewhere)
        save_adapter(moved(adapted(elsewhere)), tmp_path / name, DIGEST)
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}
    assert set(files) == {"adapter_model.safetensors", "adapter_config.json", "base.json"}
    config = json.loads(files["adapter_config.json"])
    assert config["target_modules"] == sorted(config["target_modules"]) and config["base_model_name_or_path"] == "base"
    assert json.loads(files["base.json"]) == {"digest": DIGEST, "name": "base"}
    assert not any(b"/" in files[name] for name in ("adapter_config.json", "base.json"))


def test_peft_itself_reads_the_folder(folder, tmp_path):
    loaded = moved(adapted(folder))
    save_adapter(loaded, tmp_path, DIGEST)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path).eval()
    found = completion_log_probs(model, loaded.facts, PROMPTS, COMPLETIONS).log_probs
    torch.testing.assert_close(found.detach(), log_probs(loaded), atol=1e-6, rtol=0)


def test_a_value_head_goes_with_the_adapter(folder, tmp_path):
    loaded = adapted(folder)
    head = give_value_head(loaded, 3, generator())
    save_adapter(loaded, tmp_path, DIGEST)
    again = load_adapter(load_model(folder), tmp_path, DIGEST)
    assert torch.equal(again.value_head.hidden.weight, head.hidden.weight)


def test_another_base_is_an_error_that_names_both(folder, tmp_path):
    save_adapter(adapted(folder), tmp_path, DIGEST)
    with pytest.raises(UserError, match=r"of the base model \w+ with digest 0123456789abcdef, .* has digest ffffffff"):
        load_adapter(load_model(folder), tmp_path, "f" * 64)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("base.json", lambda path: path.unlink(), r"base\.json not found; without it nobody knows"),
        ("base.json", lambda path: path.write_text("{}"), r"base\.json is damaged"),
        ("adapter_model.safetensors", lambda path: path.write_bytes(b"no"), "holds a damaged adapter"),
        ("adapter_model.safetensors", lambda path: path.unlink(), "holds a damaged adapter"),
        ("adapter_config.json", lambda path: path.write_text("{"), "holds a damaged adapter"),
        ("adapter_config.json", lambda path: path.unlink(), "holds a damaged adapter"),
    ],
)
def test_a_missing_or_damaged_file_is_an_error(folder, tmp_path, file, damage, message):
    save_adapter(adapted(folder), tmp_path, DIGEST)
    damage(tmp_path / file)
    with pytest.raises(UserError, match=message):
        load_adapter(load_model(folder), tmp_path, DIGEST)


@pytest.mark.parametrize("change", [lambda tensor: None, lambda tensor: tensor[:-1].clone()])
def test_tensors_that_are_missing_or_do_not_fit_are_an_error(folder, tmp_path, change):
    save_adapter(adapted(folder), tmp_path, DIGEST)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    first = min(tensors)
    tensors[first] = change(tensors[first])
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"does not fit its adapter_config\.json: 1 tensors"):
        load_adapter(load_model(folder), tmp_path, DIGEST)


def test_merged_it_is_an_ordinary_model_with_the_same_log_probs(folder, tmp_path):
    loaded = moved(adapted(folder))
    give_value_head(loaded, None, generator())
    expected = log_probs(loaded)
    save_model(merged(loaded), tmp_path)
    torch.testing.assert_close(log_probs(load_model(tmp_path)), expected, atol=1e-5, rtol=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert set(model.state_dict()) == set(load_model(folder).model.state_dict())
    assert not torch.equal(expected, log_probs(load_model(folder)))
    assert torch.equal(read_value_head(tmp_path, loaded.hidden_size).weight, loaded.value_head.weight)
