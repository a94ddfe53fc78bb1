"""The command line: one subcommand per stage, as the workflow calls them, and commands for configuration and results.

This module only parses. It stays light: `--help` loads neither torch nor pandas; a stage is imported when it runs.
"""

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from comlrl_stages.errors import UserError, machine_fault

app = typer.Typer(
    help="Cooperative training of teams of LLM agents, stage by stage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Check, show and document the configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SETTING]...",
        help="settings as stage.key=<json>, for example pair.pairs_per_task=8; what is left out takes its default. "
        "`comlrl-stages settings STAGE` lists them",
        show_default=False,
    ),
]


def _path(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


def _table(kind: str, text: str, *names: str) -> Any:
    """An option for tables of one kind; tables of another are refused before any work."""

    def check(value: Any) -> Any:
        for path in value if isinstance(value, list) else [value]:
            if path is not None and path.is_file():
                from comlrl_stages.inputs import check_kind

                check_kind(names[0], path, kind)
        return value

    return typer.Option(*names, help=text, show_default=False, callback=check)


Items = Annotated[Path, _table("task items", "table of task items", "--items")]
Models = Annotated[list[Path], _path("model folder of an agent; once per agent, in actor order", "--model")]
Completions = Annotated[Path, _table("completions", "table of completions", "--completions")]
Rewards = Annotated[Path, _table("rewards", "table of rewards", "--rewards")]
Pairs = Annotated[Path, _table("pairs", "table of preference pairs", "--pairs")]
Output = Annotated[Path, _path("what the stage makes", "--output")]
TrainingLog = Annotated[Path, _path("training log to write", "--training-log")]


# --- stages -------------------------------------------------------------------------------------------------------


@app.command()
def prepare(output: Output, settings: Settings = None) -> None:
    """Fetch, convert or make one language model: a folder with safetensors, tokenizer and resolved facts."""
    _run("prepare", settings, {}, {"model": output})


@app.command()
def split(
    train: Annotated[Path, _path("training items to write", "--train")],
    evaluation: Annotated[Path, _path("eval items to write", "--eval")],
    validation: Annotated[Path | None, _path("validation items to write", "--validation")] = None,
    settings: Settings = None,
) -> None:
    """Read the task items, check them against the task, and split them into train, eval (and validation)."""
    outputs = {"train": train, "eval": evaluation} | ({"validation": validation} if validation else {})
    _run("split", settings, {}, outputs)


@app.command()
def sample(items: Items, model: Models, output: Output, settings: Settings = None) -> None:
    """Sample joint responses of the base team: every prompt, candidate and agent."""
    _run("sample", settings, {"items": items, "models": model}, {"completions": output})


@app.command()
def score(items: Items, completions: Completions, output: Output, settings: Settings = None) -> None:
    """Score each joint response by the task's reward."""
    _run("score", settings, {"train": items, "completions": completions}, {"rewards": output})


@app.command()
def pair(rewards: Rewards, completions: Completions, output: Output, settings: Settings = None) -> None:
    """Make preference pairs from scored joint responses."""
    _run("pair", settings, {"rewards": rewards, "completions": completions}, {"pairs": output})


@app.command()
def replay(pairs: Pairs, output: Output, settings: Settings = None) -> None:
    """Say which pairs train, and in which order."""
    _run("replay", settings, {"pairs": pairs}, {"training_pairs": output})


@app.command()
def refer(
    pairs: Pairs,
    completions: Completions,
    rewards: Rewards,
    model: Models,
    output: Output,
    settings: Settings = None,
) -> None:
    """Compute the reference policy's log-probabilities of the pairs' responses, once."""
    inputs = {"pairs": pairs, "completions": completions, "rewards": rewards, "models": model}
    _run("refer", settings, inputs, {"reference_log_probs": output})


@app.command()
def reward(
    items: Items,
    pairs: Pairs,
    completions: Completions,
    rewards: Rewards,
    model: Annotated[Path, _path("model folder of the backbone", "--model")],
    output: Output,
    training_log: TrainingLog,
    settings: Settings = None,
) -> None:
    """Fit the joint reward model on preference pairs and measure it on held-out items."""
    inputs = {"items": items, "pairs": pairs, "completions": completions, "rewards": rewards, "model": model}
    _run("reward", settings, inputs, {"reward_model": output, "training_log": training_log})


@app.command()
def optimize(
    model: Models,
    output: Output,
    training_log: TrainingLog,
    items: Annotated[Path | None, _table("task items", "training items (reinforcement learning)", "--items")] = None,
    validation: Annotated[
        Path | None, _table("task items", "validation items (evaluation while training)", "--validation")
    ] = None,
    reward_model: Annotated[Path | None, _path("fitted reward model that is maximised", "--reward-model")] = None,
    critic_model: Annotated[
        list[Path] | None, _path("model folder of a critic; once per agent (iac), or once (maac)", "--critic-model")
    ] = None,
    pairs: Annotated[Path | None, _table("pairs", "preference pairs (madpo)", "--pairs")] = None,
    completions: Annotated[
        Path | None, _table("completions", "completions of the pairs (madpo)", "--completions")
    ] = None,
    rewards: Annotated[Path | None, _table("rewards", "rewards of the pairs (madpo)", "--rewards")] = None,
    training_pairs: Annotated[
        Path | None, _table("training pairs", "which pairs train, in order (madpo)", "--training-pairs")
    ] = None,
    reference_log_probs: Annotated[
        Path | None, _table("reference log probs", "reference log-probs (madpo)", "--reference-log-probs")
    ] = None,
    settings: Settings = None,
) -> None:
    """Train the team: `optimize.algorithm` names the algorithm. Goes on from its last checkpoint after a kill."""
    inputs = {
        "models": model,
        "items": items,
        "validation": validation,
        "reward_model": reward_model,
        "critic_models": critic_model or None,
        "pairs": pairs,
        "completions": completions,
        "rewards": rewards,
        "training_pairs": training_pairs,
        "reference_log_probs": reference_log_probs,
    }
    _run("optimize", settings, inputs, {"policy": output, "training_log": training_log})


@app.command("sample-evaluation")
def sample_evaluation(
    items: Annotated[Path, _path("eval items", "--items")],
    train_items: Annotated[Path, _path("training items", "--train-items")],
    model: Models,
    output: Output,
    policy: Annotated[Path | None, _path("trained policy; without it the base team is evaluated", "--policy")] = None,
    settings: Settings = None,
) -> None:
    """Sample a team's joint responses for evaluation."""
    inputs = {"eval": items, "train": train_items, "models": model, "policy": policy}
    _run("sample_evaluation", settings, inputs, {"completions": output})


@app.command()
def evaluate(
    items: Annotated[Path, _path("eval items", "--items")],
    train_items: Annotated[Path, _path("training items", "--train-items")],
    completions: Completions,
    output: Output,
    metrics: Annotated[Path, _path("metrics to write", "--metrics")],
    settings: Settings = None,
) -> None:
    """Score a team's evaluation responses by the task's reward and compute its metrics."""
    inputs = {"eval": items, "train": train_items, "completions": completions}
    _run("evaluate", settings, inputs, {"evaluation": output, "metrics": metrics})


@app.command()
def export(
    policy: Annotated[Path, _path("trained policy", "--policy")],
    output: Output,
    model: Annotated[list[Path] | None, _path("base model of an agent (LoRA); once per agent", "--model")] = None,
    settings: Settings = None,
) -> None:
    """Export a trained team: agent_0, agent_1, ... loadable by from_pretrained, with checksums and provenance."""
    _run("export", settings, {"policy": policy, "models": model or None}, {"export": output})


@app.command()
def card(
    export: Annotated[Path, _path("exported team; the card is also put into its folders", "--export")],
    metrics: Annotated[Path, _path("metrics of the team", "--metrics")],
    base_metrics: Annotated[Path | None, _path("metrics of the untrained team", "--base-metrics")] = None,
    output: Output = Path("card.md"),
    settings: Settings = None,
) -> None:
    """Write the model card of an exported team."""
    inputs = {"export": export, "metrics": metrics, "base_metrics": base_metrics}
    _run("card", settings, inputs, {"card": output})


@app.command()
def report(
    evaluation: Annotated[
        list[Path], _table("evaluation", "evaluation table; once per method and seed", "--evaluation")
    ],
    output: Output,
    training_log: Annotated[
        list[Path] | None, _table("training log", "training log; repeatable", "--training-log")
    ] = None,
    reward_model: Annotated[list[Path] | None, _path("reward model; repeatable", "--reward-model")] = None,
    artifact: Annotated[list[Path] | None, _path("further artifact to list; repeatable", "--artifact")] = None,
    settings: Settings = None,
) -> None:
    """Compare the methods of an experiment: one page, summary tables, figures."""
    inputs = {
        "evaluations": evaluation,
        "training_logs": training_log or [],
        "reward_models": reward_model or [],
        "artifacts": artifact or [],
    }
    _run("report", settings, inputs, {"report": output})


@app.command("settings")
def show_settings(stage: Annotated[str, typer.Argument(help="a stage, for example pair or optimize")]) -> None:
    """List the settings of a stage with their defaults."""
    from comlrl_stages.settings import describe_settings

    print(describe_settings(stage.replace("-", "_")))


def _run(stage: str, strings: list[str] | None, inputs: Mapping[str, Any], outputs: Mapping[str, Path]) -> None:
    """Parse the settings, open the work, run the stage."""
    _stop_with_parent()  # before anything that takes time
    # Idle OpenMP threads must sleep: spinning ones slow every other stage on the machine down, up to seven times.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from comlrl_stages.artifacts import open_work
    from comlrl_stages.provenance import check_surroundings
    from comlrl_stages.settings import parse_settings
    from comlrl_stages.tracking import open_run

    settings, runtime, tracked = parse_settings(stage, [string for string in strings or [] if string])
    check_surroundings(stage, settings, tracked)
    with open_work(stage, tracked, inputs, outputs, runtime) as work, open_run(work, settings):
        if not work.finished:
            try:
                with _no_early_end():
                    importlib.import_module(f"comlrl_stages.stages.{stage}").run(settings, work)
            except SystemExit as end:
                raise UserError(f"the task's code called sys.exit({end.code!r}); let it raise an exception") from end


@contextmanager
def _no_early_end() -> Iterator[None]:
    """Make os._exit raise SystemExit in this process: in a task's code it would pass for a stage that ended well."""
    end, stage = os._exit, os.getpid()

    def refuse(code: int) -> None:
        if os.getpid() != stage:  # a forked process of a library
            end(code)
        raise SystemExit(code)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = end


def _stop_with_parent() -> None:
    """Stop when the Snakemake that started this stage is gone: an orphan must not work beside its successor."""
    workflow = os.environ.get("COMLRL_STAGES_WORKFLOW_PID")
    if workflow is None or os.getppid() != int(workflow):
        return

    def watch() -> None:
        while os.getppid() == int(workflow):
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


# --- configuration ------------------------------------------------------------------------------------------------

CONFIG = Path("config/config.yaml")
ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option("--configfile", help="config/config.yaml and overlays, later ones win", show_default=False),
]


