"""The report that the workflow makes, opened in a browser, and the files beside it."""

import json
import socket
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from matplotlib.image import imread

from ..reporting.chromium import visit
from .conftest import EXPERIMENT, Workflow

FIGURES = [
    "improvement",
    "learning_curves",
    "lengths",
    "over_optimisation",
    "pipeline",
    "reward_models",
    "scores",
    "tokens",
]
COLUMNS = ["method", "seed", "eval_reward_mean", "eval_reward_low", "eval_reward_high", "improvement_over_base"]


@pytest.fixture
def report(finished: Workflow) -> Path:
    return finished.folder / "results" / "small" / "report"


def test_the_browser_has_no_complaint_and_asks_for_nothing_but_the_page(report: Path) -> None:
    page = report / "report.html"
    seen = visit(page)
    assert (seen.errors, seen.failed) == ([], [])
    assert seen.requests == [page.as_uri()]


def test_every_figure_is_drawn_on_the_page(report: Path) -> None:
    (drawn,) = visit(
        report / "report.html",
        "[...document.querySelectorAll('figure')].map(figure => {"
        "  const svg = figure.querySelector('svg'), box = svg.getBoundingClientRect();"
        "  return [box.width, box.height, svg.querySelectorAll('path, use, text').length,"
        "    figure.querySelector('figcaption').textContent.length];"
        "})",
    ).values
    assert len(drawn) == len(FIGURES)
    for width, height, marks, caption in drawn:
        assert width > 200 and height > 50 and marks > 10 and caption > 20


def test_every_figure_is_a_file_for_papers_and_one_for_slides(report: Path) -> None:
    assert sorted(path.name for path in (report / "figures").iterdir()) == sorted(
        f"{name}.{kind}" for name in FIGURES for kind in ("svg", "png")
    )
    for name in FIGURES:
        drawn = xml.etree.ElementTree.parse(report / "figures" / f"{name}.svg").getroot()
        assert drawn.tag.endswith("svg") and sum(1 for _ in drawn.iter()) > 20, name
        assert imread(report / "figures" / f"{name}.png").std() > 0.01, f"{name} is a blank picture"


def test_each_items_prompt_stands_above_the_answers_of_every_method(report: Path) -> None:
    prompts, above = visit(
        report / "report.html",
        "[...document.querySelectorAll('#samples .prompt')].map(prompt => prompt.textContent)",
        "[...document.querySelectorAll('#samples .prompt')].map(prompt => {"
        "  const answers = [];"
        "  for (let e = prompt.nextElementSibling; e && !e.matches('.prompt'); e = e.nextElementSibling)"
        "    answers.push(...(e.matches('.answer') ? [e] : e.querySelectorAll('.answer')));"
        "  const bottom = prompt.getBoundingClientRect().bottom;"
        "  return [answers.length, answers.every(answer => answer.getBoundingClientRect().top >= bottom)];"
        "})",
    ).values
    items = pq.read_table(report.parent / "split" / "eval.parquet")["prompt"].to_pylist()
    assert sorted(prompts) == sorted(items)
    assert above == [[len(EXPERIMENT["methods"]), True]] * len(items)


def test_the_answers_on_the_page_are_those_of_the_evaluation(report: Path) -> None:
    (shown,) = visit(report / "report.html", "document.querySelector('#samples').textContent").values
    for method in EXPERIMENT["methods"]:
        path = report.parent / "seed0" / "methods" / method / "evaluation" / "evaluation.parquet"
        for row in pq.read_table(path).to_pylist():
            if row["decoding"] == "greedy":
                assert all(text.strip()[:20] in shown for text in row["texts"])


def test_the_summary_has_a_row_per_method_and_seed_and_the_columns_that_the_page_shows(report: Path) -> None:
    summary = pd.read_csv(report / "summary.csv")
    (head,) = visit(
        report / "report.html", "[...document.querySelectorAll('#seeds th')].map(e => e.textContent)"
    ).values
    assert summary["method"].tolist() == list(EXPERIMENT["methods"]) and set(summary["seed"]) == {0}
    assert set(COLUMNS) <= set(summary.columns)
    assert {name.replace("_", " ") for name in summary.columns} <= {name.strip() for name in head}


