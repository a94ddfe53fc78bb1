"""Several optimizer steps on the responses of one step: their weights, the importance ratio and its clip."""

from contextlib import contextmanager

import pytest
import torch

from comlrl_stages.artifacts import open_work
from comlrl_stages.stages import optimize_actor_critic, optimize_group
from comlrl_stages.teams.team import load_team

from .conftest import counting_characters, log_of, reinforcement_settings

JOINT = -1
WHOLE = 100  # items per step: all four
ROWS = 12  # responses of one agent in a step: four items of three
KINDS = [{"algorithm": "magrpo"}, {"algorithm": "iac", "critic": "shared"}, {"algorithm": "maac", "critic_type": "q"}]


class _Unpublished(Exception):
    pass


@contextmanager
def algorithm_of(pipeline, folder, settings):
    """The algorithm of a run without the loop."""
    inputs = pipeline.task_inputs()
    module = optimize_group if settings.algorithm == "magrpo" else optimize_actor_critic
    with pytest.raises(_Unpublished), open_work("optimize", {}, inputs, {"policy": folder / "policy"}) as work:
        team = load_team(inputs["models"], work.digest("models"), settings.team, settings.compute, trainable=True)
        algorithm = module.build(settings, work, team)
        try:
            yield algorithm
        finally:
            algorithm.close()
        raise _Unpublished


def gradients_of(pipeline, folder, **changes):
    """By minibatch of the first step: the gradients by part and parameter; weights never move. And the numbers."""
    found = []
    with algorithm_of(pipeline, folder, reinforcement_settings(**changes, items_per_step=WHOLE)) as algorithm:

        def update():
            parameters = {
                f"{name}|{key}": parameter
                for name, part in algorithm.parts.items()
                for key, parameter in part.module.named_parameters()
                if parameter.grad is not None
            }
            found.append({key: parameter.grad.double() for key, parameter in parameters.items()})
            for parameter in parameters.values():
                parameter.grad = None

        numbers = algorithm.train(0, update)
    return found, numbers


def assert_close(found, expected, tolerance=1e-4):
    assert set(found) == set(expected) and expected
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    assert scale > 0
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=tolerance * scale, rtol=1e-3)


def mean_of(gradients):
    names = {name for one in gradients for name in one}
    zero = {name: torch.zeros_like(next(one[name] for one in gradients if name in one)) for name in names}
    return {name: sum(one.get(name, zero[name]) for one in gradients) / len(gradients) for name in names}


@pytest.mark.parametrize("reduction", ["sequence_sum", "token_mean"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_minibatches_of_weights_that_stay_average_to_the_whole(mixed, tmp_path, kind, reduction):
    """Also where the last one is filled in part: 12 responses in minibatches of 5."""
    given = {**kind, "loss_reduction": reduction}
    (whole,), numbers = gradients_of(mixed, tmp_path / "whole", **given)
    split, split_numbers = gradients_of(mixed, tmp_path / "split", **given, train_batch_size=5)
    assert len(split) == 3
    assert_close(mean_of(split), whole)
    assert not all(torch.allclose(split[0][name], whole[name], rtol=0.1) for name in whole)
    for agent in (JOINT, 0, 1):
        expected = {k: v for k, v in numbers.values[0, agent].items() if k.endswith("loss") or k == "entropy"}
        found = {k: split_numbers.values[0, agent][k] for k in expected}
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_passes_over_the_buffer_take_each_response_once_in_another_order(mixed, tmp_path, kind):
    split, numbers = gradients_of(mixed, tmp_path / "twice", **kind, train_batch_size=6, buffer_epochs=2)
    (whole,), once = gradients_of(mixed, tmp_path / "whole", **kind)
    assert len(split) == 4
    for passed in (split[:2], split[2:]):
        assert_close(mean_of(passed), whole)
    assert not all(torch.allclose(split[0][name], split[2][name], rtol=0.1) for name in split[0])
    assert numbers.values[0, JOINT]["loss"] == pytest.approx(once.values[0, JOINT]["loss"], rel=1e-3)
    assert numbers.tokens == once.tokens


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_ratio_changes_no_gradient_of_the_policy_that_sampled(mixed, tmp_path, kind, temperature):
    given = {**kind, "sampling": {"max_new_tokens": 12, "temperature": temperature}}
    (plain,), _ = gradients_of(mixed, tmp_path / "plain", **given)
    (ratio,), numbers = gradients_of(mixed, tmp_path / "ratio", **given, importance_ratio=True, clip=0.2)
    assert_close(ratio, plain)
    assert numbers.values[0, 0]["clipped_share"] == 0.0


def test_a_batch_of_the_whole_step_or_more_is_the_whole(mixed, tmp_path):
    (whole,), _ = gradients_of(mixed, tmp_path / "whole")
    for size in (ROWS, 10 * ROWS):
        (found,), _ = gradients_of(mixed, tmp_path / str(size), train_batch_size=size)
        assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_later_minibatches_are_clipped_and_counted(mixed, tmp_path, kind):
    given = {**kind, "learning_rate": 1e-2, "items_per_step": WHOLE, "train_batch_size": 4, "buffer_epochs": 4}
    given |= {"importance_ratio": True, "task": counting_characters(tmp_path)}
    narrow = log_of(mixed.reinforce(tmp_path / "narrow", clip=0.05, **given)["training_log"])
    wide = log_of(mixed.reinforce(tmp_path / "wide", clip=0.9, **given)["training_log"])
    none = log_of(mixed.reinforce(tmp_path / "none", **given)["training_log"])
    for agent in (0, 1):
        assert 0 < wide[1, agent, "clipped_share"] < narrow[1, agent, "clipped_share"] < 1
        assert (1, agent, "clipped_share") not in none


def test_clipping_keeps_the_policy_nearer_to_the_one_that_sampled(mixed, tmp_path):
    """Many passes over one buffer: without the clip the policy runs away from it."""
    given = {"learning_rate": 1e-2, "items_per_step": 2, "train_batch_size": 2, "buffer_epochs": 8}
    given |= {"importance_ratio": True, "task": counting_characters(tmp_path)}
    moved = []
    for name, clip in (("clipped", 0.1), ("free", None)):
        log = log_of(mixed.reinforce(tmp_path / name, clip=clip, **given)["training_log"])
        moved.append(log[2, JOINT, "kl"])
    assert 0 < moved[0] < 0.7 * moved[1]
