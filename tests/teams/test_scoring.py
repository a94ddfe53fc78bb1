"""Log-probabilities of many completions: order, batches, and equal rows."""

import pytest

from comlrl_stages.teams.log_probs import completion_log_probs
from comlrl_stages.teams.scoring import score_completions

PROMPTS = [[0, 4, 40, 41, 42], [0, 4], [0, 50, 51, 52, 53, 54], [0, 4], [0, 4]]
COMPLETIONS = [[60, 61, 1], [70], [80, 81, 82, 83, 6], [70], []]


def score(loaded, compute, token_budget=4096, temperature=1.0):
    return score_completions(loaded, compute, PROMPTS, COMPLETIONS, temperature=temperature, token_budget=token_budget)


@pytest.mark.parametrize("token_budget", [1, 12, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_each_row_has_the_log_probs_of_its_tokens_in_the_order_given(
    tiny_model, cpu_float32, token_budget, temperature
):
    found = score(tiny_model, cpu_float32, token_budget, temperature)
    for values, prompt, completion in zip(found, PROMPTS, COMPLETIONS, strict=True):
        alone = completion_log_probs(
            tiny_model.model, tiny_model.facts, [prompt], [completion], temperature=temperature
        ).log_probs[0]
        assert len(values) == len(completion)
        assert values == pytest.approx(alone.tolist(), abs=1e-5)


def test_equal_rows_are_computed_once(tiny_llama, cpu_float32):
    seen = []
    handle = tiny_llama.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        found = score(tiny_llama, cpu_float32)
    finally:
        handle.remove()
    assert sum(seen) == len(set(zip(map(tuple, PROMPTS), map(tuple, COMPLETIONS), strict=True))) == 4
    assert found[1] == found[3]


def test_no_gradient_is_kept(tiny_llama, cpu_float32):
    score(tiny_llama, cpu_float32)
    assert all(parameter.grad is None for parameter in tiny_llama.model.parameters())


def test_nothing_to_score_is_no_trouble(tiny_llama, cpu_float32):
    assert score_completions(tiny_llama, cpu_float32, [], [], temperature=1.0, token_budget=64) == []
