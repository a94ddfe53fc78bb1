"""The command line: light, honest about mistakes, and never at work without its workflow."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from comlrl_stages.artifacts import COMPLETIONS, open_work, read_manifest, table_of, write_table
from comlrl_stages.cli import app
from comlrl_stages.provenance import code_fingerprint
from comlrl_stages.settings import SETTINGS

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "comlrl_stages.cli"]
STAGES = sorted(name.replace("_", "-") for name in ["optimize", *SETTINGS])
#: Runs the command line, once per group of arguments, and says which heavy libraries it loaded (pydantic is typer's
#: own choice).
WATCHED = """
import sys
from comlrl_stages.cli import app
for arguments in sys.argv[1:]:
    app(arguments.split(), standalone_mode=False, prog_name="comlrl-stages")
heavy = ("torch", "transformers", "pandas", "pyarrow", "numpy", "yaml", "matplotlib", "comlrl_stages.config")
print("loaded:", *(name for name in heavy if name in sys.modules))
"""


def run(*arguments, cwd=ROOT, **environment):
    command = [*COMMAND, *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "300", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)


def loaded(*commands):
    """The heavy libraries that commands load, and what they print."""
    command = [sys.executable, "-c", WATCHED, *commands]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    printed, _, libraries = done.stdout.rpartition("loaded:")
    return set(libraries.split()), printed


# --- light --------------------------------------------------------------------------------------------------------


def test_every_stage_is_a_subcommand():
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert names >= set(STAGES)


def test_help_of_every_command_loads_nothing_heavy():
    commands = ["", *STAGES, "settings", "config", "config check"]
    libraries, text = loaded(*(f"{command} --help" for command in commands))
    assert libraries == set()
    assert all(f"Usage: comlrl-stages {command}".strip() in text for command in commands)


def test_listing_settings_loads_no_torch():
    libraries, text = loaded("settings sample-evaluation")
    assert libraries <= {"comlrl_stages.config", "yaml"} and "sample_evaluation.samples_per_task  (default 16)" in text


def test_stages_without_a_model_load_no_torch(tmp_path):
    outputs = f"--train {tmp_path}/train.parquet --eval {tmp_path}/eval.parquet"
    libraries, _ = loaded(f"split {outputs} split.task.name=length_ratio")
    assert not libraries & {"torch", "transformers"}
    assert read_manifest(tmp_path / "train.parquet")["counts"]["rows"] == 16


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["pair", "pair.sead=1"], "error: settings of pair: sead: unknown key (nearest: 'seed')"),
        (["pair", "pair.seed"], "error: setting 'pair.seed': expected key=value"),
        (["pair"], "is not a finished artifact. Run the stage that makes it"),
        (["settings", "pare"], "error: no stage 'pare'; stages: optimize, prepare"),
        (["config", "check", "--configfile", "nowhere.yaml"], "error: nowhere.yaml: not found (looked for it from"),
    ],
)
def test_a_mistake_is_one_message_and_no_traceback(tmp_path, arguments, told):
    if arguments[0] == "pair":
        arguments = [*arguments, "--rewards", "r", "--completions", "c", "--output", "o"]
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and told in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "o").exists()


def test_a_wrong_option_says_how_the_command_is_used():
    done = run("pair", "--reward", "x")
    assert done.returncode == 2 and "No such option" in done.stderr and "--rewards" in done.stderr


# --- configuration ------------------------------------------------------------------------------------------------


def test_config_check_tells_each_experiment():
    done = run("config", "check")
    assert done.returncode == 0 and "quickstart: 2 agents, 3 methods, 3 seeds: fine" in done.stdout.splitlines()


def test_config_check_tells_mistakes_with_file_and_key(tmp_path):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/mine.yaml").write_text("task: length_ratio\nteam: tiny\nmethods: [base]\nsead: 1\n")
    (tmp_path / "config.yaml").write_text("experiments: [mine]\n")
    done = run("config", "check", "--configfile", tmp_path / "config.yaml")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}/experiments/mine.yaml: sead: unknown key (nearest: 'seeds')")


def test_config_check_names_the_experiments_it_is_asked_for(tmp_path):
    for name, methods in {"good": "[base]", "other": "[base]", "bad": "[bass]"}.items():
        path = tmp_path / "experiments" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"task: length_ratio\nteam: tiny\nmethods: {methods}\npreferences: {{mine: {{}}}}\n")
    (tmp_path / "config.yaml").write_text("experiments: [good]\n")
    check = ("config", "check", "--configfile", tmp_path / "config.yaml")
    assert run(*check).stdout.splitlines() == [
        "warning: good: no method uses preferences.mine",
        "good: 2 agents, 1 methods, 1 seeds: fine",
    ]
    assert "other: 2 agents" in run(*check, "other").stdout
    assert "bad.yaml: methods: method 'bass' needs an algorithm" in run(*check, "bad").stderr
    every = run(*check, "--all")
    assert every.returncode == 1 and "bad.yaml" in every.stderr
    assert run("config", "show", "smollm2").stdout.startswith("experiments:\n  smollm2:")


def test_config_show_prints_every_default_and_lays_overlays_on(tmp_path):
    override = {"override": {"experiments": {"quickstart": {"seeds": [5], "methods": {"madpo": {"beta": 0.5}}}}}}
    (tmp_path / "overlay.yaml").write_text(yaml.safe_dump(override))
    shown = yaml.safe_load(run("config", "show").stdout)
    overlaid = run("config", "show", "--configfile", "config/config.yaml", "--configfile", tmp_path / "overlay.yaml")
    assert shown["experiments"]["quickstart"]["methods"]["madpo"]["loss"] == "sigmoid"
    assert shown["experiments"]["quickstart"]["sampling"]["temperature"] == 1.0
    assert shown["models"]["tiny"]["builtin"] == "tiny"
    changed = yaml.safe_load(overlaid.stdout)["experiments"]["quickstart"]
    assert changed["seeds"] == [5] and changed["methods"]["madpo"]["beta"] == 0.5 and "marlhf" in changed["methods"]


def test_config_shown_is_config_that_can_be_read(tmp_path):
    (tmp_path / "experiments").mkdir()
    shown = yaml.safe_load(run("config", "show").stdout)
    (tmp_path / "experiments/again.yaml").write_text(yaml.safe_dump(shown["experiments"]["quickstart"]))
    (tmp_path / "config.yaml").write_text("experiments: [again]\n")
    again = yaml.safe_load(run("config", "show", "--configfile", tmp_path / "config.yaml").stdout)
    assert again["experiments"]["again"] == shown["experiments"]["quickstart"]


def test_schema_and_reference_are_printed_for_files():
    assert run("config", "schema").stdout == (ROOT / "config/schema.json").read_text(encoding="utf-8")
    assert run("config", "reference").stdout in (ROOT / "config/README.md").read_text(encoding="utf-8")


# --- stages -------------------------------------------------------------------------------------------------------


SPLIT = ["split", "--train", "t.parquet", "--eval", "e.parquet", "split.task.name=length_ratio"]


def test_a_stage_tracks_what_it_was_told_and_not_how_it_ran(tmp_path):
    code = f"code={code_fingerprint(('comlrl_stages.stages.split',))}"
    done = run(*SPLIT, code, "", "runtime.score_workers=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    provenance = json.loads((tmp_path / "t.parquet.provenance.json").read_text())
    assert provenance["tracked"] == {"split.task.name": "length_ratio", "code": code.removeprefix("code=")}


@pytest.mark.parametrize("told", ["code=abc", "task_code=abc", "versions.datasets=0.1", "schema.version=0"])
def test_a_stage_refuses_to_pass_for_other_code_than_its_own(tmp_path, told):
    done = run(*SPLIT, told, cwd=tmp_path)
    assert done.returncode == 1
    assert told in done.stderr and "another clone" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.parquet*"))


def test_arguments_that_changed_places_are_named_with_what_they_got(tmp_path):
    write_table(tmp_path / "completions.parquet", table_of([], COMPLETIONS), COMPLETIONS)
    swapped = ["--rewards", "completions.parquet", "--completions", "rewards.parquet", "--output", "pairs.parquet"]
    done = run("pair", *swapped, cwd=tmp_path)
    assert done.returncode == 1
    told = "error: --rewards: completions.parquet is a table of completions, expected a table of rewards."
    assert done.stderr.startswith(told) and not (tmp_path / "pairs.parquet.partial").exists()
    assert (
        "--items: completions.parquet is a table of completions"
        in run("sample", "--items", "completions.parquet", "--model", "m", "--output", "o.parquet", cwd=tmp_path).stderr
    )


#: A workflow that starts a stage, says its process id, and waits.
WORKFLOW = """
import os, subprocess, sys, time
environment = {**os.environ, "COMLRL_STAGES_WORKFLOW_PID": str(os.getpid())}
stage = subprocess.Popen(sys.argv[1:], env=environment)
print(stage.pid, flush=True)
time.sleep(60)
"""


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def held(tmp_path):
    """A stage's command line whose work in progress this process holds, so that the stage waits."""
    with open_work("split", {}, {}, {"train": tmp_path / "train.parquet"}) as work:
        yield ["split", "--train", str(tmp_path / "train.parquet"), "--eval", str(tmp_path / "eval.parquet")]
        work.output("train").write_text("the end")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at /proc")
