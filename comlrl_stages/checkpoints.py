"""Step-level checkpoints of a training stage.

A checkpoint is a folder `step_<n>` with `tensors.safetensors` and `state.json`. It appears under its name only when
complete, and older ones go once it is there, so a kill at any moment leaves at least the last good one.
"""

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def save_checkpoint(
    folder: Path, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any], *, keep: Collection[int] = ()
) -> None:
    """Write the checkpoint of `step` finished steps; floats in `state` survive exactly (JSON by repr).

    Others go once it is there, but those of the steps `keep`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary, final = folder / f".step_{step:08d}.tmp", folder / f"step_{step:08d}"
    for leftover in folder.glob(".step_*.tmp"):
        shutil.rmtree(leftover)
    temporary.mkdir()
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary / "tensors.safetensors"
    )
    (temporary / "state.json").write_text(json.dumps(state), encoding="utf-8")
    if final.exists():  # an earlier run came this far, and was killed before its next checkpoint
        shutil.rmtree(final)
    os.replace(temporary, final)
    for old in folder.glob("step_*"):
        if old != final and _step(old) not in keep:
            shutil.rmtree(old)


def load_checkpoint(
    folder: Path, most: int | None = None
) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]] | None:
    """Return (finished steps, tensors, state) of the newest checkpoint of at most `most` steps, or None."""
    found = sorted(folder.glob("step_*")) if folder.is_dir() else []
    found = [path for path in found if most is None or _step(path) <= most]
    if not found:
        return None
    newest = found[-1]
    state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    return _step(newest), load_file(newest / "tensors.safetensors"), state


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))
