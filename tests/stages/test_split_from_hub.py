"""Items from data sets on the hub: rows and types as they are there, the commit on record, and honest refusals."""

import datetime
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from comlrl_stages.artifacts import read_table

from ..hub import CLOSED, Hub, User

MODULES = ("comlrl_stages.stages.split", "comlrl_stages.artifacts", "datasets")
TASK = 'split.task={"name": "length_ratio"}'
CARD = b"""---
configs:
- config_name: easy
  data_files: [{split: train, path: easy/train-*.parquet}, {split: test, path: easy/test.parquet}]
- config_name: hard
  data_files: [{split: train, path: hard/train.parquet}]
---
# Words
"""


def items(count, word="word", **fields):
    return [{"prompt": f"{word} {i}", "target_min": 1.0, "target_max": 2.0, "level": i} | fields for i in range(count)]


def jsonl(rows):
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


def parquet(rows):
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream)
    return stream.getvalue()


#: Types that JSON does not have, and some that readers like to change.
TYPED = {"day": datetime.date(2024, 2, 29), "at": datetime.datetime(2024, 2, 29, 12), "nested": {"größe": [1.5, None]}}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with Hub(tmp_path_factory.mktemp("hub")) as hub:
        lines = items(8, "line", nested={"labels": ["größe", "長さ"], "range": [1.5, 2]}, date="2024-02-29")
        hub.add("datasets", "org/lines", {"train.jsonl": jsonl(lines[:4]), "test.jsonl": jsonl(lines[6:])}, "old")
        hub.add("datasets", "org/lines", {"train.jsonl": jsonl(lines[:6]), "test.jsonl": jsonl(lines[6:])})
        rows = items(10, **TYPED)
        shards = {"easy/train-0.parquet": parquet(rows[:5]), "easy/train-1.parquet": parquet(rows[5:8])}
        files = {"README.md": CARD, "easy/test.parquet": parquet(rows[8:]), "hard/train.parquet": parquet(items(6))}
        hub.add("datasets", "org/words", files | shards)
        hub.add("datasets", "org/broken", {"train.jsonl": b'{"prompt": \n'})
        for repo in ("org/gated", "org/down"):
            hub.add("datasets", repo, {"README.md": b"# Lines", "train.jsonl": jsonl(lines)})
        hub.add("datasets", "org/members", {"train.jsonl": jsonl(lines)})
        hub.gated, hub.failing = {"org/gated", "org/members"}, {"org/down": 503}
        yield hub


@pytest.fixture(scope="module")
def user(hub, tmp_path_factory):
    with User(tmp_path_factory.mktemp("user"), hub.endpoint, MODULES) as user:
        yield user


def command(folder, source, **settings):
    strings = [f"split.{key}={json.dumps(value)}" for key, value in {"source": source, **settings}.items()]
    return ["split", "--train", folder / "train.parquet", "--eval", folder / "eval.parquet", TASK, *strings]


def split(user, folder, source, **settings):
    user.does(*command(folder, source, **settings))
    return [read_table(folder / f"{name}.parquet").drop_columns(["task_id"]) for name in ("train", "eval")]


def refused(user, folder, source, **settings):
    told = user.fails(*command(folder, source, **settings))
    assert not (folder / "train.parquet").exists()
    return told


def revisions(folder):
    return json.loads((folder / "train.parquet.provenance.json").read_text())["resolved"]["revision"]


def levels(table):
    return table["level"].to_pylist()


# --- rows and types -----------------------------------------------------------------------------------------------


def test_json_lines_arrive_as_they_are_and_the_commit_is_on_record(hub, user, tmp_path):
    train, evaluation = split(user, tmp_path, "hub://org/lines", eval_split="test")
    assert levels(train) == [0, 1, 2, 3, 4, 5] and levels(evaluation) == [6, 7]
    assert train["nested"].to_pylist()[0] == {"labels": ["größe", "長さ"], "range": [1.5, 2.0]}
    assert train.schema.field("level").type == pa.int64()
    assert revisions(tmp_path) == [f"hub://org/lines@{hub.commit('datasets', 'org/lines', 'main')}"]


def test_parquet_keeps_its_types_and_its_shards_their_order(user, tmp_path):
    train, evaluation = split(user, tmp_path, "hub://org/words", subset="easy", eval_split="test")
    expected = pa.Table.from_pylist(items(10, **TYPED))
    assert train.equals(expected.slice(0, 8)) and evaluation.equals(expected.slice(8))


def test_a_subset_and_a_fraction_for_eval(user, tmp_path):
    train, evaluation = split(user, tmp_path, "hub://org/words", subset="hard", eval_fraction=0.5)
    assert sorted(levels(train) + levels(evaluation)) == list(range(6)) and evaluation.num_rows == 3