def test_a_stage_stops_when_its_workflow_is_killed(held):
    command = [sys.executable, "-c", WORKFLOW, *COMMAND, *held, "split.task.name=length_ratio"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as workflow:
        stage = int(workflow.stdout.readline())
        try:
            assert wait_until(lambda: is_waiting(stage))
            workflow.send_signal(signal.SIGKILL)
            assert wait_until(lambda: not is_running(stage), 10)
        finally:
            workflow.kill()
            if is_running(stage):
                os.kill(stage, signal.SIGKILL)


def is_waiting(stage):
    """Whether the stage got as far as its watch on the workflow: it runs a second thread."""
    try:
        return len(list(Path(f"/proc/{stage}/task").iterdir())) > 1
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at /proc")
def test_a_stage_started_by_hand_needs_no_workflow(held):
    """A process id left over in the environment, which is not the parent's, stops nothing."""
    environment = {**os.environ, "COMLRL_STAGES_WORKFLOW_PID": "1"}
    command = [*COMMAND, *held, "split.task.name=length_ratio"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as stage:
        time.sleep(1.5)
        assert stage.poll() is None
        stage.kill()


@pytest.mark.parametrize(
    ("items", "prompt", "told"),
    [
        ("sys.exit(0)", "'a'", "sys.exit"),
        ("[{'prompt': 'a'}, {'prompt': 'b'}]", "os._exit(0)", "the formatter of agent_0"),
    ],
)
def test_a_task_that_ends_its_process_does_not_pass_for_a_stage_that_ended_well(tmp_path, items, prompt, told):
    (tmp_path / "mine.py").write_text(
        f"import os, sys\n\nclass Task:\n    agents = 1\n    def items(self):\n        return {items}\n"
        f"    def formatters(self, item):\n        return {prompt}\n"
        "    def reward(self, texts):\n        return [0.0 for _ in texts]\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "comlrl_stages.cli", "split", "--train", "train.parquet", "--eval", "eval.parquet"]
    settings = ["split.task.file=mine.py", "split.task.object=Task", "split.agents=1"]
    done = subprocess.run([*command, *settings], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert told in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "train.parquet").exists()
