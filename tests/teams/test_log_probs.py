"""Log-probabilities of completions."""

import pytest
import torch

from comlrl_stages.teams.log_probs import completion_log_probs
from comlrl_stages.teams.value_head import new_head

PROMPTS = [[0, 4, 40, 41, 42], [0, 4], [0, 50, 51, 52, 53, 54, 55, 56, 57]]
COMPLETIONS = [[60, 61, 1], [70], [80, 81, 82, 83, 84, 85, 6]]


def score(loaded, prompts=PROMPTS, completions=COMPLETIONS, **options):
    return completion_log_probs(loaded.model, loaded.facts, prompts, completions, **options)


def by_hand(loaded, prompt, completion, temperature=1.0):
    logits = loaded.model(torch.tensor([[*prompt, *completion]])).logits[0].double() / temperature
    log_probs = logits.log_softmax(-1)
    return torch.stack([log_probs[len(prompt) - 1 + place, token] for place, token in enumerate(completion)]).float()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_row_alone_equals_the_row_in_a_batch_and_the_plain_formula(tiny_model, temperature):
    with torch.no_grad():
        batch = score(tiny_model, temperature=temperature)
        for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
            alone = score(tiny_model, [prompt], [completion], temperature=temperature).log_probs[0]
            in_batch = batch.log_probs[row, : len(completion)]
            torch.testing.assert_close(in_batch, alone, atol=1e-5, rtol=0)
            torch.testing.assert_close(
                in_batch, by_hand(tiny_model, prompt, completion, temperature), atol=1e-5, rtol=0
            )


def test_kl_of_a_model_with_itself_is_zero_under_any_padding(tiny_model):
    with torch.no_grad():
        policy = score(tiny_model)
        longer = score(tiny_model, [*PROMPTS, list(range(10, 60))], [*COMPLETIONS, list(range(60, 100))])
    width = policy.mask.shape[1]
    log_ratio = (longer.log_probs[:3, :width] - policy.log_probs)[policy.mask]
    k3 = log_ratio.exp() - log_ratio - 1
    assert (k3 >= 0).all()
    assert k3.abs().max() < 1e-9 and log_ratio.abs().max() < 1e-5


def test_the_end_is_scored_where_it_is_the_pad_token_and_pads_never_are(tiny_gpt2):
    end = tiny_gpt2.facts.pad_id
    assert tiny_gpt2.facts.eos_ids == (end,)
    prompts, completions = [[end, 30, end], [30, 31]], [[40, end], [41, end, 42, end]]
    with torch.no_grad():
        scores = score(tiny_gpt2, prompts, completions)
    assert scores.mask.tolist() == [[True, True, False, False], [True] * 4]
    assert (scores.log_probs[0, 2:] == 0).all()
    for row in range(2):
        expected = by_hand(tiny_gpt2, prompts[row], completions[row])
        torch.testing.assert_close(scores.log_probs[row, : len(completions[row])], expected, atol=1e-5, rtol=0)


def test_an_empty_completion_sums_to_zero(tiny_model):
    with torch.no_grad():
        scores = score(tiny_model, completions=[[60, 61], [], [62]], entropy=True)
    assert not scores.mask[1].any()
    assert scores.log_probs[1].sum() == 0 and scores.entropy[1].sum() == 0
    assert scores.log_probs.isfinite().all()


def test_a_batch_of_empty_completions_is_defined(tiny_model):
    scores = score(tiny_model, completions=[[], [], []], entropy=True)
    assert scores.log_probs.shape == scores.mask.shape == scores.entropy.shape == (3, 0)
    scores.log_probs.sum().backward()


def test_a_one_token_completion_has_a_finite_gradient(tiny_model):
    tiny_model.model.zero_grad()
    score(tiny_model, [[0, 4, 40], [5]], [[50], [1]]).log_probs[0].sum().backward()
    gradients = [weight.grad for weight in tiny_model.model.parameters() if weight.grad is not None]
    assert any(gradient.abs().sum() > 0 for gradient in gradients)
    assert all(gradient.isfinite().all() for gradient in gradients)
    tiny_model.model.zero_grad()


def test_padding_never_changes_the_gradient(tiny_model):
    def gradient(prompts, completions):
        tiny_model.model.zero_grad()
        score(tiny_model, prompts, completions).log_probs[0].sum().backward()
        return tiny_model.model.get_input_embeddings().weight.grad.clone()

    alone = gradient(PROMPTS[:1], COMPLETIONS[:1])
    torch.testing.assert_close(gradient(PROMPTS, COMPLETIONS), alone, atol=1e-5, rtol=1e-4)
    tiny_model.model.zero_grad()


