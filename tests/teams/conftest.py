"""Two tiny models with random weights: Llama-style with a chat template, GPT-2-style with learned positions."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.loading import LoadedModel, facts_of, load_model, save_model

# Models this small gain nothing from more threads, and waiting for them costs much on a busy machine.
torch.set_num_threads(1)

SENTENCES = [
    "hello world, the little fox runs over the hill and says hello to the owl.",
    "The owl and the fox tell a story about the river, the hill and the moon.",
    "Once upon a time there was a small boat on the river. It was happy.",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT_TOKENS = ["<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CONTEXT_LENGTH = 128


def train_tokenizer(special_tokens: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def llama() -> LoadedModel:
    tokens = train_tokenizer(CHAT_TOKENS, 320)
    tokens.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=0,
        eos_token_id=[1, 6],
        pad_token_id=2,
        initializer_range=0.2,
    )
    return _random(LlamaForCausalLM, config, tokenizer)


def gpt2() -> LoadedModel:
    end = "<|endoftext|>"
    tokens = train_tokenizer([end], 300)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token=end, eos_token=end, pad_token=end)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT_LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return _random(GPT2LMHeadModel, config, tokenizer)


def _random(architecture, config, tokenizer) -> LoadedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = architecture(config).eval()
    return LoadedModel(model, tokenizer, facts_of(model, tokenizer))


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_model(llama(), folder)
    return folder


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    save_model(gpt2(), folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(llama_folder) -> LoadedModel:
    return load_model(llama_folder)


@pytest.fixture(scope="session")
def tiny_gpt2(gpt2_folder) -> LoadedModel:
    return load_model(gpt2_folder)


@pytest.fixture(params=["llama", "gpt2"])
def tiny_model(request) -> LoadedModel:
    """Each of the two models in turn."""
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.fixture(scope="session")
def cpu_float32() -> Compute:
    return Compute("cpu", "float32")
