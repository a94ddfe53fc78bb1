"""The builtin tiny model: its corpus stays off the benchmark, its bytes depend on the seed alone, its answers end."""

import re

import numpy as np
import pytest
import torch

from comlrl_stages.seeding import stream
from comlrl_stages.tasks import length_ratio
from comlrl_stages.teams import tiny_corpus
from comlrl_stages.teams.loading import LoadedModel, facts_of, load_model, save_model
from comlrl_stages.teams.tiny import CONTEXT_LENGTH, EOS, build_tiny_model, encode_examples, tiny_tokenizer

torch.set_num_threads(1)

STEPS = 100


@pytest.fixture(scope="module")
def examples():
    rng = stream(0, "test", "corpus")
    return [tiny_corpus.draw_example(rng) for _ in range(4000)]


@pytest.fixture(scope="module")
def trained():
    return build_tiny_model(STEPS, 0)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(0)


def sentences(example):
    return re.findall(r"[^.]+\.", example.answer)


def reward(short, long):
    ratio = long / short
    return np.exp(-np.maximum.reduce([2.0 - ratio, ratio - 3.0, np.zeros_like(ratio)]))


def test_the_corpus_knows_neither_the_prompts_nor_the_roles_of_the_benchmark(examples):
    corpus = "\n".join(f"{e.system or ''}\n{e.prompt}\n{e.answer}" for e in examples).lower()
    written = " ".join(str(value) for value in vars(tiny_corpus).values()).lower()  # rare templates count, too
    task = length_ratio.Task()
    for item in task.items():
        assert item["prompt"].lower().rstrip(".") not in corpus + written
    roles = [formatter({"prompt": ""}).strip() for formatter in task.formatters]
    for words in [*roles, "short", "brief", "detailed", "response", "concise"]:
        assert words.lower() not in corpus + written, words


def test_answers_have_one_two_or_three_sentences_equally_often(examples):
    counts = np.bincount([len(sentences(example)) for example in examples])
    assert counts[0] == 0 and len(counts) == 4
    assert np.all(np.abs(counts[1:] / len(examples) - 1 / 3) < 0.03)


def test_every_template_can_be_written_within_its_length():
    for kind in tiny_corpus.KINDS:
        for templates, (shortest, longest) in (
            (kind.openings, tiny_corpus.OPENING_LENGTH),
            (kind.details, tiny_corpus.DETAIL_LENGTH),
            (kind.closings, tiny_corpus.CLOSING_LENGTH),
        ):
            for template in templates:
                rng = stream(0, "test", template)
                lengths = [len(tiny_corpus._fill(rng, template, kind.subjects[i % 10])) for i in range(400)]
                assert any(shortest <= length <= longest for length in lengths), template


def test_articles_and_plurals_are_spelled():
    assert tiny_corpus._spelled("A owl met a inventor and some citys, foxs and birthdays.") == (
        "An owl met an inventor and some cities, foxes and birthdays."
    )


def test_an_untrained_team_earns_half_and_one_against_more_sentences_nearly_everything(examples):
    lengths = [np.array([len(e.answer) for e in examples if len(sentences(e)) == n]) for n in (1, 2, 3)]
    rng = stream(0, "test", "reward")
    base = reward(*(rng.choice(np.concatenate(lengths), 20000) for _ in range(2)))
    assert 0.40 < base.mean() < 0.60
    for longer in lengths[1:]:
        assert reward(rng.choice(lengths[0], 20000), rng.choice(longer, 20000)).mean() > 0.93


def test_the_tokenizer_encodes_any_text_and_knows_the_words_of_the_answers(tokenizer, examples):
    text = "Zürich, 東京 & 🦊!"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    words = {word for example in examples for word in re.findall(r" \w+", example.answer)}
    split = [word for word in words if len(tokenizer(word, add_special_tokens=False)["input_ids"]) > 1]
    assert len(split) < 0.05 * len(words)


def test_an_example_has_one_bos_and_ends_in_one_eos(tokenizer, examples):
    for example, (prompt, answer) in zip(examples[:200], encode_examples(tokenizer, examples[:200]), strict=True):
        assert prompt.count(tokenizer.bos_token_id) == 1 and prompt[0] == tokenizer.bos_token_id
        assert answer.count(tokenizer.eos_token_id) == 1 and answer[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(answer) == example.answer + EOS
        assert len(prompt) + len(answer) < CONTEXT_LENGTH


def test_answers_fit_into_forty_tokens(tokenizer, examples):
    assert max(len(answer) for _, answer in encode_examples(tokenizer, examples)) <= 36


def test_the_same_seed_gives_the_same_bytes_whatever_the_global_generator(tmp_path):
    for name, global_seed in (("a", 1), ("b", 2)):
        torch.manual_seed(global_seed)
        model, tokenizer, _ = build_tiny_model(3, 7)
        save_model(LoadedModel(model, tokenizer, facts_of(model, tokenizer)), tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "facts.json"} <= set(files)
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build_tiny_model(1, 0)
    assert torch.equal(torch.rand(3), expected)


def test_another_seed_gives_another_model():
    first, second = (build_tiny_model(1, seed)[0].lm_head.weight for seed in (0, 1))
    assert not torch.equal(first, second)


def test_a_short_pretraining_learns_to_end_and_to_write_words(trained, examples, tmp_path):
    model, tokenizer, loss = trained
    assert loss < 4.0  # nats per token; an untrained model has about 7
    save_model(LoadedModel(model, tokenizer, facts_of(model, tokenizer)), tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    prompts, answers = zip(*encode_examples(loaded.tokenizer, examples[:32]), strict=True)
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = loaded.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            ends = logits.log_softmax(-1)[:, tokenizer.eos_token_id].exp()
            assert ends[:3].max() < 0.05  # never in the first words
            assert ends[-1] == ends.max()


def test_progress_is_told_once_per_step():
    told = []
    build_tiny_model(2, 0, told.append)
    assert told == [1, 1]