def test_the_summary_is_the_same_in_all_its_forms(report: Path) -> None:
    as_csv, as_parquet = pd.read_csv(report / "summary.csv"), pd.read_parquet(report / "summary.parquet")
    pd.testing.assert_frame_equal(as_csv, as_parquet, check_dtype=False)
    as_markdown = (report / "summary.md").read_text(encoding="utf-8")
    assert all(method in as_markdown for method in as_csv["method"])


def test_the_mean_of_the_summary_is_that_of_the_evaluation(report: Path) -> None:
    for row in pd.read_csv(report / "summary.csv").itertuples():
        path = report.parent / f"seed{row.seed}" / "methods" / row.method / "evaluation" / "evaluation.parquet"
        scores = pd.read_parquet(path, columns=["task_id", "split", "decoding", "reward"])
        scores = scores[(scores["split"] == "eval") & (scores["decoding"] == "sampled")]
        assert scores.groupby("task_id")["reward"].mean().mean() == pytest.approx(row.eval_reward_mean)


def test_the_page_and_the_summary_hold_nothing_of_the_machine(report: Path) -> None:
    listed = json.loads((report.parent / "report.manifest.json").read_text(encoding="utf-8"))["files"]
    hidden = (str(report.parents[2]).encode(), socket.gethostname().encode() + b" ", b"pandas")
    for name in listed:
        content = (report / name).read_bytes()
        assert not any(text in content for text in hidden), name


def test_the_page_of_costs_is_a_link_away_and_leads_back(report: Path) -> None:
    (link,) = visit(report / "report.html", "document.querySelector('#cost p a').href").values
    page = report / "cost" / "cost.html"
    assert link == page.as_uri()
    seen = visit(page, "document.querySelector('#stages p a').href", "document.querySelectorAll('figure svg').length")
    assert (seen.errors, seen.failed, seen.requests) == ([], [], [page.as_uri()])
    assert seen.values == [(report / "report.html").as_uri(), 1]
    assert socket.gethostname() in page.read_text(encoding="utf-8")


def test_the_page_of_costs_is_not_listed_and_verify_finds_nothing_wrong(
    finished: Workflow, report: Path, tmp_path: Path
) -> None:
    listed = json.loads((report.parent / "report.manifest.json").read_text(encoding="utf-8"))["files"]
    assert (report / "cost" / "cost.html").is_file() and not any(name.startswith("cost/") for name in listed)
    config = tmp_path / "config.yaml"
    config.write_text("experiments: [small]\n", encoding="utf-8")
    command = [sys.executable, "-m", "comlrl_stages.cli", "verify", "results/small", "--configfile", str(config)]
    done = subprocess.run(command, **finished.process(), check=False)
    assert done.returncode == 0 and "different" not in done.stdout and "broken" not in done.stdout, done.stdout


def test_metrics_of_the_evaluation_and_the_summary_agree_in_every_digit(report: Path) -> None:
    same = {
        "eval_reward_mean": "eval/turn_1/reward_mean",
        "eval_reward_low": "eval/turn_1/reward_low",
        "eval_reward_high": "eval/turn_1/reward_high",
        "greedy_reward_mean": "eval/greedy/turn_1/reward_mean",
        "kl_per_token": "eval/kl_per_token",
        "part_ratio": "eval/parts/ratio",
        "truncated_share": "eval/truncated_share",
    }
    for row in pd.read_csv(report / "summary.csv").to_dict("records"):
        folder = report.parent / f"seed{row['seed']}" / "methods" / row["method"] / "evaluation"
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        for column, name in same.items():
            assert row[column] == metrics.get(name) or (pd.isna(row[column]) and metrics.get(name) is None), column
