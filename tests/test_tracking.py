"""Runs on Weights & Biases: the real client, offline and with servers on this machine that work, refuse or are gone."""

import importlib
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from comlrl_stages import tracking
from comlrl_stages.artifacts import artifact_digest, open_work, read_manifest
from comlrl_stages.config import Experiment
from comlrl_stages.errors import UserError
from comlrl_stages.project import parse
from comlrl_stages.settings import PairSettings, flatten, parse_settings
from comlrl_stages.tracking import comlrl_metrics, metric_name, open_run

from .stages import conftest as stages
from .stages.conftest import files_of, reinforcement_settings
from .wandb_records import RunRecord
from .wandb_server import Server

KEY = "0123456789abcdef0123456789abcdef01234567"
OPTIONS = {"mode": "offline", "project": "teams", "name": "small-madpo-seed0", "tags": ["one", "two"], "group": "small"}
SETTINGS = PairSettings(seed=7)
EVAL = "eval/turn_1/expected_return"
pipelines, pipeline = stages.pipelines, stages.pipeline


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A project folder to work in, and a key that must never be seen again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(tracking, "PATIENCE_S", 3.0)
    (tmp_path / "input.txt").write_text("read", encoding="utf-8")
    yield tmp_path
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_ERROR_REPORTING"):
        os.environ.pop(name, None)


def update(step, *, env_step=0, **values):
    """The rows of one update of the team."""
    place = {"step": step, "env_step": env_step, "tokens": 10 * step, "turn": 0, "agent": -1}
    return [{**place, "name": name, "value": value} for name, value in values.items()]


@contextmanager
def stage(options=None, name="made.txt"):
    """A stage that makes one text file, tracked."""
    inputs, outputs = {"items": Path("input.txt")}, {"made": Path("results/small") / name}
    options = {**OPTIONS, "dir": "results/small", **(options or {})}
    identity = {**flatten("optimize", SETTINGS), "code": "abc"}
    with open_work("optimize", identity, inputs, outputs, {"tracking": options}) as work, open_run(work, SETTINGS):
        yield work
        if not work.finished:
            work.output("made").write_text("made", encoding="utf-8")


def recorded():
    (record,) = RunRecord.all_below(Path("results"))
    return record


def files_with_the_key(folder):
    return [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


# --- what is recorded ---------------------------------------------------------------------------------------------


def test_a_run_says_what_it_belongs_to(folder):
    with stage() as work:
        key = work.key
    run, config = recorded().run, recorded().config
    assert (run.project, run.run_group, run.job_type) == ("teams", "small", "optimize")
    assert run.display_name == "small-madpo-seed0" and list(run.tags) == ["one", "two"]
    assert {name: config[name] for name in SETTINGS.model_dump()} == SETTINGS.model_dump()
    assert config["work"]["key"] == key and config["work"]["provenance"] == {"code": "abc"}
    assert recorded().exit_code == 0
    assert files_with_the_key(folder) == []


def test_inputs_and_outputs_are_named_by_digest_and_their_content_stays_here():
    with stage():
        pass
    record = recorded()
    assert record.artifacts(used=True) == {"input.txt": artifact_digest(Path("input.txt"))}
    assert record.artifacts(used=False) == {"small-made.txt": artifact_digest(Path("results/small/made.txt"))}
    contents = [Path(file.local_path) for one in record.of_kind("artifact") for file in one.manifest.contents]
    assert {path.read_text(encoding="utf-8") for path in contents} == {path.name for path in contents}


def test_numbers_of_reinforcement_learning_stand_over_env_steps():
    with stage() as work:
        work.track(update(1, env_step=8, loss=0.5))
        work.track([*update(2, env_step=16, loss=0.25), {**update(2, env_step=16, kl=0.1)[0], "agent": 1}])
    record = recorded()
    assert record.axes == {"*": "env_step"} and record.steps == [1, 2]
    first, second = record.history
    assert (first["env_step"], first["tokens"], first["loss"]) == (8, 10, 0.5)
    assert (second["env_step"], second["loss"], second["agent_1/kl"]) == (16, 0.25, 0.1)


def test_numbers_of_training_on_pairs_stand_over_steps():
    with stage() as work:
        work.track(update(0, held_out_accuracy=0.5))
        work.track(update(1, loss=0.5))
        work.track(update(1, changed_share=1.0))
    record = recorded()
    assert record.axes == {"*": "step"} and record.steps == [0, 1]
    assert record.history[1]["loss"] == 0.5 and record.history[1]["changed_share"] == 1.0


def test_metrics_of_an_evaluation_keep_their_names():
    with stage() as work:
        work.track([{"name": "eval/turn_1/reward_mean", "value": 0.5}, {"name": "eval/items", "value": 4}])
    (row,) = recorded().history
    assert row["eval/turn_1/reward_mean"] == 0.5 and row["eval/items"] == 4
    assert recorded().axes == {}


def test_a_stage_that_fails_is_a_failed_run():
    with pytest.raises(UserError, match="wrong"), stage() as work:
        work.track(update(1, loss=0.5))
        raise UserError("wrong")
    assert recorded().exit_code == 1 and recorded().steps == [1]


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "name"),
    [({}, "x"), ({"agent": 0}, "agent_0/x"), ({"turn": 2}, "turn_2/x"), ({"turn": 1, "agent": 1}, "agent_1/turn_1/x")],
)
def test_names_say_agent_and_turn(place, name):
    assert metric_name({"agent": -1, "turn": 0, **place, "name": "x"}) == name