def test_entropy_is_that_of_the_next_token_distribution(tiny_llama):
    with torch.no_grad():
        scores = score(tiny_llama, entropy=True)
        logits = tiny_llama.model(torch.tensor([[*PROMPTS[0], *COMPLETIONS[0]]])).logits[0, 4:7]
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(scores.entropy[0, :3], expected, atol=1e-5, rtol=0)
    assert (scores.entropy[0, 3:] == 0).all()


def test_scores_are_float32_under_bfloat16_autocast(tiny_llama):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        scores = score(tiny_llama, entropy=True)
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(scores.log_probs, score(tiny_llama).log_probs, atol=0.15, rtol=0.02)


def test_a_model_without_logits_to_keep_gives_the_same_scores(tiny_llama):
    class Plain(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask, position_ids, use_cache):
            return self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)

    with torch.no_grad():
        plain = completion_log_probs(Plain(tiny_llama.model), tiny_llama.facts, PROMPTS, COMPLETIONS)
        torch.testing.assert_close(plain.log_probs, score(tiny_llama).log_probs, atol=1e-6, rtol=0)


def test_rows_that_cannot_be_scored_are_refused(tiny_llama):
    with pytest.raises(ValueError, match="Prompt of row 1 is empty"):
        score(tiny_llama, [[1], []], [[2], [3]])
    with pytest.raises(ValueError, match="2 prompts but 1 completions"):
        score(tiny_llama, [[1], [1]], [[2]])
    with pytest.raises(ValueError, match="Row 0 has 100 prompt and 29 completion tokens, more than the 128"):
        score(tiny_llama, [[5] * 100], [[5] * 29])


# --- values ---


def head_of(loaded, width=None):
    return new_head(loaded.hidden_size, width, torch.Generator().manual_seed(0))


def value_by_hand(loaded, head, ids):
    return head(loaded.model.base_model(torch.tensor([ids])).last_hidden_state[0, -1])


@pytest.mark.parametrize("place", ["prompt", "response"])
def test_values_are_those_at_the_end_of_prompt_or_response_alone_and_in_a_batch(tiny_model, place):
    head = head_of(tiny_model)
    with torch.no_grad():
        batch = score(tiny_model, value_head=head, value_at=place)
        for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
            alone = score(tiny_model, [prompt], [completion], value_head=head, value_at=place)
            expected = value_by_hand(tiny_model, head, prompt if place == "prompt" else [*prompt, *completion])
            torch.testing.assert_close(batch.values[row], expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(alone.values[0], expected, atol=1e-5, rtol=0)


def test_the_head_changes_no_log_prob_and_without_it_there_are_no_values(tiny_model):
    with torch.no_grad():
        plain, valued = score(tiny_model), score(tiny_model, value_head=head_of(tiny_model))
    assert plain.values is None and valued.values.shape == (3,)
    assert torch.equal(plain.log_probs, valued.log_probs)


def test_values_of_prompts_alone_need_no_completion(tiny_model):
    head = head_of(tiny_model)
    with torch.no_grad():
        for place in ("prompt", "response"):
            scores = score(tiny_model, completions=[[], [], []], value_head=head, value_at=place)
            expected = score(tiny_model, value_head=head).values
            torch.testing.assert_close(scores.values, expected, atol=1e-5, rtol=0)
            assert scores.log_probs.shape == (3, 0)
    assert score(tiny_model, [], [], value_head=head).values.shape == (0,)


def test_values_and_log_probs_share_a_pass_whose_gradients_reach_head_and_model(tiny_model):
    head = head_of(tiny_model, width=4)
    tiny_model.model.zero_grad()
    scores = score(tiny_model, value_head=head, value_at="response")
    scores.values.square().sum().backward(retain_graph=True)
    by_value = tiny_model.model.get_input_embeddings().weight.grad.clone()
    assert all(parameter.grad.abs().sum() > 0 for parameter in head.parameters()) and by_value.abs().sum() > 0
    scores.log_probs.sum().backward()
    assert not torch.equal(tiny_model.model.get_input_embeddings().weight.grad, by_value)
    tiny_model.model.zero_grad()


def test_the_value_of_a_response_that_ends_with_the_pad_token_is_read_there(tiny_gpt2):
    end, head = tiny_gpt2.facts.pad_id, head_of(tiny_gpt2)
    prompts, completions = [[end, 30, end], [30, 31]], [[40, end], [41, end, 42, end]]
    with torch.no_grad():
        scores = score(tiny_gpt2, prompts, completions, value_head=head, value_at="response")
        for row in range(2):
            expected = value_by_hand(tiny_gpt2, head, prompts[row] + completions[row])
            torch.testing.assert_close(scores.values[row], expected, atol=1e-5, rtol=0)


def test_values_are_float32_under_bfloat16_autocast_and_no_hook_stays(tiny_model):
    head = head_of(tiny_model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        scores = score(tiny_model, value_head=head)
    assert scores.values.dtype == torch.float32
    assert not tiny_model.model.base_model._forward_hooks
