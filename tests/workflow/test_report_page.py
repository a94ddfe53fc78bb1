"""The report that the workflow makes, opened in a browser, and the files beside it."""

import xml.etree.ElementTree
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from matplotlib.image import imread

from ..reporting.chromium import visit
from .conftest import EXPERIMENT, Workflow

pytestmark = pytest.mark.xdist_group("workflow")

FIGURES = ["costs", "improvement", "learning_curves", "lengths", "pipeline", "reward_models", "scores"]
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
