import warnings

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from comlrl_stages.reporting import curves, figures, training

METHODS = ("base", "madpo", "marlhf")


@pytest.fixture(autouse=True)
def no_warnings():
    """A figure that makes Matplotlib or numpy warn would litter the log of the stage."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def log(name: str, values: list[float], **place: object) -> pd.DataFrame:
    row = {"owner": "madpo", "seed": 0, "phase": "madpo", "agent": -1, "turn": 0, "env_step": 0} | place
    return pd.DataFrame([{**row, "step": step, "name": name, "value": value} for step, value in enumerate(values)])


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes if axes.axison]


def panel(figure: Figure, title: str):
    (found,) = [axes for axes in figure.axes if axes.get_title(loc="left") == title]
    return found


def test_rewards_are_drawn_over_joint_responses_and_losses_over_steps():
    rewards = pd.concat([log("reward_mean", [0.1, 0.2], env_step=64), log("kl", [0.7, 0.6], env_step=64)])
    labels = [axes.get_xlabel() for axes in curves.learning_curves(rewards, METHODS).axes]
    assert labels[:2] == ["joint responses", "step"]


def test_names_that_nobody_foresaw_are_drawn():
    assert titles(curves.learning_curves(log("surprise", [1.0, 2.0]), METHODS)) == ["surprise"]


def test_values_that_are_not_numbers_leave_gaps():
    broken = pd.concat([log("loss", [float("nan")] * 3), log("accuracy", [0.5, float("nan"), 0.7])])
    assert isinstance(curves.learning_curves(broken, METHODS), Figure)


def test_what_only_single_agents_log_is_drawn_over_agents():
    rows = pd.concat([log("loss", [0.7]), log("entropy", [1.0], agent=0), log("loss", [9.0], agent=0)])
    found = training.of_team(rows)
    assert sorted(zip(found["name"], found["value"], strict=True)) == [("entropy", 1.0), ("loss", 0.7)]


def test_the_band_reaches_from_the_lowest_to_the_highest_seed():
    rows = pd.concat([log("loss", [1.0, 2.0]), log("loss", [3.0, 4.0], seed=1)])
    band = curves.learning_curves(rows, METHODS).axes[0].collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (1.0, 4.0)


def test_a_single_logged_step_is_a_disc_and_its_range_a_bar():
    rows = pd.concat([log("loss", [1.0]), log("loss", [3.0], seed=1)])
    axes = curves.learning_curves(rows, METHODS).axes[0]
    (line,) = axes.lines
    assert (line.get_marker(), line.get_xydata().tolist()) == ("o", [[0.0, 2.0]])
    assert axes.get_xticks().tolist() == [0]
    (bar,) = axes.collections
    assert bar.get_segments()[0].tolist() == [[0.0, 1.0], [0.0, 3.0]]


def test_a_long_curve_has_no_discs():
    (line,) = curves.learning_curves(log("loss", [1.0] * 50), METHODS).axes[0].lines
    assert line.get_marker() == ""


def test_what_has_no_value_at_all_takes_no_panel():
    rows = pd.concat([log("accuracy", [float("nan")]), log("margin", [0.0]), log("loss", [0.7])])
    assert titles(curves.learning_curves(rows, METHODS)) == ["margin", "loss"]


def test_without_logs_there_is_no_learning_curve():
    assert curves.learning_curves(log("loss", []).reindex(columns=log("loss", [1.0]).columns), METHODS) is None


# --- phases -------------------------------------------------------------------------------------------------------


def test_methods_of_one_algorithm_stand_side_by_side_by_the_task_reward():
    """madpo stands for a method on the task's reward, marlhf for the same algorithm on a learned one."""
    on_task = log("reward_mean", [0.1, 0.2], phase="magrpo", env_step=8)
    learned = [
        log(name, values, owner="marlhf", phase="magrpo", env_step=8)
        for name, values in (("reward_mean", [1.0, 3.0]), ("task_reward_mean", [0.3, 0.4]), ("loss", [9.0, 9.0]))
    ]
    drawn = curves.learning_curves(pd.concat([on_task, *learned]), METHODS)
    assert titles(drawn) == ["task reward", "learned reward"]
    assert len(panel(drawn, "task reward").lines) == 2
    (line,) = panel(drawn, "learned reward").lines
    assert line.get_ydata().tolist() == [2.0]  # both steps at one env_step
    (part, *_) = drawn.subfigs
    assert [text.get_text() for text in part.legends[0].get_texts()] == ["madpo", "marlhf"]


def test_a_block_of_one_method_with_the_name_of_its_phase_has_no_key():
    assert curves.learning_curves(log("loss", [0.7, 0.6]), METHODS).subfigs[0].legends == []


def test_critics_have_value_loss_and_explained_variance_and_clipping_its_share():
    names = ("reward_mean", "kl", "value_loss", "explained_variance", "clipped_share", "entropy")
    rows = pd.concat([log(name, [0.1, 0.2], phase="iac") for name in names])
    expected = ["task reward", "KL to reference, nats/token", "value loss", "explained variance"]
    assert titles(curves.learning_curves(rows, METHODS)) == [*expected, "share of tokens clipped"]


