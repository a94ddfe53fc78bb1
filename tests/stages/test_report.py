import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from comlrl_stages.artifacts import mismatches, open_work, read_manifest
from comlrl_stages.errors import UserError
from comlrl_stages.files import beside, write_json
from comlrl_stages.stages import report

from ..reporting.synthetic import make_experiment


def run(results: Path, settings, inputs, name: str = "report") -> Path:
    folder = results / "demo" / name
    with open_work("report", {}, inputs, {"report": folder}) as work:
        report.run(settings, work)
    return folder


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    results = tmp_path_factory.mktemp("project") / "results"
    settings, inputs = make_experiment(results)
    return results, settings, inputs, run(results, settings, inputs)


def test_the_folder_holds_page_summaries_and_figures(experiment):
    folder = experiment[3]
    of_results, of_training = ("scores", "improvement", "lengths"), ("learning_curves", "over_optimisation")
    names = (*of_results, *of_training, "reward_models", "tokens", "pipeline")
    figures = {f"figures/{name}.{kind}" for name in names for kind in ("svg", "png")}
    summaries = {"report.html", "summary.csv", "summary.parquet", "summary.md"}
    assert set(read_manifest(folder)["files"]) == figures | summaries


def test_the_page_of_costs_lies_in_the_folder_but_not_in_its_manifest(experiment):
    folder = experiment[3]
    listed = set(read_manifest(folder)["files"])
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found - listed == {"cost/cost.html", "cost/figures/times.svg", "cost/figures/times.png"}
    assert mismatches(folder, read_manifest(folder)) == []


def test_other_times_hosts_and_memory_change_no_listed_byte(tmp_path):
    settings, inputs = make_experiment(tmp_path / "results", methods=("base", "marlhf"), seeds=(0,))
    folders = []
    for name, timing in (("a", {"wall_s": 3.0, "host": "one", "peak_memory_mb": 7}), ("b", {"wall_s": 4000.0})):
        for path in (tmp_path / "results").rglob("*.timing.json"):
            write_json(path, timing)
        folders.append(run(tmp_path / "results", settings, inputs, name))
    assert read_manifest(folders[0]) == read_manifest(folders[1])
    pages = [(folder / "cost" / "cost.html").read_text(encoding="utf-8") for folder in folders]
    assert "one" in pages[0] and pages[0] != pages[1]


def test_the_page_of_costs_tells_what_each_stage_took_and_where(experiment):
    text = (experiment[3] / "cost" / "cost.html").read_text(encoding="utf-8")
    # 12 evaluated teams of 12 s; 12 trainings (two rounds of madpo, one of the others) of 95 s: 19 min 00 s
    assert "somewhere" in text and "2 min 24 s" in text and "19 min 00 s" in text and "900" in text


def test_runs_without_a_timing_are_counted_apart(tmp_path):
    settings, inputs = make_experiment(tmp_path / "results", methods=("base",), seeds=(0,))
    beside(inputs["evaluations"][0], "timing").unlink()
    folder = run(tmp_path / "results", settings, inputs)
    assert "1 further run left no record" in (folder / "cost" / "cost.html").read_text(encoding="utf-8")


def test_the_summary_is_the_same_in_every_format(experiment):
    folder = experiment[3]
    table = pq.read_table(folder / "summary.parquet").to_pandas()
    assert len(table) == 12 and list(table.columns[:3]) == ["method", "seed", "eval_reward_mean"]
    pd.testing.assert_frame_equal(pd.read_csv(folder / "summary.csv"), table, check_dtype=False)
    text = (folder / "summary.md").read_text(encoding="utf-8")
    assert "marlhf scores highest" in text and text.count("\n| marlhf |") == 4


def test_the_summary_tells_what_was_trained(experiment):
    table = pd.read_csv(experiment[3] / "summary.csv").set_index(["method", "seed"])
    assert table.loc[("madpo", 0), "tokens_trained"] == 2 * 30 * 640  # two rounds
    assert table.loc[("marlhf", 0), "env_steps"] == 64 * 40
    assert table.loc[("base", 0), ["env_steps", "tokens_trained"]].tolist() == [0, 0]


def test_a_second_report_of_the_same_results_is_the_same_bytes(experiment):
    results, settings, inputs, folder = experiment
    again = run(results, settings, inputs, "again")
    assert read_manifest(again)["files"] == read_manifest(folder)["files"]


def test_page_and_summaries_name_neither_host_nor_folder(experiment):
    results, _, _, folder = experiment
    for name in ("report.html", "summary.csv", "summary.md", "figures/pipeline.svg"):
        text = (folder / name).read_text(encoding="utf-8")
        assert "somewhere" not in text and str(results.parent) not in text


def test_the_page_shows_counts_provenance_and_doubts(experiment):
    html = (experiment[3] / "report.html").read_text(encoding="utf-8")
    for expected in (
        "equal_reward",
        "0123456789abcdef",
        "torch 2.13.0",
        "reward model blind: held-out accuracy",
        "86.0 %",
    ):
        assert expected in html


@pytest.mark.parametrize("methods", [("base",), ("madpo", "marlhf"), ("base", "marlhf")])
def test_one_seed_or_no_base_or_nothing_trained_still_makes_a_report(tmp_path, methods):
    settings, inputs = make_experiment(tmp_path / "results", methods=methods, seeds=(5,))
    folder = run(tmp_path / "results", settings, inputs)
    assert len(pd.read_csv(folder / "summary.csv")) == len(methods)


def test_evaluations_alone_are_enough(tmp_path):
    settings, inputs = make_experiment(tmp_path / "results", methods=("base",), seeds=(0,))
    folder = run(tmp_path / "results", settings, {"evaluations": inputs["evaluations"]})
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert 'id="learning"' not in html and 'id="reward-models"' not in html


def test_a_method_without_evaluation_is_named(tmp_path):
    settings, inputs = make_experiment(tmp_path / "results", methods=("base",), seeds=(0,))
    with pytest.raises(UserError, match="No evaluation of method madpo"):
        run(tmp_path / "results", settings.model_copy(update={"methods": ["base", "madpo"]}), inputs)


def test_an_edited_reward_model_is_noticed(tmp_path):
    settings, inputs = make_experiment(tmp_path / "results", methods=("base",), seeds=(0,))
    quality = inputs["reward_models"][0] / "quality.json"
    quality.write_text(quality.read_text() + " ")
    with pytest.raises(UserError, match=r"quality\.json: has changed"):
        run(tmp_path / "results", settings, inputs)


def test_torch_is_not_loaded():
    code = "import sys, comlrl_stages.stages.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
