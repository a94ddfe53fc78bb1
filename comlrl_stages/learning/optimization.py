"""AdamW as every trainer here uses it: what decays, how the learning rate moves, how gradients are clipped.

Weights are float32 masters: a bfloat16 weight swallows an update smaller than 1/256 of itself. `changed_share` proves
that they moved.
"""

import math
from collections.abc import Iterable
from typing import Literal

import torch

from comlrl_stages.errors import UserError

Decay = Literal["constant", "linear", "cosine"]


def parameter_groups(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], weight_decay: float
) -> list[dict[str, object]]:
    """Return AdamW groups of the trainable parameters: matrices decay, norms and biases (one dimension) do not."""
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    epsilon: float = 1e-8,
) -> torch.optim.AdamW:
    """Return AdamW (arXiv 1711.05101) over `parameter_groups`."""
    groups = parameter_groups(named_parameters, weight_decay)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon)


def lr_scale(step: int, total: int, warmup_fraction: float, decay: Decay) -> float:
    """Return the factor on the learning rate for update `step` (0 is the first) of `total`.

    The first ceil(warmup_fraction * total) updates rise linearly to 1; the rest stay, fall linearly or as a half
    cosine towards 0. The factor is above 0 at every update, so none is wasted.
    """
    warmup = math.ceil(warmup_fraction * total)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(total - warmup, 1)
    if decay == "constant":
        return 1.0
    if decay == "linear":
        return 1.0 - progress
    if decay == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f"unknown decay {decay!r}; expected constant, linear or cosine")


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use `learning_rate` for the next update of every group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float | None) -> float:
    """Scale the gradients so that their joint L2 norm is at most `max_norm` and return the norm before that.

    None only measures. Raises UserError where the norm is not finite: such an update would destroy the weights.
    """
    limit = math.inf if max_norm is None else max_norm
    norm = torch.nn.utils.clip_grad_norm_(list(parameters), limit).item()
    if not math.isfinite(norm):
        raise UserError(
            f"the gradient norm is {norm}, so training has diverged. Lower learning_rate, set max_gradient_norm, "
            "or use compute_dtype float32."
        )
    return norm


def weight_sample(parameters: Iterable[torch.nn.Parameter], per_tensor: int = 1024) -> torch.Tensor:
    """Return a copy of up to `per_tensor` evenly spaced elements of each parameter, as one vector (elements,)."""
    return torch.cat([_evenly_spaced(parameter.detach().flatten(), per_tensor) for parameter in parameters])


def changed_share(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the share of sampled weights that differ between two `weight_sample` calls; 0 means that nothing trained.

    A few thousand elements cost nothing beside an update, where a full copy would double the memory of the weights.
    """
    if before.shape != after.shape:
        raise ValueError(f"weight samples of shape {tuple(before.shape)} and {tuple(after.shape)} cannot be compared")
    return (before != after).double().mean().item()


def training_state(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return all that a resumed training needs, by name: trainable weights and the optimizer's state of each.

    Learning rates are not part of it: they follow from the step.
    """
    state: dict[str, torch.Tensor] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            state[f"weight:{name}"] = parameter.detach()
            state |= {f"{key}:{name}": value for key, value in optimizer.state[parameter].items()}
    return state


def restore_training_state(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    state: dict[str, torch.Tensor],
) -> None:
    """Put `training_state` back, so that the next update is bit for bit that of an undisturbed run."""
    trainable = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
    for key, value in state.items():
        kind, _, name = key.partition(":")
        if kind == "weight":
            with torch.no_grad():
                trainable[name].copy_(value)
        else:
            device = "cpu" if kind == "step" else trainable[name].device
            optimizer.state[trainable[name]][kind] = value.to(device, copy=True)


def _evenly_spaced(values: torch.Tensor, count: int) -> torch.Tensor:
    stride = max(1, math.ceil(values.numel() / count))
    return values[::stride].clone()
