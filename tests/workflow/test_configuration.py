"""What the configuration makes of the workflow: overlays, shadowed files, shared work, and mistakes, told at once."""

import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import yaml

from .conftest import EXPERIMENT, Workflow, make_workflow

SMALL = ("--config", "experiments=small")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """A project in which nothing has run. Tests add files of their own and run nothing but dry runs."""
    return make_workflow(tmp_path_factory.mktemp("configuration"))


def cli(workflow: Workflow, *arguments: str) -> subprocess.CompletedProcess:
    """Run `comlrl-stages` in the project folder."""
    command = [sys.executable, "-m", "comlrl_stages.cli", *arguments]
    return subprocess.run(command, **workflow.process(), check=False)


# --- values laid over the files -----------------------------------------------------------------------------------

OVERLAY = {"override": {"experiments": {"small": {"seeds": [3], "methods": {"madpo": {"beta": 0.7}}}}}}


def test_an_overlay_file_changes_what_it_names_and_nothing_else(project: Workflow) -> None:
    project.write("overlay.yaml", yaml.safe_dump({"experiments": ["small"], **OVERLAY}))
    plan = project.run("-n", "-p", "--configfile", "overlay.yaml")
    assert set(re.findall(r"experiment=small, seed=(\d+)", plan)) == {"3"}
    assert set(re.findall(r"optimize\.beta=([\d.]+)", plan)) == {"0.7"}
    assert "sample.candidates=4" in plan and "method=marlhf" in plan


def test_an_override_on_the_command_line_runs_exactly_what_reads_it(finished: Workflow) -> None:
    override = "override={experiments: {small: {methods: {madpo: {beta: 0.7}}}}}"
    jobs = finished.jobs(*SMALL, override)
    assert set(jobs) - {"all"} == {"optimize", "sample_evaluation", "evaluate", "export", "card", "report"}
    assert all("method=madpo" in job for rule in set(jobs) - {"all", "report"} for job in jobs[rule])


def test_values_of_an_override_on_the_command_line_keep_their_types(project: Workflow) -> None:
    arguments = '{think: false, depth: 2, year: "2024"}'
    override = f"override={{experiments: {{small: {{seeds: 7, team: {{template_arguments: {arguments}}}}}}}}}"
    plan = project.run("-n", "-p", "--until", "sample", *SMALL, override)
    assert '{"depth": 2, "think": false, "year": "2024"}' in plan
    assert "collections/default" in plan and "seed7/" in plan and "seed0/" not in plan


def test_the_command_line_shows_the_configuration_that_the_workflow_runs(project: Workflow) -> None:
    project.write("config/config.yaml", "experiments: [small]\n")
    project.write("config/variant.yaml", yaml.safe_dump(OVERLAY))
    done = cli(project, "config", "show", "--configfile", "config/config.yaml", "--configfile", "config/variant.yaml")
    shown = yaml.safe_load(done.stdout)
    small = shown["experiments"]["small"]
    assert small["seeds"] == [3] and small["methods"]["madpo"]["beta"] == 0.7
    assert small["collections"]["default"]["candidates"] == 4
    assert shown["models"]["tiny"]["pretraining_steps"] == 10, "the project's own model goes before the one that ships"


def test_an_experiment_of_the_project_goes_before_one_that_ships(project: Workflow) -> None:
    project.write_experiment({**EXPERIMENT, "seeds": [8], "methods": ["base"]}, "quickstart")
    jobs = project.jobs("--config", "experiments=quickstart")
    assert jobs["evaluate"] == {"experiment=quickstart, seed=8, method=base"}
    assert "pretraining_steps=10" in project.run("-n", "-p", "--until", "prepare", "--config", "experiments=quickstart")


def test_one_core_is_enough_and_changes_nothing(finished: Workflow) -> None:
    assert "Nothing to be done" in finished.run("-n", *SMALL, cores=1)


# --- shared work --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(project: Workflow) -> dict[str, set[str]]:
    """Jobs of two experiments on one model; in the first, methods and preferences share what they can."""
    sharing = {
        **EXPERIMENT,
        "preferences": {"few": {"pairs_per_task": 1}, "many": {"pairs_per_task": 3}},
        "reward_models": {"joint": {**EXPERIMENT["reward_models"]["default"], "preferences": "many"}},
        "methods": {
            "madpo": {"preferences": "few"},
            "simpo": {"algorithm": "madpo", "loss": "simpo", "reference": "none", "preferences": "many"},
            "marlhf": {"reward_model": "joint"},
            "weak_kl": {"algorithm": "marlhf", "reward_model": "joint", "kl_coefficient": 0.0},
        },
    }
    project.write_experiment(sharing, "sharing")
    project.write_experiment({**EXPERIMENT, "methods": ["base"], "items": {"limit": 5}}, "other")
    return project.jobs("--config", "experiments=[sharing,other]")


