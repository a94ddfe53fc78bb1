"""Compare the methods of an experiment: one page, summary tables, figures.

Reads the evaluation tables of every method and seed, the training logs and reward models, and what lies beside all
artifacts. Writes a folder with report.html (which needs nothing else to be read), summary.csv, summary.parquet,
summary.md and figures/. No model is run here, and torch is not loaded.

Equal results make an equal manifest, so nothing of the machine stands in these files. Wall times, memory and hosts have
a page of their own, cost/cost.html, which lies in the folder but is not listed in its manifest.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from comlrl_stages.artifacts import (
    EVALUATION,
    TRAINING_LOG,
    Work,
    mismatches,
    read_manifest,
    read_table,
    seal,
    write_table,
)
from comlrl_stages.errors import UserError
from comlrl_stages.files import beside
from comlrl_stages.reporting import answer, cost, records, summary
from comlrl_stages.reporting.contents import page_of
from comlrl_stages.reporting.material import Material, RewardModel
from comlrl_stages.reporting.page import render
from comlrl_stages.settings import ReportSettings

QUALITY, HELD_OUT = "quality.json", "held_out.parquet"


def run(settings: ReportSettings, work: Work) -> None:
    """Write the folder `report`.

    Inputs: `evaluations` (tables), and optionally `training_logs` (tables), `reward_models` (folders) and `artifacts`
    (whatever else is to be listed; everything upstream of any input is found by itself).
    """
    evaluation = read_evaluations(work.inputs["evaluations"], settings.methods)
    logs = read_training_logs(work.inputs.get("training_logs", []))
    design = summary.design_of(evaluation, settings)
    folder = work.output("report")
    folder.mkdir(exist_ok=True)
    material = Material(
        experiment=settings.experiment,
        description=settings.description,
        design=design,
        evaluation=evaluation,
        results=summary.results(evaluation, design),
        summary=summary.summary_table(evaluation, logs, design),
        logs=logs,
        reward_models=[read_reward_model(path) for path in work.inputs.get("reward_models", [])],
        records=records.collect(path for paths in work.inputs.values() for path in paths),
        figures=folder / "figures",
    )
    write_summary(material, folder)
    (folder / "report.html").write_text(render(page_of(material)), encoding="utf-8")
    work.count("report", rows=len(material.summary), joint_responses=len(evaluation))
    add_costs(material, folder, work)


def add_costs(material: Material, folder: Path, work: Work) -> None:
    """Write the page of costs, and move it into the report's folder once the manifest of the report is made.

    Everything is made before and moves in one step: a run killed after the manifest is not repeated.
    """
    made = work.partial / cost.FOLDER
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    page = cost.page_of(material.experiment, material.records, made)
    (made / cost.NAME).write_text(render(page), encoding="utf-8")
    seal(work)
    os.replace(made, folder / cost.FOLDER)


def read_evaluations(paths: Sequence[Path], methods: Sequence[str]) -> pd.DataFrame:
    """Read the evaluation tables of all methods and seeds as one frame."""
    tables = [read_table(path, EVALUATION) for path in paths]
    evaluation = pa.concat_tables(tables).to_pandas() if tables else pd.DataFrame(columns=EVALUATION.names)
    absent = [method for method in methods if method not in set(evaluation["method"])]
    if absent:
        raise UserError(
            f"No evaluation of method {', '.join(absent)} among the {len(tables)} evaluation tables given "
            f"(they hold {', '.join(sorted(set(evaluation['method']))) or 'nothing'}). Run the evaluate stage for it."
        )
    return evaluation


def read_training_logs(paths: Sequence[Path]) -> pd.DataFrame:
    """Read training logs as one frame with columns `kind`, `owner` and `seed`, rounds laid end to end."""
    frames = []
    for path in paths:
        owner = records.owner_of(path)
        frame = read_table(path, TRAINING_LOG).to_pandas()
        frames.append(frame.assign(kind=owner.kind, owner=str(owner), seed=owner.seed))
    if not frames:
        return pd.DataFrame(columns=[*TRAINING_LOG.names, "kind", "owner", "seed"])
    return summary.end_to_end(pd.concat(frames, ignore_index=True))


def read_reward_model(folder: Path) -> RewardModel:
    """Read quality and held-out scores of a reward model; the weights are left alone."""
    owner, files = records.owner_of(folder), read_manifest(folder)["files"]
    problems = mismatches(folder, {"files": {name: files[name] for name in (QUALITY, HELD_OUT)}})
    if problems:
        raise UserError("\n".join(problems) + f"\nDelete {beside(folder, 'manifest')} and run the workflow again.")
    return RewardModel(
        name=owner.name,
        seed=owner.seed,
        quality=json.loads((folder / QUALITY).read_text(encoding="utf-8")),
        held_out=pq.read_table(folder / HELD_OUT).to_pandas(),
    )


def write_summary(material: Material, folder: Path) -> None:
    """Write the summary in three formats."""
    table = pa.Table.from_pandas(material.summary, preserve_index=False)
    write_table(folder / "summary.parquet", table.replace_schema_metadata(None))  # it names the version of pandas
    material.summary.to_csv(folder / "summary.csv", index=False, lineterminator="\n")
    title = f"# {material.experiment}"
    sentences = answer.headline(material.results, material.design)
    text = summary.markdown([title, "", " ".join(sentences)], material.summary, material.results, material.design)
    (folder / "summary.md").write_text(text, encoding="utf-8")
