"""Every algorithm's gradient against autograd of its formula written out: two agents, two turns, float64.

The policies are tables of logits over five tokens, one row for each context and previous token; the values are tables
too. `formula` functions loop over agents, nodes, samples and tokens in plain Python and share nothing with the package.
`batched` functions do what a trainer does: pad rows, call the package, sum weighted micro-batches.
"""

import itertools
import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch

from comlrl_stages.learning import madpo
from comlrl_stages.learning.actor_critic import td_advantages, td_targets, value_loss, value_weights
from comlrl_stages.learning.advantages import advantages
from comlrl_stages.learning.kl import k3, kl_on_returns
from comlrl_stages.learning.policy_gradient import policy_gradient_loss, row_weights
from comlrl_stages.learning.returns import Node, completion_returns, joint_returns

AGENTS, TOKENS, BEGIN = 2, 5, 5
LONGEST = 4
DISCOUNT, KL_COEFFICIENT = 0.9, 0.3
VALUE_COEFFICIENT, VALUE_CLIP, ADVANTAGE_CLIP = 0.6, 0.2, 0.7
MODES = ["magrpo", "marloo", "maremax", "mareinforce"]


# --- the example ---


@dataclass
class Turn:
    """One node: its context's row in the tables, the agents' responses, and rewards and children of joint responses."""

    context: int
    responses: list[list[list[int]]]
    joints: list[tuple[int, ...]]
    rewards: list[float]
    children: list["Turn | None"] = field(default_factory=list)


class Draws:
    """Draws an example; contexts are numbered as they come."""

    def __init__(self, seed: int, longest: int = LONGEST) -> None:
        self.rng = np.random.default_rng(seed)
        self.longest = longest
        self.contexts = 0

    def turn(self, samples: int, pairing: str) -> Turn:
        self.contexts += 1
        joints = [(k,) * AGENTS for k in range(samples)]
        if pairing == "cross":
            joints = list(itertools.product(range(samples), repeat=AGENTS))
        responses = [[self.response() for _ in range(samples)] for _ in range(AGENTS)]
        return Turn(self.contexts - 1, responses, joints, self.rng.normal(size=len(joints)).tolist())

    def response(self) -> list[int]:
        return self.rng.integers(TOKENS, size=self.rng.integers(1, self.longest + 1)).tolist()

    def tree(self, samples: int, branching: int, pairing: str) -> Turn:
        root = self.turn(samples, pairing)
        root.children = [self.turn(branching, pairing) for _ in root.joints]
        return root


def _trees(pairing: str, longest: int = LONGEST) -> tuple[list[Turn], int]:
    """Three items of two turns, one turn, and two turns of which one branch ended; failed rewards; 2 or 3 samples."""
    draws = Draws(seed=1, longest=longest)
    roots = [draws.tree(2, 3, pairing), draws.turn(3, pairing), draws.tree(2, 2, pairing)]
    roots[0].rewards[1] = roots[0].children[0].rewards[2] = math.nan
    roots[2].children[0] = None
    roots[2].children[1].rewards = [math.nan] * len(roots[2].children[1].joints)
    return roots, draws.contexts


def _trajectories() -> tuple[list[list[Turn]], int]:
    """Five trajectories of one joint response per turn; one ended early and one reward failed."""
    draws = Draws(seed=2)
    found = [[draws.turn(1, "aligned") for _ in range(1 if number == 3 else 2)] for number in range(5)]
    found[1][1].rewards = [math.nan]
    return found, draws.contexts


