"""MADPO on stored pairs: each update lowers the preference loss of a minibatch of joint margins.

The reference log-probabilities come from a table, so no reference model is in memory. The loss itself is
learning/madpo.py; here pairs become tensors, in micro-batches that fit the token budget and add up exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from comlrl_stages.artifacts import (
    COMPLETIONS,
    PAIRS,
    REFERENCE_LOG_PROBS,
    REWARDS,
    TRAINING_PAIRS,
    Work,
    read_table,
)
from comlrl_stages.errors import UserError
from comlrl_stages.learning import madpo
from comlrl_stages.preferences.joint_responses import SIDES, JointResponses
from comlrl_stages.seeding import stream, torch_seed
from comlrl_stages.settings import MadpoSettings
from comlrl_stages.stages.optimize import JOINT, StepNumbers, Update, agent_parts
from comlrl_stages.teams.batching import plan_batches
from comlrl_stages.teams.log_probs import completion_log_probs
from comlrl_stages.teams.lora import adapter_dropout
from comlrl_stages.teams.team import Team

# Nats per token by which float32 log-probs of one response differ between batches: a smaller margin is a tie.
ROUNDING = 1e-6


@dataclass(frozen=True)
class TrainingPair:
    """Token ids of both sides for every agent; `reference` holds summed log-probabilities by side and agent."""

    pair_id: str
    sides: Mapping[str, Sequence[Mapping[str, Any]]]
    reference: Mapping[str, Sequence[float]] | None

    @property
    def longest(self) -> int:
        """Tokens of its longest prompt and completion."""
        return max(len(c["prompt_ids"]) + len(c["completion_ids"]) for side in SIDES for c in self.sides[side])


def build(settings: MadpoSettings, work: Work, team: Team) -> "MadpoUpdates":
    """Read the pairs that train, in their order."""
    pairs = {pair["pair_id"]: pair for pair in read_table(work.inputs["pairs"], PAIRS).to_pylist()}
    completions = read_table(work.inputs["completions"], COMPLETIONS)
    rewards = read_table(work.inputs["rewards"], REWARDS)
    responses = JointResponses(completions, rewards, ["prompt_ids", "completion_ids"])
    reference = _reference(work, team) if settings.reference != "none" else None
    chosen = read_table(work.inputs["training_pairs"], TRAINING_PAIRS).sort_by("draw")["pair_id"].to_pylist()
    unknown = next((pair_id for pair_id in chosen if pair_id not in pairs), None)
    if unknown is not None:
        raise UserError(
            f"{work.inputs['training_pairs']}: names the pair {unknown}, which {work.inputs['pairs']} does not hold. "
            "Run the replay stage again."
        )
    return MadpoUpdates(settings, team, [_training_pair(pairs[i], responses, reference) for i in chosen])


class MadpoUpdates:
    """The updates of one MADPO run: `epochs` passes over the pairs, each in its own seeded order."""

    validation = None

    def __init__(self, settings: MadpoSettings, team: Team, pairs: Sequence[TrainingPair]) -> None:
        self._settings = settings
        self._team = team
        self._pairs = pairs
        self._per_epoch = -(-len(pairs) // settings.batch_size)
        self.total_steps = settings.epochs * self._per_epoch
        self.parts = agent_parts(settings, team)

    def close(self) -> None:
        """Nothing was started."""

    def save(self, policy: Path) -> None:
        """Nothing but agents was trained."""

    def train(self, step: int, update: Update) -> StepNumbers:
        """One update by the mean loss over a minibatch of pairs."""
        batch = self._minibatch(step)
        generators = self._dropout(step)
        seen: list[tuple[torch.Tensor, ...]] = []
        numbers = StepNumbers()
        loss = 0.0
        for indices in plan_batches([2 * pair.longest for pair in batch], self._settings.compute.training_tokens):
            chosen = [batch[i] for i in indices]
            sums, tokens, entropies = self._log_probs(chosen, generators)
            margins = self._margins(chosen, sums, tokens)
            losses = madpo.losses(
                margins,
                loss=self._settings.loss,
                beta=self._settings.beta,
                gamma=self._settings.gamma,
                label_smoothing=self._settings.label_smoothing,
            )
            (losses.sum() / len(batch)).backward()
            loss += losses[0].detach().sum().item() / len(batch)
            numbers.tokens += int(tokens.sum())
            seen.append((margins.detach(), sums.detach(), tokens, entropies, self._reference_sums(chosen)))
        update()
        for agent, values in self._diagnostics(seen).items():
            numbers.add(agent, **values)
        numbers.add(loss=loss)
        return numbers

    def _minibatch(self, step: int) -> list[TrainingPair]:
        epoch, position = divmod(step, self._per_epoch)
        settings = self._settings
        generator = stream(settings.seed, "optimize", settings.method, settings.round, "order", epoch)
        order = generator.permutation(len(self._pairs))
        return [self._pairs[i] for i in order[position * settings.batch_size :][: settings.batch_size]]

    def _dropout(self, step: int) -> list[torch.Generator]:
        """The stream of each agent's adapter dropout in this step."""
        settings = self._settings
        names = ("dropout", settings.method, settings.round, step)
        seeds = [torch_seed(settings.seed, *names, agent) for agent in range(len(self._team.agents))]
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    def _log_probs(
        self, pairs: Sequence[TrainingPair], generators: Sequence[torch.Generator]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Summed log-probs with gradient, token counts and summed entropies, each (agents, sides, pairs)."""
        sums, tokens, entropies = [], [], []
        for agent, loaded in enumerate(self._team.agents):
            completions = [pair.sides[side][agent] for side in SIDES for pair in pairs]
            with self._team.compute.autocast(), adapter_dropout(loaded.model, generators[agent]):
                scores = completion_log_probs(
                    loaded.model,
                    loaded.facts,
                    [completion["prompt_ids"] for completion in completions],
                    [completion["completion_ids"] for completion in completions],
                    temperature=self._settings.temperature,
                    entropy=True,
                )
            shape = (len(SIDES), len(pairs))
            sums.append(scores.log_probs.sum(dim=1).view(shape))
            tokens.append(scores.mask.sum(dim=1).view(shape))
            entropies.append(scores.entropy.detach().sum(dim=1).view(shape))
        return torch.stack(sums), torch.stack(tokens), torch.stack(entropies)

    def _margins(self, pairs: Sequence[TrainingPair], sums: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self._settings.loss == "simpo":
            return madpo.length_normalised_margins(sums[:, 0], sums[:, 1], tokens[:, 0], tokens[:, 1])
        reference = self._reference_sums(pairs)
        if reference is None:
            return madpo.margins(sums[:, 0], sums[:, 1])
        return madpo.margins(sums[:, 0], sums[:, 1], reference[:, 0], reference[:, 1])

    def _reference_sums(self, pairs: Sequence[TrainingPair]) -> torch.Tensor | None:
        """(agents, sides, pairs), or None without a reference."""
        if pairs[0].reference is None:
            return None
        sums = torch.tensor([[pair.reference[side] for pair in pairs] for side in SIDES], dtype=torch.float32)
        return sums.permute(2, 0, 1).to(self._team.compute.device)

    def _diagnostics(self, seen: Sequence[tuple[torch.Tensor | None, ...]]) -> dict[int, dict[str, float]]:
        """Means over the minibatch, per agent and for the team."""
        margins, sums, tokens, entropies = (torch.cat([one[i] for one in seen], dim=-1) for i in range(4))
        if seen[0][4] is not None:
            margins = margins.where(margins.abs() > ROUNDING * tokens.sum(dim=1), 0.0)
        values = madpo.diagnostics(margins, sums[:, 0], sums[:, 1])
        for agent in range(len(self._team.agents)):
            own = values[agent]
            own["length_mean"] = tokens[agent].double().mean().item()
            own["entropy"] = (entropies[agent].sum() / tokens[agent].sum()).item()
        if seen[0][4] is not None:
            reference = torch.cat([one[4] for one in seen], dim=-1)
            for agent in range(len(self._team.agents)):
                # The responses are the reference's own, so this estimates KL(reference || policy), per token.
                values[agent]["kl"] = ((reference[agent] - sums[agent]).sum() / tokens[agent].sum()).item()
            values[JOINT]["kl"] = ((reference - sums).sum() / tokens.sum()).item()
        return values


def _training_pair(
    pair: Mapping[str, Any],
    responses: JointResponses,
    reference: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]] | None,
) -> TrainingPair:
    sides = {side: responses.agents(pair["task_id"], pair[side]) for side in SIDES}
    if reference is None:
        return TrainingPair(pair["pair_id"], sides, None)
    sums = {side: _sums(pair["pair_id"], side, sides[side], reference) for side in SIDES}
    return TrainingPair(pair["pair_id"], sides, sums)


def _sums(
    pair_id: str,
    side: str,
    completions: Sequence[Mapping[str, Any]],
    reference: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
) -> list[float]:
    """Summed reference log-probs of each agent's response, after the numbers of tokens were compared."""
    rows = reference.get((pair_id, side), [])
    found, expected = [row["tokens"] for row in rows], [len(row["completion_ids"]) for row in completions]
    if found != expected:
        raise UserError(
            f"the reference log-probs of pair {pair_id}, {side}, are of responses with {found} tokens, but the "
            f"completions have {expected}: they belong to other pairs or completions. Run the refer stage again."
        )
    return [row["log_prob_sum"] for row in rows]


def _reference(work: Work, team: Team) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """Rows of all agents by pair and side, in actor order, after the digests of the models were compared."""
    path = work.inputs["reference_log_probs"]
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in read_table(path, REFERENCE_LOG_PROBS).sort_by("agent").to_pylist():
        if row["reference_digest"] != team.digests[row["agent"]]:
            raise UserError(
                f"{path}: the log-probs of agent_{row['agent']} come from another model than the one that is trained. "
                "Run the refer stage again."
            )
        rows.setdefault((row["pair_id"], row["side"]), []).append(row)
    return rows
