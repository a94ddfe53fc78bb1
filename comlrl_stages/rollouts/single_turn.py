"""One turn of rollouts: every prompt, sample and agent, batched across all of them.

The batches are planned from the inputs before any is sampled. A stage that is killed and goes on therefore batches as
an undisturbed one would, and gives the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comlrl_stages.errors import UserError
from comlrl_stages.seeding import stream
from comlrl_stages.tasks.protocol import Exchange, Task
from comlrl_stages.teams.batching import plan_batches
from comlrl_stages.teams.sampling import Request, Sampled, SamplingParameters, sample
from comlrl_stages.teams.team import Team


@dataclass(frozen=True)
class Context:
    """Where joint responses come from: the part of the table key K that all items of a batch share."""

    source: str
    round: int = 1
    step: int = 0


@dataclass(frozen=True)
class Prompted:
    """An item with the prompt of each agent, as text and as token ids."""

    item: Mapping[str, Any]
    prompts: Sequence[str]
    prompt_ids: Sequence[Sequence[int]]

    @property
    def task_id(self) -> str:
        return self.item["task_id"]


@dataclass(frozen=True)
class Draw:
    """One completion to sample. `turn` counts from 0; `node` names the joint context within its item's rollout."""

    context: Context
    prompted: Prompted
    sample: int
    agent: int
    greedy: bool = False
    turn: int = 0
    node: str = ""

    def request(self, seed: int) -> Request:
        """The sampler's request; its stream is a function of the seed and the key of this completion."""
        prompt_ids = self.prompted.prompt_ids[self.agent]
        if self.greedy:
            return Request(prompt_ids, None)
        where = self.context
        place = (self.prompted.task_id, self.turn, self.node, self.sample, self.agent)
        return Request(prompt_ids, stream(seed, "sample", where.source, where.round, where.step, *place))


@dataclass(frozen=True)
class Batch:
    """Draws that one model samples at once; `positions` are their places in the plan's order."""

    agent: int
    greedy: bool
    positions: Sequence[int]


def prompt_items(
    team: Team, task: Task, items: Sequence[Mapping[str, Any]], max_new_tokens: int, overflow: str
) -> tuple[list[Prompted], dict[str, int]]:
    """Format and encode the prompts of all items.

    A prompt is never cut. One that leaves no room for `max_new_tokens` in the model's context is an error, or the item
    is dropped and counted (`overflow`: error or drop).
    """
    prompted, dropped = [], 0
    for item in items:
        prompts = task.format(item)
        found = Prompted(item, prompts, team.encode(prompts))
        if _fits(team, found, max_new_tokens, overflow):
            prompted.append(found)
        else:
            dropped += 1
    if not prompted:
        raise UserError(
            f"every one of the {len(items)} items was dropped, for its prompt leaves no room for a completion"
        )
    return prompted, {"prompt_too_long": dropped} if dropped else {}


def continued(
    team: Team, task: Task, prompted: Prompted, history: Sequence[Exchange], sampling: Any
) -> Prompted | None:
    """The item with the prompts of the turn after `history`; None where they leave no room for a completion."""
    turn = len(history)
    prompts = task.next_prompts(prompted.item, history)
    try:
        found = Prompted(prompted.item, prompts, team.encode(prompts))
    except UserError as error:
        raise UserError(f"item {prompted.task_id}, turn {turn + 1}: {error}") from error
    return found if _fits(team, found, sampling.max_new_tokens, sampling.overflow, turn) else None


def joint_draws(
    context: Context, prompted: Sequence[Prompted], samples: int, agents: int, *, greedy: bool = False
) -> list[Draw]:
    """Draws of `samples` joint responses per item, in table order: item, sample, agent."""
    return [
        Draw(context, one, sample, agent, greedy)
        for one in prompted
        for sample in range(samples)
        for agent in range(agents)
    ]


