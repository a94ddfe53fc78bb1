"""Artifacts: all or nothing on disk whatever happens to the writer, and refused when they are not what was written."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from comlrl_stages import artifacts
from comlrl_stages.artifacts import (
    COMPLETIONS,
    PAIRS,
    REWARDS,
    TRAINING_LOG,
    TRAINING_PAIRS,
    artifact_digest,
    checked_directory,
    digest_of_part,
    mismatches,
    open_work,
    read_json,
    read_manifest,
    read_table,
    table_of,
    write_table,
)
from comlrl_stages.errors import UserError
from comlrl_stages.files import beside, file_digest, write_json

SCHEMAS = [value for value in vars(artifacts).values() if isinstance(value, pa.Schema)]
ROWS = [{"draw": n, "pair_id": f"p{n}", "from_round": 1, "age": 0, "round_weight": 0.5} for n in range(3)]


def make(folder, rows=ROWS, tracked=None, inputs=None, **counts):
    """One piece of work with a table and a folder as artifacts."""
    outputs = {"pairs": folder / "pairs.parquet", "model": folder / "model"}
    with open_work("test", tracked or {}, inputs or {}, outputs) as work:
        if not work.finished:
            fill(work, rows)
            work.count("pairs", rows=len(rows), **counts)
    return outputs


def fill(work, rows=ROWS):
    write_table(work.output("pairs"), table_of(rows, TRAINING_PAIRS), TRAINING_PAIRS)
    for name in ("a.txt", "agent_0/weights.bin", "agent_1/inner/ü x.bin"):
        path = work.output("model") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def snapshot(folder):
    """Bytes of every file below a folder but the timing."""
    files = [path for path in folder.rglob("*") if path.is_file() and ".timing." not in path.name]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def refusal(function, *arguments):
    with pytest.raises(UserError) as refused:
        function(*arguments)
    return str(refused.value)


# --- what is published --------------------------------------------------------------------------------------------


def test_artifacts_are_published_with_manifest_provenance_and_timing(tmp_path):
    make(tmp_path)
    kinds = ("", ".manifest.json", ".provenance.json", ".timing.json")
    names = {f"{name}{kind}" for name in ("model", "pairs.parquet") for kind in kinds}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert read_table(tmp_path / "pairs.parquet", TRAINING_PAIRS).to_pylist() == ROWS
    assert (checked_directory(tmp_path / "model") / "agent_1/inner/ü x.bin").read_text() == "agent_1/inner/ü x.bin"


def test_a_manifest_lists_every_file_by_name_digest_and_size(tmp_path):
    make(tmp_path, dropped={"why": 1})
    manifest = read_manifest(tmp_path / "model")
    assert manifest["schema"] == 1 and list(manifest["files"]) == [
        "a.txt",
        "agent_0/weights.bin",
        "agent_1/inner/ü x.bin",
    ]
    facts = manifest["files"]["agent_0/weights.bin"]
    assert facts == {"sha256": file_digest(tmp_path / "model/agent_0/weights.bin"), "bytes": 19}
    assert read_manifest(tmp_path / "pairs.parquet")["counts"] == {"rows": 3, "dropped": {"why": 1}}


def test_manifests_hold_no_time_host_or_path_of_this_machine(tmp_path):
    make(tmp_path)
    for path in tmp_path.glob("*.manifest.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        assert set(content) == {"schema", "files", "counts"}
        assert all(set(facts) == {"sha256", "bytes"} for facts in content["files"].values())
        assert str(tmp_path) not in path.read_text(encoding="utf-8")


def test_equal_work_in_another_place_gives_equal_bytes(tmp_path):
    make(tmp_path / "one", dropped=Counter(b=1, a=2)), make(tmp_path / "two", dropped={"a": 2, "b": 1})
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")


def test_provenance_names_settings_inputs_and_facts(tmp_path):
    source = make(tmp_path / "in")["model"]
    with open_work(
        "next", {"next.seed": "0"}, {"models": [source, source], "none": None}, {"x": tmp_path / "x"}
    ) as work:
        work.output("x").write_text("x")
        work.resolved(dtype="float32", device="cpu")
    provenance = json.loads(beside(tmp_path / "x", "provenance").read_text(encoding="utf-8"))
    digest = artifact_digest(source)
    assert provenance == {
        "stage": "next",
        "tracked": {"next.seed": "0"},
        "inputs": [{"name": "models", "path": str(source), "digest": digest}] * 2,
        "resolved": {"dtype": "float32", "device": "cpu"},
    }


def test_paths_with_spaces_and_other_scripts_work(tmp_path):
    folder = tmp_path / "tâche 1 = {x}" / "a=b" / "日本"
    outputs = make(folder, inputs={"source": make(tmp_path / "in put")["model"]})
    assert read_table(outputs["pairs"], TRAINING_PAIRS).column_names == TRAINING_PAIRS.names


def test_a_new_result_replaces_the_old_one_whole(tmp_path):
    make(tmp_path)
    (tmp_path / "model/extra.txt").write_text("from before")
    make(tmp_path, ROWS[:1], {"test.seed": "1"})
    assert not (tmp_path / "model/extra.txt").exists()
    assert read_table(tmp_path / "pairs.parquet").num_rows == 1


@pytest.mark.parametrize("kind", ["file", "link", "broken link"])
def test_a_folder_replaces_what_stands_in_its_place(tmp_path, kind):
    (tmp_path / "elsewhere").mkdir()
    if kind == "file":
        (tmp_path / "model").write_text("x")
    else:
        (tmp_path / "model").symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nowhere"))
    make(tmp_path)
    assert not (tmp_path / "model").is_symlink() and checked_directory(tmp_path / "model").is_dir()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_manifest_is_written_last(tmp_path, monkeypatch):
    moved, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda made, target: (moved.append(Path(target)), replace(made, target)))
    make(tmp_path)
    published = [target.name for target in moved if target.parent == tmp_path]
    assert len(published) == 8
    assert published[-2:] == ["pairs.parquet.manifest.json", "model.manifest.json"]


def test_numbers_of_numpy_can_be_counted(tmp_path):
    make(tmp_path, tokens=np.int64(7), mean=np.float32(0.5), flag=np.bool_(True), dropped=Counter("aab"))
    counts = read_manifest(tmp_path / "pairs.parquet")["counts"]
    assert counts == {"rows": 3, "tokens": 7, "mean": 0.5, "flag": True, "dropped": {"a": 2, "b": 1}}


def test_what_cannot_stand_in_a_manifest_is_refused_where_it_is_counted(tmp_path):
    with pytest.raises(TypeError, match="cannot stand in a manifest"):
        make(tmp_path, where=Path("x"))


# --- errors and kills ---------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def stop_inside(folder, tracked=None, inputs=None):
    with (
        pytest.raises(Stop),
        open_work("test", tracked or {}, inputs or {}, {"pairs": folder / "pairs.parquet"}) as work,
    ):
        assert not work.finished
        before = sorted(path.name for path in work.partial.iterdir())
        (work.partial / "shard").write_text("1")
        raise Stop
    return before


def test_an_error_publishes_nothing_and_keeps_the_work(tmp_path):
    assert stop_inside(tmp_path) == [".lock", "key", "reserve"]
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.parquet.partial"]
    assert stop_inside(tmp_path) == [".lock", "key", "reserve", "shard"]


def test_an_error_leaves_the_old_result_alone(tmp_path):
    make(tmp_path)
    before = snapshot(tmp_path)
    stop_inside(tmp_path, {"test.seed": "1"})
    shutil.rmtree(tmp_path / "pairs.parquet.partial")
    assert snapshot(tmp_path) == before


def test_other_settings_empty_the_partial_folder(tmp_path):
    stop_inside(tmp_path, {"test.seed": "0"})
    assert stop_inside(tmp_path, {"test.seed": "1"}) == [".lock", "key", "reserve"]
    assert stop_inside(tmp_path, {"test.seed": "0"}) == [".lock", "key", "reserve"]


def test_other_inputs_empty_the_partial_folder(tmp_path):
    source = make(tmp_path / "in")["model"]
    stop_inside(tmp_path, inputs={"source": source})
    assert "shard" in stop_inside(tmp_path, inputs={"source": source})
    make(tmp_path / "in", tracked={"again": "1"})
    assert "shard" in stop_inside(tmp_path, inputs={"source": source})  # the same content, made again
    with open_work("test", {}, {}, {"model": source}) as work:
        (work.output("model")).mkdir()
        (work.output("model") / "a.txt").write_text("other content")
    assert "shard" not in stop_inside(tmp_path, inputs={"source": source})


def test_a_partial_folder_that_was_half_emptied_belongs_to_no_work(tmp_path, monkeypatch):
    stop_inside(tmp_path, {"test.seed": "0"})
    (tmp_path / "pairs.parquet.partial/a_folder").mkdir()
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(sorted(listed(folder))))  # a_folder comes before the key
    monkeypatch.setattr(artifacts.shutil, "rmtree", lambda path: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop), open_work("test", {"test.seed": "1"}, {}, {"pairs": tmp_path / "pairs.parquet"}):
        pass
    monkeypatch.undo()
    assert stop_inside(tmp_path, {"test.seed": "0"}) == [".lock", "key", "reserve"]


def test_an_output_that_was_not_written_is_an_error(tmp_path):
    outputs = {"pairs": tmp_path / "pairs.parquet"}
    with (
        pytest.raises(RuntimeError, match="stage test did not write its output pairs"),
        open_work("test", {}, {}, outputs),
    ):
        pass
    assert not outputs["pairs"].exists() and not beside(outputs["pairs"], "manifest").exists()


def run_child(step, work):
    """Do `work` in a process of its own that is killed before the given step of writing, moving or deleting files."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    steps = iter(range(step))

    def until_killed(function):
        def counted(*arguments, **named):
            if next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return counted

    for module, names in ((artifacts, "write_json _replace _empty"), (os, "replace unlink rmdir"), (pq, "write_table")):
        for name in names.split():
            setattr(module, name, until_killed(getattr(module, name)))
    work()
    os._exit(0)


