"""Arguments that changed places: which one got which kind of table."""

import json

import pyarrow as pa
import pytest

from comlrl_stages.artifacts import COMPLETIONS, REWARDS, table_of, write_table
from comlrl_stages.errors import UserError
from comlrl_stages.inputs import TASK_ITEMS, check_kind


@pytest.fixture
def folder(tmp_path):
    write_table(tmp_path / "completions.parquet", table_of([], COMPLETIONS), COMPLETIONS)
    write_table(tmp_path / "rewards.parquet", table_of([], REWARDS), REWARDS)
    write_table(tmp_path / "items.parquet", pa.table({"prompt": ["a"]}))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind"), [("completions", "completions"), ("rewards", "rewards"), ("items", TASK_ITEMS)]
)
def test_a_table_of_the_expected_kind_is_fine(folder, name, kind):
    assert check_kind("--x", folder / f"{name}.parquet", kind) is None


@pytest.mark.parametrize(
    ("name", "expected", "told"),
    [
        ("completions", "rewards", "is a table of completions, expected a table of rewards"),
        ("rewards", TASK_ITEMS, "is a table of rewards, expected a table of task items"),
        ("items", "pairs", "is a table of task items, expected a table of pairs"),
    ],
)
def test_a_table_of_another_kind_names_the_option(folder, name, expected, told):
    with pytest.raises(UserError) as refused:
        check_kind("--rewards", folder / f"{name}.parquet", expected)
    assert str(refused.value).startswith(f"--rewards: {folder / name}.parquet {told}")


def test_what_is_no_table_is_told_where_it_is_read(tmp_path):
    (tmp_path / "a.parquet").write_text(json.dumps({}))
    assert check_kind("--rewards", tmp_path / "a.parquet", "rewards") is None
    assert check_kind("--rewards", tmp_path / "missing.parquet", "rewards") is None
