import os
import re
import subprocess
import sys
import warnings

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from comlrl_stages.learning import calibration
from comlrl_stages.reporting import diagram, figures
from comlrl_stages.reporting.records import Node, Pipeline
from comlrl_stages.reporting.statistics import Estimate
from comlrl_stages.reporting.summary import Result

METHODS = ("base", "madpo", "marlhf")


def result(method: str, level: float) -> Result:
    compared = None if method == "base" else Estimate(0.2, 0.1, 0.3)
    cells = level + np.array([[-0.1, 0.1], [0.0, 0.2]])
    counts = np.full((2, 2), 4)
    mean, iqm = Estimate(level, level - 0.1, level + 0.1), Estimate(level, 0.3, 0.9)
    return Result(method, cells, counts, counts, mean, iqm, compared, compared)


def log(name: str, values: list[float], **place: object) -> pd.DataFrame:
    row = {"owner": "madpo", "seed": 0, "phase": "madpo", "agent": -1, "turn": 0, "env_step": 0} | place
    return pd.DataFrame([{**row, "step": step, "name": name, "value": value} for step, value in enumerate(values)])


@pytest.fixture(autouse=True)
def no_warnings():
    """A figure that makes Matplotlib or numpy warn would litter the log of the stage."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_base_is_grey_and_a_method_keeps_its_colour_whatever_else_is_compared():
    assert figures.colours(METHODS) == {"base": "#8a919a", "madpo": "#0072b2", "marlhf": "#d55e00"}
    assert figures.colours(METHODS[1:])["marlhf"] == "#d55e00"


def test_files_are_the_same_bytes_when_drawn_again(tmp_path):
    for folder in ("a", "b"):
        figures.save(figures.scores([result(m, 0.5) for m in METHODS], "reward"), tmp_path / folder, "scores")
    for name in ("scores.svg", "scores.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert b"dc:date" not in (tmp_path / "a" / "scores.svg").read_bytes()


def test_a_users_matplotlib_settings_change_no_byte(tmp_path):
    for folder, width in (("a", 0.8), ("b", 3.0)):
        with matplotlib.rc_context({"xtick.major.width": width}):
            figures.save(figures.scores([result(m, 0.5) for m in METHODS], "reward"), tmp_path / folder, "scores")
    assert (tmp_path / "a" / "scores.svg").read_bytes() == (tmp_path / "b" / "scores.svg").read_bytes()


def test_the_pipeline_is_drawn_alike_in_every_process(tmp_path):
    """Python hashes strings anew in each process, so nothing may be drawn in the order of a set."""
    code = (
        "import sys, pathlib\n"
        "from comlrl_stages.reporting import diagram, figures\n"
        "from comlrl_stages.reporting.records import Node, Pipeline\n"
        "nodes = {key: Node(key, key, key, 1) for key in 'abcdefgh'}\n"
        "drawn = diagram.pipeline(Pipeline(nodes, {('a', key) for key in 'bcdefgh'}), 'abc')\n"
        "sys.stdout.write(figures.save(drawn, pathlib.Path(sys.argv[1]), 'pipeline'))\n"
    )
    drawn = [
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert drawn[0] and drawn[0] == drawn[1]


def test_two_figures_of_one_page_share_no_id(tmp_path):
    found = [
        set(re.findall(r'\bid="([^"]+)"', figures.save(figures.bars([("sample", 5, "5")], "tokens"), tmp_path, name)))
        for name in ("one", "two")
    ]
    assert found[0] and not found[0] & found[1]


def test_every_reference_inside_a_figure_is_resolved(tmp_path):
    svg = figures.save(figures.scores([result(m, 0.5) for m in METHODS], "reward"), tmp_path, "scores")
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= ids


def test_figures_take_their_colours_from_the_page_and_name_no_host(tmp_path):
    svg = figures.save(figures.scores([result(m, 0.5) for m in METHODS], "reward"), tmp_path, "scores")
    assert "var(--ink)" in svg and "var(--c0)" in svg
    assert not re.search(r"#[0-9a-f]{6}\b", svg)
    assert "http" not in svg


def test_names_are_written_as_they_are(tmp_path):
    svg = figures.save(figures.scores([result("<b>$x_1$ & co", 0.5)], "reward"), tmp_path, "scores")
    assert "&lt;b&gt;$x_1$ &amp; co" in svg


def test_an_interval_that_is_unknown_is_left_out(tmp_path):
    nothing = Estimate(0.5, float("nan"), float("nan"))
    one = np.array([[1]])
    alone = Result("base", np.array([[0.5]]), one, one, nothing, nothing, None, None)
    assert "0.50" in figures.save(figures.scores([alone], "reward"), tmp_path, "scores")


def test_rewards_are_drawn_over_joint_responses_and_losses_over_steps():
    rewards = pd.concat([log("reward_mean", [0.1, 0.2], env_step=64), log("loss", [0.7, 0.6], env_step=64)])
    labels = [axes.get_xlabel() for axes in figures.learning_curves(rewards, METHODS).axes]
    assert labels[:2] == ["joint responses", "step"]


def test_names_that_nobody_foresaw_are_drawn():
    titles = [axes.get_title(loc="left") for axes in figures.learning_curves(log("surprise", [1.0, 2.0]), METHODS).axes]
    assert titles[0] == "madpo: surprise"


def test_values_that_are_not_numbers_leave_gaps():
    broken = pd.concat([log("loss", [float("nan")] * 3), log("accuracy", [0.5, float("nan"), 0.7])])
    assert isinstance(figures.learning_curves(broken, METHODS), Figure)


def test_what_only_single_agents_log_is_drawn_over_agents():
    rows = pd.concat([log("loss", [0.7]), log("entropy", [1.0], agent=0), log("loss", [9.0], agent=0)])
    found = figures.of_team(rows)
    assert sorted(zip(found["name"], found["value"], strict=True)) == [("entropy", 1.0), ("loss", 0.7)]


def test_the_band_reaches_from_the_lowest_to_the_highest_seed():
    rows = pd.concat([log("loss", [1.0, 2.0]), log("loss", [3.0, 4.0], seed=1)])
    band = figures.learning_curves(rows, METHODS).axes[0].collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (1.0, 4.0)


def test_a_single_logged_step_is_a_disc_and_its_range_a_bar():
    rows = pd.concat([log("loss", [1.0]), log("loss", [3.0], seed=1)])
    axes = figures.learning_curves(rows, METHODS).axes[0]
    (line,) = axes.lines
    assert (line.get_marker(), line.get_xydata().tolist()) == ("o", [[0.0, 2.0]])
    assert axes.get_xticks().tolist() == [0]
    (bar,) = axes.collections
    assert bar.get_segments()[0].tolist() == [[0.0, 1.0], [0.0, 3.0]]


def test_a_long_curve_has_no_discs():
    (line,) = figures.learning_curves(log("loss", [1.0] * 50), METHODS).axes[0].lines
    assert line.get_marker() == ""


def test_what_has_no_value_at_all_takes_no_panel():
    rows = pd.concat([log("accuracy", [float("nan")]), log("margin", [0.0]), log("loss", [0.7])])
    titles = [axes.get_title(loc="left") for axes in figures.learning_curves(rows, METHODS).axes]
    assert titles == ["madpo: margin", "madpo: loss", ""]


def test_without_logs_there_is_no_learning_curve():
    assert figures.learning_curves(log("loss", []).reindex(columns=log("loss", [1.0]).columns), METHODS) is None


def test_a_reward_model_without_spread_can_be_drawn():
    margins = np.zeros(4)
    panels = figures.RewardModelPanels(
        "flat", calibration.reliability(margins), margins, np.zeros(8), np.full(8, np.nan)
    )
    assert isinstance(figures.reward_models([panels]), Figure)


def test_lengths_tell_cut_responses_from_finished_ones():
    rows = [("base", 0, 3, "stop"), ("base", 0, 8, "length"), ("base", 1, 8, "length")]
    drawn = figures.lengths(
        pd.DataFrame(rows, columns=["method", "agent", "tokens", "finish_reasons"]), ("base", "madpo")
    )
    assert [axes.get_title(loc="left") for axes in drawn.axes[:3]] == ["agent_0", "agent_1", "finish reason"]


def test_stages_stand_right_of_what_they_need_and_methods_in_their_own_lanes():
    nodes = {key: Node(key, key[1:], key[0], 1) for key in ("dsplit", "dprepare", "atrain", "btrain", "beval")}
    graph = Pipeline(nodes, {("dprepare", "atrain"), ("dsplit", "atrain"), ("dprepare", "btrain"), ("btrain", "beval")})
    place = diagram.places(graph, ["b", "a"])
    assert place["atrain"][0] == place["btrain"][0] == 1 and place["beval"][0] == 2
    assert place["dsplit"][1] < place["btrain"][1] < place["atrain"][1]
    assert len(set(place.values())) == len(place)


def test_an_arrow_that_a_longer_way_implies_is_left_out():
    assert diagram.direct({("a", "b"), ("b", "c"), ("a", "c")}) == {("a", "b"), ("b", "c")}


def test_an_arrow_goes_round_a_box_in_its_lane():
    assert diagram.way((0, 0), (2, 0), {(0, 0), (2, 0)}, 0.0) == [(0.38, 0), (1.62, 0)]
    assert min(y for _, y in diagram.way((0, 0), (2, 0), {(0, 0), (1, 0), (2, 0)}, 0.0)) < 0
