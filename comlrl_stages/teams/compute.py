"""Where a model runs and in which precision its products are computed.

Weights stay float32 masters everywhere; bfloat16 means autocast over them, so that small AdamW updates are never lost
in the rounding of the weights. `auto` takes bfloat16 only where it was measured to be faster.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from comlrl_stages.errors import UserError

# Below this hidden size the casts of autocast cost more than the faster products save.
SMALLEST_BFLOAT16_HIDDEN_SIZE = 256


@dataclass(frozen=True)
class Compute:
    """A resolved device ("cpu", "cuda", "cuda:1", ...) and compute dtype ("float32" or "bfloat16")."""

    device: str
    dtype: str

    def autocast(self) -> AbstractContextManager:
        """Return the context in which forward passes run: autocast for bfloat16, nothing for float32."""
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16)


def resolve_compute(requested_dtype: str, device: str, hidden_size: int) -> Compute:
    """Return the device and dtype that "auto" means on this machine; other values are taken as they are.

    "auto" is bfloat16 on a CUDA device that has it, and on a CPU with AVX512-BF16 or AMX for models of at least 256
    hidden units.

    Raises:
        UserError: the dtype is unknown, or the device is unknown or absent.
    """
    if requested_dtype not in ("auto", "float32", "bfloat16"):
        raise UserError(f"compute_dtype is {requested_dtype!r}; expected auto, float32 or bfloat16.")
    device = _resolve_device(device)
    if requested_dtype == "auto":
        requested_dtype = "bfloat16" if _bfloat16_pays(device, hidden_size) else "float32"
    return Compute(device, requested_dtype)


def set_up_torch(threads: int) -> None:
    """Fix what makes results depend on the machine's state: the number of threads, and kernels that race."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)


def _resolve_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind, index = torch.device(device).type, torch.device(device).index
    except RuntimeError as error:
        raise UserError(
            f"device is {device!r}, which torch does not know; expected auto, cpu, cuda, cuda:0, ..."
        ) from error
    if kind == "cuda" and (index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device is {device!r}, but torch sees {torch.cuda.device_count()} CUDA devices; set device to auto or cpu."
        )
    return device


def _bfloat16_pays(device: str, hidden_size: int) -> bool:
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return hidden_size >= SMALLEST_BFLOAT16_HIDDEN_SIZE and device == "cpu" and _cpu_has_bfloat16()


def _cpu_has_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