def test_numbers_of_one_turn_have_the_names_of_comlrl_too():
    rows = update(1, env_step=8, reward_mean=0.75, loss=1.0)
    for agent, (kl, length) in enumerate([(0.5, 10.0), (0.25, 40.0)]):
        own = {"kl": kl, "kl_penalty": 0.1 * kl * length, "length_mean": length}
        rows += [{**row, "agent": agent} for row in update(1, env_step=8, **own)]
    assert comlrl_metrics(rows) == {
        "turn_1/reward_mean": 0.75,
        "turn_1/expected_return": 0.75,
        "turn_1/reference_kl_mean": 7.5,  # 5 and 10 nats per response
        "turn_1/reference_kl_penalty_mean": pytest.approx(0.75),
    }


def test_numbers_of_several_turns_have_the_names_of_comlrl_by_turn():
    rows = update(1, env_step=8, reward_mean=0.5, kl=9.0, kl_penalty=9.0, length_mean=9.0)  # of the whole step
    for turn, (reward, expected) in enumerate([(0.25, 1.0), (0.75, 0.75)], start=1):
        own = update(1, env_step=8, reward_mean=reward, expected_return=expected)
        for agent in (0, 1):
            found = {"kl": 0.5 * turn, "kl_penalty": 0.125 * turn, "length_mean": 10.0}
            own += [{**row, "agent": agent} for row in update(1, env_step=8, **found)]
        rows += [{**row, "turn": turn} for row in own]
    assert comlrl_metrics(rows) == {
        "turn_1/reward_mean": 0.25,
        "turn_1/expected_return": 1.0,
        "turn_1/reference_kl_mean": 5.0,
        "turn_1/reference_kl_penalty_mean": 0.125,
        "turn_2/reward_mean": 0.75,
        "turn_2/expected_return": 0.75,
        "turn_2/reference_kl_mean": 10.0,
        "turn_2/reference_kl_penalty_mean": 0.25,
    }


def test_validation_stands_over_env_steps_from_before_the_first():
    with stage() as work:
        work.track([{**row, "phase": "validation"} for row in update(0, **{EVAL: 0.5})])
        work.track(update(1, env_step=8, reward_mean=0.25))
        work.track([{**row, "phase": "validation"} for row in update(1, env_step=8, **{EVAL: 0.75})])
    record = recorded()
    assert record.axes == {"*": "env_step"} and record.steps == [0, 1]
    assert [(row["env_step"], row[EVAL]) for row in record.history] == [(0, 0.5), (8, 0.75)]
    assert "turn_1/reward_mean" not in record.history[0] and record.history[1]["turn_1/reward_mean"] == 0.25


def test_a_preference_loss_has_no_names_of_reinforcement_learning():
    rows = update(1, loss=1.0, kl=0.1)
    rows += [{**row, "agent": agent} for agent in (0, 1) for row in update(1, kl=0.1, length_mean=4.0)]
    assert comlrl_metrics(rows) == {}


# --- kills --------------------------------------------------------------------------------------------------------


def train(pipeline, folder, options, stop_after=None):
    """MARLHF, tracked or not; four updates, and validation before the first and after every second."""
    settings = reinforcement_settings(items_per_step=2, epochs=2, eval_interval=12, eval_num_samples=1)
    outputs = {"policy": folder / "policy", "training_log": folder / "training_log.parquet"}
    inputs = {**pipeline.marlhf_inputs(), "validation": pipeline.eval}
    given = (flatten("optimize", settings), inputs, outputs)
    runtime = {"checkpoint_interval": 1, "tracking": options}
    with open_work("optimize", *given, runtime) as work, open_run(work, settings):
        if stop_after is not None:
            work.progress = lambda total, label: interrupt_after(stop_after)
        importlib.import_module("comlrl_stages.stages.optimize").run(settings, work)
    return outputs