def test_a_critic_at_its_beginning_does_not_flatten_the_curve():
    rows = pd.concat([log("reward_mean", [0.1] * 3), log("explained_variance", [-40.0, 0.5, 0.9])])
    assert panel(curves.learning_curves(rows, METHODS), "explained variance").get_ylim()[0] == -1.0


def validated(env_steps: list[int], values: list[float], turn: int = 1, **place: object) -> pd.DataFrame:
    rows = log(f"eval/turn_{turn}/reward_mean", values, phase="validation", **place)
    return rows.assign(env_step=env_steps)


def discs(axes) -> list[tuple[float, float, str]]:
    """Place and filling of single marks."""
    marks = [line for line in axes.lines if len(line.get_xdata()) == 1]
    return [(*line.get_xydata()[0].tolist(), to_hex(line.get_markerfacecolor())) for line in marks]


def test_validation_is_drawn_over_the_training_and_takes_no_block_of_its_own():
    rows = [log("reward_mean", [0.1, 0.2, 0.3]).assign(env_step=[8, 16, 24]), validated([0, 16], [0.3, 0.5])]
    drawn = curves.learning_curves(pd.concat(rows), METHODS, {"madpo": {(0, 1)}})
    assert titles(drawn) == ["task reward"]
    shade = figures.colours(METHODS)["madpo"]
    assert discs(panel(drawn, "task reward")) == [(0.0, 0.3, "#ffffff"), (16.0, 0.5, shade)]  # step 1 was kept


def test_a_validation_of_several_turns_is_drawn_with_the_turns():
    training_rows = [log("reward_mean", [0.1, 0.2], turn=turn).assign(env_step=[8, 16]) for turn in (0, 1, 2)]
    rows = pd.concat([*training_rows, *(validated([16], [0.1 * turn], turn) for turn in (1, 2))])
    assert discs(panel(curves.learning_curves(rows, METHODS), "task reward")) == []
    found = discs(panel(curves.turns(rows, METHODS), "task reward"))
    assert [(x, y) for x, y, _ in found] == [(16.0, 0.1), (16.0, 0.2)]


# --- turns --------------------------------------------------------------------------------------------------------


def test_each_turn_is_a_line_that_says_its_number():
    names = {"reward_mean": 0.5, "expected_return": 1.0, "parts/x": 3.0}
    rows = pd.concat(
        [
            log(name, [turn * value, turn * value], turn=turn).assign(env_step=[8, 16])
            for name, value in names.items()
            for turn in (0, 1, 2)
        ]
    )
    drawn = curves.turns(rows, METHODS)
    assert titles(drawn) == ["task reward", "expected return"]
    axes = panel(drawn, "expected return")
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[8, 1], [16, 1]], [[8, 2], [16, 2]]]
    assert [text.get_text() for text in axes.texts] == ["turn 1", "turn 2"]
    assert axes.lines[0].get_alpha() < axes.lines[1].get_alpha() == 1.0


def test_kl_of_a_turn_that_agents_log_is_drawn_as_their_mean():
    rows = [log("reward_mean", [0.5], turn=1, env_step=8)]
    rows += [log("kl", [value], turn=1, env_step=8, agent=agent) for agent, value in enumerate((0.1, 0.3))]
    rows += [log("kl", [9.0], env_step=8)]
    (line,) = panel(curves.turns(pd.concat(rows), METHODS), "KL to reference, nats/token").lines
    assert line.get_ydata() == pytest.approx([0.2])


def test_without_turns_there_is_no_figure_of_them():
    assert curves.turns(log("reward_mean", [0.1, 0.2]), METHODS) is None


# --- learned reward and task reward -------------------------------------------------------------------------------


def course(values: list[float]) -> training.Rewards:
    points = np.array(values)
    return training.Rewards("marlhf", np.arange(1, len(points) + 1), points, -points, points, -points, 1)


def test_a_course_runs_from_a_ring_to_its_last_arrow_and_says_both_steps():
    drawn = curves.over_optimisation([course([0.0, 1.0, 2.0, 3.0])], METHODS, {"marlhf": -1.5})
    axes = drawn.axes[0]
    assert axes.get_title(loc="left") == "marlhf"
    assert {text.get_text() for text in axes.texts} == {"", "step 1", "step 4", "eval −1.50"}
    arrows = [(text.xyann, text.xy) for text in axes.texts if not text.get_text()]
    assert arrows[-1] == ((2.0, -2.0), (3.0, -3.0))
    line, ring, level = axes.lines
    assert line.get_xydata().tolist() == [[0, 0], [1, -1], [2, -2], [3, -3]]
    assert (ring.get_xydata().tolist(), to_hex(ring.get_markerfacecolor())) == ([[0.0, 0.0]], "#ffffff")
    assert level.get_ydata() == [-1.5, -1.5]


@pytest.mark.parametrize("points", [1, 2, 3])
def test_a_short_course_can_be_drawn(points, tmp_path):
    drawn = curves.over_optimisation([course([1.0] * points)] * 4, METHODS, {})
    assert "step 1" in figures.save(drawn, tmp_path, "over_optimisation")