Experiments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[EXPERIMENT]...", help="experiments, in place of those of config.yaml", show_default=False),
]
EveryExperiment = Annotated[bool, typer.Option("--all", help="every experiment of config/experiments")]


@config_app.command()
def check(experiments: Experiments = None, every: EveryExperiment = False, configfile: ConfigFiles = None) -> None:
    """Check experiments, their models and tasks, and make the items and prompts of each as its first stage will.

    Items of the hub are left to that stage. No reward is called and no model is loaded.
    """
    from comlrl_stages.checks import check_items, check_project, check_sources, warnings_of

    project = _project(configfile, experiments, every)
    check_sources(project)
    lines = list(check_project(project))
    for line in [*check_items(project), *warnings_of(project), *lines]:
        print(line)


@config_app.command()
def show(experiments: Experiments = None, every: EveryExperiment = False, configfile: ConfigFiles = None) -> None:
    """Print the resolved experiments and models, defaults included, as YAML."""
    import yaml

    project = _project(configfile, experiments, every)
    resolved = {
        "experiments": {name: e.model_dump(mode="json") for name, e in project.experiments.items()},
        "models": {name: m.model_dump(mode="json") for name, m in project.models.items()},
    }
    print(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), end="")


@config_app.command()
def schema() -> None:
    """Print the JSON schema of the configuration files (kept in config/schema.json, for editors)."""
    from comlrl_stages.config_reference import json_schema

    print(json_schema(), end="")


