"""Actor-critic: one-step temporal-difference targets, the policy's advantages, and the critic's loss.

A response has one value, V(h) read at the end of its prompt or Q(h, y) read at the end of the response. The critic
learns the TD(0) target and the policy follows the TD error. IAC has a critic for each agent, MAAC one for the joint
history of the team (both arXiv 2601.21972); the mathematics is the same, with that agent's or the team's values.

Trajectories of unequal length are padded to (trajectories, turns); what stands in the padding is never read. Weights
are computed once for all rows of a buffer, so the losses of any split into micro-batches add up exactly.
"""

from dataclasses import dataclass

import torch

from comlrl_stages.learning.advantages import standardised


@dataclass(frozen=True)
class TDTargets:
    """values: (trajectories, turns), zero where not valid. valid: (trajectories, turns) bool, what can be learned."""

    values: torch.Tensor
    valid: torch.Tensor


def td_targets(rewards: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, discount: float = 1.0) -> TDTargets:
    """Return the TD(0) target of every response: r_t + discount * V_{t+1}, and r_t at the last turn of a trajectory.

    rewards, values: (trajectories, turns), values those of the critic when the trajectories were sampled. lengths:
    (trajectories,) turns that took place; nothing is bootstrapped beyond them, whether the trajectory ended by itself
    or early. A response whose reward is not finite is not valid; the turn before it keeps its target, which holds the
    critic's value of that turn and not its reward.

    Raises ValueError for shapes that do not fit or a length outside 1..turns.
    """
    _check_shapes(rewards, values, lengths)
    turn = torch.arange(rewards.shape[1], device=rewards.device)
    happened = turn < lengths.unsqueeze(1)
    valid = happened & rewards.isfinite()
    following = torch.zeros_like(values)
    following[:, :-1] = values.detach()[:, 1:].where(happened[:, 1:], 0.0)
    return TDTargets((rewards + discount * following).where(valid, 0.0), valid)


def td_advantages(
    targets: TDTargets, values: torch.Tensor, *, normalise: bool = False, clip: float | None = None
) -> torch.Tensor:
    """Return what the policy follows, without gradient and zero where not valid: the TD error, target - value.

    values: (trajectories, turns), those that `td_targets` was given. `normalise` gives (A - mean A) / max(population
    std of A, 1e-6) over all valid responses. `clip` then limits the result to [-clip, clip].
    """
    errors = (targets.values - values.detach()).where(targets.valid, 0.0)
    if normalise:
        errors = standardised(errors.reshape(1, -1), targets.valid.reshape(1, -1)).view_as(errors)
    return errors if clip is None else errors.clamp(-clip, clip)


def value_weights(valid: torch.Tensor, minibatches: int = 1) -> torch.Tensor:
    """Return each response's weight in the value loss, float64 in the shape of `valid` (bool): 1 / number of valid.

    valid: all responses of a buffer. For a buffer that is trained on in several minibatches the weights are multiplied
    by their number, as `policy_gradient.row_weights` does.
    """
    return valid.double() * minibatches / valid.sum().clamp(min=1)


def value_errors(
    values: torch.Tensor, old_values: torch.Tensor, targets: torch.Tensor, clip: float | None = None
) -> torch.Tensor:
    """Return the squared error of each value, all of one shape; only `values` has a gradient.

    With `clip` it is the larger of the errors of the value and of the value kept within `clip` of the old one, the
    value clipping of PPO implementations (arXiv 2005.12729, section 3): a value that has moved by more than `clip`
    towards its target gets no gradient any more.
    """
    targets, old_values = targets.detach(), old_values.detach()
    errors = (targets - values).square()
    if clip is None:
        return errors
    kept_near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(errors, (targets - kept_near).square())


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    clip: float | None = None,
) -> torch.Tensor:
    """Return this micro-batch's part of the value loss: the sum of weight * `value_errors`, a scalar with gradient.

    All (rows,); weights from `value_weights` over the whole buffer. A row of weight 0 is not read.
    """
    used = weights != 0
    errors = value_errors(values[used], old_values[used], targets[used], clip)
    return (errors * weights[used].to(errors.dtype)).sum()


def _check_shapes(rewards: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> None:
    if rewards.ndim != 2 or values.shape != rewards.shape or lengths.shape != rewards.shape[:1]:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and lengths {tuple(lengths.shape)} do not "
            "fit; expected (trajectories, turns) twice and (trajectories,)"
        )
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= rewards.shape[1]:
        raise ValueError(f"lengths from {int(lengths.min())} to {int(lengths.max())}; expected 1 to {rewards.shape[1]}")