def test_two_experiments_prepare_a_common_model_once(shared: dict[str, set[str]]) -> None:
    assert shared["prepare"] == {"model=tiny"}
    assert len(shared["split"]) == len(shared["report"]) == 2


def test_two_preferences_sample_and_score_a_common_collection_once(shared: dict[str, set[str]]) -> None:
    for rule in ("sample", "score"):
        assert shared[rule] == {"experiment=sharing, seed=0, collection=default"}
    assert {job.rpartition("=")[2] for job in shared["pair"]} == {"few", "many"}


def test_two_methods_fit_a_common_reward_model_once(shared: dict[str, set[str]]) -> None:
    assert shared["reward"] == {"experiment=sharing, seed=0, reward_model=joint"}
    assert len(shared["optimize"]) == 4


def test_a_method_without_reference_has_no_job_for_it(shared: dict[str, set[str]]) -> None:
    assert shared["refer"] == {"experiment=sharing, seed=0, method=madpo, round=001"}


def test_an_experiment_of_the_base_team_alone_makes_no_preferences(shared: dict[str, set[str]]) -> None:
    rules = {rule for rule, jobs in shared.items() if any("experiment=other" in job for job in jobs)}
    assert rules == {"split", "sample_evaluation", "evaluate", "report"}


# --- what a method reads ------------------------------------------------------------------------------------------


def plan_of(workflow: Workflow, values: dict, name: str, *arguments: str) -> str:
    """The dry run of a small experiment with other values, its commands included."""
    workflow.write_experiment({**EXPERIMENT, **values}, name)
    return workflow.run("-n", "-p", *arguments, "--config", f"experiments={name}")


def command(plan: str, stage: str, method: str) -> str:
    """The command of a method's stage."""
    (found,) = {line for line in plan.splitlines() if f"exec comlrl-stages {stage} " in line and f"/{method}/" in line}
    return found


def test_a_method_on_the_task_reward_fits_no_reward_model(project: Workflow) -> None:
    jobs = plan_of(project, {"methods": ["base", "magrpo", "iac"]}, "task_reward")
    assert "rule optimize" in jobs and not re.findall(r"^rule (sample|score|pair|reward):", jobs, re.MULTILINE)
    assert "--reward-model" not in command(jobs, "optimize", "magrpo")


def test_every_backend_shares_one_reward_model(project: Workflow) -> None:
    methods = {name: {"algorithm": "marlhf", "backend": name} for name in ("magrpo", "mareinforce", "iac", "maac")}
    plan = plan_of(project, {"methods": methods}, "backends")
    assert len(re.findall(r"^rule reward:", plan, re.MULTILINE)) == 1
    for name in methods:
        assert "--reward-model=results/backends/seed0/reward_models/default" in command(plan, "optimize", name)
        assert f'optimize.algorithm="{name}"' in command(plan, "optimize", name)


def test_critics_start_from_the_models_that_are_named(project: Workflow) -> None:
    project.write("config/models/judge.yaml", yaml.safe_dump({"builtin": "tiny", "pretraining_steps": 5}))
    methods = {
        "iac": {},
        "maac": {"critic_model": "judge"},
        "shared": {"algorithm": "iac", "critic": "shared"},
        "magrpo": {},
    }
    plan = plan_of(project, {"methods": methods}, "critics")
    found = {name: re.findall(r"--critic-model=(\S+?)'? ", command(plan, "optimize", name)) for name in methods}
    tiny, judge = "results/models/tiny", "results/models/judge"
    assert found == {"iac": [tiny, tiny], "maac": [judge], "shared": [], "magrpo": []}
    assert "wildcards: model=judge" in plan


def test_validation_items_are_split_where_some_are_kept_apart(project: Workflow) -> None:
    methods = {"magrpo": {"eval_interval": 8}, "maac": {}}
    plan = plan_of(project, {"items": {"limit": 10, "validation_fraction": 0.25}, "methods": methods}, "validated")
    assert "rule split_with_validation:" in plan and "rule split:" not in plan
    path = "results/validated/split/validation.parquet"
    assert f"--validation {path}" in plan
    assert f"--validation={path}" in command(plan, "optimize", "magrpo")
    assert "--validation" not in command(plan, "optimize", "maac")
    assert "--validation" not in plan_of(project, {"methods": ["base"]}, "unvalidated")


