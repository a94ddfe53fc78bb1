"""Which device and dtype `auto` means."""

import pytest
import torch

from comlrl_stages.errors import UserError
from comlrl_stages.teams.compute import Compute, resolve_compute


def cpu_has_bfloat16() -> bool:
    with open("/proc/cpuinfo") as file:
        flags = file.read()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def test_small_models_compute_in_float32_on_cpu():
    assert resolve_compute("auto", "cpu", hidden_size=64) == Compute("cpu", "float32")


def test_large_models_compute_in_bfloat16_where_the_cpu_has_it():
    expected = "bfloat16" if cpu_has_bfloat16() else "float32"
    assert resolve_compute("auto", "cpu", hidden_size=576).dtype == expected


def test_a_requested_dtype_is_taken_as_it_is():
    assert resolve_compute("bfloat16", "cpu", hidden_size=8).dtype == "bfloat16"
    assert resolve_compute("float32", "cpu", hidden_size=4096).dtype == "float32"


def test_autocast_computes_products_in_the_dtype_and_keeps_float32_weights():
    layer = torch.nn.Linear(4, 4)
    with Compute("cpu", "bfloat16").autocast():
        assert layer(torch.ones(1, 4)).dtype == torch.bfloat16
    with Compute("cpu", "float32").autocast():
        assert layer(torch.ones(1, 4)).dtype == torch.float32
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype, device", [("float16", "cpu"), ("auto", "gpu"), ("auto", "cuda:99")])
def test_unknown_requests_are_refused_by_name(dtype, device):
    with pytest.raises(UserError, match=r"float16|gpu|cuda:99"):
        resolve_compute(dtype, device, hidden_size=64)
