"""Task items: reading, stable ids, the partition, repeated items, and errors that name the place."""

import datetime
import gzip
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from comlrl_stages.config import Items
from comlrl_stages.errors import UserError
from comlrl_stages.tasks.items import load_items, partition
from comlrl_stages.tasks.protocol import TaskSource, load_task

LENGTH_RATIO = load_task(TaskSource(name="length_ratio"))


def load(source, task=LENGTH_RATIO, **settings):
    return load_items(Items(source=str(source), **settings), task)


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prompts(count):
    return [{"prompt": f"prompt {i}", "level": i} for i in range(count)]


def task_of(tmp_path, code):
    path = tmp_path / "items_task.py"
    path.write_text(code + "\n\ndef reward(first, second):\n    return [1.0]\n")
    return load_task(TaskSource(file=str(path), object=None))


def test_ten_items_split_as_in_the_docs(tmp_path):
    items = [{"prompt": item["prompt"]} for item in LENGTH_RATIO.items()[:10]]
    splits = load(written(tmp_path / "items.jsonl", items), eval_fraction=0.2, split_seed=42)
    assert (splits.train.num_rows, splits.eval.num_rows, splits.validation) == (8, 2, None)
    assert splits.eval["prompt"].to_pylist() == [items[5]["prompt"], items[6]["prompt"]]


@pytest.mark.parametrize("count", [2, 3, 10, 101])
@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.34, 0.5])
@pytest.mark.parametrize("seed", [0, 42, 2**31 - 1])
def test_the_partition_is_that_of_datasets(count, fraction, seed):
    from datasets import Dataset

    split = Dataset.from_dict({"i": range(count)}).train_test_split(test_size=fraction, seed=seed)
    kept, split_off = partition(count, fraction, seed)
    assert (list(kept), list(split_off)) == (list(split["train"]["i"]), list(split["test"]["i"]))


def test_the_shuffle_is_that_of_datasets_and_leaves_eval_alone(tmp_path):
    from datasets import Dataset

    path = written(tmp_path / "items.jsonl", prompts(20))
    plain, shuffled = load(path), load(path, shuffle=True, shuffle_seed=7)
    expected = Dataset.from_dict({"i": plain.train["level"].to_pylist()}).shuffle(seed=7)["i"]
    assert shuffled.train["level"].to_pylist() == list(expected)
    assert shuffled.eval.equals(plain.eval)


def test_every_field_keeps_its_type(tmp_path):
    table = pa.table(
        {
            "prompt": ["a {x} 🙂", "b"],
            "count": pa.array([1, 2], pa.int16()),
            "when": pa.array([datetime.datetime(2024, 5, 1), None], pa.timestamp("ms")),
            "tests": [[{"input": [1, 2], "ok": True}], []],
            "score": [0.5, 2.0],
        }
    )
    pq.write_table(table, tmp_path / "items.parquet")
    splits = load(tmp_path / "items.parquet", eval_fraction=0.5)
    assert splits.train.schema.field("task_id").type == pa.string()
    assert splits.train.column_names == ["task_id", *table.column_names]
    assert splits.train.drop_columns(["task_id"]).schema == table.schema
    rows = splits.train.to_pylist() + splits.eval.to_pylist()
    first = next(row for row in rows if row["count"] == 1)
    assert (first["prompt"], first["tests"]) == ("a {x} 🙂", [{"input": [1, 2], "ok": True}])