@pytest.mark.parametrize("revision", ["branch", "commit"])
def test_a_revision_is_a_branch_or_a_commit(hub, user, tmp_path, revision):
    commit = hub.commit("datasets", "org/lines", "old")
    named = {"branch": "old", "commit": commit}[revision]
    train, _ = split(user, tmp_path, "hub://org/lines", revision=named, eval_split="test")
    assert levels(train) == [0, 1, 2, 3]
    assert revisions(tmp_path) == [f"hub://org/lines@{commit}"]


def test_an_eval_source_of_its_own_is_on_record_too(hub, user, tmp_path):
    _, evaluation = split(user, tmp_path, "task", eval_source="hub://org/lines", eval_split="test")
    assert levels(evaluation) == [6, 7]
    assert revisions(tmp_path) == [f"hub://org/lines@{hub.commit('datasets', 'org/lines', 'main')}"]


def test_a_slice_of_a_split_is_a_split(user, tmp_path):
    train, evaluation = split(user, tmp_path, "hub://org/lines", split="train[:3]", eval_split="train[3:]+test")
    assert levels(train) == [0, 1, 2] and levels(evaluation) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("source", ["lines", "words"])
def test_streaming_takes_the_limit_and_gives_the_same_rows_and_types(user, tmp_path, source):
    settings = {"source": f"hub://org/{source}", "limit": 3, "eval_split": "test", "eval_limit": 1}
    settings |= {"subset": "easy"} if source == "words" else {}
    streamed = split(user, tmp_path / "a", streaming=True, **settings)
    downloaded = split(user, tmp_path / "b", **settings)
    assert [table.num_rows for table in streamed] == [3, 1]
    assert all(one.equals(other) for one, other in zip(streamed, downloaded, strict=True))
    assert revisions(tmp_path / "a") == revisions(tmp_path / "b")


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repo", "settings", "told"),
    [
        ("lines", {"split": "trian"}, "items.split is 'trian' (nearest: 'train'), but {} has: train, test."),
        ("lines", {"eval_split": "dev"}, "items.eval_split is 'dev', but {} has: train, test."),
        ("lines", {"split": "dev", "streaming": True, "limit": 2}, "items.split is 'dev', but {} has: train, test."),
        ("words", {}, "items.subset is not set, but {} has: easy, hard."),
        ("words", {"subset": "hart"}, "items.subset is 'hart' (nearest: 'hard'), but {} has: easy, hard."),
        ("lines", {"subset": "x"}, "items.subset is 'x', but {} has: default."),
        ("lines", {"revision": "v9"}, "hub dataset 'org/lines' (revision v9): there is no such revision."),
        ("none", {}, "hub dataset 'org/none': there is no such dataset at "),
        ("gated", {}, "access is restricted. Ask for it at "),
        ("members", {}, "Dataset 'org/members' is a gated dataset on the Hub. You must be authenticated to access it."),
        ("down", {}, "answered with status 503. Try again later, or give a local file or folder as items.source"),
        ("a/b", {}, "this is no id of the hub. Expected owner/name."),
        ("broken", {}, "{}, split train (commit "),
    ],
)
def test_what_is_not_there_says_what_is(user, tmp_path, repo, settings, told):
    source = f"hub://org/{repo}"
    assert told.format(source) in refused(user, tmp_path, source, **settings)


# --- without the hub ----------------------------------------------------------------------------------------------


def test_offline_the_cache_serves_but_never_with_another_revision(hub, tmp_path):
    with User(tmp_path, hub.endpoint, MODULES) as online:
        fetched = split(online, tmp_path / "a", "hub://org/lines", eval_split="test")
        with User(tmp_path, CLOSED, MODULES, {"HF_HUB_OFFLINE": "1"}) as offline:
            again = split(offline, tmp_path / "b", "hub://org/lines", eval_split="test")
            assert all(one.equals(other) for one, other in zip(again, fetched, strict=True))
            assert revisions(tmp_path / "a") == revisions(tmp_path / "b")
            told = refused(offline, tmp_path / "c", "hub://org/lines", revision="old")
            assert "HF_HUB_OFFLINE is set, and the local cache does not have it" in told
            assert "(hf download org/lines --repo-type dataset)" in told
            split(online, tmp_path / "d", "hub://org/lines", revision="old")
            told = refused(offline, tmp_path / "e", "hub://org/lines")
            main, old = (hub.commit("datasets", "org/lines", name) for name in ("main", "old"))
            assert f"commit {main} cannot be loaded, only {old} from the cache of `datasets`" in told


def test_a_hub_that_nobody_reaches_is_named(user, tmp_path):
    with User(user.home, CLOSED, MODULES) as alone:
        told = refused(alone, tmp_path, "hub://org/other")
    assert f"hub dataset 'org/other': {CLOSED} cannot be reached (ConnectError: " in told


def test_a_local_folder_of_the_same_name_is_not_taken_for_the_hubs(user, tmp_path):
    folder = user.home / "org" / "lines"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_bytes(jsonl(items(5)))
    told = refused(user, tmp_path, "hub://org/lines")
    (folder / "train.jsonl").unlink()
    folder.rmdir()
    assert "or a local folder named org/lines" in told
