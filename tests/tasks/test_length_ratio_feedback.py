"""The length-ratio task in two turns: what both agents are told in between."""

import shutil
from pathlib import Path

import pytest

from comlrl_stages import provenance
from comlrl_stages.config import Task as TaskSettings
from comlrl_stages.provenance import task_fingerprint
from comlrl_stages.tasks import length_ratio
from comlrl_stages.tasks.protocol import Exchange, TaskSource, load_task

ITEM = {"prompt": "Invent a game for rainy days.", "target_min": 2.0, "target_max": 3.0}


def second_prompts(first, second, item=ITEM):
    task = load_task(TaskSource(name="length_ratio_feedback"))
    return task.next_prompts(item, [Exchange(task.format(item), (first, second))])


def test_the_first_turn_is_that_of_length_ratio():
    task, plain = (load_task(TaskSource(name=name)) for name in ("length_ratio_feedback", "length_ratio"))
    assert task.items() == plain.items() and task.format(ITEM) == plain.format(ITEM)
    scores = [one.reward([["Hi"], ["Hello"]], [ITEM], {}) for one in (task, plain)]
    assert scores[0] == scores[1] == length_ratio.Task().reward(["Hi"], ["Hello"], batch_items=[ITEM])


def test_both_agents_are_told_the_lengths_their_ratio_and_the_wanted_range():
    short, detailed = second_prompts("x" * 36, "y" * 81)
    feedback = short.removeprefix("Write a short response to this task:\n")
    assert feedback == detailed.removeprefix("Write a detailed response to this task:\n") != short
    assert ITEM["prompt"] in feedback
    assert all(number in feedback for number in ("36", "81", "2.25", "2 to 3"))


def test_an_empty_first_answer_has_no_ratio():
    assert "0 and 81 characters, ratio none" in second_prompts("", "y" * 81)[0]


def test_the_wanted_range_is_the_items_own():
    assert "1.5 to 2" in second_prompts("x", "y", {**ITEM, "target_min": 1.5, "target_max": 2.0})[0]


def test_items_take_the_targets_in_turn_and_only_the_second_prompt_tells_which():
    task = load_task(TaskSource(name="length_ratio_feedback", options={"targets": [[0.5, 0.75], [2, 3]]}))
    items = task.items()
    ranges = [(item["target_min"], item["target_max"]) for item in items]
    assert ranges == [(0.5, 0.75), (2.0, 3.0)] * (len(items) // 2)
    assert task.format(items[0]) == task.format({**items[0], "target_min": 2.0, "target_max": 3.0})
    assert task.reward([["x" * 10], ["y" * 6]], [items[0]], {})[0][0] == 1.0


@pytest.mark.parametrize("parts", [("transition",), ("reward",)])
def test_the_fingerprint_covers_the_task_that_it_builds_on(tmp_path, monkeypatch, parts):
    task, found = (
        TaskSettings(name="length_ratio_feedback"),
        {task_fingerprint(TaskSettings(name="length_ratio"), parts)},
    )
    for change in ("", "EXTRA = 1\n"):
        package = tmp_path / f"copy{len(change)}" / "comlrl_stages"
        shutil.copytree(Path(length_ratio.__file__).parent, package / "tasks")
        (package / "__init__.py").touch()
        with (package / "tasks" / "length_ratio.py").open("a") as file:
            file.write(change)
        monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
        monkeypatch.setattr(provenance, "_file", lambda module, package=package: package / "tasks" / f"{task.name}.py")
        found.add(task_fingerprint(task, parts))
    assert len(found) == 3
