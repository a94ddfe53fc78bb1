"""AdamW groups, schedule, clipping, the proof that weights move, and resuming."""

import math

import pytest
import torch

from comlrl_stages.errors import UserError
from comlrl_stages.learning import optimization


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))


def _adamw(model, learning_rate=0.1):
    return optimization.adamw(
        model.named_parameters(), learning_rate=learning_rate, weight_decay=0.5, betas=(0.9, 0.99)
    )


def _update(model, optimizer, step):
    optimizer.zero_grad()
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
    model(inputs).square().mean().backward()
    optimizer.step()


def test_norms_and_biases_do_not_decay(model):
    decaying, still = optimization.parameter_groups(model.named_parameters(), 0.5)
    assert [p.ndim for p in decaying["params"]] == [2, 2]
    assert [p.ndim for p in still["params"]] == [1, 1, 1, 1]
    assert (decaying["weight_decay"], still["weight_decay"]) == (0.5, 0.0)


def test_frozen_parameters_are_left_out(model):
    model[0].requires_grad_(False)
    groups = optimization.parameter_groups(model.named_parameters(), 0.5)
    assert sum(len(group["params"]) for group in groups) == 4


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_schedule_worked_out_by_hand(decay, expected):
    scales = [optimization.lr_scale(step, 6, 0.25, decay) for step in range(6)]
    assert scales == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_fraction", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("total", [1, 2, 7])
def test_no_update_is_wasted_at_rate_zero(decay, warmup_fraction, total):
    scales = [optimization.lr_scale(step, total, warmup_fraction, decay) for step in range(total)]
    assert all(0 < scale <= 1 for scale in scales)
    assert max(scales) == 1


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_returned():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert optimization.clip_gradients([parameter], None) == 5.0
    assert parameter.grad.tolist() == [3.0, 4.0]
    assert optimization.clip_gradients([parameter], 1.0) == 5.0
    assert parameter.grad.norm().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_an_error(bad):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, bad])
    with pytest.raises(UserError, match="learning_rate"):
        optimization.clip_gradients([parameter], 1.0)


def test_changed_share_sees_that_weights_move(model):
    before = optimization.weight_sample(model.parameters(), per_tensor=4)
    assert optimization.changed_share(before, optimization.weight_sample(model.parameters(), per_tensor=4)) == 0
    _update(model, _adamw(model), step=0)
    assert optimization.changed_share(before, optimization.weight_sample(model.parameters(), per_tensor=4)) > 0.9


def test_bfloat16_weights_swallow_a_small_update_that_float32_masters_keep():
    for dtype, moves in ((torch.bfloat16, False), (torch.float32, True)):
        parameter = torch.nn.Parameter(torch.ones(8, dtype=dtype))
        before = optimization.weight_sample([parameter])
        parameter.grad = torch.ones_like(parameter)
        named = [("weight", parameter)]
        optimization.adamw(named, learning_rate=1e-5, weight_decay=0.0, betas=(0.9, 0.99)).step()
        assert (optimization.changed_share(before, optimization.weight_sample([parameter])) > 0) is moves


def test_a_resumed_training_ends_in_the_same_bits(model):
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = _adamw(model)
    for step in range(4):
        _update(model, optimizer, step)
        if step == 1:
            state = optimization.training_state(model.named_parameters(), optimizer)
            state = {name: value.clone() for name, value in state.items()}
    expected = {name: value.clone() for name, value in model.state_dict().items()}

    model.load_state_dict(initial)
    optimizer = _adamw(model)
    optimization.restore_training_state(model.named_parameters(), optimizer, state)
    for step in (2, 3):
        _update(model, optimizer, step)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
