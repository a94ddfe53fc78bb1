"""Checkpoints of a training stage: exact, complete or not there, and only the newest kept."""

import math
import shutil

import pytest
import torch

from comlrl_stages.checkpoints import load_checkpoint, save_checkpoint


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_tensors_come_back_bit_by_bit(tmp_path, dtype):
    tensors = {
        "agent_0|model.weight": torch.linspace(-3, 3, 12).reshape(3, 4).to(dtype),
        "agent_1|transposed": torch.arange(6).reshape(2, 3).to(dtype).T,
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 2).to(dtype),
    }
    save_checkpoint(tmp_path, 3, tensors, {})
    step, loaded, _ = load_checkpoint(tmp_path)
    assert step == 3 and set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name], tensor)


def test_special_numbers_survive_in_tensors(tmp_path):
    tensor = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45])
    save_checkpoint(tmp_path, 1, {"x": tensor}, {})
    loaded = load_checkpoint(tmp_path)[1]["x"]
    assert torch.equal(loaded.view(torch.int32), tensor.view(torch.int32))


def test_parameters_that_need_gradients_are_saved_as_numbers(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(2))
    save_checkpoint(tmp_path, 1, {"p": parameter}, {})
    assert not load_checkpoint(tmp_path)[1]["p"].requires_grad and parameter.requires_grad


def test_floats_of_the_state_survive_exactly(tmp_path):
    state = {"log": [0.1 + 0.2, 1e-323, -0.0, 1 / 3, math.inf, -math.inf], "step": 2**62, "name": "é", "none": None}
    save_checkpoint(tmp_path, 1, {}, {**state, "nan": math.nan})
    loaded = load_checkpoint(tmp_path)[2]
    assert math.isnan(loaded.pop("nan")) and loaded == state
    assert math.copysign(1, loaded["log"][2]) == -1


def test_the_newest_is_loaded_and_older_ones_go(tmp_path):
    for step in (9, 10, 100):
        save_checkpoint(tmp_path / "checkpoints", step, {"x": torch.tensor(step)}, {"at": step})
    assert names(tmp_path / "checkpoints") == ["step_00000100"]
    step, tensors, state = load_checkpoint(tmp_path / "checkpoints")
    assert (step, int(tensors["x"]), state) == (100, 100, {"at": 100})


def test_two_checkpoints_left_by_a_kill_give_the_newer(tmp_path):
    save_checkpoint(tmp_path, 9, {}, {"at": 9})
    shutil.copytree(tmp_path / "step_00000009", tmp_path / "kept")
    save_checkpoint(tmp_path, 10, {}, {"at": 10})
    (tmp_path / "kept").rename(tmp_path / "step_00000009")
    assert load_checkpoint(tmp_path)[2] == {"at": 10}


def test_what_a_kill_left_half_written_is_ignored_and_cleaned_away(tmp_path):
    save_checkpoint(tmp_path, 5, {}, {"at": 5})
    (tmp_path / ".step_00000006.tmp").mkdir()
    (tmp_path / ".step_00000006.tmp/tensors.safetensors").write_bytes(b"half")
    assert load_checkpoint(tmp_path)[0] == 5
    save_checkpoint(tmp_path, 7, {}, {"at": 7})
    assert names(tmp_path) == ["step_00000007"]


def test_without_a_checkpoint_there_is_none(tmp_path):
    assert load_checkpoint(tmp_path / "nowhere") is None
    assert load_checkpoint(tmp_path) is None


def test_checkpoints_to_keep_stay_and_can_be_asked_for(tmp_path):
    for step, keep in ((1, []), (4, [1]), (6, [4])):
        save_checkpoint(tmp_path, step, {"x": torch.tensor(step)}, {}, keep=keep)
    assert names(tmp_path) == ["step_00000004", "step_00000006"]
    assert load_checkpoint(tmp_path, most=5)[0] == 4 and load_checkpoint(tmp_path)[0] == 6
    assert load_checkpoint(tmp_path, most=3) is None