def drive(folder, old, deleted):
    """For every step: kill the work there, look at what it left, do it again. Prints what was seen, as JSON."""
    os.fsync = lambda descriptor: None  # slow, and of no use against kills
    make(folder / "undisturbed")
    for step in range(200):
        place = folder / str(step)
        if old:
            make(place, ROWS[:1], {"test.seed": "old"})
        code = run_child(step, lambda place=place: make(place))
        published = [place / name for name in ("pairs.parquet", "model") if beside(place / name, "manifest").exists()]
        problems = [problem for path in published for problem in mismatches(path, read_manifest(path))]
        if deleted and code != 0:
            delete_outputs(place)
        make(place)
        same = snapshot(place) == snapshot(folder / "undisturbed")
        print(json.dumps({"step": step, "code": code, "problems": problems, "same": same}))
        if code == 0:
            return


def delete_outputs(place):
    """As Snakemake does after a job that failed: every declared output goes, the partial folder stays."""
    shutil.rmtree(place / "model", ignore_errors=True)
    for path in place.glob("*"):
        if path.is_file():
            path.unlink()


@pytest.mark.parametrize(("old", "deleted"), [(False, False), (True, True)])
def test_a_writer_killed_anywhere_leaves_nothing_wrong_and_is_completed_by_the_next(tmp_path, old, deleted):
    code = f"import test_artifacts, pathlib; test_artifacts.drive(pathlib.Path({str(tmp_path)!r}), {old}, {deleted})"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(seen) > 15 and [run["code"] for run in seen] == [-signal.SIGKILL] * (len(seen) - 1) + [0]
    assert not [run for run in seen if run["problems"] or not run["same"]]


