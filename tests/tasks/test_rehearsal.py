"""Items that are made twice: equal ones pass, others are refused, and code that ends its process is told."""

import pytest

from comlrl_stages.config import Items
from comlrl_stages.errors import UserError
from comlrl_stages.tasks.items import load_items
from comlrl_stages.tasks.protocol import TaskSource, load_task
from comlrl_stages.tasks.rehearsal import rehearse

REWARD = "    def reward(first, second):\n        return [1.0]\n"


@pytest.fixture
def source(tmp_path):
    """Write a task's file and return its source."""

    def write(items, header=""):
        (tmp_path / "mine.py").write_text(f"{header}\n\nclass Task:\n{REWARD}{items}\n", encoding="utf-8")
        return TaskSource(file=str(tmp_path / "mine.py"))

    return write


def twice(task, **settings):
    """Rehearse, then load, as the split stage does."""
    settings = Items(**settings)
    return load_items(settings, load_task(task), rehearse(settings, task))


def test_items_that_are_equal_each_time_pass(source):
    task = source("    def items(self):\n        return [{'prompt': str(i)} for i in range(5)]")
    assert list(rehearse(Items(), task)) == ["train"]
    assert twice(task).train.num_rows == 4


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ("import random; return [{'prompt': str(random.random())} for _ in range(3)]", "item 1 had another content"),
        ("import os; return [{'prompt': f'{os.getpid()} {i}'} for i in range(3)]", "item 1 had another content"),
        (
            "import os; return [{'prompt': str(i)} for i in range(2 + os.getpid() % 1009)]",
            r"first there were \d+ items, then \d+",
        ),
        ("return [{'prompt': word} for word in set(map(str, range(40)))]", "the same items came in another order"),
    ],
)
def test_items_that_differ_each_time_are_refused_with_advice(source, monkeypatch, items, told):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UserError, match=rf"the train items were made twice, and {told}. Give random numbers a seed"):
        twice(source(f"    def items(self):\n        {items}"))


def test_items_of_a_class_and_of_a_function_and_of_eval_are_made_twice_too(source, tmp_path):
    listed = source("    import os\n    items = [{'prompt': str(os.getpid())}, {'prompt': 'b'}]")
    with pytest.raises(UserError, match="the train items were made twice"):
        twice(listed)
    fixed = (
        "    items = [{'prompt': 'a'}]\n    def eval_items():\n        import os; return [{'prompt': str(os.getpid())}]"
    )
    with pytest.raises(UserError, match="the eval items were made twice"):
        twice(source(fixed))
    (tmp_path / "data.py").write_text("import os\n\ndef rows():\n    return [{'prompt': str(os.getpid())}]\n")
    with pytest.raises(UserError, match=r"data.py:rows: the train items were made twice"):
        twice(TaskSource(name="length_ratio"), source=f"{tmp_path / 'data.py'}:rows")


@pytest.mark.parametrize("call", ["os._exit(0)", "os._exit(3)", "os.abort()"])
@pytest.mark.parametrize("at_import", [False, True])
def test_code_that_ends_its_process_is_named(source, call, at_import):
    ending = f"import os\n{call}" if at_import else "import os"
    task = source(f"    def items(self):\n        {call}", ending)
    with pytest.raises(UserError, match=r"mine.py: this code ended the process that imported it .*exit code"):
        rehearse(Items(), task)


def test_code_that_fails_does_so_where_the_items_are_read(source):
    task = source("    def items(self):\n        return 1 / 0")
    assert rehearse(Items(), task) == {}
    with pytest.raises(UserError, match="ZeroDivisionError"):
        twice(task)


def test_items_may_start_processes_of_their_own(source):
    pool = "multiprocessing.get_context('spawn').Pool(1)"
    task = source(
        f"    def items(self):\n        import multiprocessing\n        with {pool} as pool:\n"
        "            return [{'prompt': str(n)} for n in pool.map(abs, [1, -2])]"
    )
    assert len(rehearse(Items(), task)["train"]) == 2


def test_a_file_and_a_task_that_ships_are_not_read_twice(source, tmp_path):
    (tmp_path / "items.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert rehearse(Items(), TaskSource(name="length_ratio")) == {}
    assert rehearse(Items(source=str(tmp_path / "items.jsonl")), source("    pass")) == {}