def plan(team: Team, draws: Sequence[Draw], max_new_tokens: int, token_budget: int) -> list[Batch]:
    """Batches of draws: by model, sampled and greedy apart, sorted by length, each within the token budget."""
    batches = []
    for group in team.groups():
        for greedy in (False, True):
            positions = [i for i, draw in enumerate(draws) if draw.agent in group and draw.greedy == greedy]
            costs = [len(draws[i].prompted.prompt_ids[draws[i].agent]) + max_new_tokens for i in positions]
            batches += [
                Batch(group[0], greedy, [positions[i] for i in batch]) for batch in plan_batches(costs, token_budget)
            ]
    return batches


def sample_batch(
    team: Team, draws: Sequence[Draw], batch: Batch, parameters: SamplingParameters, token_budget: int, seed: int
) -> list[Sampled]:
    """Sample the completions of one batch, in the order of its positions."""
    requests = [draws[position].request(seed) for position in batch.positions]
    if batch.greedy:
        parameters = SamplingParameters(
            temperature=0.0,
            max_new_tokens=parameters.max_new_tokens,
            min_new_tokens=parameters.min_new_tokens,
            stop=parameters.stop,
        )
    return sample(team.agents[batch.agent], requests, parameters, team.compute, token_budget)


def sample_draws(team: Team, draws: Sequence[Draw], sampling: Any, token_budget: int, seed: int) -> list[Sampled]:
    """Sample all draws, in their order. `sampling`: a stage's sampling settings."""
    parameters = sampling_parameters(sampling)
    found: dict[int, Sampled] = {}
    for batch in plan(team, draws, parameters.max_new_tokens, token_budget):
        sampled = sample_batch(team, draws, batch, parameters, token_budget, seed)
        found |= zip(batch.positions, sampled, strict=True)
    return [found[position] for position in range(len(draws))]


def sampling_parameters(settings: Any) -> SamplingParameters:
    """The sampler's parameters from a stage's `sampling` settings."""
    return SamplingParameters(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_new_tokens=settings.max_new_tokens,
        min_new_tokens=settings.min_new_tokens,
        stop=tuple(settings.stop),
    )


def row(team: Team, draw: Draw, sampled: Sampled) -> dict[str, Any]:
    """A row of the completions table."""
    return {
        "source": draw.context.source,
        "round": draw.context.round,
        "step": draw.context.step,
        "task_id": draw.prompted.task_id,
        "turn": draw.turn,
        "node": draw.node,
        "sample": draw.sample,
        "agent": draw.agent,
        "model_digest": team.digests[draw.agent],
        "prompt": draw.prompted.prompts[draw.agent],
        "prompt_ids": draw.prompted.prompt_ids[draw.agent],
        "completion_ids": sampled.completion_ids,
        "ids_from": "sampled",
        "log_probs": sampled.log_probs,
        "text": sampled.text,
        "finish_reason": sampled.finish_reason,
    }


def _fits(team: Team, prompted: Prompted, max_new_tokens: int, overflow: str, turn: int = 0) -> bool:
    """Whether every prompt leaves room for `max_new_tokens`. Raises UserError if not and `overflow` is error."""
    too_long = _too_long(team, prompted, max_new_tokens, turn)
    if too_long is not None and overflow == "error":
        raise UserError(too_long)
    return too_long is None


def _too_long(team: Team, prompted: Prompted, max_new_tokens: int, turn: int) -> str | None:
    for agent, ids in enumerate(prompted.prompt_ids):
        context = team.agents[agent].facts.context_length
        if len(ids) + max_new_tokens > context:
            where = f"item {prompted.task_id}, turn {turn + 1}" if turn else f"item {prompted.task_id}"
            return (
                f"{where}: the prompt of agent_{agent} has {len(ids)} tokens and sampling.max_new_tokens is "
                f"{max_new_tokens}, more than the model's context of {context}. Shorten the prompt, lower "
                "max_new_tokens, or set sampling.overflow to drop."
            )
    return None
