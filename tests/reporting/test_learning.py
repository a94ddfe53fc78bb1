"""What the page says of training: kept weights, turns, learned reward against task reward."""

import pandas as pd
import pytest

from comlrl_stages.reporting import learning, records, summary
from comlrl_stages.reporting.material import Material
from comlrl_stages.stages import report

from .synthetic import make_experiment

METHODS, SEEDS = ("base", "madpo", "marlhf"), (0, 1)


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Settings, evaluation rows, logs and records of the made-up experiment."""
    settings, inputs = make_experiment(tmp_path_factory.mktemp("project") / "results", methods=METHODS, seeds=SEEDS)
    evaluation = report.read_evaluations(inputs["evaluations"], settings.methods)
    logs = report.read_training_logs(inputs["training_logs"])
    return settings, evaluation, logs, records.collect(path for paths in inputs.values() for path in paths)


def sections(read, folder, *, evaluation=None, logs=None, found=None):
    settings = read[0]
    evaluation = read[1] if evaluation is None else evaluation
    logs = read[2] if logs is None else logs
    design = summary.design_of(evaluation, settings)
    material = Material(
        experiment="demo",
        description="",
        design=design,
        evaluation=evaluation,
        results=summary.results(evaluation, design),
        summary=pd.DataFrame(),
        logs=logs,
        reward_models=[],
        records=read[3] if found is None else found,
        figures=folder,
    )
    return {section.anchor: section for section in learning.sections(material)}


def test_only_what_there_is_has_a_section(read, tmp_path):
    assert list(sections(read, tmp_path)) == ["learning", "over-optimisation"]
    pairs = read[2][read[2]["owner"] == "madpo"]
    assert list(sections(read, tmp_path, logs=pairs)) == ["learning"]
    assert sections(read, tmp_path, logs=read[2].iloc[:0]) == {}


def test_over_optimisation_is_told_with_the_reward_at_the_end(read, tmp_path):
    section = sections(read, tmp_path)["over-optimisation"]
    ((_, table),) = section.tables
    (row,) = table.rows
    told = dict(zip(table.head, row, strict=True))
    assert told["method"] == "marlhf"
    assert -0.4 < float(told["learned, first"].replace("−", "-")) < 0.6 and float(told["learned, last"]) > 1.2
    assert float(told["task, first"]) < float(told["task, last"]) <= float(told["task, highest"])
    assert "[" in told["task reward on eval items"]
    assert "right and down is over-optimisation" in section.figures[0].caption


def test_kept_weights_are_told_by_step(read, tmp_path):
    """The policy's manifest counts best_step where a run kept its best weights."""
    policies = [one for one in read[3] if one.stage == "optimize" and one.owner.name == "marlhf" and one.rows is None]
    kept = [type(one)(**{**vars(one), "steps": 40, "best_step": 25}) for one in policies[:1]]
    section = sections(read, tmp_path, found=kept)["learning"]
    ((title, table),) = section.tables
    assert title == "Weights that were kept" and list(table.rows) == [["marlhf", "0", "25", "40"]]
    assert sections(read, tmp_path)["learning"].tables == []


def test_rings_are_explained_where_there_are_some(read, tmp_path):
    row = read[2][read[2]["owner"] == "marlhf"].iloc[:1]
    ring = row.assign(phase="validation", name="eval/turn_1/reward_mean")
    assert "Rings" in sections(read, tmp_path, logs=pd.concat([read[2], ring]))["learning"].figures[0].caption
    assert "Rings" not in sections(read, tmp_path)["learning"].figures[0].caption


def test_turns_have_their_reward_return_and_share_of_episodes(read, tmp_path):
    """Every second episode plays another turn, with a reward of 0.5; the first turn's return counts it once."""
    first = read[1]
    later = first[first["sample"] % 2 == 0].assign(turn=1, node="0", reward=0.5, expected_return=0.5)
    joined = pd.concat([first, later], ignore_index=True)
    two = sections(read, tmp_path, evaluation=joined, logs=read[2].iloc[:0])["turns"]
    ((_, table),) = two.tables
    rows = {(row[0], row[1]): row[2:] for row in table.rows}
    assert set(rows) == {(method, turn) for method in METHODS for turn in "12"}
    assert rows["base", "1"][0] == "100 %" and rows["base", "2"] == ["50.0 %", "0.50 [0.50, 0.50]", "0.50 [0.50, 0.50]"]
    assert two.figures == []


def test_turns_in_training_are_drawn(read, tmp_path):
    later = read[1].assign(turn=1, node="0")
    own = read[2][(read[2]["owner"] == "marlhf") & (read[2]["name"] == "reward_mean")]
    rows = [own.assign(turn=turn, name=name) for turn in (1, 2) for name in ("reward_mean", "expected_return")]
    evaluation = pd.concat([read[1], later], ignore_index=True)
    section = sections(read, tmp_path, evaluation=evaluation, logs=pd.concat([read[2], *rows]))["turns"]
    (figure,) = section.figures
    assert figure.name == "turns" and (tmp_path / "turns.svg").is_file()
    assert "marlhf turn 2 expected return from" in figure.alt