def test_jsonl_json_csv_parquet_and_gzip_hold_the_same_items(tmp_path):
    rows = prompts(6)
    written(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "a.csv").write_text("prompt,level\n" + "".join(f'"prompt {i}",{i}\n' for i in range(6)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    first, *others = [load(path) for path in sorted(tmp_path.iterdir())]
    assert all(other.train.equals(first.train) and other.eval.equals(first.eval) for other in others)
    assert len(others) == 4


def test_csv_text_may_span_lines(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,n\n"two\nlines",1\nNA,2\n')
    splits = load(tmp_path / "a.csv", eval_fraction=0.5)
    assert {*splits.train["prompt"].to_pylist(), *splits.eval["prompt"].to_pylist()} == {"two\nlines", "NA"}


def test_ids_follow_the_content_not_the_place(tmp_path):
    rows = prompts(5)
    first = load(written(tmp_path / "a.jsonl", rows))
    other = load(
        written(
            tmp_path / "b.jsonl",
            [{"note": "new", "prompt": "x", "level": 9}, *({"note": None, **row} for row in reversed(rows))],
        )
    )

    def ids(splits):
        tables = (splits.train, splits.eval)
        return {row["prompt"]: row["task_id"] for table in tables for row in table.to_pylist()}

    assert ids(first).items() <= ids(other).items()
    assert all(len(task_id) == 16 for task_id in ids(first).values())


def test_a_field_that_one_item_lacks_is_named(tmp_path):
    rows = [{"prompt": "a", "topic": "dogs"}, {"prompt": "b"}]
    with pytest.raises(UserError, match=r"item 2 has no field 'topic', which other items have.*null"):
        load(written(tmp_path / "a.jsonl", rows))


def test_own_ids_are_kept_as_text(tmp_path):
    splits = load(written(tmp_path / "a.jsonl", [{"task_id": 7, "prompt": "a"}, {"task_id": 8, "prompt": "b"}]))
    assert {*splits.train["task_id"].to_pylist(), *splits.eval["task_id"].to_pylist()} == {"7", "8"}
    named = [{"prompt": "a", "task_id": "HumanEval/0"}, {"prompt": "b", "task_id": "HumanEval/1"}]
    assert load(written(tmp_path / "b.jsonl", named)).train.column_names == ["task_id", "prompt"]


def test_a_repeated_id_names_both_rows(tmp_path):
    rows = [{"task_id": "x", "prompt": "a"}, {"task_id": "y", "prompt": "b"}, {"task_id": "x", "prompt": "c"}]
    with pytest.raises(UserError, match="items 1 and 3 are different, but both have the task_id x"):
        load(written(tmp_path / "a.jsonl", rows))


def test_identical_items_are_refused_or_dropped_and_counted(tmp_path):
    rows = [*prompts(5), {"prompt": "prompt 1", "level": 1}]
    path = written(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match="items 2 and 6 are identical"):
        load(path)
    splits = load(path, duplicates="drop")
    assert splits.train.num_rows + splits.eval.num_rows == 5
    assert splits.dropped["train"] == {"duplicate": 1}


def test_an_item_in_train_and_eval_is_refused_or_dropped_from_train(tmp_path):
    train = written(tmp_path / "train.jsonl", prompts(5))
    evaluation = written(tmp_path / "eval.jsonl", [*prompts(2), {"prompt": "new", "level": 0}])
    with pytest.raises(UserError, match="of the train split is also in the eval split"):
        load(train, eval_source=str(evaluation))
    splits = load(train, eval_source=str(evaluation), duplicates="drop")
    assert (splits.train["level"].to_pylist(), splits.eval.num_rows) == ([2, 3, 4], 3)
    assert splits.dropped["train"] == {"in_eval": 2}


def test_an_id_names_one_item_over_all_splits(tmp_path):
    train = written(tmp_path / "train.jsonl", [{"task_id": "x", "prompt": "a"}])
    evaluation = written(tmp_path / "eval.jsonl", [{"task_id": "x", "prompt": "b"}])
    with pytest.raises(UserError, match="the task_id x names an item of the train split and a different one"):
        load(train, eval_source=str(evaluation))


def test_validation_is_cut_from_train_or_read(tmp_path):
    path = written(tmp_path / "a.jsonl", prompts(20))
    splits = load(path, validation_fraction=0.25)
    assert [splits.train.num_rows, splits.validation.num_rows, splits.eval.num_rows] == [12, 4, 4]
    levels = [level for table in (splits.train, splits.validation, splits.eval) for level in table["level"].to_pylist()]
    assert sorted(levels) == list(range(20))
    own = written(tmp_path / "v.jsonl", [{"prompt": "v", "level": 1}])
    assert load(path, validation_source=str(own)).validation["prompt"].to_pylist() == ["v"]
    with pytest.raises(UserError, match="Give only one"):
        load(path, validation_source=str(own), validation_fraction=0.5)


def test_limits_take_the_first_items(tmp_path):
    path = written(tmp_path / "a.jsonl", prompts(20))
    own = written(tmp_path / "e.jsonl", [{"prompt": f"e{i}", "level": i} for i in range(9)])
    splits = load(path, limit=4, eval_source=str(own), eval_limit=2)
    assert (splits.train["level"].to_pylist(), splits.eval["prompt"].to_pylist()) == ([0, 1, 2, 3], ["e0", "e1"])


def test_a_limit_of_eval_items_needs_eval_items_of_their_own(tmp_path):
    code = "items = [{'prompt': str(i)} for i in range(9)]"
    with pytest.raises(UserError, match=r"items.eval_limit: the eval items have no source of their own"):
        load("task", task_of(tmp_path, code), eval_limit=1)
    own = task_of(tmp_path, code + "\neval_items = [{'prompt': 'a'}, {'prompt': 'b'}]")
    assert load("task", own, eval_limit=1).eval["prompt"].to_pylist() == ["a"]


@pytest.mark.parametrize(
    ("column", "told"),
    [
        (pa.array([1.0, float("nan")]), "item 2, key x: is the float nan"),
        (pa.array([b"a", b"b"]), "item 1, key x: is of type bytes"),
        (pa.array([[{"y": 1.0}], [{"y": float("inf")}]]), "item 2, key x.0.y: is the float inf"),
    ],
)
def test_values_that_no_item_may_hold_are_refused_in_files_too(tmp_path, column, told):
    pq.write_table(pa.table({"prompt": ["a", "b"], "x": column}), tmp_path / "items.parquet")
    with pytest.raises(UserError, match=f"items.parquet: {told}"):
        load(tmp_path / "items.parquet")


def test_a_task_brings_items_and_eval_items(tmp_path):
    items = "items = [{'prompt': 'a', 'extra': None}, {'prompt': 'b', 'extra': 1}]"
    code = f"{items}\n\ndef eval_items():\n    return [{{'prompt': 'c'}}]"
    splits = load("task", task_of(tmp_path, code))
    assert splits.train.select(["prompt", "extra"]).to_pylist() == [
        {"prompt": "a", "extra": None},
        {"prompt": "b", "extra": 1},
    ]
    assert splits.eval["prompt"].to_pylist() == ["c"]
    with pytest.raises(UserError, match=r"has no items. Set items.source"):
        load("task", task_of(tmp_path, "x = 1"))


def test_datasets_of_every_kind_are_read(tmp_path):
    code = """
from datasets import Dataset, Features, Value
kept = Dataset.from_dict({"prompt": list("abcdef"), "n": range(6)}, features=Features(
    {"prompt": Value("string"), "n": Value("int32")}))
items = kept.filter(lambda row: row["n"] != 2)
def stream():
    return kept.to_iterable_dataset()
"""
    task = task_of(tmp_path, code)
    splits = load("task", task)
    assert sorted(splits.train["n"].to_pylist() + splits.eval["n"].to_pylist()) == [0, 1, 3, 4, 5]
    assert splits.train.schema.field("n").type == pa.int32()
    stream = f"{tmp_path / 'items_task.py'}:stream"
    assert load(stream, limit=3).train.schema.field("n").type == pa.int32()
    with pytest.raises(UserError, match=r"is a stream of unknown length. Set items.limit"):
        load(stream)
    task.items.save_to_disk(tmp_path / "saved")
    assert load(tmp_path / "saved").train.equals(splits.train)


def test_a_saved_dataset_dict_has_splits(tmp_path):
    from datasets import Dataset, DatasetDict

    parts = {"train": Dataset.from_list(prompts(3)), "test": Dataset.from_list([{"prompt": "t", "level": 0}])}
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    splits = load(tmp_path / "saved", eval_split="test")
    assert (splits.train.num_rows, splits.eval["prompt"].to_pylist()) == (3, ["t"])
    with pytest.raises(UserError, match=r"has no split 'dev'. It has: train, test"):
        load(tmp_path / "saved", eval_split="dev")


def test_a_task_whose_items_have_splits_gives_train_and_eval(tmp_path):
    code = """
from datasets import Dataset, DatasetDict
items = DatasetDict({"train": Dataset.from_list([{"prompt": "a"}]), "test": Dataset.from_list([{"prompt": "b"}])})
"""
    splits = load("task", task_of(tmp_path, code), eval_split="test")
    assert (splits.train["prompt"].to_pylist(), splits.eval["prompt"].to_pylist()) == (["a"], ["b"])
    with pytest.raises(UserError, match=r"items.eval_split is 'test', but items of .* has no splits"):
        load("task", eval_split="test")


def test_items_inside_a_package_are_found(tmp_path, monkeypatch):
    inner = tmp_path / "package_of_items" / "data"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("")
    written(inner / "items.jsonl", prompts(3))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert load("package://package_of_items/data/items.jsonl").train.num_rows == 2
    with pytest.raises(UserError, match="no installed package 'no_such_package'"):
        load("package://no_such_package/items.jsonl")


def test_streaming_needs_a_limit():
    with pytest.raises(UserError, match=r"streaming of the eval items needs items.eval_limit"):
        load_items(
            Items(source="task", streaming=True, limit=3, eval_source="hub://no-such-owner-1/no-such-set"),
            LENGTH_RATIO,
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', r"a.jsonl, line 2, column \d+: is not valid JSON"),
        ('{"prompt": "a"}\n\n["b"]\n', "a.jsonl, line 3: is a JSON list, expected an object"),
        ('{"prompt": "a"}\n{"prompt": "\\ud800"}\n', r"a.jsonl, line 2: has half a surrogate pair \('\\ud800'\)"),
        ("\n", "has no items for the train split"),
        ('{"prompt": "a"}\n', "none is left for training"),
        ('{"prompt": "a", "x": 1}\n{"prompt": "b", "x": "1"}\n', "field 'x' cannot be stored.*item 2 has '1'"),
        ('{"prompt": "a", "x": {}}\n', "the field x holds only empty objects"),
        ("{}\n", "item 1 is {}"),
        ('{"prompt": "a"}\n{"prompt": "b", "x": [NaN]}\n', "item 2, key x.0: is the float nan"),
    ],
)
def test_a_bad_jsonl_file_is_refused_with_the_place(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        load(tmp_path / "a.jsonl")


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "\\ud83d\\ude00"}\n{"prompt": "b"}\n')
    splits = load(tmp_path / "a.jsonl")
    assert "😀" in splits.train["prompt"].to_pylist() + splits.eval["prompt"].to_pylist()


def test_bytes_that_are_no_utf8_name_the_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match=r"a.jsonl, line 2: is not UTF-8"):
        load(tmp_path / "a.jsonl")


def test_a_missing_file_and_an_unknown_form_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"none.jsonl does not exist"):
        load(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match=r"none of the known sources. Use `task`, a .jsonl"):
        load("owner/name")


