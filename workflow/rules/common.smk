"""What all stages share: the checked project, the settings of each stage, the names of folders."""

import os
import re
import sys
from itertools import product
from types import SimpleNamespace

from comlrl_stages.checks import check_project, check_sources, warnings_of
from comlrl_stages.config import critic_models_of, used_reward_models
from comlrl_stages.config_methods import Base, Madpo, PolicyTraining
from comlrl_stages.errors import UserError
from comlrl_stages.project import from_command_line, load_project, merge
from comlrl_stages.provenance import tracked as tracked_settings
from comlrl_stages.job_settings import instances, tracking_of

# The stages run with the interpreter that runs the workflow, even where its environment is not activated, and stop
# when the workflow has died. Where a user's code goes through a set, it does so in the same order each time.
os.environ.update(
    PATH=os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()]),
    COMLRL_STAGES_WORKFLOW_PID=str(os.getpid()),
    PYTHONHASHSEED="0",
)

SHIPPED_CONFIG = Path(workflow.basedir).resolve() / "config"
# A file of the working directory goes before one that ships.
CONFIG_FOLDERS = [Path("config"), *([SHIPPED_CONFIG] if SHIPPED_CONFIG != Path("config").resolve() else [])]

try:
    given = merge(config, from_command_line(workflow.config_settings.config_args or []))
    project = load_project(given, CONFIG_FOLDERS, "config.yaml, overlays and --config")
    check_sources(project)
    list(check_project(project))
except UserError as error:
    sys.exit(f"error: {error}")  # an exception would be shown with lines of this file

for warning in warnings_of(project):
    print(warning, file=sys.stderr)


wildcard_constraints:
    experiment=r"[\w.\-]+",
    seed=r"\d+",
    round=r"\d{3}",
    collection=r"[\w.\-]+",
    preferences=r"[\w.\-]+",
    reward_model=r"[\w.\-]+",
    method=r"[\w.\-]+",
    model=r"[\w.\-]+",


SEED = "results/{experiment}/seed{seed}"
METHOD = f"{SEED}/methods/{{method}}"
ROUND = f"{METHOD}/round{{round}}"


def tracked(stage):
    """Everything that decides the bytes of a stage; a change of it runs the stage again."""
    try:
        return tracked_settings(project, stage)
    except UserError as error:
        sys.exit(f"error: {error}")


def runtime(key):
    """A value that decides no byte. A function of `threads` is not recorded, so its change runs nothing."""

    def value(wildcards, threads):
        return f"runtime.{key}={getattr(experiment_of(wildcards).runtime, key)}"

    return value


def keep_checkpoints(wildcards, threads):
    """Whether checkpoints outlive a run, so that more epochs go on from there. Not recorded either."""
    return f"runtime.keep_checkpoints={str(getattr(method_of(wildcards), 'keep_checkpoints', False)).lower()}"


def tracking(stage):
    """Where a stage's numbers are shown, or null. Not recorded either."""

    def value(wildcards, threads):
        found = tracking_of(project, stage, wildcards)
        return f"runtime.tracking={found.model_dump_json() if found else 'null'}"

    return value


def arguments(stage, function):
    """Command-line arguments that depend on the job, one parameter each: `{params:q}` quotes only texts rightly."""
    most = max((len(function(job)) for job in instances(project, stage)), default=0)

    def argument(index):
        return lambda wildcards: "".join(function(wildcards)[index : index + 1])

    return {f"argument_{index}": argument(index) for index in range(most)}


def options(name, paths):
    """The option `name` once per path."""
    return [f"--{name}={path}" for path in paths]


def experiment_of(wildcards):
    return project.experiments[wildcards.experiment]


def method_of(wildcards):
    return experiment_of(wildcards).methods[wildcards.method]


def torch_threads(wildcards):
    return experiment_of(wildcards).compute.torch_threads


def score_workers(wildcards):
    return experiment_of(wildcards).runtime.score_workers
