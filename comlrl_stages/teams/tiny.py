"""The builtin tiny model: a small language model made from nothing, without network, in half a minute on a CPU core.

It is a Llama-style causal language model of half a million parameters with its own byte-level BPE tokenizer, pretrained
on the template sentences of `tiny_corpus`. Sampled at temperature 1 it writes short English answers, so a whole
experiment, from prompts to the report, can be run, tested and timed anywhere. Every number comes from named streams of
the seed: the same settings and threads give the same bytes on the same machine.

For the same seconds of pretraining, two layers and many small batches gave fewer faulty sentences than three or four
layers or larger batches.

Only answers are in the loss, not prompts: an agent never writes prompts, and all of a short pretraining then goes into
what is sampled later.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from comlrl_stages.seeding import stream, torch_seed
from comlrl_stages.teams.tiny_corpus import Example, draw_example

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|eos|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCABULARY_SIZE = 1152
CONTEXT_LENGTH = 256
TOKENIZER_EXAMPLES = 3000
BATCH_ROWS = 24
BUCKET_BATCHES = 24  # batches that are filled together, sorted by length, so that few pads are computed
INITIAL_STD = 0.05  # twice the usual: at this width it halves the steps to readable text
LEARNING_RATE, WARM_UP_STEPS = 3e-3, 20
# Logits are multiplied by this after pretraining (through the last norm). The words of a template are equally probable,
# so their choice stays as varied as it was, while words that a short pretraining has not yet ruled out nearly vanish.
SHARPENING = 1.3


class Checkpoints(Protocol):
    """Where a pretraining keeps what it needs to go on after a kill."""

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        """Put back the state of the last checkpoint and return the losses of the steps up to it."""

    def keep(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, losses: Sequence[float]) -> None:
        """Save the state after a step, if it is time."""


def build_tiny_model(
    steps: int,
    seed: int,
    progress: Callable[[int], None] = lambda advance: None,
    checkpoints: Checkpoints | None = None,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast, float]:
    """Return the pretrained model in evaluation mode, its tokenizer and the final loss (nats per answer token).

    Args:
        steps: optimizer steps; from about 600 on nearly every sampled sentence is correct English.
        seed: of the tokenizer's corpus, the weights and the order of examples.
        progress: called with 1 after each step, and with the number of those that a checkpoint holds.
        checkpoints: None keeps none.
    """
    tokenizer = tiny_tokenizer(seed)
    model = initial_model(tokenizer, seed)
    loss = pretrain(model, tokenizer, steps, seed, progress, checkpoints)
    with torch.no_grad():
        model.model.norm.weight.mul_(SHARPENING)
    return model.eval(), tokenizer, loss


def tiny_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on its own draws from the corpus: byte-level BPE, so that it can encode any text."""
    rng = stream(seed, "tiny", "tokenizer")
    examples = (draw_example(rng) for _ in range(TOKENIZER_EXAMPLES))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[BOS, EOS, PAD, *ROLES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator((text for example in examples for text in (example.prompt, example.answer)), trainer)
    bpe.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, bpe.token_to_id(BOS))])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def initial_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Build the untrained model; weights are N(0, `INITIAL_STD`), norms are 1."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # the constructor draws from the global generator; those draws are replaced
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(torch_seed(seed, "tiny", "weights"))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)
    return model


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    seed: int,
    progress: Callable[[int], None],
    checkpoints: Checkpoints | None = None,
) -> float:
    """Train on `steps` batches of answers with AdamW, warm-up and cosine decay; return the mean loss (nats per token)
    of the last tenth of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    losses = [] if checkpoints is None else checkpoints.restore(model, optimizer)
    if losses:
        progress(len(losses))
    model.train()
    batches = itertools.islice(_batches(tokenizer, stream(seed, "tiny", "batches")), len(losses), steps)
    for step, (ids, targets) in enumerate(batches, start=len(losses)):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * _schedule(step, steps)
        loss = _answer_loss(model, ids, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if checkpoints is not None:
            checkpoints.keep(model, optimizer, losses)
        progress(1)
    return float(np.mean(losses[-max(1, steps // 10) :]))


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up, then a half cosine to 2 % of the peak."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))


def _answer_loss(model: LlamaForCausalLM, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over answer tokens. Rows are padded on the right, which causal attention never sees; logits
    are computed only where there is a target. `ids`, `targets`: (rows, tokens), targets -100 outside answers."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    scored = targets >= 0
    return functional.cross_entropy(model.lm_head(hidden[scored]), targets[scored])


def _batches(
    tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches without end: rows of similar length together, the batches of one bucket in random order."""
    while True:
        bucket = [draw_example(rng) for _ in range(BATCH_ROWS * BUCKET_BATCHES)]
        rows = sorted(encode_examples(tokenizer, bucket), key=lambda row: len(row[0]) + len(row[1]))
        for start in rng.permutation(BUCKET_BATCHES) * BATCH_ROWS:
            yield _padded(rows[start : start + BATCH_ROWS], tokenizer.pad_token_id)


def encode_examples(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]
) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids through the chat template, answer ids with EOS) of each example."""
    chats = [
        [{"role": "system", "content": example.system}] * bool(example.system)
        + [{"role": "user", "content": example.prompt}]
        for example in examples
    ]
    prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer([example.answer + EOS for example in examples], add_special_tokens=False)["input_ids"]
    return list(zip(prompt_ids, answer_ids, strict=True))


def _padded(rows: Sequence[tuple[list[int], list[int]]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input ids and next-token targets, (rows, tokens) each, padded on the right."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), pad_id)
    targets = torch.full((len(rows), width), -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        targets[row, len(prompt) - 1 : end - 1] = torch.tensor(answer)
    return ids[:, :-1], targets[:, :-1]
