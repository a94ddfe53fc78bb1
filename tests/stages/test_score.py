"""The score stage: joint responses of a completions table, their rewards, and what becomes of failures."""

import math

import pyarrow as pa
import pytest

from comlrl_stages import artifacts
from comlrl_stages.artifacts import COMPLETIONS, REWARDS, open_work, read_manifest, read_table, table_of, write_table
from comlrl_stages.errors import UserError
from comlrl_stages.settings import ScoreSettings
from comlrl_stages.stages import score
from comlrl_stages.tasks.length_ratio import Task

ITEM = {"task_id": "t0", **Task().items()[0]}
OTHER = {"task_id": "t1", **Task().items()[1]}


def completion(sample, agent, text, **given):
    key = {"source": "policy", "round": 1, "step": 0, "task_id": "t0", "turn": 1, "node": ""}
    return {**key, "sample": sample, "agent": agent, "text": text, "finish_reason": "stop", **given}


def artifact(folder, name, table, schema=None):
    """Publish a table as a stage would."""
    with open_work("made", {}, {}, {name: folder / f"{name}.parquet"}) as work:
        write_table(work.output(name), table, schema)
    return folder / f"{name}.parquet"


@pytest.fixture
def scored(tmp_path):
    """Run the stage on completions; return the rows of its rewards."""

    def run(completions, items=(ITEM, OTHER), **settings):
        inputs = {
            "completions": artifact(tmp_path, "completions", table_of(completions, COMPLETIONS), COMPLETIONS),
            "train": artifact(tmp_path, "train", pa.Table.from_pylist(list(items))),
        }
        settings = ScoreSettings(**{"task": {"name": "length_ratio"}, **settings})
        with open_work("score", {}, inputs, {"rewards": tmp_path / "rewards.parquet"}) as work:
            score.run(settings, work)
        return read_table(tmp_path / "rewards.parquet", REWARDS).to_pylist()

    run.folder = tmp_path
    return run


def failing_task(folder, log=None):
    path = folder / "failing.py"
    path.write_text(
        "def reward(first, second):\n"
        + (f"    open({str(log)!r}, 'a').write(first[0] + ' ')\n" if log else "")
        + "    return [float(first[0])]\n"
    )
    return {"file": str(path), "object": None}


def test_aligned_samples_form_joint_responses(scored):
    completions = [
        completion(1, 1, "Hello"),
        completion(0, 0, "Hi"),
        completion(0, 1, "Hello"),
        completion(1, 0, ""),
        completion(0, 0, "abcd", task_id="t1"),
        completion(0, 1, "abcd", task_id="t1"),
    ]
    rows = scored(completions, scale=10.0, shift=-1.0)
    assert [(r["task_id"], r["joint"], r["samples"]) for r in rows] == [
        ("t0", 0, [0, 0]),
        ("t0", 1, [1, 1]),
        ("t1", 0, [0, 0]),
    ]
    assert [r["raw"] for r in rows] == [1.0, 0.0, pytest.approx(0.36787944)]
    assert [r["reward"] for r in rows] == [9.0, -1.0, pytest.approx(2.6787944)]
    assert dict(rows[0]["parts"]) == {"ratio": 2.5, "first_chars": 2.0, "second_chars": 5.0}
    assert {(r["scorer"], r["status"], r["source"], r["round"]) for r in rows} == {("task", "ok", "policy", 1)}


def test_one_model_that_wrote_all_roles_is_scored_by_its_sections(scored):
    rows = scored([completion(0, -1, "<a>..", role_texts=["Hi", "Hello"])])
    assert (rows[0]["samples"], rows[0]["raw"]) == ([0, 0], 1.0)


def test_an_invalid_completion_is_marked_and_not_scored(scored):
    completions = [
        completion(0, 0, "Hi"),
        completion(0, 1, "", invalid="echo of the prompt"),
        completion(1, 0, "Hi"),
        completion(1, 1, "Hello"),
    ]
    rows = scored(completions)
    assert [r["status"] for r in rows] == ["invalid", "ok"]
    assert rows[0]["error"] == "agent_1: echo of the prompt" and math.isnan(rows[0]["reward"])
    counts = read_manifest(scored.folder / "rewards.parquet")["counts"]
    assert counts == {"rows": 2, "dropped": {"invalid": 1}}


