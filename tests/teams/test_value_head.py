"""The value head: its draw, its precision, its file."""

import pytest
import torch
from safetensors.torch import save_file

from comlrl_stages.errors import UserError
from comlrl_stages.teams.value_head import check_width, load_head, new_head, save_head

SIZE = 8
WIDTHS = pytest.mark.parametrize("width", [None, 5])


def drawn(width=None, seed=0, **options):
    return new_head(SIZE, width, torch.Generator().manual_seed(seed), **options)


def states(*shape):
    return torch.randn(*shape, SIZE, generator=torch.Generator().manual_seed(1))


def test_a_linear_head_is_a_product_and_a_bias():
    head = drawn()
    head.bias.data.fill_(3.0)
    expected = states(4, 2) @ head.weight[0] + 3.0
    torch.testing.assert_close(head(states(4, 2)), expected)
    assert head.width is None


def test_a_hidden_layer_has_tanh():
    head = drawn(5)
    hidden = torch.tanh(states(4) @ head.hidden.weight.T + head.hidden.bias)
    torch.testing.assert_close(head(states(4)), hidden @ head.weight[0] + head.bias)
    assert head.width == 5


@WIDTHS
def test_weights_come_from_the_generator_alone(width):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = drawn(width)
    assert torch.equal(torch.get_rng_state(), before)
    for name, tensor in first.state_dict().items():
        assert torch.equal(drawn(width).state_dict()[name], tensor)
        assert torch.equal(drawn(width, seed=1).state_dict()[name], tensor) is name.endswith("bias")


@WIDTHS
def test_it_computes_in_float32_under_bfloat16(width):
    head = drawn(width)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = head(states(4).bfloat16())
    assert values.dtype == torch.float32
    assert torch.equal(values, head(states(4).bfloat16().float()))


@WIDTHS
@pytest.mark.parametrize("bias", [True, False])
def test_save_and_load_give_the_same_bits(tmp_path, width, bias):
    head = drawn(width, bias=bias)
    save_head(head, tmp_path / "head")
    again = load_head(tmp_path / "head", SIZE, advice="", bias=bias)
    assert again.width == width and torch.equal(again(states(4)), head(states(4)))
    assert all(parameter.requires_grad for parameter in again.parameters())


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "head not found; a model without its head gives no value. Train again"),
        (lambda path: path.write_bytes(b"nothing"), r"head is damaged .* Train again"),
        (lambda path: save_head(new_head(7, None, torch.Generator()), path), r"\(1, 7\).*needs a head of.*\(1, 8\)"),
        (lambda path: save_file({"score": torch.zeros(1, SIZE)}, path), "score"),
        (lambda path: save_file({"hidden.bias": torch.zeros(3)}, path), r"needs a head of.*hidden\.weight': \(3, 8\)"),
    ],
)
def test_a_head_that_is_missing_damaged_or_of_another_size_is_an_error(tmp_path, write, message):
    write(tmp_path / "head")
    with pytest.raises(UserError, match=message):
        load_head(tmp_path / "head", SIZE, advice="Train again.")


def test_another_hidden_layer_than_asked_for_is_an_error():
    check_width(drawn(5), 5, "folder")
    with pytest.raises(UserError, match=r"folder: .* a hidden layer of 5 units, .* no hidden layer. Set .* to 5"):
        check_width(drawn(5), None, "folder")
    with pytest.raises(UserError, match=r"has no hidden layer, .* of 5 units. Set value_hidden to null"):
        check_width(drawn(), 5, "folder")
