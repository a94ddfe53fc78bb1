"""Log-probabilities of many completions without gradient, each distinct one computed once."""

from collections.abc import Sequence

import torch

from comlrl_stages.teams.batching import plan_batches
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.loading import LoadedModel
from comlrl_stages.teams.log_probs import completion_log_probs


@torch.no_grad()
def score_completions(
    loaded: LoadedModel,
    compute: Compute,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    temperature: float,
    token_budget: int,
) -> list[list[float]]:
    """Return the log-probability of every completion token, in the order given.

    Batches of at most `token_budget` tokens are planned by length over the distinct (prompt, completion) rows.
    """
    rows = [(tuple(prompt), tuple(completion)) for prompt, completion in zip(prompts, completions, strict=True)]
    distinct = list(dict.fromkeys(rows))
    scored: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}
    for batch in plan_batches([len(prompt) + len(completion) for prompt, completion in distinct], token_budget):
        chosen = [distinct[i] for i in batch]
        with compute.autocast():
            scores = completion_log_probs(
                loaded.model,
                loaded.facts,
                [prompt for prompt, _ in chosen],
                [completion for _, completion in chosen],
                temperature=temperature,
            )
        for row, values in zip(chosen, scores.log_probs.tolist(), strict=True):
            scored[row] = values[: len(row[1])]
    return [scored[row] for row in rows]