def test_failures_beyond_the_tolerance_stop_the_stage_and_show_the_first(scored):
    completions = [completion(s, a, text) for s, text in enumerate(["1", "x", "2", "y"]) for a in (0, 1)]
    task = failing_task(scored.folder)
    message = r"(?s)failed for 2 of 4 .*share of 0.25.*item t0, responses 'x', 'x': exception.*'y', 'y'"
    with pytest.raises(UserError, match=message):
        scored(completions, task=task, tolerate_failures=0.25)
    assert not list(scored.folder.glob("rewards.parquet*.json"))
    rows = scored(completions, task=task, tolerate_failures=0.5)
    assert [r["status"] for r in rows] == ["ok", "exception", "ok", "exception"]
    counts = read_manifest(scored.folder / "rewards.parquet")["counts"]
    assert counts["dropped"] == {"exception": 2}


def test_a_hanging_reward_is_not_called_again_once_the_stage_must_fail(scored):
    log, task = scored.folder / "log", scored.folder / "hanging.py"
    task.write_text(
        "import time\n"
        "def reward(first, second):\n"
        f"    open({str(log)!r}, 'a').write(first[0] + ' ')\n"
        "    time.sleep(1000)\n"
    )
    completions = [completion(s, a, str(s)) for s in range(40) for a in (0, 1)]
    settings = {"task": {"file": str(task), "object": None}, "time_limit_s": 0.5}
    with pytest.raises(UserError, match=r"failed for 1 of 1 joint responses so far \(40 in all\)"):
        scored(completions, **settings)
    with pytest.raises(UserError, match=r"failed for 3 of 3 joint responses so far \(40 in all\)"):
        scored(completions, **settings, tolerate_failures=0.05)
    assert log.read_text().split() == ["0", "0", "1", "2"]


def test_what_was_scored_before_the_failure_is_kept_and_counted(scored, monkeypatch):
    monkeypatch.setattr(score, "JOINTS_PER_SHARD", 2)
    log, broken = scored.folder / "log", scored.folder / "broken"
    task = scored.folder / "service.py"
    task.write_text(
        "import os\n"
        "def reward(first, second):\n"
        f"    open({str(log)!r}, 'a').write(first[0] + ' ')\n"
        f"    if first[0] == '1' or first[0] == '3' and os.path.exists({str(broken)!r}):\n"
        "        raise OSError('no answer')\n"
        "    return [float(first[0])]\n"
    )
    settings = {"task": {"file": str(task), "object": None}, "tolerate_failures": 0.2}
    completions = [completion(s, a, str(s)) for s in range(6) for a in (0, 1)]
    broken.touch()
    with pytest.raises(UserError, match=r"(?s)failed for 2 of 4 .*responses '1', '1': .*responses '3', '3': "):
        scored(completions, **settings)
    assert not (scored.folder / "rewards.parquet").exists()
    with pytest.raises(UserError, match=r"(?s)failed for 2 of 4 .*responses '1', '1': .*responses '3', '3': "):
        scored(completions, **settings)
    broken.unlink()
    rows = scored(completions, **settings)
    assert [r["status"] for r in rows] == ["ok", "exception", "ok", "ok", "ok", "ok"]
    assert log.read_text().split() == ["0", "1", "2", "3", "2", "3", "2", "3", "4", "5"]


def test_nan_is_counted_but_is_no_failure(scored):
    completions = [completion(s, a, text) for s, text in enumerate(["nan", "2"]) for a in (0, 1)]
    rows = scored(completions, task=failing_task(scored.folder))
    assert [r["status"] for r in rows] == ["nan", "ok"]


def test_a_stopped_run_continues_after_its_last_shard(scored, monkeypatch):
    monkeypatch.setattr(score, "JOINTS_PER_SHARD", 2)
    log = scored.folder / "log"
    task = failing_task(scored.folder, log)
    good = [completion(s, a, str(s)) for s in range(5) for a in (0, 1)]
    write = artifacts.write_table

    def stopped(path, table, schema=None):
        if "00000004" in path.name:
            raise KeyboardInterrupt
        write(path, table, schema)

    monkeypatch.setattr(score, "write_table", stopped)
    with pytest.raises(KeyboardInterrupt):
        scored(good, task=task)
    monkeypatch.setattr(score, "write_table", write)
    rows = scored(good, task=task)
    assert [r["raw"] for r in rows] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert log.read_text().split() == ["0", "1", "2", "3", "4", "4"]


def test_completions_of_an_unknown_item_or_a_missing_agent_are_refused(scored):
    with pytest.raises(UserError, match="has completions of item t9, which is not among the 2 items"):
        scored([completion(0, 0, "a", task_id="t9"), completion(0, 1, "a", task_id="t9")])
    with pytest.raises(UserError, match="item t0, sample 0: has texts of 1 agents, expected 2"):
        scored([completion(0, 0, "a")])


def test_no_completions_give_an_empty_table(scored):
    assert scored([]) == []


def test_the_stage_does_not_import_torch():
    import subprocess
    import sys

    code = "import sys, comlrl_stages.stages.score, comlrl_stages.stages.split; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
