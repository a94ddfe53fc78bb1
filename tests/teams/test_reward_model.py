"""The joint reward model: its score and its folder."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from comlrl_stages.errors import UserError
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.loading import LoadedModel, facts_of, save_model
from comlrl_stages.teams.reward_model import load_reward_model, new_reward_model, save_reward_model, score_joint
from comlrl_stages.teams.tiny import tiny_tokenizer

CPU = Compute("cpu", "float32")
PROMPTS = ["Write a line about rain.", "Now write a longer one."]


def _backbone(kind, tokenizer):
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=len(tokenizer), n_positions=128, n_embd=32, n_layer=2, n_head=2, **ids)
        )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, max_position_embeddings=128, **ids))


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(0)


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """A llama-style and a gpt2-style model folder; pad == eos in the second."""
    made = {}
    for kind in ("llama", "gpt2"):
        model = _backbone(kind, tokenizer)
        facts = facts_of(model, tokenizer)
        if kind == "gpt2":
            facts = type(facts)(**{**vars(facts), "pad_id": facts.eos_ids[0]})
        made[kind] = tmp_path_factory.mktemp(kind)
        save_model(LoadedModel(model, tokenizer, facts), made[kind])
    return made


def _new(folder, seed=0, max_length=128):
    return new_reward_model(folder, max_length=max_length, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def loaded(folders, request):
    return _new(folders[request.param])


def _inputs(loaded):
    texts = [("a", "b"), ("It rains.", ""), ("It rains all day.", "The sea is wide and the town is small.")]
    return [loaded.encode(PROMPTS, responses) for responses in texts]


def test_a_length_beyond_the_context_is_lowered_to_it(folders):
    assert _new(folders["gpt2"], max_length=4096).max_length == 128


def test_score_reads_the_last_real_token(loaded):
    ids = [list(joint.ids) for joint in _inputs(loaded)]
    with torch.inference_mode():
        scores = loaded.model(ids)
        for row, score in zip(ids, scores, strict=True):
            hidden = loaded.model.backbone(torch.tensor([row])).last_hidden_state[0, len(row) - 1]
            assert score.item() == pytest.approx(loaded.model.head(hidden).item(), abs=1e-6)


def test_score_is_independent_of_batch_mates_and_padding_side(loaded):
    ids = [list(joint.ids) for joint in _inputs(loaded)]
    width = max(map(len, ids)) + 3
    pad = loaded.facts.pad_id
    left = torch.tensor([[pad] * (width - len(row)) + row for row in ids])
    left_mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in ids])
    with torch.inference_mode():
        alone = torch.cat([loaded.model([row]) for row in ids])
        torch.testing.assert_close(loaded.model(ids), alone, atol=1e-6, rtol=0)
        torch.testing.assert_close(loaded.model.score(left, left_mask), alone, atol=1e-6, rtol=0)


def test_scores_come_in_order_whatever_the_token_budget(loaded):
    inputs = _inputs(loaded)
    whole = score_joint(loaded, inputs, CPU, token_budget=4096)
    assert score_joint(loaded, inputs, CPU, token_budget=1) == pytest.approx(whole, abs=1e-6)
    assert len(set(whole)) == len(whole)


def test_head_stays_float32_under_bfloat16(loaded):
    with torch.inference_mode(), Compute("cpu", "bfloat16").autocast():
        assert loaded.model([[1, 2, 3]]).dtype == torch.float32


def test_save_and_load_give_the_same_bits(loaded, tmp_path):
    save_reward_model(loaded, tmp_path / "reward_model")
    again = load_reward_model(tmp_path / "reward_model")
    assert again.max_length == loaded.max_length
    assert again.facts == loaded.facts
    assert _inputs(again) == _inputs(loaded)
    assert score_joint(again, _inputs(again), CPU, 4096) == score_joint(loaded, _inputs(loaded), CPU, 4096)


def test_head_is_drawn_from_its_own_generator_alone(folders):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = _new(folders["llama"]).model.head.weight
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(_new(folders["llama"]).model.head.weight, first)
    assert not torch.equal(_new(folders["llama"], seed=1).model.head.weight, first)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda head: head.unlink(), "without its head"),
        (lambda head: head.write_bytes(b"nothing"), "damaged"),
        (lambda head: save_file({"weight": torch.zeros(1, 7)}, head), r"\(1, 7\).*\(1, 32\)"),
        (lambda head: save_file({"score": torch.zeros(1, 32)}, head), "score"),
        (lambda head: (head.parent / "reward_model.json").unlink(), "reward_model.json not found"),
        (lambda head: (head.parent / "reward_model.json").write_text("{}"), "max_length"),
    ],
)
def test_a_head_that_is_missing_or_does_not_fit_is_an_error(folders, tmp_path, damage, message):
    save_reward_model(_new(folders["llama"]), tmp_path)
    damage(tmp_path / "head.safetensors")
    with pytest.raises(UserError, match=message):
        load_reward_model(tmp_path)


@pytest.mark.parametrize("rows", [None, 7])
def test_a_backbone_with_missing_or_misshapen_weights_is_an_error(folders, tmp_path, rows):
    save_reward_model(_new(folders["llama"]), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["norm.weight"]
    if rows is not None:
        weights["norm.weight"] = torch.zeros(rows)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"1 weights are missing or of another shape .*norm\.weight"):
        load_reward_model(tmp_path)
