"""The text of a whole team, and one agent's own ids, within a maximal length."""

import pytest

from comlrl_stages.errors import UserError
from comlrl_stages.teams.joint_text import encode_joint, encode_own
from comlrl_stages.teams.loading import Facts
from comlrl_stages.teams.tiny import tiny_tokenizer

PROMPTS = ["Write a line about rain.", "Now write a longer one."]
RESPONSES = ["It rains.", "It rains all day in the town by the sea."]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(0)


@pytest.fixture(scope="module")
def facts(tokenizer):
    return Facts((tokenizer.eos_token_id,), tokenizer.pad_token_id, tokenizer.bos_token_id, 128, None)


@pytest.fixture
def text(tokenizer, facts):
    def encoded(prompts, responses, max_length=128):
        joint = encode_joint(tokenizer, facts, prompts, responses, max_length)
        return tokenizer.decode(joint.ids), joint

    return encoded


def test_text_holds_all_prompts_and_responses_in_role_order(text):
    words, joint = text(PROMPTS, RESPONSES)
    parts = ["<|bos|>", PROMPTS[0], RESPONSES[0], PROMPTS[1], RESPONSES[1], "<|eos|>"]
    places = [words.index(part) for part in parts]
    assert places == sorted(places)
    assert not joint.cut


def test_one_bos_and_one_eos_even_if_the_texts_spell_them(text, facts):
    ids = text(["<|bos|>hello<|eos|>", "hi"], ["<|eos|>", "yes <|eos|>"])[1].ids
    assert (ids.count(facts.bos_id), ids[0]) == (1, facts.bos_id)
    assert (ids.count(facts.eos_ids[0]), ids[-1]) == (1, facts.eos_ids[0])


def test_prompts_are_cut_first_and_the_longest_of_them(text):
    long = " ".join(["the wide sea"] * 40)
    words, joint = text([long, PROMPTS[1]], RESPONSES, max_length=100)
    assert len(joint.ids) == 100
    assert joint.cut
    assert all(part in words for part in [*RESPONSES, PROMPTS[1]])
    assert "sea\nAgent 0:" in words  # the end of the prompt, next to the response, is kept


def test_no_agents_response_is_lost_even_without_room_for_prompts(text):
    long = " ".join(["the wide sea"] * 60)
    words, joint = text(PROMPTS, [long, "It rains."], max_length=70)
    assert len(joint.ids) == 70
    assert "the wide sea" in words
    assert "It rains." in words
    assert PROMPTS[0] not in words


def test_a_length_that_does_not_hold_the_template_is_an_error(text):
    with pytest.raises(UserError, match=r"max_length is 20.* Set max_length to at least"):
        text(PROMPTS, RESPONSES, max_length=20)


def test_the_least_length_that_the_error_names_is_enough(text):
    with pytest.raises(UserError) as error:
        text(PROMPTS, RESPONSES, max_length=20)
    least = int(str(error.value).split(" take ")[1].split(".")[0])
    assert len(text(PROMPTS, RESPONSES, max_length=least)[1].ids) == least


def test_an_error_says_whose_limit_it_is_and_what_to_do(tokenizer, facts):
    with pytest.raises(UserError, match=r"the critic's context is 20, .* Choose another\."):
        options = {"limit": "the critic's context", "advice": "Choose another."}
        encode_joint(tokenizer, facts, PROMPTS, RESPONSES, 20, **options)


@pytest.mark.parametrize(
    ("room", "ids", "cut"),
    [
        (9, (1, 2, 3, 4, 5), False),
        (5, (1, 2, 3, 4, 5), False),
        (4, (2, 3, 4, 5), True),
        (2, (4, 5), True),
        (1, (4,), True),
    ],
)
def test_own_ids_lose_the_start_of_the_prompt_first_and_then_the_end_of_the_completion(room, ids, cut):
    joint = encode_own([1, 2, 3], [4, 5], room)
    assert (joint.ids, joint.cut) == (ids, cut)


def test_own_prompt_alone_keeps_its_end():
    assert encode_own([1, 2, 3], [], 2).ids == (2, 3)