def test_both_kinds_of_experiments_run_side_by_side(project: Workflow) -> None:
    project.write_experiment({**EXPERIMENT, "methods": ["base"], "items": {"validation_fraction": 0.25}}, "three.way")
    project.write_experiment({**EXPERIMENT, "methods": ["base"]}, "two-way")
    jobs = project.jobs("--config", "experiments=[three.way,two-way]")
    assert (jobs["split_with_validation"], jobs["split"]) == ({"experiment=three.way"}, {"experiment=two-way"})


def test_adapters_are_merged_into_the_models_that_they_belong_to(project: Workflow) -> None:
    methods = {"whole": {"algorithm": "magrpo"}, "adapters": {"algorithm": "madpo", "lora": {"rank": 4}}}
    plan = plan_of(project, {"methods": methods}, "adapted")
    for stage in ("export", "sample-evaluation"):
        assert command(plan, stage, "adapters").count("--model=results/models/tiny") == 2
    assert "--model" not in command(plan, "export", "whole")


def test_kept_checkpoints_are_told_and_not_recorded(project: Workflow) -> None:
    kept = {"keep_checkpoints": True, "schedule_steps": 100}
    plan = plan_of(project, {"methods": {"magrpo": kept, "madpo": {}}}, "kept")
    assert "runtime.keep_checkpoints=true" in command(plan, "optimize", "magrpo")
    assert "runtime.keep_checkpoints=false" in command(plan, "optimize", "madpo")


def test_a_team_of_an_earlier_run_goes_on(project: Workflow, finished: Workflow) -> None:
    run = finished.folder / "results/small/seed0/methods/madpo/export"
    plan = plan_of(project, {"team": {"model": {"path": str(run)}}, "methods": ["base", "magrpo"]}, "again")
    for agent in range(2):
        assert f"wildcards: model=again.agent_{agent}" in plan and f"{run}/agent_{agent}" in plan
    models = re.findall(r"--model=results/models/(\S+?)'? ", command(plan, "optimize", "magrpo"))
    assert models == ["again.agent_0", "again.agent_1"]


# --- mistakes -----------------------------------------------------------------------------------------------------

THREE_AGENTS = "class Task:\n    items = [{'prompt': 'a'}]\n\n    def reward(one, two, three):\n        return [0.0]\n"
#: By experiment: what differs from the small one, and what is said of it.
MISTAKES = {
    "unknown-key": (
        {"seads": [1]},
        "config/experiments/unknown-key.yaml: seads: unknown key (nearest: 'seeds'). Valid here: description, task,",
    ),
    "unknown-key-inside": (
        {"methods": {"madpo": {"betta": 1}}},
        "config/experiments/unknown-key-inside.yaml: methods.madpo.betta: unknown key (nearest: 'beta')",
    ),
    "wrong-value": (
        {"seeds": [-1], "sampling": {"temperature": "hot"}},
        "config/experiments/wrong-value.yaml: sampling.temperature: Input should be a valid number",
    ),
    "unknown-model": ({"team": "large"}, "team, reward_models or methods: no model 'large'"),
    "unknown-task": ({"task": "lenght_ratio"}, "'lenght_ratio'"),
    "too-many-agents": (
        {"team": {"model": "tiny", "agents": 3}},
        "experiment too-many-agents: the team has 3 agents, but the reward and formatters of the task are for 2. "
        "Change team.agents (or team.models) or the task.",
    ),
    "too-few-agents": (
        {"task": {"file": "tasks/three.py"}},
        "experiment too-few-agents: the team has 2 agents, but the reward and formatters of the task are for 3.",
    ),
    "missing-task": ({"task": {"file": "tasks/missing.py"}}, "tasks/missing.py: not found (looked for it from"),
    "missing-object": ({"task": {"file": "tasks/three.py", "object": "Tusk"}}, "has no object named 'Tusk'"),
    "syntax-error": ({"task": {"file": "tasks/syntax.py"}}, "tasks/syntax.py: is not valid Python: '(' was never"),
    "import-error": ({"task": {"file": "tasks/importing.py"}}, "No module named 'no_such_module'"),
    "missing-items": (
        {"items": "data/missing.jsonl"},
        "experiment missing-items: items: data/missing.jsonl: not found (looked for data/missing.jsonl from",
    ),
    "unknown-parameter": ({"scoring": {"parameters": {"strict": 1}}}, "scoring.parameters.strict: the reward function"),
}


@pytest.fixture(scope="module")
def mistaken(project: Workflow) -> Workflow:
    project.write("tasks/three.py", THREE_AGENTS)
    project.write("tasks/syntax.py", "class Task:\n    def reward(one, two:\n        return [0.0]\n")
    project.write("tasks/importing.py", "import no_such_module\n")
    for name, (changes, _) in MISTAKES.items():
        project.write_experiment({**deepcopy(EXPERIMENT), **changes}, name)
    project.write("config/experiments/broken.yaml", "task: [length_ratio\n")
    return project


