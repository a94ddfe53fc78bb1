"""The length-ratio task: its values, prompts and metrics."""

import math

import pytest

from comlrl_stages.tasks.length_ratio import Task
from comlrl_stages.tasks.protocol import TaskSource, load_task

SOURCE = TaskSource(name="length_ratio")


@pytest.mark.parametrize(
    ("first", "second", "reward"),
    [
        ("Hi", "Hello", 1.0),
        ("", "Hello", 0.0),
        ("abcd", "abcd", 0.36787944),
        ("ab", "abcd", 1.0),  # both bounds count as inside
        ("ab", "abcdef", 1.0),
        ("a", "abcdef", math.exp(-3)),
        ("abc", "", math.exp(-2)),
    ],
)
def test_reward_is_one_in_the_band_and_decays_outside(first, second, reward):
    item = Task().items()[0]
    ((value, _),) = Task().reward([first], [second], batch_items=[item])
    assert value == pytest.approx(reward, abs=1e-8)


def test_parts_are_the_ratio_and_the_lengths():
    item = Task().items()[0]
    both = Task().reward(["Hi", ""], ["Hello", "Hello"], batch_items=[item, item])
    assert [parts for _, parts in both] == [
        {"ratio": 2.5, "first_chars": 2, "second_chars": 5},
        {"first_chars": 0, "second_chars": 5},
    ]


def test_twenty_different_prompts_go_to_two_roles():
    task = load_task(SOURCE)
    items = task.items()
    assert len({item["prompt"] for item in items}) == 20
    assert items[0] == {"prompt": "Describe a city in the clouds.", "target_min": 2.0, "target_max": 3.0}
    assert task.format(items[0]) == [
        "Write a short response to this task:\nDescribe a city in the clouds.",
        "Write a detailed response to this task:\nDescribe a city in the clouds.",
    ]


def test_options_move_the_band():
    item = Task(target_min=1.0, target_max=1.5).items()[0]
    ((value, _),) = Task().reward(["abcd"], ["abcd"], batch_items=[item])
    assert value == 1.0


def test_response_chars_are_the_mean_over_agents_then_items():
    task = Task()
    completions = [[["ab", "abcd"], ["", ""]], [["abcd", "abcd"], ["ab", "abcdef"]]]  # [agent][item][turn]
    rows = task.eval_logger(agent_completions_turns=completions, batch_items=[{}, {}], prompts=["", ""])
    assert rows == [
        {"turn_1/response_chars": 3.0, "turn_2/response_chars": 4.0},
        {"turn_1/response_chars": 1.0, "turn_2/response_chars": 3.0},
    ]
    assert task.eval_aggregator(rows, num_turns=2) == {"turn_1/response_chars": 2.0, "turn_2/response_chars": 3.5}
    assert task.eval_aggregator([], num_turns=2) == {}
    assert task.eval_aggregator([rows[0], {"turn_1/response_chars": 1.0}], num_turns=2) == {
        "turn_1/response_chars": 2.0,
        "turn_2/response_chars": 4.0,  # an episode that ended has no second turn
    }