def test_what_was_computed_before_the_kill_is_not_computed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "_publish", lambda *arguments: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        make(tmp_path)
    monkeypatch.undo()
    outputs = {"pairs": tmp_path / "pairs.parquet", "model": tmp_path / "model"}
    with open_work("test", {}, {}, outputs) as work:
        assert work.finished
    assert checked_directory(tmp_path / "model") and read_table(tmp_path / "pairs.parquet").num_rows == 3


def test_a_finished_artifact_that_was_lost_is_made_again(tmp_path, monkeypatch):
    """Killed after the artifacts moved and before the manifests came; then somebody deletes one."""
    monkeypatch.setattr(artifacts, "_publish_json", lambda *arguments: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        make(tmp_path)
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "model")
    outputs = {"pairs": tmp_path / "pairs.parquet", "model": tmp_path / "model"}
    with open_work("test", {}, {}, outputs) as work:
        assert not work.finished
        fill(work)
    assert checked_directory(tmp_path / "model")


# --- two at once --------------------------------------------------------------------------------------------------


HOLD = """
import sys, time
from pathlib import Path
from comlrl_stages.artifacts import open_work
with open_work("test", {}, {}, {"pairs": Path(sys.argv[1]) / "pairs.parquet"}) as work:
    (work.partial / "shard").write_text("1")
    print("working", flush=True)
    time.sleep(float(sys.argv[2]))
    work.output("pairs").write_text("theirs")
"""