def refusal(workflow: Workflow, *arguments: str) -> str:
    """What a run that ends at a mistake says of it, to the end of its output. The run must have made nothing."""
    done = subprocess.run(workflow.command(*arguments), **workflow.process(), check=False)
    assert done.returncode == 1, done.stdout
    _, found, told = done.stdout.partition("error: ")
    assert found and "Traceback" not in done.stdout and ".smk" not in done.stdout
    assert not re.search(r'File "[^"]*(comlrl_stages|site-packages)/', done.stdout)
    assert not (workflow.folder / "results").exists()
    return told.strip()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_an_experiment_is_one_readable_message_before_any_work(mistaken: Workflow, name: str) -> None:
    assert MISTAKES[name][1] in refusal(mistaken, "--config", f"experiments={name}")


@pytest.mark.parametrize("name", ["unknown-key", "too-few-agents", "syntax-error", "missing-items"])
def test_the_check_of_the_command_line_says_the_same(mistaken: Workflow, name: str) -> None:
    mistaken.write("check.yaml", f"experiments: [{name}]\n")
    done = cli(mistaken, "config", "check", "--configfile", "check.yaml")
    assert done.returncode == 1
    assert done.stdout.strip() == f"error: {refusal(mistaken, '--config', f'experiments={name}')}"


def test_every_mistake_of_a_file_is_told_at_once(mistaken: Workflow) -> None:
    told = refusal(mistaken, "--config", "experiments=wrong-value").splitlines()
    assert len(told) == 2 and "seeds.0" in told[0] + told[1]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("experiments=smal", "no experiment 'smal' (config/experiments/smal.yaml or "),
        ("experiments=broken", "config/experiments/broken.yaml: is not valid YAML"),
        ("experiments=models", "an experiment cannot be called 'models'"),
        ("experiments=[]", "experiments: List should have at least 1 item"),
        ("experiment=small", "experiment: unknown key (nearest: 'experiments')"),
        ("override={experiments: {smal: {}}}", "override.experiments.smal: no experiment 'smal'"),
        (
            "override={experiments: {small: {seeds: [0]}",
            "--config override=...: is not valid YAML: while parsing a flow",
        ),
        ("experiments=[small", "--config experiments=...: is not valid YAML: while parsing a flow sequence"),
        ("experiments=[small,small]", "experiments: 'small' stands twice"),
        ("experiments=a.partial", "'a.partial' cannot be a name: a name does not end in"),
    ],
)
def test_a_mistake_on_the_command_line_is_told_before_any_work(mistaken: Workflow, config: str, told: str) -> None:
    assert told in refusal(mistaken, "--config", config)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "config/config.yaml: expected a mapping of keys to values, found an empty file"),
        ("experiments:\n\t- small\n", "(line 2, column 1); indent with spaces, not with tabs"),
        ("experiments: [small\n", "config/config.yaml: is not valid YAML: while parsing a flow sequence"),
        ("- small\n", "config/config.yaml: expected a mapping of keys to values, found list"),
        (
            "experiments: [a]\nexperiments: [b]\n",
            "config/config.yaml: is not valid YAML: key 'experiments' stands twice",
        ),
        ("experiments: null\n", "config.yaml, overlays and --config: experiments: is missing and has no default"),
    ],
)
def test_a_broken_config_yaml_is_one_message_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    workflow = make_workflow(tmp_path)
    (workflow.code / "config" / "config.yaml").write_text(text, encoding="utf-8")
    said = refusal(workflow, "-n")
    assert told in said and len(said.splitlines()) == 1


def test_what_no_method_uses_is_a_warning_and_stops_nothing(project: Workflow) -> None:
    project.write_experiment({**deepcopy(EXPERIMENT), "collections": {"default": {}, "wide": {}}}, "idle")
    plan = project.run("-n", "--until", "split", "--config", "experiments=idle")
    assert "warning: idle: no method uses collections.wide\n" in plan and "rule split" in plan


# --- Snakemake's own report ---------------------------------------------------------------------------------------


def test_snakemakes_report_holds_the_pages_with_their_captions(finished: Workflow, tmp_path: Path) -> None:
    pytest.importorskip("pygments")
    finished.run("--report", str(tmp_path / "out.html"), *SMALL)
    html = (tmp_path / "out.html").read_text(encoding="utf-8")
    for caption in (
        "The full report of the experiment small: scores, curves, samples, provenance.",
        "One row per method and seed of small; intervals are 95 % bootstrap over items and samples.",
        "Model card of the team trained by madpo with seed 0.",
        "Model card of the team trained by marlhf with seed 0.",
    ):
        assert caption in html
