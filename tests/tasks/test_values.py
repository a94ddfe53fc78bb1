"""What a field of an item may hold, and what is said of anything else."""

import datetime
import decimal
import math

import numpy as np
import pytest

from comlrl_stages.errors import UserError
from comlrl_stages.tasks.values import check_item


@pytest.mark.parametrize(
    "value",
    [
        "text",
        3,
        2.5,
        True,
        None,
        [1, [2, None]],
        ("a", 1),
        {"a": {"b": ["c"]}},
        datetime.datetime(2024, 5, 1),
        datetime.date(2024, 5, 1),
        decimal.Decimal("1.5"),
        np.int64(3),
        np.float32(0.5),
        np.array([[1.0, 2.0]]),
    ],
    ids=repr,
)
def test_values_that_come_back_from_a_file_are_fine(value):
    assert check_item({"prompt": "a", "x": value}, 1, "here") is None


@pytest.mark.parametrize(
    ("value", "path", "told"),
    [
        ({1, 2}, "x", "is of type set ({1, 2}). An item holds text, finite numbers"),
        ([{"tags": frozenset("a")}], "x.0.tags", "of type frozenset"),
        (b"abc", "x", "of type bytes (b'abc')"),
        ({"deep": [0.0, math.nan]}, "x.deep.1", "is the float nan"),
        (-math.inf, "x", "is the float -inf"),
        (np.float32("inf"), "x", "is the float inf"),
        (np.array([1.0, math.nan]), "x.1", "is the float nan"),
        (len, "x", "of type builtin_function_or_method"),
        (iter([1]), "x", "of type list_iterator"),
        (object, "x", "of type type"),
        (1j, "x", "of type complex (1j)"),
        ({"a": {1: 2}}, "x.a (a key inside)", "is of type int (1)"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_any_other_value_is_refused_with_item_key_and_type(value, path, told):
    with pytest.raises(UserError) as refused:
        check_item({"prompt": "a", "x": value}, 7, "data.jsonl")
    assert str(refused.value).startswith(f"data.jsonl: item 7, key {path}: ")
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("value", "advice"),
    [({1}, "sorted(...)"), (b"a", "Decode it"), (math.nan, "make it None"), (len, "Write it as text")],
)
def test_what_to_do_is_said(value, advice):
    with pytest.raises(UserError, match=rf"{advice.replace('(', '[(]').replace(')', '[)]')}"):
        check_item({"x": value}, 1, "here")