@config_app.command()
def reference() -> None:
    """Print the reference of all keys (kept in config/README.md)."""
    from comlrl_stages.config_reference import markdown

    print(markdown(), end="")


@config_app.command("describe-task", hidden=True)
def describe_task(task: Annotated[str, typer.Argument(help="the experiment's `task`, as JSON")]) -> None:
    """Load a task and print what it has, as JSON."""
    import json

    from comlrl_stages.checks import describe
    from comlrl_stages.config import Task

    print(json.dumps(describe(Task.model_validate_json(task))))


def _project(configfiles: list[Path] | None, experiments: list[str] | None = None, every: bool = False) -> Any:
    """The checked project, of the `experiments` given or of `every` one where they stand for the configuration's."""
    from comlrl_stages.project import known_names, load_project

    config, folders, origin = _config(configfiles)
    named = known_names(folders, "experiments") if every else experiments
    return load_project({**config, "experiments": named} if named else config, folders, origin)


def _config(configfiles: list[Path] | None) -> tuple[dict[str, Any], list[Path], str]:
    """The configuration, the folders of its experiments and models, and its name in messages."""
    from comlrl_stages.project import merge, read_yaml

    files = configfiles or [CONFIG]
    config: dict[str, Any] = {}
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: not found (looked for it from {Path.cwd()}); name it with --configfile")
        config = merge(config, read_yaml(file))
    folders = list(dict.fromkeys([Path("config"), *(file.parent for file in files)]))
    return config, folders, " + ".join(str(file) for file in files)


