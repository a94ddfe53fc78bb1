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
