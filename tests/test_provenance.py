"""What makes a stage run again: its settings, the code and data it reads, and nothing else."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from comlrl_stages import provenance, registry
from comlrl_stages.config import Task
from comlrl_stages.errors import UserError
from comlrl_stages.job_settings import instances
from comlrl_stages.project import load_project
from comlrl_stages.provenance import LIBRARIES, OUTSIDE, TASK_PARTS, strings, task_fingerprint, tracked
from comlrl_stages.settings import SETTINGS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "comlrl_stages"
STAGES = ["optimize", *SETTINGS]
#: Prints the code fingerprint of every job of the shipped quickstart, as JSON.
PRINT_FINGERPRINTS = """
import json, sys
from pathlib import Path
from comlrl_stages import provenance
from comlrl_stages.project import load_project
from comlrl_stages.job_settings import instances
from comlrl_stages.settings import SETTINGS
project = load_project({"experiments": "quickstart"}, [Path(sys.argv[1])])
found = {}
for stage in ["optimize", *SETTINGS]:
    for wildcards in instances(project, stage):
        strings = provenance.strings(project, stage, wildcards)
        name = f"{stage} {wildcards.method}" if stage == "optimize" else stage
        found[name] = [strings.get("code"), strings.get("task_code")]
print(json.dumps([provenance.__file__, found]))
"""


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path, monkeypatch):
    """Each test stands in a folder of its own, and nothing is known from an earlier one."""
    monkeypatch.chdir(tmp_path)
    for remembering in (provenance._task_fingerprint, provenance._data_digest):
        remembering.cache_clear()


def write(path, text):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def project_of(folder, experiment, **override):
    write(folder / "experiments/mine.yaml", experiment)
    return load_project(
        {"experiments": "mine", "override": {"experiments": {"mine": override}}}, [folder, ROOT / "config"]
    )


def wildcards_of(**names):
    """What Snakemake hands to a parameter function."""
    return SimpleNamespace(**names, items=lambda: names.items())


def values_of(parameters, **names):
    return {value(wildcards_of(**names)) for value in parameters.values()}


MINIMAL = "task: length_ratio\nteam: tiny\nmethods: [base, madpo]\n"
JOB = {"experiment": "mine", "seed": "0"}

# --- the parameters of a rule -------------------------------------------------------------------------------------


def test_a_parameter_names_its_key_and_value(tmp_path):
    values = values_of(tracked(project_of(tmp_path, MINIMAL), "pair"), **JOB, preferences="default")
    assert {'pair.selection="reward_gap"', "pair.seed=0", "pair.min_gap=0.0", "schema.version=1", ""} <= values
    assert [value for value in values if re.fullmatch("code=[0-9a-f]{16}", value)]


def test_parameters_are_texts_under_names_that_snakemake_leaves_alone(tmp_path):
    project = project_of(tmp_path, MINIMAL)
    for stage in STAGES:
        assert all(name.startswith("setting_") for name in tracked(project, stage))


@pytest.mark.parametrize("stage", ["sample", "sample_evaluation", "optimize", "refer", "reward", "prepare"])
def test_versions_of_the_libraries_that_decide_numbers_are_tracked(tmp_path, stage):
    project = project_of(tmp_path, MINIMAL, methods=["madpo", "marlhf"])
    wildcards = next(iter(instances(project, stage)))
    assert {f"versions.{library}" for library in LIBRARIES[stage]} <= set(strings(project, stage, wildcards))
    assert "torch" in LIBRARIES[stage]


def test_braces_in_a_prompt_template_survive(tmp_path):
    project = project_of(tmp_path, MINIMAL, task={"options": {"template": "Q: {question} {experiment}"}})
    values = values_of(tracked(project, "sample"), **JOB, collection="default")
    assert 'sample.task.options={"template": "Q: {question} {experiment}"}' in values


def test_a_setting_changes_the_strings_of_the_stages_that_read_it(tmp_path):
    names = {
        "collection": "default",
        "preferences": "default",
        "method": "madpo",
        "round": "001",
        "reward_model": "default",
    }
    changed = {
        "pair": {"preferences": {"default": {"min_gap": 0.25}}},
        "sample": {"collections": {"default": {"candidates": 4}}},
        "optimize": {"methods": {"madpo": {"beta": 0.2}}},
        "score": {"scoring": {"time_limit_s": 5}},
        "sample_evaluation": {"evaluation": {"samples_per_task": 2}},
    }
    stages = [
        "split",
        "sample",
        "score",
        "pair",
        "replay",
        "refer",
        "optimize",
        "sample_evaluation",
        "evaluate",
        "export",
    ]
    before = {s: values_of(tracked(project_of(tmp_path, MINIMAL), s), **JOB, **names) for s in stages}
    for stage, override in changed.items():
        project = project_of(tmp_path, MINIMAL, **override)
        differing = {s for s in stages if values_of(tracked(project, s), **JOB, **names) != before[s]}
        assert differing == ({"score", "evaluate"} if stage == "score" else {stage})


def test_another_method_beside_it_changes_nothing_of_a_job(tmp_path):
    job = {**JOB, "method": "madpo", "round": "001"}
    alone = tracked(project_of(tmp_path, MINIMAL), "optimize")
    both = tracked(project_of(tmp_path, MINIMAL, methods={"marlhf": {}}), "optimize")
    assert len(both) > len(alone) and values_of(both, **job) == values_of(alone, **job)


def test_runtime_settings_change_nothing(tmp_path):
    override = {"runtime": {"score_workers": 7, "checkpoint_interval": 1}, "seeds": [0, 1], "description": ""}
    one, other = project_of(tmp_path, MINIMAL), project_of(tmp_path, MINIMAL, **override)
    for stage, names in (("score", {"collection": "default"}), ("optimize", {"method": "madpo", "round": "001"})):
        assert values_of(tracked(one, stage), **JOB, **names) == values_of(tracked(other, stage), **JOB, **names)


# --- code ---------------------------------------------------------------------------------------------------------


def copied(folder):
    shutil.copytree(PACKAGE, folder / "comlrl_stages", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "comlrl_stages"


@pytest.fixture
def copy(tmp_path):
    """A copy of the package that a test may edit."""
    return copied(tmp_path / "copy")


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """The fingerprints of the package as it is."""
    return fingerprints(copied(tmp_path_factory.mktemp("before")))


def fingerprints(package):
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PRINT_FINGERPRINTS, str(ROOT / "config")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=package.parent, check=False)
    assert done.returncode == 0, done.stderr
    file, found = json.loads(done.stdout)
    assert Path(file).is_relative_to(package)
    return found


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def changed(before, after):
    return {name for name in before if before[name] != after[name]}


def test_comments_docstrings_and_layout_change_no_fingerprint(copy, before):
    for path in copy.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tree.body[:1] = ast.parse('"""Another docstring."""').body
        path.write_text(f"# a comment\n\n\n{ast.unparse(tree)}\n\n", encoding="utf-8")
    assert fingerprints(copy) == before


def test_an_edited_algorithm_changes_its_own_training_only(copy, before):
    write(copy / "learning/madpo.py", (copy / "learning/madpo.py").read_text(encoding="utf-8") + "\nEDITED = 1\n")
    assert changed(before, fingerprints(copy)) == {"optimize madpo"}


def test_an_edited_policy_gradient_changes_marlhf_only(copy, before):
    path = copy / "stages/optimize_group.py"
    write(path, path.read_text(encoding="utf-8") + "\nEDITED = 1\n")
    assert changed(before, fingerprints(copy)) == {"optimize marlhf"}


def test_an_edited_sampler_changes_all_that_sample(copy, before):
    path = copy / "teams/sampling.py"
    write(path, path.read_text(encoding="utf-8") + "\nEDITED = 1\n")
    edited = changed(before, fingerprints(copy))
    assert edited >= {"sample", "sample_evaluation", "optimize marlhf"}
    assert edited.isdisjoint({"split", "score", "pair", "replay", "report", "card", "evaluate"})


def test_what_reads_moves_or_shows_changes_nothing(copy, before):
    edit(copy / "config.py", "class Runtime(Strict):", "class Runtime(Strict):\n    more: int = 3\n")
    for name in OUTSIDE - {"comlrl_stages.config"}:
        path = copy / f"{name.rpartition('.')[2]}.py"
        write(path, path.read_text(encoding="utf-8") + "\nEDITED = 1\n")
    assert fingerprints(copy) == before


def test_an_edited_page_template_changes_the_report_only(copy, before):
    edit(copy / "reporting/template.html", "</html>", "<!-- edited --></html>")
    assert changed(before, fingerprints(copy)) == {"report"}


def test_an_edited_reward_of_a_shipped_task_does_not_sample_again(copy, before):
    edit(copy / "tasks/length_ratio.py", "return math.exp(-distance)", "return 2 * math.exp(-distance)")
    assert changed(before, fingerprints(copy)) == {"score", "evaluate", "optimize marlhf"}


def test_an_edited_formatter_of_a_shipped_task_does_not_score_again(copy, before):
    edit(copy / "tasks/length_ratio.py", "Write a short response", "Write a brief response")
    assert changed(before, fingerprints(copy)) == {"sample", "sample_evaluation", "optimize marlhf"}


def test_an_added_task_or_algorithm_changes_nothing(copy, before):
    edit(copy / "registry.py", "TASKS = {", 'TASKS = {\n    "another": "comlrl_stages.tasks.another",')
    write(copy / "tasks/another.py", "class Task:\n    pass\n")
    assert fingerprints(copy) == before


def closure(stage, *more):
    return {
        name.removeprefix("comlrl_stages.") for name in provenance._closure([f"comlrl_stages.stages.{stage}", *more])
    }


@pytest.mark.parametrize("stage", ["split", "score", "pair", "replay", "evaluate", "report", "card"])
def test_stages_without_a_model_have_no_module_with_torch(stage):
    modules = closure(stage)
    assert not [name for name in modules if name.startswith("teams.")]
    for name in modules:
        tree = ast.parse(provenance._file(f"comlrl_stages.{name}").read_text(encoding="utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        assert not {module for module in imported if module.split(".")[0] in ("torch", "transformers")}, name


@pytest.mark.parametrize(
    ("stage", "needed"),
    [
        ("prepare", "teams.tiny teams.tiny_corpus teams.loading seeding"),
        ("split", "tasks.items tasks.sources tasks.protocol"),
        (
            "sample",
            "teams.sampling teams.prompts teams.loading teams.compute rollouts.single_turn tasks.protocol seeding",
        ),
        ("sample_evaluation", "teams.sampling teams.log_probs teams.prompts rollouts.single_turn seeding"),
        ("score", "tasks.scoring tasks.protocol rollouts.joint"),
        ("evaluate", "tasks.scoring tasks.protocol reporting.statistics rollouts.joint seeding"),
        ("pair", "preferences.selection preferences.joint_responses seeding"),
        ("refer", "teams.log_probs teams.loading preferences.joint_responses"),
        (
            "reward",
            "teams.reward_model learning.bradley_terry learning.optimization preferences.joint_responses seeding",
        ),
        ("optimize", "learning.optimization teams.loading"),
        ("report", "reporting.page reporting.figures reporting.statistics reporting.summary"),
    ],
)
def test_the_code_of_a_stage_is_all_that_it_runs(stage, needed):
    assert {f"stages.{stage}", *needed.split()} <= closure(stage)


def test_every_stage_has_a_module():
    for stage in STAGES:
        assert (PACKAGE / f"stages/{stage}.py").is_file()
        assert closure(stage).isdisjoint({name.removeprefix("comlrl_stages.") for name in OUTSIDE})


def test_an_algorithm_is_no_part_of_another():
    names = ("madpo", "magrpo", "maac")
    madpo, magrpo, maac = (closure("optimize", registry.ALGORITHMS[name]) for name in names)
    assert "learning.madpo" in madpo - magrpo - maac and "learning.actor_critic" in maac - magrpo - madpo
    assert {"learning.policy_gradient", "teams.reward_model", "tasks.scoring"} <= (magrpo & maac) - madpo
    own = {"stages.optimize_madpo", "stages.optimize_group", "stages.optimize_actor_critic"}
    assert not closure("optimize") & own


def test_modules_outside_every_closure_exist():
    assert all(provenance._file(name) for name in OUTSIDE)


def test_registered_modules_exist():
    for name in (*registry.ALGORITHMS.values(), *registry.TASKS.values()):
        assert provenance._file(name), name


def test_shipped_tasks_use_nothing_of_the_package_that_their_fingerprint_misses():
    followed = {"comlrl_stages.tasks", *registry.TASKS.values()}
    for name in registry.TASKS.values():
        assert set(provenance._imports(name)) <= {"comlrl_stages.errors"} | followed


# --- a user's task ------------------------------------------------------------------------------------------------

TASK = '''"""A task."""
import math
from words import count

LIMIT = 3
UNUSED = 1


def helper_of_reward(text):
    """Only the reward calls it."""
    return math.sqrt(count(text)) * LIMIT


def first(item):
    return "first: " + item["prompt"]


class Task:
    """Two agents."""

    formatters = [first, first]
    reward_scope = "team"

    def items(self):
        return [{"prompt": "a"}, {"prompt": "b"}]

    def reward(self, one, two):
        return [helper_of_reward(x + y) for x, y in zip(one, two)]

    def metrics_callback(self, rows):
        return {"mean": 1.0}
'''


def task_fingerprints(text=TASK, target="Task", words="def count(text):\n    return len(text)\n", folder="."):
    write(f"{folder}/mine.py", text)
    write(f"{folder}/words.py", words)
    provenance._task_fingerprint.cache_clear()
    task = Task(file=f"{folder}/mine.py", object=target)
    return {stage: task_fingerprint(task, parts) for stage, parts in TASK_PARTS.items()}


def rerun(old, new, text=TASK, target="Task"):
    assert old in text
    return changed(task_fingerprints(text, target), task_fingerprints(text.replace(old, new), target))


SCORING = {"score", "evaluate", "optimize"}
PROMPTING = {"sample", "sample_evaluation", "optimize"}


@pytest.mark.parametrize(
    ("old", "new", "stages"),
    [
        ("helper_of_reward(x + y) for", "helper_of_reward(y + x) for", SCORING),
        ("math.sqrt", "math.log1p", SCORING),
        ("LIMIT = 3", "LIMIT = 4", SCORING),
        ('"first: "', '"1st: "', PROMPTING),
        ('{"prompt": "b"}', '{"prompt": "c"}', {"split"}),
        ('{"mean": 1.0}', '{"mean": 2.0}', {"evaluate", "optimize"}),
        ('reward_scope = "team"', 'reward_scope = "agent"', SCORING),
        ("UNUSED = 1", "UNUSED = 2", set()),
        ('"""A task."""', "# nothing", set()),
        ('"""Only the reward calls it."""', '"""The reward calls it."""', set()),
        ("\n\n\ndef first", "\n# the first agent's\ndef first", set()),
        ("class Task:", "print()\n\n\nclass Task:", set(TASK_PARTS)),
    ],
)
def test_an_edit_of_a_task_concerns_the_stages_that_run_the_edited_part(old, new, stages):
    assert rerun(old, new) == stages


MODULE = (
    TASK.partition("class Task:")[0]
    + """formatters = [first, first]