def interrupt_after(units):
    done = 0

    def advance(n=1, note="", kept=False):
        nonlocal done
        done += n
        if done >= units:
            raise KeyboardInterrupt

    return advance


def test_a_training_that_was_killed_goes_on_in_its_run_to_the_same_bytes(pipeline, folder):
    options = {**OPTIONS, "dir": str(folder / "tracked")}
    with pytest.raises(KeyboardInterrupt):
        train(pipeline, folder / "tracked", options, stop_after=2)
    tracked = train(pipeline, folder / "tracked", options)
    plain = train(pipeline, folder / "plain", None)
    assert files_of(*tracked.values()) == files_of(*plain.values())
    first, second = RunRecord.all_below(folder / "tracked")
    assert first.run.run_id == second.run.run_id
    assert first.steps == [0, 1, 2] and second.steps == [0, 1, 2, 3, 4]
    assert [row["env_step"] for row in second.history] == [0, 6, 12, 18, 24]
    assert second.axes == {"*": "env_step"}
    assert second.history[2]["agent_0/loss"] == first.history[2]["agent_0/loss"]
    assert {"turn_1/reward_mean", "turn_1/reference_kl_mean", "agent_1/changed_share"} <= set(second.history[4])
    validated = [step for step, row in zip(second.steps, second.history, strict=True) if EVAL in row]
    assert validated == [0, 2, 4]


def test_other_work_is_another_run():
    with stage():
        pass
    with stage(name="other.txt"):
        pass
    first, second = RunRecord.all_below(Path("results"))
    assert first.run.run_id != second.run.run_id


def test_a_kill_while_the_upload_is_waited_for_loses_nothing():
    inputs, outputs = {"items": Path("input.txt")}, {"made": Path("results/made.txt")}
    runtime = {"tracking": {**OPTIONS, "dir": "results"}}
    with pytest.raises(KeyboardInterrupt), open_work("optimize", {}, inputs, outputs, runtime) as work:
        with open_run(work, SETTINGS):
            work.output("made").write_text("made", encoding="utf-8")
        raise KeyboardInterrupt
    with open_work("optimize", {}, inputs, outputs, runtime) as work, open_run(work, SETTINGS):
        assert work.finished
    assert read_manifest(Path("results/made.txt"))["files"]["made.txt"]["bytes"] == 4
    first, second = RunRecord.all_below(Path("results"))
    assert first.run.run_id == second.run.run_id and second.artifacts(used=False) == first.artifacts(used=False)


def test_the_server_gets_each_step_once_over_a_kill(folder, monkeypatch, capsys):
    with Server().running() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with pytest.raises(KeyboardInterrupt), stage({"mode": "online"}) as work:
            for step in (1, 2, 3):
                work.track(update(step, env_step=8 * step, loss=1.0 / step))
            raise KeyboardInterrupt
        with stage({"mode": "online"}) as work:
            work.track([*update(1, env_step=8, loss=1.0), *update(2, env_step=16, loss=0.5)])  # of the checkpoint
            for step in (3, 4, 5):
                work.track(update(step, env_step=8 * step, loss=1.0 / step))
    (rows,) = server.history.values()
    assert [(row["_step"], row["env_step"], row["loss"]) for row in rows] == [(s, 8 * s, 1.0 / s) for s in range(1, 6)]
    assert server.exit_codes == [1, 0]
    told = capsys.readouterr().err
    assert f"W&B: {server.url}/team/teams/runs/" in told
    assert KEY not in told and files_with_the_key(folder) == []


# --- what fails ---------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def told_by_a_tracked_stage(capsys, options=None):
    with stage(options) as work:
        work.track(update(1, loss=0.5))
    assert Path("results/small/made.txt").read_text(encoding="utf-8") == "made"
    return [line for line in capsys.readouterr().err.splitlines() if line]


@pytest.mark.parametrize("status", [403, 500])
def test_a_server_that_refuses_leaves_a_record_to_upload_later(status, folder, monkeypatch, capsys):
    with Server(status).running() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        warning, hint = told_by_a_tracked_stage(capsys, {"mode": "online"})
    assert server.requests
    assert warning.startswith("W&B: the server cannot be used (") and KEY not in warning
    assert "wandb sync results/small/wandb/offline-run-" in hint
    assert recorded().steps == [1] and files_with_the_key(folder) == []


