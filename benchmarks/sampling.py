"""Tokens per second of the project's sampler against `generate`, in one run, the two in turn.

    python benchmarks/sampling.py results/models/smollm2 --rows 64 --new-tokens 48 --threads 2 --repeats 3

Both sample at temperature 1 from the same prompts with the same compute dtype. Absolute figures vary with the machine
and what else it does; read the ratio.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from comlrl_stages.seeding import stream
from comlrl_stages.tasks.length_ratio import PROMPTS, detailed_formatter
from comlrl_stages.teams.compute import resolve_compute
from comlrl_stages.teams.loading import load_model
from comlrl_stages.teams.prompts import PromptFormat, encode_prompt
from comlrl_stages.teams.sampling import Request, SamplingParameters, sample


def main(
    model: Annotated[Path, typer.Argument(help="a prepared model folder")],
    rows: int = 64,
    prompts: Annotated[int, typer.Option(help="distinct prompts among the rows")] = 4,
    new_tokens: int = 48,
    threads: int = 2,
    repeats: int = 3,
    dtype: str = "auto",
) -> None:
    """Print the median tokens per second of both samplers and their ratio."""
    torch.set_num_threads(threads)
    loaded = load_model(model)
    compute = resolve_compute(dtype, "cpu", loaded.model.config.hidden_size)
    texts = [detailed_formatter({"prompt": PROMPTS[row % prompts]}) for row in range(rows)]
    ids = [encode_prompt(loaded.tokenizer, loaded.facts, text, PromptFormat()) for text in texts]

    def ours() -> int:
        requests = [Request(prompt, stream(0, "benchmark", row)) for row, prompt in enumerate(ids)]
        parameters = SamplingParameters(max_new_tokens=new_tokens)
        found = sample(loaded, requests, parameters, compute, token_budget=10**9)
        return sum(len(one.completion_ids) for one in found)

    def generate() -> int:
        longest = max(map(len, ids))
        pad = loaded.facts.pad_id
        inputs = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in ids])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in ids])
        torch.manual_seed(0)
        with torch.no_grad(), compute.autocast():
            found = loaded.model.generate(
                input_ids=inputs,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=new_tokens,
                eos_token_id=list(loaded.facts.eos_ids),
                pad_token_id=pad,
            )
        ends = torch.isin(found[:, longest:], torch.tensor(loaded.facts.eos_ids)).int()
        return int((ends.cumsum(1) - ends == 0).sum())

    figures: dict[str, list[float]] = {"ours": [], "generate": []}
    for _ in range(repeats):
        figures["ours"].append(_rate(ours))
        figures["generate"].append(_rate(generate))
    print(f"{model}: {rows} rows of {prompts} prompts, {new_tokens} new tokens, {compute.dtype}, {threads} threads")
    for name, rates in figures.items():
        print(f"{name:>9}: {median(rates):7.0f} tokens/s   (of {', '.join(f'{rate:.0f}' for rate in rates)})")
    ratios = [own / other for own, other in zip(figures["ours"], figures["generate"], strict=True)]
    print(f"{'ratio':>9}: {median(ratios):7.2f}")


def _rate(run: Callable[[], int]) -> float:
    start = time.perf_counter()
    tokens = run()
    return tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    typer.run(main)
