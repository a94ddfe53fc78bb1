"""The split stage: tables of items, counted, with the task checked on every one of them."""

import json

import pytest

from comlrl_stages.artifacts import open_work, read_manifest, read_table
from comlrl_stages.errors import UserError
from comlrl_stages.settings import SplitSettings
from comlrl_stages.stages import split


def run_split(folder, names=("train", "eval"), **settings):
    settings = SplitSettings(**{"task": {"name": "length_ratio"}, "agents": 2, **settings})
    outputs = {name: folder / f"{name}.parquet" for name in names}
    with open_work("split", {}, {}, outputs) as work:
        split.run(settings, work)
    return {name: read_table(path) for name, path in outputs.items()}


def test_the_shipped_task_gives_sixteen_and_four(tmp_path):
    tables = run_split(tmp_path)
    assert [tables["train"].num_rows, tables["eval"].num_rows] == [16, 4]
    assert tables["train"].column_names == ["task_id", "prompt", "target_min", "target_max"]
    assert read_manifest(tmp_path / "train.parquet")["counts"] == {"rows": 16, "dropped": {}}


def test_validation_is_written_where_it_is_asked_for(tmp_path):
    tables = run_split(tmp_path, ("train", "eval", "validation"), validation_fraction=0.25)
    assert [tables[name].num_rows for name in ("train", "eval", "validation")] == [12, 4, 4]


def test_the_same_settings_give_the_same_bytes(tmp_path):
    run_split(tmp_path / "a"), run_split(tmp_path / "b")
    assert (tmp_path / "a/train.parquet").read_bytes() == (tmp_path / "b/train.parquet").read_bytes()


def test_dropped_items_are_counted(tmp_path):
    rows = [{"prompt": str(i % 8), "target_min": 1.0, "target_max": 2.0} for i in range(10)]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_split(tmp_path, source=str(tmp_path / "items.jsonl"), duplicates="drop")
    assert read_manifest(tmp_path / "train.parquet")["counts"]["dropped"] == {"duplicate": 2}


def test_a_formatter_that_fails_for_one_item_stops_the_split(tmp_path):
    rows = [{"task_id": str(i), "prompt": f"p{i}"} for i in range(9)] + [{"task_id": "odd", "prompt": None}]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_task.py").write_text("def reward(first, second):\n    return [1.0]\n")
    task = {"file": str(tmp_path / "my_task.py"), "object": None}
    with pytest.raises(UserError, match="agent_0, item odd: the item has no prompt"):
        run_split(tmp_path, source=str(tmp_path / "items.jsonl"), task=task)
    assert not (tmp_path / "train.parquet").exists()


@pytest.mark.parametrize("prompt", ["str(random.random())", "str(SEEN.append(1) or SEEN)"])
def test_a_formatter_that_makes_another_prompt_each_time_stops_the_split(tmp_path, prompt):
    head = "import random\n\nSEEN = []\n\ndef reward(first, second):\n    return [1.0]\n\n"
    (tmp_path / "my_task.py").write_text(f"{head}formatters = [lambda item: 'a', lambda item: {prompt}]\n")
    (tmp_path / "items.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    task = {"file": str(tmp_path / "my_task.py"), "object": None}
    with pytest.raises(UserError, match=r"the formatter of agent_1 made two prompts of item .*no random number"):
        run_split(tmp_path, source=str(tmp_path / "items.jsonl"), task=task)


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ("[{'prompt': 'a', 'tags': {'b', 'c'}}]", "item 1, key tags: is of type set"),
        ("[{'prompt': str(os.getpid())}, {'prompt': 'b'}]", "the train items were made twice, and item 1 had another"),
        ("os._exit(0)", "this code ended the process that imported it and made the items"),
    ],
)
def test_items_that_cannot_be_kept_or_differ_each_time_or_end_the_process_stop_the_split(tmp_path, items, told):
    (tmp_path / "my_task.py").write_text(
        f"import os\n\ndef items():\n    return {items}\n\ndef reward(first, second):\n    return [1.0]\n"
    )
    with pytest.raises(UserError, match=told):
        run_split(tmp_path, task={"file": str(tmp_path / "my_task.py"), "object": None})
    assert not (tmp_path / "train.parquet").exists()


def test_team_and_task_must_agree_on_the_number_of_agents(tmp_path):
    with pytest.raises(UserError, match=r"task of 2 agents, but the team has 3"):
        run_split(tmp_path, agents=3)
