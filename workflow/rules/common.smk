"""Names of inputs, and what every rule is told. The logic is in the package; these functions only name things."""

import os
import sys
from itertools import product

from comlrl_stages.checks import check_project
from comlrl_stages.config import Base, Madpo, Marlhf, used_reward_models
from comlrl_stages.errors import UserError
from comlrl_stages.project import load_project
from comlrl_stages.provenance import tracked as tracked_settings
from comlrl_stages.settings import instances

# The stages run with the interpreter that runs the workflow, even where its environment is not activated.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# A stage whose workflow has died stops by this.
os.environ["COMLRL_STAGES_WORKFLOW_PID"] = str(os.getpid())

CONFIG_FOLDERS = list(dict.fromkeys([Path("config"), Path(workflow.basedir) / "config"]))

try:
    project = load_project(config, CONFIG_FOLDERS)
    list(check_project(project))
except UserError as error:
    raise WorkflowError(str(error))


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
        raise WorkflowError(str(error))


def runtime(key):
    """A value that decides no byte. A function of `threads` is not recorded, so its change runs nothing."""

    def value(wildcards, threads):
        return f"runtime.{key}={getattr(experiment_of(wildcards).runtime, key)}"

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


def manifest(artifact):
    """The file that says that an artifact is done."""
    return f"{artifact}.manifest.json"


def base_models(wildcards):
    """Model folders of the agents, in actor order."""
    return [f"results/models/{name}" for name in experiment_of(wildcards).team.model_names()]


def base_model_manifests(wildcards):
    return [manifest(folder) for folder in dict.fromkeys(base_models(wildcards))]


def base_model_arguments(wildcards):
    return options("model", base_models(wildcards))


def seed_folder(wildcards):
    return f"results/{wildcards.experiment}/seed{wildcards.seed}"


def collection_table(wildcards, preferences, table):
    """A table of the collection that some preferences compare."""
    collection = experiment_of(wildcards).preferences[preferences].collection
    return f"{seed_folder(wildcards)}/collections/{collection}/{table}.parquet"


def preferences_of_reward_model(wildcards):
    return experiment_of(wildcards).reward_models[wildcards.reward_model].preferences


def pairs_table(wildcards, preferences):
    return f"{seed_folder(wildcards)}/preferences/{preferences}/pairs.parquet"


def reward_model_backbone(wildcards):
    experiment = experiment_of(wildcards)
    given = experiment.reward_models[wildcards.reward_model].model
    return f"results/models/{given or experiment.team.model_names()[0]}"


def trained_methods(experiment):
    return [name for name, method in experiment.methods.items() if not isinstance(method, Base)]


def policy_of(wildcards):
    """The policy of a method's last round; the base team has none."""
    if isinstance(method_of(wildcards), Base):
        return []
    return f"{seed_folder(wildcards)}/methods/{wildcards.method}/round001/policy"


def reports():
    return [f"results/{experiment}/report/report.html" for experiment in project.experiments]


def cards():
    return [
        f"results/{name}/seed{seed}/methods/{method}/card.md"
        for name, experiment in project.experiments.items()
        for seed, method in product(experiment.seeds, trained_methods(experiment))
    ]