def test_reserved_names_are_refused_and_can_be_renamed(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"prompt": "a", "source": "web"}, {"prompt": "b", "source": "book"}])
    with pytest.raises(UserError, match=r"field named source.*items.rename"):
        load(path)
    assert load(path, rename={"source": "origin"}).train.column_names == ["task_id", "prompt", "origin"]
    with pytest.raises(UserError, match=r"has no field 'sorce' \(nearest: 'source'\)"):
        load(path, rename={"sorce": "origin"})
    with pytest.raises(UserError, match="two fields named prompt"):
        load(path, rename={"source": "prompt"})


def test_an_eval_split_needs_a_source_with_splits(tmp_path):
    path = written(tmp_path / "a.jsonl", prompts(3))
    with pytest.raises(UserError, match=r"items.eval_split is 'test', but .* has no splits"):
        load(path, eval_split="test")


def test_a_function_that_fails_shows_the_users_line(tmp_path):
    task = task_of(tmp_path, "def items():\n    return 1 / 0")
    with pytest.raises(UserError, match=r"(?s)the function that makes the items raised.*line 2.*ZeroDivisionError"):
        load("task", task)


def test_plain_files_are_read_without_importing_datasets(tmp_path):
    import subprocess

    path = written(tmp_path / "a.jsonl", prompts(4))
    code = (
        "import sys; from comlrl_stages.config import Items; from comlrl_stages.tasks.items import load_items; "
        "from comlrl_stages.tasks.protocol import TaskSource, load_task; "
        f"load_items(Items(source={str(path)!r}), load_task(TaskSource(name='length_ratio'))); "
        "assert not {'datasets', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