def _table(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _policies(contexts: int, seed: int = 3) -> list[torch.Tensor]:
    return [_table(seed + agent, contexts, TOKENS + 1, TOKENS) for agent in range(AGENTS)]


def _near(tables: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """The tables before the last updates: where sampling took place."""
    return [table.detach() + 0.3 * _table(seed + i, *table.shape) for i, table in enumerate(tables)]


def _all_turns(roots: list[Turn]) -> list[Turn]:
    return [node for root in roots for node in (root, *root.children) if node]


def _gradients(loss: torch.Tensor, tables: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, tables, allow_unused=True, materialize_grads=True))


def _leaves(tables: list[torch.Tensor]) -> list[torch.Tensor]:
    return [table.detach().clone().requires_grad_() for table in tables]


def _assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-8) -> None:
    assert any(gradient.abs().max() > 1e-3 for gradient in expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


# --- formulas, written out ---


def _log_table(policy: torch.Tensor) -> torch.Tensor:
    """log softmax of every row of logits."""
    return policy - policy.exp().sum(-1, keepdim=True).log()


def _token_log_probs(log_table, context: int, response: list[int]) -> list:
    """log pi of each token; tensors from a tensor, numbers from an array."""
    return [log_table[context, previous, token] for previous, token in itertools.pairwise([BEGIN, *response])]


def _response_kl(own, reference, context: int, response: list[int]) -> float:
    both = zip(*(_token_log_probs(table, context, response) for table in (own, reference)), strict=True)
    return sum(math.exp(other - mine) - (other - mine) - 1.0 for mine, other in both)


def _gain(log_table, behaviour, clip: float | None, context: int, response: list[int], advantage: float):
    """sum over tokens of A log pi, or with a clip of PPO's surrogate of A pi / pi_behaviour."""
    log_probs = _token_log_probs(log_table, context, response)
    if clip is None:
        return advantage * sum(log_probs)
    total = 0.0
    for log_prob, old in zip(log_probs, _token_log_probs(behaviour, context, response), strict=True):
        ratio = (log_prob - old).exp()
        if advantage > 0 and ratio > 1 + clip:
            total = total + advantage * (1 + clip)
        elif advantage < 0 and ratio < 1 - clip:
            total = total + advantage * (1 - clip)
        else:
            total = total + advantage * ratio
    return total


def _joint_return(node: Turn, joint: int) -> float:
    child = node.children[joint] if node.children else None
    if child is None:
        return node.rewards[joint]
    below = [_joint_return(child, j) for j in range(len(child.joints))]
    below = [value for value in below if math.isfinite(value)]
    return node.rewards[joint] + DISCOUNT * sum(below) / len(below) if below else math.nan


def _completion_return(node: Turn, agent: int, sample: int, cross_reduction: str) -> float:
    part = [_joint_return(node, j) for j, joint in enumerate(node.joints) if joint[agent] == sample]
    finite = [value for value in part if math.isfinite(value)]
    if not finite:
        return math.nan
    return sum(finite) / len(finite) * (len(part) if cross_reduction == "sum" else 1)


def _group_advantage(returns: list[float], k: int, mode: str, normalise: bool) -> float:
    finite = [value for value in returns if math.isfinite(value)]

    def plain(value: float) -> float:
        if mode == "magrpo":
            return value - sum(finite) / len(finite)
        if mode == "marloo":
            return value - (sum(finite) - value) / (len(finite) - 1) if len(finite) > 1 else 0.0
        return value - max(finite) if mode == "maremax" else value

    if not normalise:
        return plain(returns[k])
    mean = sum(map(plain, finite)) / len(finite)
    std = math.sqrt(sum((plain(value) - mean) ** 2 for value in finite) / len(finite))
    return (plain(returns[k]) - mean) / max(std, 1e-6)


@dataclass(frozen=True)
class Group:
    """A group method as a user sets it."""

    mode: str = "magrpo"
    normalise: bool = False
    pairing: str = "aligned"
    cross_reduction: str = "mean"
    reduction: str = "sequence_sum"
    clip: float | None = None  # None: on-policy, no ratio


def _group_formula(method: Group, roots, policies, behaviours, references) -> torch.Tensor:
    """Sum over agents of the mean over nodes of (1/K) sum_k -A_k sum_t log pi, or of the sum over all tokens."""
    loss = 0.0
    for agent in range(AGENTS):
        policy = _log_table(policies[agent])
        behaviour, reference = (_log_table(tables[agent]).numpy() for tables in (behaviours, references))
        terms, tokens, nodes = [], 0, 0
        for node in _all_turns(roots):
            returns = []
            for k, response in enumerate(node.responses[agent]):
                kl = _response_kl(behaviour, reference, node.context, response)
                returns.append(_completion_return(node, agent, k, method.cross_reduction) - KL_COEFFICIENT * kl)
            kept = [k for k, value in enumerate(returns) if math.isfinite(value)]
            nodes += bool(kept)
            for k in kept:
                response = node.responses[agent][k]
                advantage = _group_advantage(returns, k, method.mode, method.normalise)
                gain = _gain(policy, behaviour, method.clip, node.context, response, advantage)
                terms.append(gain / len(kept) if method.reduction == "sequence_sum" else gain)
                tokens += len(response)
        loss = loss - sum(terms) / (nodes if method.reduction == "sequence_sum" else tokens)
    return loss


@dataclass(frozen=True)
class Critic:
    """An actor-critic method as a user sets it."""

    algorithm: str = "iac"
    kind: str = "v"
    shared: bool = False
    normalise: bool = False
    advantage_clip: float | None = None

    @property
    def value_clip(self) -> float | None:
        return VALUE_CLIP if self.shared else None


def _value(method: Critic, tables, agent: int, turn: Turn) -> torch.Tensor:
    """V of a context or Q of a context and its responses, from the agent's own table, the team's, or the actor's."""
    last = [turn.responses[other][0][-1] for other in range(AGENTS)]
    if method.shared:
        previous = last[agent] if method.kind == "q" else BEGIN
        return (tables[agent][turn.context, previous] * tables[AGENTS][agent]).sum()
    if method.algorithm == "iac":
        value = tables[AGENTS][agent, turn.context, BEGIN]
        return value + tables[AGENTS][agent, turn.context, last[agent]] if method.kind == "q" else value
    value = tables[AGENTS][0, turn.context, BEGIN]
    if method.kind == "q":
        for other in range(AGENTS):
            value = value + tables[AGENTS][other, turn.context, last[other]]
    return value


def _critic_tables(method: Critic, contexts: int) -> list[torch.Tensor]:
    """The agents' policies and, last, the value tables (agents, contexts, tokens + 1) or the heads (agents, tokens)."""
    shape = (AGENTS, TOKENS) if method.shared else (AGENTS, contexts, TOKENS + 1)
    return [*_policies(contexts), _table(9, *shape)]


def _actor_critic_formula(method: Critic, trajectories, tables, old_tables) -> torch.Tensor:
    """Sum over agents of mean -A sum_t log pi, plus the coefficient times the critics' mean squared errors."""
    policy_loss, value_losses = 0.0, []
    for agent in range(AGENTS):
        policy = _log_table(tables[agent])
        advantages, gains, errors = [], [], []
        for trajectory in trajectories:
            for t, turn in enumerate(trajectory):
                if not math.isfinite(turn.rewards[0]):
                    continue
                target = turn.rewards[0]
                if t + 1 < len(trajectory):
                    target += DISCOUNT * _value(method, old_tables, agent, trajectory[t + 1]).item()
                old = _value(method, old_tables, agent, turn).item()
                new = _value(method, tables, agent, turn)
                error = (target - new) ** 2
                if method.value_clip and abs(new.item() - old) > VALUE_CLIP:
                    near = old + math.copysign(VALUE_CLIP, new.item() - old)
                    error = error if error > (target - near) ** 2 else torch.tensor((target - near) ** 2)
                errors.append(error)
                advantages.append(target - old)
                gains.append(sum(_token_log_probs(policy, turn.context, turn.responses[agent][0])))
        if method.normalise:
            mean = sum(advantages) / len(advantages)
            std = math.sqrt(sum((value - mean) ** 2 for value in advantages) / len(advantages))
            advantages = [(value - mean) / max(std, 1e-6) for value in advantages]
        if method.advantage_clip:
            advantages = [max(-method.advantage_clip, min(method.advantage_clip, value)) for value in advantages]
        policy_loss = policy_loss - sum(a * g for a, g in zip(advantages, gains, strict=True)) / len(gains)
        value_losses.append(sum(errors) / len(errors))
    if method.algorithm == "maac":  # one critic, one step: the agents' errors are the same
        value_losses = value_losses[:1]
    return policy_loss + VALUE_COEFFICIENT * sum(value_losses)


def _preference_formula(loss: str, agent: int, pairs, policies, references) -> torch.Tensor:
    """One agent's mean loss on pairs of joint responses (winner, loser by sample); the others' margins are numbers."""
    beta, gamma, total = 0.4, 0.2, 0.0
    for turn, winner, loser in pairs:
        joint = 0.0
        for other in range(AGENTS):
            policy, reference = _log_table(policies[other]), _log_table(references[other]).numpy()
            sides = []
            for response in (turn.responses[other][winner], turn.responses[other][loser]):
                log_prob = sum(_token_log_probs(policy, turn.context, response))
                if loss == "simpo":
                    sides.append(log_prob / len(response))
                else:
                    sides.append(log_prob - sum(_token_log_probs(reference, turn.context, response)))
            margin = sides[0] - sides[1]
            joint = joint + (margin if other == agent else margin.item())
        if loss == "ipo":
            total = total + (joint - 1 / (2 * beta)) ** 2
        else:
            total = total + torch.log(1 + torch.exp(-(beta * joint - (gamma if loss == "simpo" else 0.0))))
    return total / len(pairs)


# --- the same through the package, as a trainer does it ---


@dataclass(frozen=True)
class Layout:
    """How rows are laid out, which must not matter: padding (left, right), order of rows, micro-batches."""

    padding: tuple[int, int] = (0, 0)
    to_the_right: bool = False
    seed: int | None = None
    micro_batch: int = 1000

    def batches(self, count: int) -> list[np.ndarray]:
        order = np.arange(count) if self.seed is None else np.random.default_rng(self.seed).permutation(count)
        return [order[start : start + self.micro_batch] for start in range(0, count, self.micro_batch)]


LAYOUTS = {
    "padding": Layout(padding=(2, 3)),
    "padding side": Layout(to_the_right=True),
    "batch order": Layout(seed=5),
    "micro-batches": Layout(micro_batch=3),
    "all at once": Layout((1, 2), True, 6, 7),
}


@dataclass(frozen=True)
class Row:
    """One response of one agent."""

    context: int
    response: list[int]


def _scored(policy: torch.Tensor, rows: list[Row], layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and mask, (rows, tokens); pads are token 0, which is also a real token."""
    width = max(len(row.response) for row in rows) + sum(layout.padding)
    tokens, previous = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        length = len(row.response)
        start = width - layout.padding[1] - length if layout.to_the_right else layout.padding[0]
        tokens[i, start : start + length] = torch.tensor(row.response)
        previous[i, start : start + length] = torch.tensor([BEGIN, *row.response[:-1]])
        mask[i, start : start + length] = True
    contexts = torch.tensor([row.context for row in rows])[:, None]
    return policy[contexts, previous].log_softmax(-1).gather(2, tokens[..., None])[..., 0], mask


def _summed(policy: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    log_probs, mask = _scored(policy, rows, Layout())
    return log_probs.where(mask, 0.0).sum(1)


def _policy_loss(policy, behaviour, clip, rows, advantage, weights, layout: Layout) -> torch.Tensor:
    """Sum of the losses of all micro-batches."""
    loss = 0.0
    for batch in layout.batches(len(rows)):
        some = [rows[i] for i in batch]
        log_probs, mask = _scored(policy, some, layout)
        options = {"behaviour_log_probs": _scored(behaviour, some, layout)[0], "clip": clip} if clip else {}
        loss = loss + policy_gradient_loss(log_probs, mask, advantage[batch], weights[batch], **options).loss
    return loss


def _tree(turn: Turn) -> Node:
    return Node(turn.rewards, [child and _tree(child) for child in turn.children])


def _group_batched(method: Group, roots, policies, behaviours, references, layout: Layout) -> torch.Tensor:
    nodes = _all_turns(roots)
    joint = [returns for root in roots for returns in joint_returns(_tree(root), DISCOUNT)]
    loss = 0.0
    for agent in range(AGENTS):
        rows = [Row(node.context, response) for node in nodes for response in node.responses[agent]]
        log_probs, mask = _scored(behaviours[agent], rows, layout)
        kl = k3(log_probs, _scored(references[agent], rows, layout)[0], mask).values.sum(1)
        sizes = [len(node.responses[agent]) for node in nodes]
        returns = torch.full((len(nodes), max(sizes)), math.nan, dtype=torch.float64)
        for i, own in enumerate(kl.split(sizes)):
            found = completion_returns(joint[i], AGENTS, method.pairing, method.cross_reduction)[agent]
            returns[i, : sizes[i]] = kl_on_returns(torch.from_numpy(found), own, KL_COEFFICIENT)
        group = advantages(returns, method.mode, method.normalise)
        is_row = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
        advantage, valid = group.values[is_row], group.valid[is_row]
        group_sizes = group.group_sizes.repeat_interleave(torch.tensor(sizes))
        lengths = torch.tensor([len(row.response) for row in rows])
        weights = torch.zeros(len(rows), dtype=torch.float64)
        weights[valid] = row_weights(group_sizes[valid], lengths[valid], method.reduction)
        loss = loss + _policy_loss(policies[agent], behaviours[agent], method.clip, rows, advantage, weights, layout)
    return loss


def _actor_critic_batched(method: Critic, trajectories, tables, old_tables, layout: Layout) -> torch.Tensor:
    turns = [(i, t, turn) for i, trajectory in enumerate(trajectories) for t, turn in enumerate(trajectory)]
    lengths = torch.tensor([len(trajectory) for trajectory in trajectories])
    shape = (len(trajectories), int(lengths.max()))
    rewards, old_values = (torch.full(shape, padding, dtype=torch.float64) for padding in (3.0, 7.0))
    loss = 0.0
    for agent in range(AGENTS):
        for i, t, turn in turns:
            rewards[i, t] = turn.rewards[0]
            old_values[i, t] = _value(method, old_tables, agent, turn).detach()
        targets = td_targets(rewards, old_values, lengths, DISCOUNT)
        advantage = td_advantages(targets, old_values, normalise=method.normalise, clip=method.advantage_clip)
        at = tuple(torch.tensor([place[axis] for place in turns]) for axis in range(2))
        rows = [Row(turn.context, turn.responses[agent][0]) for _, _, turn in turns]
        tokens, valid = torch.tensor([len(row.response) for row in rows]), targets.valid[at]
        weights = torch.zeros(len(rows), dtype=torch.float64)
        weights[valid] = row_weights(torch.ones(len(rows))[valid], tokens[valid], "sequence_sum")
        loss = loss + _policy_loss(tables[agent], None, None, rows, advantage[at], weights, layout)
        if method.algorithm == "iac" or agent == 0:
            weights = value_weights(targets.valid)[at]
            for batch in layout.batches(len(rows)):
                values = torch.stack([_value(method, tables, agent, turns[i][2]) for i in batch])
                own = old_values[at][batch], targets.values[at][batch], weights[batch]
                loss = loss + VALUE_COEFFICIENT * value_loss(values, *own, method.value_clip)
    return loss


def _preference_batched(loss: str, pairs, policies, references) -> torch.Tensor:
    def side(tables, which: int) -> torch.Tensor:
        return torch.stack(
            [
                _summed(tables[agent], [Row(pair[0].context, pair[0].responses[agent][pair[which]]) for pair in pairs])
                for agent in range(AGENTS)
            ]
        )

    def tokens(which: int) -> torch.Tensor:
        return torch.tensor([[len(pair[0].responses[agent][pair[which]]) for pair in pairs] for agent in range(AGENTS)])

    if loss == "simpo":
        margins = madpo.length_normalised_margins(side(policies, 1), side(policies, 2), tokens(1), tokens(2))
    else:
        margins = madpo.margins(side(policies, 1), side(policies, 2), side(references, 1), side(references, 2))
    gamma = 0.2 if loss == "simpo" else 0.0
    return madpo.losses(margins, loss=loss, beta=0.4, gamma=gamma).sum() / len(pairs)


def _group_gradients(method: Group, loss=None, longest: int = LONGEST) -> list[torch.Tensor]:
    roots, contexts = _trees(method.pairing, longest)
    policies = _leaves(_policies(contexts))
    behaviours, references = _near(policies, 20), _near(policies, 40)
    return _gradients((loss or _group_formula)(method, roots, policies, behaviours, references), policies)


def _critic_gradients(method: Critic, loss=None) -> list[torch.Tensor]:
    trajectories, contexts = _trajectories()
    tables = _leaves(_critic_tables(method, contexts))
    return _gradients((loss or _actor_critic_formula)(method, trajectories, tables, _near(tables, 20)), tables)


def _through_the_package(function, layout: Layout = LAYOUTS["all at once"]):
    return partial(function, layout=layout)


GROUPS = [Group(mode, normalise=True) for mode in MODES] + [
    Group(mode, False, pairing, cross_reduction, reduction, clip)
    for mode in MODES
    for pairing, cross_reduction in (("aligned", "mean"), ("cross", "mean"), ("cross", "sum"))
    for reduction in ("sequence_sum", "token_mean")
    for clip in (None, 0.2)
]
CRITICS = [
    Critic(algorithm, kind, shared, normalise, clip)
    for algorithm, shared in (("iac", False), ("iac", True), ("maac", False))
    for kind in ("v", "q")
    for normalise, clip in ((False, None), (True, ADVANTAGE_CLIP))
]


@pytest.mark.parametrize("method", GROUPS, ids=str)
def test_group_methods_follow_their_formula(method):
    found = _group_gradients(method, _through_the_package(_group_batched))
    _assert_equal(found, _group_gradients(method))


@pytest.mark.parametrize("method", CRITICS, ids=str)
def test_actor_critic_methods_follow_their_formula(method):
    found = _critic_gradients(method, _through_the_package(_actor_critic_batched))
    _assert_equal(found, _critic_gradients(method))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "simpo"])
def test_preference_losses_follow_each_agents_own_formula(loss):
    roots, contexts = _trees("aligned")
    pairs = [(node, 0, 1) for node in _all_turns(roots)] + [(roots[0], 1, 0), (roots[1], 1, 2)]
    policies = _leaves(_policies(contexts))
    references = _near(policies, 40)
    found = _gradients(_preference_batched(loss, pairs, policies, references), policies)
    for agent in range(AGENTS):
        own = _gradients(_preference_formula(loss, agent, pairs, policies, references), policies)
        _assert_equal([found[agent]], [own[agent]])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("reduction", ["sequence_sum", "token_mean"])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_layout_of_a_batch_does_not_change_a_group_methods_gradient(name, reduction, clip):
    method = Group(reduction=reduction, clip=clip)
    plain = _group_gradients(method, _through_the_package(_group_batched, Layout()))
    changed = _group_gradients(method, _through_the_package(_group_batched, LAYOUTS[name]))
    _assert_equal(changed, plain, 1e-12)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shared", [False, True])
def test_the_layout_of_a_batch_does_not_change_an_actor_critics_gradient(name, shared):
    method = Critic(shared=shared)
    plain = _critic_gradients(method, _through_the_package(_actor_critic_batched, Layout()))
    changed = _critic_gradients(method, _through_the_package(_actor_critic_batched, LAYOUTS[name]))
    _assert_equal(changed, plain, 1e-12)


def test_without_normalisation_the_four_group_methods_differ():
    found = [_group_gradients(Group(mode), _through_the_package(_group_batched)) for mode in MODES]
    for one, other in itertools.combinations(found, 2):
        assert all((a - b).abs().max() > 1e-3 for a, b in zip(one, other, strict=True))


def test_with_normalisation_the_four_group_methods_are_the_same():
    found = [_group_gradients(Group(mode, normalise=True), _through_the_package(_group_batched)) for mode in MODES]
    for other in found[1:]:
        _assert_equal(other, found[0], 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_one_token_responses_have_a_gradient(mode):
    found = _group_gradients(Group(mode), _through_the_package(_group_batched), longest=1)
    _assert_equal(found, _group_gradients(Group(mode), longest=1))


def test_the_discount_and_the_failed_rewards_of_the_example_matter():
    roots, _ = _trees("aligned")
    discounted, plain = (joint_returns(_tree(roots[0]), discount)[0] for discount in (DISCOUNT, 1.0))
    assert discounted[0] == pytest.approx(_joint_return(roots[0], 0))
    assert abs(discounted[0] - plain[0]) > 1e-3
    assert np.isnan(discounted[1])
    last = joint_returns(_tree(roots[2]), DISCOUNT)[0]
    assert last[0] == roots[2].rewards[0]
    assert np.isnan(last[1])
