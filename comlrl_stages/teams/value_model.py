"""A value model: a language model without its output layer, and a head that reads the state at the last token.

Joint reward models and critics are value models. In a folder it is a model folder (the backbone) with the head's file.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from comlrl_stages.errors import UserError
from comlrl_stages.teams.batching import plan_batches
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.loading import Facts, in_own_memory
from comlrl_stages.teams.log_probs import positions
from comlrl_stages.teams.value_head import ValueHead, save_head


class ValueModel(nn.Module):
    """A backbone and a value head, which stays in float32 whatever the compute dtype."""

    def __init__(self, backbone: nn.Module, head: ValueHead, pad_id: int):
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.pad_id = pad_id

    def forward(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the values (rows,) float32 of texts given as token ids, none empty. Differentiable."""
        lengths = torch.tensor([len(row) for row in ids])
        padded = torch.full((len(ids), int(lengths.max())), self.pad_id)
        for row, values in enumerate(ids):
            padded[row, : len(values)] = torch.tensor(values)
        return self.score(padded, torch.arange(padded.shape[1]) < lengths.unsqueeze(1))

    def score(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Return the values (rows,) of a padded batch; input_ids, mask (rows, tokens), pads on either side.

        The mask, never a token value, says what is padding, and positions count real tokens only.
        """
        device = self.head.weight.device
        input_ids, mask = input_ids.to(device), mask.to(device).long()
        inputs = {"input_ids": input_ids, "attention_mask": mask, "use_cache": False}
        if "position_ids" in signature(self.backbone.forward).parameters:
            inputs["position_ids"] = positions(mask)
        hidden = self.backbone(**inputs).last_hidden_state
        last = mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
        return self.head(hidden[torch.arange(len(hidden), device=device), last])


def values_of(model: ValueModel, ids: Sequence[Sequence[int]], compute: Compute, token_budget: int) -> list[float]:
    """Return the value of each text without gradient, in order; each distinct one is computed once.

    Batches of at most `token_budget` tokens are planned by length.
    """
    distinct = list(dict.fromkeys(map(tuple, ids)))
    values: dict[tuple[int, ...], float] = {}
    for batch in plan_batches([len(row) for row in distinct], token_budget):
        chosen = [distinct[i] for i in batch]
        with torch.inference_mode(), compute.autocast():
            values |= zip(chosen, model(chosen).tolist(), strict=True)
    return [values[tuple(row)] for row in ids]


def load_value_model(
    folder: Path, head: Callable[[int], ValueHead], *, device: str = "cpu", trust_remote_code: bool = False
) -> tuple[ValueModel, Any, Facts]:
    """Load the backbone in `folder` and put on it what `head` returns for the size of its states.

    No dropout: the model is in evaluation mode.

    Returns:
        model, tokenizer, facts.

    Raises:
        UserError: the folder is no complete model folder.
    """
    facts = Facts.read(folder)
    backbone = _load_backbone(folder, trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    model = ValueModel(backbone, head(backbone.config.get_text_config().hidden_size), facts.pad_id)
    return in_own_memory(model).to(device).eval(), tokenizer, facts


def save_value_model(model: ValueModel, tokenizer: Any, facts: Facts, folder: Path, head_file: str) -> None:
    """Write backbone, tokenizer, facts and head; what `load_value_model` reads gives the same values bit for bit."""
    folder.mkdir(parents=True, exist_ok=True)
    model.backbone.save_pretrained(folder, max_shard_size="1TB")
    tokenizer.save_pretrained(folder)
    facts.write(folder)
    save_head(model.head, folder / head_file)


def _load_backbone(folder: Path, trust_remote_code: bool) -> nn.Module:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would warn that the output layer is left out, which is meant
    try:
        backbone, info = AutoModel.from_pretrained(
            folder,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are an error below
        )
    finally:
        logging.set_verbosity(verbosity)
    wrong = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if wrong:
        raise UserError(
            f"{folder}: {len(wrong)} weights are missing or of another shape than config.json says "
            f"({', '.join(wrong[:3])}); expected a complete model. Prepare it again."
        )
    return backbone