def reward(one, two):
    return [helper_of_reward(x + y) for x, y in zip(one, two)]
"""
)


@pytest.mark.parametrize(
    ("old", "new", "stages"),
    [
        ("math.sqrt", "math.log1p", SCORING),
        ('"first: "', '"1st: "', PROMPTING),
        ("zip(one, two)", "zip(two, one)", SCORING),
    ],
)
def test_a_module_that_is_the_task_is_taken_apart_as_well(old, new, stages):
    assert rerun(old, new, MODULE, target=None) == stages


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("    formatters = [first, first]", "    def formatters(self, item):\n        return self.items()"),
        ("    formatters = [first, first]", "    def formatters(self, item):\n        return Task.items(self)"),
    ],
)
def test_a_part_that_another_part_uses_counts_for_both(one, other):
    text = TASK.replace(one, other)
    assert rerun('{"prompt": "b"}', '{"prompt": "c"}', text) == {"split", *PROMPTING}


def test_the_items_method_of_a_mapping_is_no_part_of_the_task():
    text = TASK.replace('"first: " + item["prompt"]', "str(sorted(item.items()))")
    assert rerun('{"prompt": "b"}', '{"prompt": "c"}', text) == {"split"}


def test_a_task_that_is_made_by_a_call_counts_whole():
    text = TASK.replace("class Task:", "class Made:") + "\nmade = Made()\n"
    assert rerun("math.sqrt", "math.log1p", text, target="made") == set(TASK_PARTS)


def test_an_imported_file_beside_the_task_counts_where_it_is_used():
    assert changed(task_fingerprints(), task_fingerprints(words="def count(text):\n    return 1\n")) == SCORING


def test_imported_packages_beside_the_task_count_with_what_they_import():
    text = TASK.replace("from words import count", "from tools.lengths import count")
    write("tools/__init__.py", "")
    write("tools/lengths.py", "from . import base\n\n\ndef count(text):\n    return base.size(text)\n")
    write("tools/base.py", "def size(text):\n    return len(text)\n")
    write("tools/other.py", "X = 1\n")
    before = task_fingerprints(text)
    write("tools/other.py", "X = 2\n")
    assert task_fingerprints(text) == before
    write("tools/base.py", "def size(text):\n    return 2 * len(text)\n")
    assert changed(before, task_fingerprints(text)) == SCORING


def test_files_that_import_each_other_end():
    assert task_fingerprints(words="import mine, words\ncount = len\n")


def test_the_folder_of_a_task_changes_nothing():
    assert task_fingerprints(folder="here") == task_fingerprints(folder="there is/another")


def test_options_are_settings_and_no_code(tmp_path):
    one, other = ({"task": {"options": {"target_min": value}}} for value in (1.0, 2.0))
    found = [
        strings(project_of(tmp_path, MINIMAL, **override), "score", SimpleNamespace(**JOB, collection="default"))
        for override in (one, other)
    ]
    assert found[0]["task_code"] == found[1]["task_code"]
    assert found[0]["score.task.options"] == 'score.task.options={"target_min": 1.0}' != found[1]["score.task.options"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"def reward(:\n", "is not valid Python: invalid syntax"),
        (b"x = '\xff'\n", "is not valid Python: "),
        (b"x = 1\x00\n", "is not valid Python: "),
        (None, "not found (looked for it from"),
    ],
)
def test_a_file_that_is_no_python_is_named(tmp_path, content, told):
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as refused:
        task_fingerprint(Task(file=str(file)), ("reward",))
    assert str(refused.value).startswith(f"{file}: ") and told in str(refused.value)


def test_a_folder_is_no_python_file(tmp_path):
    with pytest.raises(UserError, match="cannot be read as a Python file"):
        task_fingerprint(Task(file=str(tmp_path)), ("reward",))


def test_a_task_that_does_not_ship_lists_those_that_do():
    with pytest.raises(UserError, match="'lenght' does not ship; shipped tasks: length_ratio"):
        task_fingerprint(Task(name="lenght"), ("reward",))


# --- data ---------------------------------------------------------------------------------------------------------


def data_digest(source):
    provenance._data_digest.cache_clear()
    provenance._task_fingerprint.cache_clear()
    return provenance._data_digest(str(source))


def test_a_touched_file_is_the_same_and_an_edited_one_is_not():
    file = write("items.jsonl", '{"prompt": "a"}\n')
    before = data_digest(file)
    os.utime(file, (1, 1))
    assert data_digest(file) == before
    write(file, '{"prompt": "b"}\n')
    assert data_digest(file) != before


def test_the_digest_of_a_folder_is_that_of_its_files_and_their_names():
    write("data/a.arrow", "1"), write("data/in/b.arrow", "2")
    before = data_digest("data")
    os.utime("data/a.arrow", (1, 1))
    assert data_digest("data") == before
    os.rename("data/in/b.arrow", "data/in/c.arrow")
    renamed = data_digest("data")
    write("data/a.arrow", "3")
    assert len({before, renamed, data_digest("data")}) == 3


def test_a_function_that_makes_items_counts_by_what_it_runs():
    write("words.py", "W = [1]\n")
    text = "from words import W\n\n\ndef make():\n    return W\n\n\ndef other():\n    return 0\n"
    file = write("data.py", text)
    before = data_digest(f"{file}:make")
    write(file, text.replace("return 0", "return 1") + "# a comment\n")
    assert data_digest(f"{file}:make") == before
    write("words.py", "W = [2]\n")
    assert data_digest(f"{file}:make") != before


def test_a_large_file_is_read_once(monkeypatch):
    monkeypatch.setattr(provenance, "SMALL_FILE", 1)
    file = write("large.jsonl", "one\n")
    os.utime(file, (1, 1))
    before = data_digest(file)
    assert len(list(Path(".snakemake/comlrl_stages").iterdir())) == 1
    file.write_text("two\n")
    os.utime(file, (1, 1))
    assert data_digest(file) == before  # same path, size and time: remembered, not read
    os.utime(file, (2, 2))
    assert data_digest(file) != before


def test_a_large_file_has_the_digest_of_a_small_one(monkeypatch):
    file = write("a.jsonl", "one\n")
    small = data_digest(file)
    monkeypatch.setattr(provenance, "SMALL_FILE", 1)
    assert data_digest(file) == small == data_digest(file)


def test_a_file_inside_a_package_is_found_without_importing_it():
    assert data_digest("package://comlrl_stages/reporting/template.html") == data_digest(
        PACKAGE / "reporting/template.html"
    )


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("nowhere.jsonl", "nowhere.jsonl: not found (looked for nowhere.jsonl from "),
        ("package://no_such_package/a.jsonl", "the Python package 'no_such_package' is not installed"),
        ("package://no_such_package.inner/a.jsonl", "the Python package 'no_such_package.inner' is not installed"),
        ("nowhere.py:make", "nowhere.py: not found"),
    ],
)
def test_data_that_is_missing_is_named(source, told):
    with pytest.raises(UserError) as refused:
        data_digest(source)
    assert told in str(refused.value)


def test_items_from_files_are_tracked_by_the_split_alone(tmp_path):
    write("items.jsonl", '{"prompt": "a"}\n')
    project = project_of(tmp_path, MINIMAL, items={"source": "items.jsonl", "eval_source": "hub://a/b"})
    split = strings(project, "split", SimpleNamespace(experiment="mine"))
    assert split["data.source"] == f"data.source={data_digest('items.jsonl')}" and "data.eval_source" not in split
    assert "data.source" not in strings(project, "sample", SimpleNamespace(**JOB, collection="default"))
