"""Text to ids and back."""

import dataclasses
import inspect

import pytest

from comlrl_stages.config import TEMPLATE_PARAMETERS
from comlrl_stages.errors import UserError
from comlrl_stages.teams.prompts import PromptFormat, decode, encode_prompt, encode_text

BOS, EOS, SYSTEM, USER, ASSISTANT, END = 0, 1, 3, 4, 5, 6


def test_a_template_that_writes_bos_gives_exactly_one(tiny_llama):
    ids = encode_prompt(tiny_llama.tokenizer, tiny_llama.facts, "hello", PromptFormat())
    hello = encode_text(tiny_llama.tokenizer, "hello", ended=False, eos_id=EOS)
    assert ids == [BOS, USER, *hello, END, ASSISTANT]
    assert type(ids) is list and {type(token) for token in ids} == {int}


def test_a_template_without_bos_gives_exactly_one(tiny_llama):
    facts = dataclasses.replace(tiny_llama.facts, chat_template="{{ messages[0]['content'] }}")
    ids = encode_prompt(tiny_llama.tokenizer, facts, "hello", PromptFormat())
    assert ids.count(BOS) == 1 and ids[0] == BOS


def test_system_message_and_template_arguments_reach_the_template(tiny_llama):
    template = tiny_llama.facts.chat_template + "{{ mood }}"
    facts = dataclasses.replace(tiny_llama.facts, chat_template=template)
    ids = encode_prompt(tiny_llama.tokenizer, facts, "fox", PromptFormat("chat", "owl", {"mood": "happy"}))
    assert ids[:2] == [BOS, SYSTEM]
    assert decode(tiny_llama.tokenizer, ids) == "owlfoxhappy"


def test_plain_prompts_have_bos_iff_the_tokenizer_adds_it(tiny_llama, tiny_gpt2):
    plain = PromptFormat("plain")
    assert encode_prompt(tiny_llama.tokenizer, tiny_llama.facts, "hello", plain)[0] == BOS
    gpt2_ids = encode_prompt(tiny_gpt2.tokenizer, tiny_gpt2.facts, "hello", plain)
    assert 0 not in gpt2_ids
    assert decode(tiny_gpt2.tokenizer, gpt2_ids) == "hello"


def test_plain_text_that_writes_bos_itself_gives_one(tiny_llama):
    ids = encode_prompt(tiny_llama.tokenizer, tiny_llama.facts, "<s>hello", PromptFormat("plain"))
    assert ids.count(BOS) == 1


def test_auto_is_plain_without_a_template_and_chat_is_refused(tiny_gpt2):
    tokenizer, facts = tiny_gpt2.tokenizer, tiny_gpt2.facts
    assert encode_prompt(tokenizer, facts, "fox", PromptFormat()) == encode_prompt(
        tokenizer, facts, "fox", PromptFormat("plain")
    )
    with pytest.raises(UserError, match="no chat template"):
        encode_prompt(tokenizer, facts, "fox", PromptFormat("chat"))


def test_a_template_that_refuses_the_system_message_says_so(tiny_llama):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    facts = dataclasses.replace(tiny_llama.facts, chat_template=template)
    with pytest.raises(UserError, match="no system"):
        encode_prompt(tiny_llama.tokenizer, facts, "fox", PromptFormat("auto", "owl"))


def test_a_template_that_fails_at_an_argument_says_so(tiny_llama):
    facts = dataclasses.replace(tiny_llama.facts, chat_template="{{ limit + 1 }}")
    with pytest.raises(UserError, match=r"refused a chat of user message: .*look at team.template_arguments"):
        encode_prompt(tiny_llama.tokenizer, facts, "fox", PromptFormat("auto", None, {"limit": "many"}))


def test_what_the_configuration_refuses_as_template_arguments_is_what_the_tokenizer_takes_for_itself(tiny_llama):
    taken = set(inspect.signature(type(tiny_llama.tokenizer).apply_chat_template).parameters) - {"kwargs"}
    assert taken | {"messages"} == set(TEMPLATE_PARAMETERS)


def test_a_prompt_without_tokens_is_refused(tiny_gpt2):
    with pytest.raises(UserError, match="no token"):
        encode_prompt(tiny_gpt2.tokenizer, tiny_gpt2.facts, "", PromptFormat())


def test_foreign_text_has_one_end_only_if_it_ended(tiny_llama):
    tokenizer = tiny_llama.tokenizer
    cut = encode_text(tokenizer, "the owl", ended=False, eos_id=EOS)
    assert BOS not in cut and EOS not in cut
    assert encode_text(tokenizer, "the owl", ended=True, eos_id=EOS) == [*cut, EOS]
    assert encode_text(tokenizer, "the owl</s>", ended=True, eos_id=EOS) == [*cut, EOS]
    assert encode_text(tokenizer, "", ended=True, eos_id=EOS) == [EOS]


def test_decoding_leaves_spaces_and_drops_special_tokens(tiny_llama):
    text = "the owl , the fox !  ünï 🦊"
    ids = encode_text(tiny_llama.tokenizer, text, ended=True, eos_id=END)
    assert decode(tiny_llama.tokenizer, ids) == text