def test_no_server_leaves_a_record_to_upload_later(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    warning, hint = told_by_a_tracked_stage(capsys, {"mode": "online"})
    assert warning.startswith("W&B: the server cannot be used (") and "wandb sync" in hint
    assert recorded().steps == [1]


def test_no_key_leaves_a_record_to_upload_later(monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY")
    warning, hint = told_by_a_tracked_stage(capsys, {"mode": "online"})
    assert warning == "W&B: WANDB_API_KEY is not set" and "wandb sync" in hint
    assert recorded().steps == [1]


def test_a_server_that_refuses_the_lineage_has_the_numbers(monkeypatch, capsys):
    with Server().running() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        _, warning = told_by_a_tracked_stage(capsys, {"mode": "online"})
    assert warning.startswith("W&B: inputs and outputs are not shown (")
    (rows,) = server.history.values()
    assert [row["_step"] for row in rows] == [1] and server.exit_codes == [0]


def test_an_upload_that_cannot_end_is_waited_for_a_while_only(monkeypatch, capsys):
    started = time.monotonic()
    with Server().running() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with pytest.raises(UserError, match="wrong"), stage({"mode": "online"}) as work:
            server.status = 500
            work.track(update(1, loss=0.5))
            raise UserError("wrong")
    assert time.monotonic() - started < 4 * tracking.PATIENCE_S
    assert "W&B: not everything is uploaded (TimeoutError" in capsys.readouterr().err


def test_without_the_client_the_stage_goes_on(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    (warning,) = told_by_a_tracked_stage(capsys)
    assert warning.startswith("W&B: given up, the stage goes on without it (ModuleNotFoundError")


def test_without_a_folder_the_stage_goes_on(capsys):
    (warning,) = told_by_a_tracked_stage(capsys, {"dir": "input.txt/below"})
    assert warning.startswith("W&B: given up, the stage goes on without it (NotADirectoryError")


def test_when_the_client_dies_the_stage_goes_on(capsys):
    with stage() as work:
        work.track(update(1, loss=0.5))
        work.tracker.__self__._run.log = lambda *given, **named: 1 / 0
        work.track(update(2, loss=0.5))
        work.track(update(3, loss=0.5))
    _, warning = capsys.readouterr().err.splitlines()
    assert warning == "W&B: given up, the stage goes on without it (ZeroDivisionError: division by zero)"


# --- off, and options ---------------------------------------------------------------------------------------------


def test_the_client_is_not_loaded_where_tracking_is_off():
    code = (
        "import sys; from pathlib import Path; from comlrl_stages.artifacts import open_work\n"
        "from comlrl_stages.settings import PairSettings; from comlrl_stages.tracking import open_run\n"
        "with open_work('pair', {}, {}, {'made': Path('made.txt')}, {'tracking': None}) as work:\n"
        "    with open_run(work, PairSettings()):\n"
        "        work.track([{'name': 'x', 'value': 1.0}]); work.output('made').write_text('made')\n"
        "assert 'wandb' not in sys.modules and not Path('results').exists()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_options_of_a_job_are_one_string_and_no_part_of_its_identity():
    text = 'runtime.tracking={"mode": "offline", "tags": ["a b"], "group": "small"}'
    _, runtime, tracked = parse_settings("pair", ["pair.seed=1", text])
    assert runtime["tracking"] == {"mode": "offline", "tags": ["a b"], "group": "small"}
    assert tracked == {"pair.seed": "1"}
    assert parse_settings("pair", ["runtime.tracking=null"])[1] == {"tracking": None}
    with pytest.raises(UserError, match="api_key: unknown key"):
        parse_settings("pair", ['runtime.tracking={"api_key": "x"}'])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"wandb": {"projekt": "x"}}, "tracking.wandb.projekt: unknown key (nearest: 'project')"),
        ({"wandb": {"api_key": KEY}}, "tracking.wandb.api_key: unknown key"),
        ({"wandb": {"project": "a/b"}}, "tracking.wandb.project"),
        ({"wandb": {"tags": ["a", "a"]}}, "tag 'a' stands twice"),
        ({"wandb": {"mode": "disabled"}}, "tracking.wandb.mode"),
    ],
)
def test_a_mistake_in_the_options_is_told(given, told):
    with pytest.raises(UserError) as refused:
        parse(Experiment, {"task": "length_ratio", "team": "tiny", "methods": ["base"], "tracking": given}, "x.yaml")
    assert told in str(refused.value) and KEY not in str(refused.value)


def test_tracking_is_off_by_default_and_when_left_empty():
    for given in ({}, {"tracking": None}, {"tracking": {}}, {"tracking": {"wandb": None}}):
        values = {"task": "length_ratio", "team": "tiny", "methods": ["base"], **given}
        assert parse(Experiment, values, "x.yaml").tracking.wandb is None