@pytest.fixture
def other(tmp_path):
    """Start another process that works in the same place; it is killed at the end."""
    started = []

    def start(seconds):
        command = [sys.executable, "-c", HOLD, str(tmp_path), str(seconds)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "working\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_second_process_gives_up_and_names_the_first(tmp_path, other, monkeypatch):
    process = other(60)
    monkeypatch.setattr(artifacts, "LOCK_PATIENCE_S", 0.3)
    text = refusal(make, tmp_path)
    assert text.startswith(f"{tmp_path / 'pairs.parquet.partial'}: another process works here (host and pid: ")
    assert f" {process.pid})" in text and "did not end within" in text
    assert (tmp_path / "pairs.parquet.partial/shard").exists()


def test_a_second_process_waits_for_the_first_to_end(tmp_path, other):
    other(0.5)
    with open_work("test", {}, {}, {"pairs": tmp_path / "pairs.parquet"}) as work:
        assert (tmp_path / "pairs.parquet").read_text() == "theirs"
        assert not (work.partial / "shard").exists()
        work.output("pairs").write_text("mine")
    assert (tmp_path / "pairs.parquet").read_text() == "mine"
    assert not work.partial.exists()


def test_the_work_of_a_killed_process_is_taken_over_at_once(tmp_path, other, monkeypatch):
    other(60).kill()
    monkeypatch.setattr(artifacts, "LOCK_PATIENCE_S", 2.0)
    assert "shard" in stop_inside(tmp_path)


# --- reading ------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path):
    return make(tmp_path)


def test_an_edited_table_is_refused(made):
    with open(made["pairs"], "ab") as stream:
        stream.write(b"x")
    text = refusal(read_table, made["pairs"], TRAINING_PAIRS)
    assert text.startswith(f"{made['pairs']}: has changed since it was written")
    assert f"Delete {made['pairs']}.manifest.json and run the workflow again." in text


def test_a_missing_table_is_named(made):
    made["pairs"].unlink()
    assert refusal(read_table, made["pairs"]).startswith(f"{made['pairs']}: missing\n")


def test_a_missing_or_edited_file_of_a_folder_is_named(made):
    (made["model"] / "a.txt").write_text("edited")
    (made["model"] / "agent_0/weights.bin").unlink()
    text = refusal(checked_directory, made["model"])
    assert f"{made['model']}/a.txt: has changed" in text and f"{made['model']}/agent_0/weights.bin: missing" in text
    assert len(mismatches(made["model"], read_manifest(made["model"]))) == 2


def test_a_folder_that_was_deleted_is_missing_file_by_file(made):
    shutil.rmtree(made["model"])
    assert f"{made['model']}/agent_0/weights.bin: missing" in refusal(checked_directory, made["model"])


def test_without_a_manifest_nothing_is_finished(made):
    beside(made["pairs"], "manifest").unlink()
    text = refusal(read_table, made["pairs"])
    assert f"{made['pairs']}.manifest.json: not found, so {made['pairs']} is not a finished artifact" in text
    assert "snakemake --cores all" in text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "is not valid JSON"),
        ('{"schema": 99, "files": {}}', "written with schema version 99, this version reads 1"),
        ("[]", "written with schema version None, this version reads 1"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_refused(made, content, told):
    beside(made["pairs"], "manifest").write_text(content)
    text = refusal(read_table, made["pairs"])
    assert text.startswith(f"{made['pairs']}.manifest.json: ") and told in text


def seal(path, counts=None):
    """Give a file a manifest that fits it."""
    files = {path.name: {"sha256": file_digest(path), "bytes": path.stat().st_size}}
    write_json(beside(path, "manifest"), {"schema": 1, "files": files, "counts": counts or {}})
    return path


@pytest.mark.parametrize("content", [b"", b"no parquet at all", b"PAR1" + bytes(40) + b"PAR1"])
def test_a_corrupt_table_is_refused(tmp_path, content):
    path = tmp_path / "pairs.parquet"
    path.write_bytes(content)
    text = refusal(read_table, seal(path), TRAINING_PAIRS)
    assert text.startswith(f"{path}: cannot be read as Parquet") and "run the workflow again" in text


def test_a_table_of_another_kind_or_version_is_refused(tmp_path, made):
    text = refusal(read_table, made["pairs"], PAIRS)
    assert "is a table of kind training_pairs/1, expected pairs/1" in text
    old = TRAINING_PAIRS.with_metadata({b"comlrl_stages.table": b"training_pairs/0"})
    write_table(tmp_path / "old.parquet", table_of(ROWS, old), old)
    text = refusal(read_table, seal(tmp_path / "old.parquet"), TRAINING_PAIRS)
    assert "is a table of kind training_pairs/0, expected training_pairs/1. Move the old results away" in text
    write_table(tmp_path / "foreign.parquet", pa.table({"a": [1]}))
    assert "of kind unknown" in refusal(read_table, seal(tmp_path / "foreign.parquet"), TRAINING_PAIRS)


def test_a_table_with_other_columns_or_types_is_refused(tmp_path):
    wider = TRAINING_PAIRS.set(0, pa.field("draw", pa.int64()))
    write_table(tmp_path / "wider.parquet", table_of(ROWS, wider), wider)
    assert "has columns" in refusal(read_table, seal(tmp_path / "wider.parquet"), TRAINING_PAIRS)


def test_json_is_checked_like_tables(tmp_path):
    write_json(tmp_path / "metrics.json", {"mean": 0.1 + 0.2})
    assert read_json(seal(tmp_path / "metrics.json")) == {"mean": 0.1 + 0.2}
    (tmp_path / "metrics.json").write_text("{}")
    assert "has changed since it was written" in refusal(read_json, tmp_path / "metrics.json")


# --- tables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.metadata[b"comlrl_stages.table"].decode())
def test_an_empty_table_of_every_kind_comes_back(tmp_path, schema):
    path = tmp_path / "table.parquet"
    write_table(path, table_of([], schema), schema)
    assert read_table(seal(path), schema).schema.equals(schema)


def test_values_of_every_kind_come_back(tmp_path):
    key = {"source": "policy", "round": 1, "step": 0, "task_id": "ü", "turn": 1, "node": ""}
    completion = {**key, "sample": 0, "agent": -1, "prompt_ids": [1, 2], "completion_ids": [], "log_probs": [-0.5]}
    reward = {**key, "joint": 0, "samples": [0, 1], "raw": float("inf"), "parts": [("ratio", 2.0)], "status": "ok"}
    for schema, row in ((COMPLETIONS, completion), (REWARDS, reward)):
        write_table(tmp_path / "table.parquet", table_of([row], schema), schema)
        (back,) = read_table(seal(tmp_path / "table.parquet"), schema).to_pylist()
        assert back == {**dict.fromkeys(schema.names), **row}


def test_equal_tables_are_equal_bytes(tmp_path):
    row = {"phase": "train", "name": "loss", "value": 0.1}
    for name in ("a", "b"):
        write_table(tmp_path / name, table_of([row] * 100, TRAINING_LOG), TRAINING_LOG)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_table_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "pairs.parquet"
    write_table(path, table_of(ROWS, TRAINING_PAIRS), TRAINING_PAIRS)
    before = path.read_bytes()
    with pytest.raises(KeyError):
        write_table(path, pa.table({"other": [1]}), TRAINING_PAIRS)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["pairs.parquet"]


def test_an_equals_sign_in_a_folder_makes_no_column(tmp_path):
    path = tmp_path / "lr=0.1" / "pairs.parquet"
    write_table(path, table_of(ROWS, TRAINING_PAIRS), TRAINING_PAIRS)
    assert read_table(seal(path), TRAINING_PAIRS).column_names == TRAINING_PAIRS.names


# --- digests ------------------------------------------------------------------------------------------------------


def test_a_digest_is_that_of_the_content(tmp_path):
    one, two = make(tmp_path / "one", seen=1), make(tmp_path / "two", seen=2)
    assert artifact_digest(one["model"]) == artifact_digest(two["model"])
    assert artifact_digest(one["pairs"]) == artifact_digest(two["pairs"])  # counts are no content
    assert artifact_digest(make(tmp_path / "three", ROWS[:1])["pairs"]) != artifact_digest(one["pairs"])


def test_a_plain_file_has_a_digest_without_a_manifest(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    assert artifact_digest(tmp_path / "x.txt") == file_digest(tmp_path / "x.txt")
    assert "x.manifest.json: not found" in refusal(artifact_digest, tmp_path / "x")


def test_a_part_of_a_folder_has_a_digest_of_its_own(made):
    before = [digest_of_part(made["model"], f"agent_{n}") for n in (0, 1)]
    manifest = read_manifest(made["model"])
    manifest["files"]["agent_1/inner/ü x.bin"]["sha256"] = "0" * 64
    write_json(beside(made["model"], "manifest"), manifest)
    after = [digest_of_part(made["model"], f"agent_{n}") for n in (0, 1)]
    assert before[0] == after[0] and len({*before, *after}) == 3


def test_digests_are_what_a_stage_sees_of_its_inputs(tmp_path, made):
    inputs = {"models": [made["model"], made["model"]], "pairs": made["pairs"], "policy": None}
    with open_work("next", {}, inputs, {"x": tmp_path / "x"}) as work:
        assert work.digest("models") == [artifact_digest(made["model"])] * 2
        assert work.digest("pairs") == artifact_digest(made["pairs"]) and "policy" not in work.inputs
        work.output("x").write_text("x")


def test_json_is_written_with_sorted_keys_and_without_leftovers(tmp_path):
    write_json(tmp_path / "a" / "x.json", {"b": 1, "a": "ü"})
    assert (tmp_path / "a/x.json").read_text(encoding="utf-8") == '{\n "a": "ü",\n "b": 1\n}\n'
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x.json"]
