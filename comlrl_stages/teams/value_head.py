"""The value head: one number for the state of a language model at one token.

It stands on the backbone of a critic or a reward model, or, as a shared head, on the actor itself. Its file beside a
model's weights is value_head.safetensors (a reward model's has a name of its own).
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from comlrl_stages.errors import UserError

VALUE_HEAD_FILE = "value_head.safetensors"
HEAD_STD = 0.02


class ValueHead(nn.Linear):
    """A linear layer to one number, after one hidden layer with tanh where a `width` is given.

    It computes in float32 whatever the compute dtype: bfloat16 would round a value of 100 to the next half.
    """

    def __init__(self, size: int, width: int | None = None, *, bias: bool = True):
        super().__init__(width or size, 1, bias=bias)
        self.hidden = None if width is None else nn.Linear(size, width)

    @property
    def width(self) -> int | None:
        """Units of the hidden layer, None without one."""
        return None if self.hidden is None else self.hidden.out_features

    def forward(self, states: Tensor) -> Tensor:
        """Return the values (...,) float32 of states (..., size)."""
        with torch.autocast(states.device.type, enabled=False):
            states = states.float()
            if self.hidden is not None:
                states = self.hidden(states).tanh()
            return super().forward(states).squeeze(-1)


def new_head(size: int, width: int | None, generator: torch.Generator, *, bias: bool = True) -> ValueHead:
    """Draw a head by `generator`: output weights from N(0, 0.02), hidden ones from N(0, 1/sqrt(size)), biases 0."""
    head = _blank_head(size, width, bias)
    with torch.no_grad():
        head.weight.normal_(std=HEAD_STD, generator=generator)
        if head.bias is not None:
            head.bias.zero_()
        if head.hidden is not None:
            head.hidden.weight.normal_(std=size**-0.5, generator=generator)
            head.hidden.bias.zero_()
    return head


def save_head(head: ValueHead, path: Path) -> None:
    """Write the head as safetensors; `load_head` gives back the same bits."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in head.state_dict().items()}, path)


def load_head(path: Path, size: int, *, advice: str, bias: bool = True) -> ValueHead:
    """Read a head for states of `size` numbers; the file says whether it has a hidden layer.

    Raises:
        UserError: the file is missing or damaged, or does not fit. A head is never made up. `advice` says what to do.
    """
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path} not found; a model without its head gives no value. {advice}") from None
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}). {advice}") from error
    hidden_bias = tensors.get("hidden.bias")
    head = _blank_head(size, None if hidden_bias is None else hidden_bias.numel(), bias)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    if found != expected:
        raise UserError(f"{path} holds {found}, but the model beside it needs a head of {expected}. {advice}")
    head.load_state_dict(tensors)
    return head


def check_width(head: ValueHead, width: int | None, folder: Path | str) -> None:
    """Check that a head restored from `folder` has the hidden layer that is asked for.

    Raises:
        UserError: it has another.
    """
    if head.width != width:
        raise UserError(
            f"{folder}: its value head has {_described(head.width)}, but value_hidden asks for {_described(width)}. "
            f"Set value_hidden to {'null' if head.width is None else head.width}, or delete {VALUE_HEAD_FILE} there to "
            "start with a new head."
        )


def _described(width: int | None) -> str:
    return "no hidden layer" if width is None else f"a hidden layer of {width} units"


def _blank_head(size: int, width: int | None, bias: bool) -> ValueHead:
    """Return a head whose weights are yet to be set; made on no device, it leaves the global generator alone."""
    with torch.device("meta"):
        head = ValueHead(size, width, bias=bias)
    return head.to_empty(device="cpu")