# --- looking after results ----------------------------------------------------------------------------------------

Folder = Annotated[Path, typer.Argument(help="`results` or anything below, for example results/quickstart")]


@app.command()
def verify(
    folder: Folder = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
    configfile: ConfigFiles = None,
) -> None:
    """Check results: their bytes against the manifests, their provenance against the present configuration and code.

    Ends with 0 if all is well, with 1 if something is damaged or would be made in another way now.
    """
    from comlrl_stages import condition, upkeep

    findings = upkeep.verify(*condition.results_of(*_config(configfile), folder))
    print(upkeep.verification_json(findings) if as_json else "\n".join(upkeep.verification_text(findings)))
    if not upkeep.is_well(findings):
        raise typer.Exit(1)


@app.command()
def status(
    experiments: Experiments = None,
    every_artifact: Annotated[bool, typer.Option("--long", help="also a line per artifact")] = False,
    configfile: ConfigFiles = None,
) -> None:
    """Say where each experiment stands: done, partial, stale and missing per stage, what would run, and why."""
    from comlrl_stages.condition import Results
    from comlrl_stages.jobs import jobs_of
    from comlrl_stages.status import conditions, status_text

    project = _project(configfile, experiments)
    for name in project.experiments:
        found = conditions(Results(project, Path.cwd(), jobs_of(project, [name])))
        print("\n".join(status_text(name, found, every_artifact=every_artifact)))


@app.command()
def accept(
    folder: Folder,
    snakefile: Annotated[
        Path | None, typer.Option("--snakefile", "-s", help="as for snakemake", show_default=False)
    ] = None,
    configfile: ConfigFiles = None,
) -> None:
    """Keep results after a refactor or an update of libraries, as if the present code had made them.

    Shows what differs. Changed settings, inputs or files are refused. The provenance keeps what it said before.
    """
    from comlrl_stages import condition, upkeep

    acceptance = upkeep.acceptance_of(*condition.results_of(*_config(configfile), folder))
    for line in acceptance.lines():
        print(line)
    upkeep.accept(acceptance, configfile or [CONFIG], snakefile)
    print(f"accepted: {len(acceptance.differences)} artifacts that differed; Snakemake's records say so, too")


@app.command()
def prune(
    folder: Folder = Path("results"),
    yes: Annotated[bool, typer.Option("--yes", help="delete without a question")] = False,
    configfile: ConfigFiles = None,
) -> None:
    """Delete unfinished work that no job of the present configuration goes on from. Lists it, then asks."""
    from comlrl_stages.condition import results_of
    from comlrl_stages.pruning import asking, prune

    for line in prune(*results_of(*_config(configfile), folder), asking(yes, typer.confirm)):
        print(line, flush=True)


@app.command()
def push(
    export: Annotated[Path, typer.Argument(help="exported team: results/<experiment>/seed<n>/methods/<method>/export")],
    repo: Annotated[str, _path("repository on the hub, owner/name", "--repo")],
    private: Annotated[bool, typer.Option("--private/--public", help="who may see a new repository")] = True,
    yes: Annotated[bool, typer.Option("--yes", help="upload without a question")] = False,
) -> None:
    """Upload an exported team to the Hugging Face hub. Checks its digests, says what would be uploaded, and asks."""
    from comlrl_stages import publishing

    plan = publishing.plan(export, repo, private)
    print(plan.summary(), flush=True)
    if not yes:
        typer.confirm("Upload?", abort=True)
    print(f"pushed: {publishing.upload(plan)}")


def main() -> None:
    """Entry point of `comlrl-stages`: a user's mistake or a full disk is a message and exit code 1, no traceback."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    except Exception as error:
        fault = machine_fault(error)
        if fault is None:
            raise
        print(f"error: {fault}", file=sys.stderr)
        _leave(1)
    _leave(0)


def _leave(code: int) -> None:
    """End at once: a stage that is killed while its libraries tidy up has published, but counts as failed.

    And without memory or disk the libraries' own tidying would fail with a traceback.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
