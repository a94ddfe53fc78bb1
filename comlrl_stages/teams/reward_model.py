"""The joint reward model: one score for the prompts and responses of a whole team.

A causal language model without its output layer reads one text, all agents' prompts and responses in role order, and a
linear head turns the state at the last token into the score. A reward model folder is a model folder (the backbone)
with two more files: head.safetensors and reward_model.json.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from comlrl_stages.errors import UserError
from comlrl_stages.teams.batching import plan_batches
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.loading import Facts, in_own_memory
from comlrl_stages.teams.log_probs import positions

HEAD_FILE, SETTINGS_FILE = "head.safetensors", "reward_model.json"
HEAD_STD = 0.02
PROMPT_HEADER = "User {agent}:\n"
RESPONSE_HEADER = "\nAgent {agent}:\n"
END_OF_AGENT = "\n"


@dataclass(frozen=True)
class JointInput:
    """Token ids of one joint text, EOS last; `cut` says that tokens were left out to fit the maximal length."""

    ids: tuple[int, ...]
    cut: bool


def encode_joint(
    tokenizer: Any, facts: Facts, prompts: Sequence[str], responses: Sequence[str], max_length: int
) -> JointInput:
    """Encode the prompts and responses of all agents, in role order, in at most `max_length` tokens.

    Where they do not fit, the longest prompts lose tokens from their start until all are equally long; only when no
    prompt token is left do the longest responses lose tokens from their end, and each keeps at least one. One EOS ends
    the text. Text that spells a special token is read as plain text.

    Raises:
        UserError: `max_length` does not even hold the template and one token per response.
    """
    headers = [
        _tokens(tokenizer, template.format(agent=agent))
        for agent in range(len(prompts))
        for template in (PROMPT_HEADER, RESPONSE_HEADER)
    ]
    opening, between = _opening(tokenizer, facts), _tokens(tokenizer, END_OF_AGENT)
    prompt_ids = [_tokens(tokenizer, prompt) for prompt in prompts]
    response_ids = [_tokens(tokenizer, response) for response in responses]
    room = max_length - len(opening) - sum(map(len, headers)) - len(between) * len(prompts) - 1
    if room < len(responses):
        raise UserError(
            f"the reward model's max_length is {max_length}, but its template and one token of each of "
            f"{len(responses)} responses take {max_length - room + len(responses)}. Set max_length to at least that."
        )
    response_lengths = _shortened([len(ids) for ids in response_ids], room)
    prompt_lengths = _shortened([len(ids) for ids in prompt_ids], room - sum(response_lengths))
    ids = list(opening)
    for agent, (prompt, response) in enumerate(zip(prompt_ids, response_ids, strict=True)):
        ids += headers[2 * agent] + prompt[len(prompt) - prompt_lengths[agent] :]
        ids += headers[2 * agent + 1] + response[: response_lengths[agent]] + between
    cut = sum(prompt_lengths) + sum(response_lengths) < sum(map(len, [*prompt_ids, *response_ids]))
    return JointInput((*ids, facts.eos_ids[0]), cut)


class JointRewardModel(nn.Module):
    """A backbone and a scalar head, which stays in float32 whatever the compute dtype."""

    def __init__(self, backbone: nn.Module, head: nn.Linear, pad_id: int):
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.pad_id = pad_id

    def forward(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the scores (rows,) float32 of joint texts given as token ids, none empty. Differentiable."""
        lengths = torch.tensor([len(row) for row in ids])
        padded = torch.full((len(ids), int(lengths.max())), self.pad_id)
        for row, values in enumerate(ids):
            padded[row, : len(values)] = torch.tensor(values)
        return self.score(padded, torch.arange(padded.shape[1]) < lengths.unsqueeze(1))

    def score(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Return the scores (rows,) of a padded batch; input_ids, mask (rows, tokens), pads on either side.

        The mask, never a token value, says what is padding, and positions count real tokens only.
        """
        device = self.head.weight.device
        input_ids, mask = input_ids.to(device), mask.to(device).long()
        inputs = {"input_ids": input_ids, "attention_mask": mask, "use_cache": False}
        if "position_ids" in signature(self.backbone.forward).parameters:
            inputs["position_ids"] = positions(mask)
        hidden = self.backbone(**inputs).last_hidden_state
        last = mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
        pooled = hidden[torch.arange(len(hidden), device=device), last].float()
        with torch.autocast(device.type, enabled=False):
            return self.head(pooled).squeeze(1)


@dataclass
class LoadedRewardModel:
    """A reward model in memory with what turns a team's texts into its input."""

    model: JointRewardModel
    tokenizer: Any
    facts: Facts
    max_length: int

    def encode(self, prompts: Sequence[str], responses: Sequence[str]) -> JointInput:
        """Encode the prompts and responses of all agents, in role order; see `encode_joint`."""
        return encode_joint(self.tokenizer, self.facts, prompts, responses, self.max_length)


def new_reward_model(
    folder: Path,
    *,
    max_length: int,
    generator: torch.Generator,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> LoadedRewardModel:
    """Put a head drawn from N(0, 0.02) by `generator` on the language model in `folder`.

    A `max_length` above the context of the model is lowered to it. No dropout: the model stays in evaluation mode.

    Raises:
        UserError: the folder is no model folder, or the model has no EOS.
    """
    facts = Facts.read(folder)
    if not facts.eos_ids:
        raise UserError(f"{folder}: the model has no EOS token, and a joint text ends with one. Use another backbone.")
    backbone = _load_backbone(folder, trust_remote_code)
    head = _blank_head(backbone)
    nn.init.normal_(head.weight, std=HEAD_STD, generator=generator)
    tokenizer = _load_tokenizer(folder, trust_remote_code)
    model = in_own_memory(JointRewardModel(backbone, head, facts.pad_id)).to(device).eval()
    return LoadedRewardModel(model, tokenizer, facts, min(max_length, facts.context_length))


def save_reward_model(loaded: LoadedRewardModel, folder: Path) -> None:
    """Write a reward model folder: backbone, tokenizer, facts, head and maximal length."""
    folder.mkdir(parents=True, exist_ok=True)
    loaded.model.backbone.save_pretrained(folder, max_shard_size="1TB")
    loaded.tokenizer.save_pretrained(folder)
    loaded.facts.write(folder)
    save_file({"weight": loaded.model.head.weight.detach().cpu().contiguous()}, folder / HEAD_FILE)
    (folder / SETTINGS_FILE).write_text(json.dumps({"max_length": loaded.max_length}) + "\n", encoding="utf-8")


def load_reward_model(folder: Path, device: str = "cpu", *, trust_remote_code: bool = False) -> LoadedRewardModel:
    """Load a reward model folder; its scores are bit for bit those of the model that was saved.

    Raises:
        UserError: a file is missing or damaged, or the head does not fit the backbone. A head is never made up.
    """
    facts = Facts.read(folder)
    max_length = _read_max_length(folder / SETTINGS_FILE)
    backbone = _load_backbone(folder, trust_remote_code)
    head = _blank_head(backbone)
    head.weight = nn.Parameter(_read_head(folder / HEAD_FILE, head.weight.shape))
    model = in_own_memory(JointRewardModel(backbone, head, facts.pad_id)).to(device).eval()
    return LoadedRewardModel(model, _load_tokenizer(folder, trust_remote_code), facts, max_length)


def score_joint(
    loaded: LoadedRewardModel, inputs: Sequence[JointInput], compute: Compute, token_budget: int
) -> list[float]:
    """Return the score of each input, in order; batches of at most `token_budget` tokens are planned by length."""
    scores = [0.0] * len(inputs)
    for batch in plan_batches([len(joint.ids) for joint in inputs], token_budget):
        with torch.inference_mode(), compute.autocast():
            batch_scores = loaded.model([inputs[i].ids for i in batch]).tolist()
        for i, score in zip(batch, batch_scores, strict=True):
            scores[i] = score
    return scores


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _opening(tokenizer: Any, facts: Facts) -> list[int]:
    """Return the BOS where the tokenizer writes one by itself."""
    writes_bos = facts.bos_id is not None and list(tokenizer("a")["input_ids"])[:1] == [facts.bos_id]
    return [facts.bos_id] if writes_bos else []


def _shortened(lengths: list[int], room: int) -> list[int]:
    """Return lengths with a sum of at most `room`: the longest are cut to a common length, the first keep the rest."""
    if sum(lengths) <= room:
        return lengths
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    result = list(lengths)
    for position, i in enumerate(order):
        share = room // (len(order) - position)
        result[i] = min(lengths[i], share)
        room -= result[i]
    return result


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


def _load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)


def _blank_head(backbone: nn.Module) -> nn.Linear:
    """Return a head whose weight is yet to be set; skip_init leaves the global generator alone."""
    hidden_size = backbone.config.get_text_config().hidden_size
    return nn.utils.skip_init(nn.Linear, hidden_size, 1, bias=False)


def _read_max_length(path: Path) -> int:
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["max_length"])
    except FileNotFoundError:
        raise UserError(f"{path} not found; expected a reward model folder. Fit the reward model again.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error!r}); fit the reward model again.") from error


def _read_head(path: Path, shape: torch.Size) -> Tensor:
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path} not found; a reward model without its head is none. Fit it again.") from None
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); fit the reward model again.") from error
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != {"weight": tuple(shape)}:
        raise UserError(f"{path} holds {found}, but the backbone needs a head of weight {tuple(shape)}. Fit it again.")
    return tensors["weight"].float()
