"""The decode loop."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, GenerationConfig, MistralConfig

from comlrl_stages.errors import UserError
from comlrl_stages.seeding import stream
from comlrl_stages.teams.batching import plan_batches
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.drawing import draw_tokens
from comlrl_stages.teams.loading import LoadedModel
from comlrl_stages.teams.log_probs import completion_log_probs
from comlrl_stages.teams.prompts import decode
from comlrl_stages.teams.sampling import Request, SamplingParameters, sample

PROMPTS = [[0, 4, 40, 41, 42], [0, 4], [0, 50, 51, 52, 53, 54, 55, 56, 57], [0, 4, 40, 41, 42], [33]]
LARGE = 10**6


def requests(prompts=PROMPTS, seed=0):
    return [Request(prompt, stream(seed, "row", row)) for row, prompt in enumerate(prompts)]


def ids(samples):
    return [one.completion_ids for one in samples]


def with_bias(loaded, **logits):
    """Return the model with all weights of the output layer 0 and the given logits, the same for every token."""

    class Biased(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.config = loaded.model, loaded.model.config

        def forward(self, logits_to_keep=0, **inputs):
            output = self.model(logits_to_keep=logits_to_keep, **inputs)
            output.logits = torch.full_like(output.logits, -30.0)
            for token, value in logits.items():
                output.logits[..., int(token.removeprefix("id"))] = value
            return output

    return LoadedModel(Biased(), loaded.tokenizer, loaded.facts)


def test_batches_are_sorted_by_cost_and_keep_the_budget():
    assert plan_batches([3, 1, 2, 1, 9], budget=4) == [[1, 3], [2], [0], [4]]
    assert plan_batches([5, 5, 5], budget=100) == [[0, 1, 2]]
    assert plan_batches([], budget=10) == []


@pytest.mark.parametrize("truncation", [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.9}])
def test_a_row_is_the_same_alone_in_any_batch_and_under_any_budget(tiny_model, cpu_float32, truncation):
    parameters = SamplingParameters(max_new_tokens=24, **truncation)
    together = ids(sample(tiny_model, requests(), parameters, cpu_float32, LARGE))
    small_batches = ids(sample(tiny_model, requests(), parameters, cpu_float32, 60))
    alone = [ids(sample(tiny_model, [request], parameters, cpu_float32, LARGE))[0] for request in requests()]
    assert together == small_batches == alone
    assert together[0] != together[3]


def test_the_same_streams_give_the_same_samples_and_others_do_not(tiny_llama, cpu_float32):
    parameters = SamplingParameters(max_new_tokens=16)
    first, second = (sample(tiny_llama, requests(), parameters, cpu_float32, LARGE) for _ in range(2))
    assert first == second
    assert ids(first) != ids(sample(tiny_llama, requests(seed=1), parameters, cpu_float32, LARGE))


def test_rows_that_end_early_do_not_disturb_the_others(tiny_llama, cpu_float32):
    """With fifty end ids rows end at many different steps, so the batch is compacted again and again."""
    facts = dataclasses.replace(tiny_llama.facts, eos_ids=tuple(range(100, 150)))
    ending = LoadedModel(tiny_llama.model, tiny_llama.tokenizer, facts)
    parameters = SamplingParameters(max_new_tokens=24)
    prompts = PROMPTS * 4
    samples = sample(ending, requests(prompts), parameters, cpu_float32, LARGE)
    alone = [sample(ending, [request], parameters, cpu_float32, LARGE)[0] for request in requests(prompts)]
    assert ids(samples) == ids(alone)
    assert len({len(one.completion_ids) for one in samples}) > 5
    for one in samples:
        ends = [token in facts.eos_ids for token in one.completion_ids]
        assert not any(ends[:-1])
        assert ends[-1] == (one.finish_reason == "stop")


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0])
def test_stored_log_probs_are_those_of_rescoring(tiny_model, cpu_float32, temperature):
    parameters = SamplingParameters(temperature=temperature, top_k=30, max_new_tokens=20, min_new_tokens=3)
    samples = sample(tiny_model, requests(), parameters, cpu_float32, LARGE)
    with torch.no_grad():
        scores = completion_log_probs(
            tiny_model.model, tiny_model.facts, PROMPTS, ids(samples), temperature=temperature
        )
    for one, row, mask in zip(samples, scores.log_probs, scores.mask, strict=True):
        np.testing.assert_allclose(one.log_probs, row[mask].numpy(), atol=2e-5)


def test_bfloat16_log_probs_are_near_those_of_rescoring(tiny_llama):
    compute = Compute("cpu", "bfloat16")
    samples = sample(tiny_llama, requests(), SamplingParameters(max_new_tokens=20), compute, LARGE)
    with torch.no_grad(), compute.autocast():
        scores = completion_log_probs(tiny_llama.model, tiny_llama.facts, PROMPTS, ids(samples))
    for one, row, mask in zip(samples, scores.log_probs, scores.mask, strict=True):
        np.testing.assert_allclose(one.log_probs, row[mask].numpy(), atol=0.2)


def test_greedy_is_what_generate_gives(tiny_model, cpu_float32):
    """Longer than a block of the cache, so that it grows."""
    parameters = SamplingParameters(temperature=0, max_new_tokens=100)
    samples = sample(tiny_model, [Request(prompt, None) for prompt in PROMPTS], parameters, cpu_float32, LARGE)
    for prompt, one in zip(PROMPTS, samples, strict=True):
        generated = tiny_model.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=100,
                eos_token_id=list(tiny_model.facts.eos_ids),
                pad_token_id=tiny_model.facts.pad_id,
            ),
        )
        assert one.completion_ids == generated[0, len(prompt) :].tolist()


def test_first_tokens_follow_the_softmax(tiny_llama, cpu_float32):
    """Pearson's statistic of 4,000 draws over the tokens expected at least 5 times, against mean + 4 deviations."""
    count, temperature = 4000, 1.3
    parameters = SamplingParameters(temperature=temperature, max_new_tokens=1)
    samples = sample(tiny_llama, requests([PROMPTS[0]] * count), parameters, cpu_float32, LARGE)
    drawn = np.bincount([one.completion_ids[0] for one in samples], minlength=tiny_llama.model.config.vocab_size)
    with torch.no_grad():
        logits = tiny_llama.model(torch.tensor([PROMPTS[0]])).logits[0, -1].double() / temperature
    expected = logits.softmax(-1).numpy() * count
    often = expected >= 5
    observed = np.append(drawn[often], drawn[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    freedom = len(expected) - 1
    assert freedom > 50
    assert ((observed - expected) ** 2 / expected).sum() < freedom + 4 * np.sqrt(2 * freedom)


def drawable(probabilities, **truncation):
    """Return the share of an even grid of uniforms that each token gets."""
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    rows = torch.tensor(probabilities, dtype=torch.float32).expand(1000, -1)
    return (torch.bincount(draw_tokens(rows, grid, **truncation), minlength=len(probabilities)) / 1000).tolist()


def test_truncation_keeps_the_hand_computed_sets():
    probabilities = [0.1, 0.4, 0.05, 0.25, 0.2]
    assert drawable(probabilities) == pytest.approx(probabilities, abs=2e-3)
    assert drawable(probabilities, top_k=2) == pytest.approx([0, 0.4 / 0.65, 0, 0.25 / 0.65, 0], abs=2e-3)
    assert drawable(probabilities, top_k=99) == pytest.approx(probabilities, abs=2e-3)
    assert drawable(probabilities, top_p=0.7) == pytest.approx([0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85], abs=2e-3)
    assert drawable(probabilities, top_p=0.3) == [0, 1, 0, 0, 0]
    assert drawable(probabilities, top_p=1.0) == pytest.approx(probabilities, abs=2e-3)
    # After top_k = 3 the shares are 0.47, 0.29, 0.24: two reach 0.7, which of the whole would take three.
    assert drawable(probabilities, top_k=3, top_p=0.7) == pytest.approx([0, 0.4 / 0.65, 0, 0.25 / 0.65, 0], abs=2e-3)


def test_a_flat_nucleus_larger_than_the_first_candidates_is_whole():
    flat = [1 / 2000] * 2000
    grid = torch.linspace(0, 0.999999, 5000, dtype=torch.float64)
    drawn = draw_tokens(torch.tensor(flat).expand(5000, -1), grid, top_p=0.9)
    assert len(drawn.unique()) == pytest.approx(1800, abs=2)


def test_a_token_of_probability_zero_is_never_drawn():
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(3, -1)
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw_tokens(probabilities, uniforms).tolist() == [1, 3, 3]


@pytest.mark.parametrize("end", [1, 6])
def test_any_end_id_ends_a_row_and_is_part_of_it(tiny_llama, cpu_float32, end):
    loaded = with_bias(tiny_llama, **{f"id{end}": 30.0})
    (one,) = sample(loaded, requests([[0, 4]]), SamplingParameters(), cpu_float32, LARGE)
    assert (one.completion_ids, one.finish_reason, one.text) == ([end], "stop", "")


def test_the_end_is_blocked_before_the_minimal_length_but_its_log_prob_is_the_policys(tiny_llama, cpu_float32):
    loaded = with_bias(tiny_llama, id6=0.0, id70=-2.0)
    for temperature in (0, 1.0):
        parameters = SamplingParameters(temperature=temperature, min_new_tokens=3, max_new_tokens=8)
        (one,) = sample(loaded, requests([[0, 4]]), parameters, cpu_float32, LARGE)
        assert one.completion_ids[:3] == [70, 70, 70]
        assert one.log_probs[0] == pytest.approx(-2.0 - np.log1p(np.exp(-2.0)), abs=1e-5)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_model_sure_of_its_end_still_gives_the_minimal_length(tiny_llama, cpu_float32, temperature):
    """All tokens but the end have probability 0 in float32."""
    loaded = with_bias(tiny_llama, id6=500.0, id70=0.0)
    parameters = SamplingParameters(temperature=temperature, min_new_tokens=2, max_new_tokens=8)
    (one,) = sample(loaded, requests([[0, 4]]), parameters, cpu_float32, LARGE)
    assert one.completion_ids == [70, 70, 6]
    assert one.log_probs == [-500.0, -500.0, 0.0]


def test_logits_that_are_not_finite_are_an_error(tiny_llama, cpu_float32):
    loaded = with_bias(tiny_llama, id70=float("nan"))
    with pytest.raises(UserError, match="not finite"):
        sample(loaded, requests([[0, 4]]), SamplingParameters(), cpu_float32, LARGE)


def test_a_cut_completion_has_full_length_and_no_end(tiny_llama, cpu_float32):
    loaded = with_bias(tiny_llama, id70=30.0)
    (one,) = sample(loaded, requests([[0, 4]]), SamplingParameters(max_new_tokens=5), cpu_float32, LARGE)
    assert (one.completion_ids, one.finish_reason) == ([70] * 5, "length")


def test_a_stop_string_ends_the_row_keeps_the_ids_and_cuts_the_text(tiny_llama, cpu_float32):
    parameters = SamplingParameters(max_new_tokens=24)
    whole = sample(tiny_llama, requests(), parameters, cpu_float32, LARGE)
    stop = whole[0].text[6:9]
    stopped = sample(
        tiny_llama, requests(), dataclasses.replace(parameters, stop=("never there", stop)), cpu_float32, LARGE
    )
    assert stopped[0].finish_reason == "stop_string"
    for before, after in zip(whole, stopped, strict=True):
        length = len(after.completion_ids)
        assert after.completion_ids == before.completion_ids[:length]
        assert after.text == before.text.split(stop)[0]
        if after.finish_reason == "stop_string":
            assert stop in decode(tiny_llama.tokenizer, after.completion_ids)
            assert stop not in decode(tiny_llama.tokenizer, after.completion_ids[:-1])


def test_sampled_ids_are_kept_where_encoding_the_text_would_merge_them(tiny_llama, cpu_float32):
    tokenizer = tiny_llama.tokenizer
    merged = tokenizer("hello", add_special_tokens=False).input_ids
    he, llo = (tokenizer.convert_tokens_to_ids(list(part)) for part in ("he", "llo"))
    assert len(merged) < len(he) + len(llo)

    class Spelling(torch.nn.Module):
        """Spells "hello" letter by letter and then ends."""

        def __init__(self):
            super().__init__()
            self.model, self.config = tiny_llama.model, tiny_llama.model.config

        def forward(self, position_ids, **inputs):
            output = self.model(position_ids=position_ids, **inputs)
            output.logits = output.logits[:, -1:] * 0
            output.logits[:, 0, [*he, *llo, 1][int(position_ids[0, -1]) - 1]] = 40.0
            return output

    (one,) = sample(
        LoadedModel(Spelling(), tokenizer, tiny_llama.facts),
        requests([[0, 4]]),
        SamplingParameters(),
        cpu_float32,
        LARGE,
    )
    assert one.completion_ids == [*he, *llo, 1]
    assert one.text == "hello"


def test_advice_in_the_generation_config_changes_nothing(tiny_llama, cpu_float32):
    parameters = SamplingParameters(max_new_tokens=16)
    plain = sample(tiny_llama, requests(), parameters, cpu_float32, LARGE)
    kept = tiny_llama.model.generation_config
    tiny_llama.model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.1, top_k=1, repetition_penalty=2.0, max_new_tokens=2, eos_token_id=70
    )
    advised = sample(tiny_llama, requests(), parameters, cpu_float32, LARGE)
    tiny_llama.model.generation_config = kept
    assert plain == advised


@pytest.fixture(scope="module", params=["sliding windows", "no position ids"])
def unusual_model(request, tiny_llama):
    """Mistral with a window of 8 tokens; BLOOM, whose positions come from the attention mask (ALiBi)."""
    shape = {"vocab_size": tiny_llama.model.config.vocab_size, "hidden_size": 32, "initializer_range": 0.3}
    if request.param == "sliding windows":
        config = MistralConfig(
            **shape,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=8,
        )
    else:
        config = BloomConfig(**shape, n_layer=2, n_head=4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    return LoadedModel(model, tiny_llama.tokenizer, tiny_llama.facts)


def test_unusual_models_sample_alone_as_in_a_batch_and_rescore(unusual_model, cpu_float32):
    parameters = SamplingParameters(max_new_tokens=24)
    together = sample(unusual_model, requests(), parameters, cpu_float32, LARGE)
    alone = [sample(unusual_model, [request], parameters, cpu_float32, LARGE)[0] for request in requests()]
    assert ids(together) == ids(alone)
    with torch.no_grad():
        scores = completion_log_probs(unusual_model.model, unusual_model.facts, PROMPTS, ids(together))
    for one, row, mask in zip(together, scores.log_probs, scores.mask, strict=True):
        np.testing.assert_allclose(one.log_probs, row[mask].numpy(), atol=2e-5)


def test_a_model_in_training_samples_without_dropout_and_stays_in_training(tiny_gpt2, cpu_float32):
    parameters = SamplingParameters(max_new_tokens=16)
    expected = sample(tiny_gpt2, requests(), parameters, cpu_float32, LARGE)
    tiny_gpt2.model.train()
    try:
        assert sample(tiny_gpt2, requests(), parameters, cpu_float32, LARGE) == expected
        assert all(module.training for module in tiny_gpt2.model.modules())
    finally:
        tiny_gpt2.model.eval()


def test_no_requests_give_no_samples(tiny_llama, cpu_float32):
    assert sample(tiny_llama, [], SamplingParameters(), cpu_float32, LARGE) == []


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([5] * 100, {"max_new_tokens": 29}, "100 prompt tokens and max_new_tokens is 29: more than the 128"),
        ([], {}, "Prompt of request 0 is empty"),
        ([5], {"top_k": 0}, "top_k is 0"),
        ([5], {"top_p": 0.0}, "top_p is 0.0"),
        ([5], {"temperature": -1.0}, "temperature is -1.0"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([5], {"stop": ("",)}, "empty string"),
    ],
)
def test_what_cannot_be_sampled_is_refused(tiny_llama, cpu_float32, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        sample(tiny_llama, requests([prompt]), SamplingParameters(**options), cpu_float32, LARGE)


def test_drawing_without_a_stream_is_refused(tiny_llama, cpu_float32):
    with pytest.raises(ValueError, match="Request 0 has no stream"):
        sample(tiny_llama, [Request([5], None)], SamplingParameters(), cpu_float32, LARGE)
