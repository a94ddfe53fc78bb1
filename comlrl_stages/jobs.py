"""Every job of a project: which artifacts it makes, and from which, by path.

The rules in `workflow/rules/` say this to Snakemake. It stands here for the commands that look after results without
Snakemake's records; a test holds the two together. Paths are those of the rules and of the provenance: they start at
`results/`. Inputs have the names under which a stage knows them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

from comlrl_stages.config import Experiment, critic_models_of, reward_model_of, used_reward_models
from comlrl_stages.config_methods import Base, Madpo, PolicyTraining, Reinforcement
from comlrl_stages.job_settings import instances
from comlrl_stages.project import Project

Inputs = dict[str, str | list[str]]

_SEED = "results/{experiment}/seed{seed}"
_METHOD = f"{_SEED}/methods/{{method}}"
_ROUND = f"{_METHOD}/round{{round}}"
#: What each stage makes, in order of execution. Work in progress lies beside the first artifact.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "prepare": ("results/models/{model}",),
    "split": (
        "results/{experiment}/split/train.parquet",
        "results/{experiment}/split/eval.parquet",
        "results/{experiment}/split/validation.parquet",
    ),
    "sample": (f"{_SEED}/collections/{{collection}}/completions.parquet",),
    "score": (f"{_SEED}/collections/{{collection}}/rewards.parquet",),
    "pair": (f"{_SEED}/preferences/{{preferences}}/pairs.parquet",),
    "replay": (f"{_ROUND}/training_pairs.parquet",),
    "refer": (f"{_ROUND}/reference_log_probs.parquet",),
    "reward": (
        f"{_SEED}/reward_models/{{reward_model}}",
        f"{_SEED}/reward_models/{{reward_model}}.training_log.parquet",
    ),
    "optimize": (f"{_ROUND}/policy", f"{_ROUND}/training_log.parquet"),
    "sample_evaluation": (f"{_METHOD}/evaluation/completions.parquet",),
    "evaluate": (f"{_METHOD}/evaluation/evaluation.parquet", f"{_METHOD}/evaluation/metrics.json"),
    "export": (f"{_METHOD}/export",),
    "card": (f"{_METHOD}/card.md",),
    "report": ("results/{experiment}/report",),
}


@dataclass(frozen=True)
class Job:
    """One run of a stage."""

    stage: str
    wildcards: SimpleNamespace
    outputs: tuple[str, ...]
    inputs: Inputs

    @property
    def partial(self) -> str:
        """The folder of its work in progress."""
        return f"{self.outputs[0]}.partial"

    @property
    def title(self) -> str:
        """For people: the stage and what tells this job from the stage's others."""
        wildcards = {name: value for name, value in vars(self.wildcards).items() if value is not None}
        seed = [f"seed {wildcards['seed']}"] if "seed" in wildcards else []
        names = [str(value) for name, value in wildcards.items() if name not in ("experiment", "seed", "round")]
        return f"{self.stage} ({', '.join(names + seed)})" if names + seed else self.stage

    def input_paths(self) -> list[str]:
        """Every artifact that the job reads."""
        return [path for given in self.inputs.values() for path in as_list(given)]


def as_list(given: str | list[str]) -> list[str]:
    """The paths under one name of an input."""
    return given if isinstance(given, list) else [given]


def jobs_of(project: Project, experiments: Sequence[str] | None = None) -> list[Job]:
    """The jobs that the reports and model cards of the experiments (all by default) need, in order of execution."""
    makers = {
        path: (stage, wildcards)
        for stage in OUTPUTS
        for wildcards in instances(project, stage)
        for path in _outputs(project, stage, wildcards)
    }
    found: dict[str, Job] = {}
    waiting = list(_targets(project, experiments or list(project.experiments)))
    while waiting:
        stage, wildcards = makers[waiting.pop()]
        outputs = _outputs(project, stage, wildcards)
        if outputs[0] not in found:
            found[outputs[0]] = Job(stage, wildcards, outputs, _inputs(project, stage, wildcards))
            waiting += found[outputs[0]].input_paths()
    return [found[path] for path in makers if path in found]


def _outputs(project: Project, stage: str, wildcards: SimpleNamespace) -> tuple[str, ...]:
    """Paths that a job makes; the validation items only where some are kept apart."""
    templates = OUTPUTS[stage]
    if stage == "split" and not project.experiments[wildcards.experiment].items.has_validation():
        templates = templates[:2]
    return tuple(template.format(**vars(wildcards)) for template in templates)


def _targets(project: Project, experiments: Sequence[str]) -> Iterator[str]:
    for name in experiments:
        experiment = project.experiments[name]
        yield _path("report", experiment=name)
        for seed, method in product(experiment.seeds, _trained(experiment)):
            yield _path("card", experiment=name, seed=seed, method=method)


# --- what each stage reads ----------------------------------------------------------------------------------------


def _inputs(project: Project, stage: str, wildcards: SimpleNamespace) -> Inputs:
    reads = _READS.get(stage)
    return reads(project.experiments[wildcards.experiment], vars(wildcards)) if reads else {}


def _path(stage: str, number: int = 0, /, **wildcards: Any) -> str:
    return OUTPUTS[stage][number].format(**wildcards)


def _trained(experiment: Experiment) -> list[str]:
    return [name for name, method in experiment.methods.items() if not isinstance(method, Base)]


def _models(experiment: Experiment) -> list[str]:
    return [_path("prepare", model=name) for name in experiment.team.model_names()]


def _train(job: Mapping[str, Any]) -> str:
    return _path("split", 0, **job)


def _eval(job: Mapping[str, Any]) -> str:
    return _path("split", 1, **job)


def _validation(job: Mapping[str, Any]) -> str:
    return _path("split", 2, **job)


def _preferences(experiment: Experiment, job: Mapping[str, Any], name: str) -> Inputs:
    """Pairs, and the collection that they compare."""
    collection = {**job, "collection": experiment.preferences[name].collection}
    return {
        "pairs": _path("pair", **{**job, "preferences": name}),
        "completions": _path("sample", **collection),
        "rewards": _path("score", **collection),
    }


def _policy(job: Mapping[str, Any]) -> str:
    return _path("optimize", **{**job, "round": "001"})


def _sample(experiment: Experiment, job: Mapping[str, Any]) -> Inputs:
    return {"items": _train(job), "models": _models(experiment)}


def _score(experiment: Experiment, job: Mapping[str, Any]) -> Inputs:
    return {"train": _train(job), "completions": _path("sample", **job)}


def _pair(experiment: Experiment, job: Mapping[str, Any]) -> Inputs:
    compared = _preferences(experiment, job, job["preferences"])
    return {name: compared[name] for name in ("rewards", "completions")}


def _replay(experiment: Experiment, job: Mapping[str, Any]) -> Inputs:
    return {"pairs": _path("pair", **job, preferences=experiment.methods[job["method"]].preferences)}


def _refer(experiment: Experiment, job: Mapping[str, Any]) -> Inputs:
    compared = _preferences(experiment, job, experiment.methods[job["method"]].preferences)
    return {**compared, "models": _models(experiment)}


def _reward(experiment: Experiment, job: Mapping[str, Any]) -> Inputs:
    given = experiment.reward_models[job["reward_model"]]
    backbone = _path("prepare", model=given.model or experiment.team.model_names()[0])
    return {"items": _train(job), **_preferences(experiment, job, given.preferences), "model": backbone}


def _optimize(experiment: Experiment, job: Mapping[str, Any]) -> Inputs:
    method = experiment.methods[job["method"]]
    if isinstance(method, Madpo):
        inputs = {**_refer(experiment, job), "training_pairs": _path("replay", **job)}
        reference = {"reference_log_probs": _path("refer", **job)} if method.reference != "none" else {}
        return {**inputs, **reference}
    inputs: Inputs = {"models": _models(experiment), "items": _train(job)}
    if isinstance(method, Reinforcement) and method.eval_interval:
        inputs["validation"] = _validation(job)
    if (reward_model := reward_model_of(method)) is not None:
        inputs["reward_model"] = _path("reward", **job, reward_model=reward_model)
    if critics := critic_models_of(method, experiment.team):
        inputs["critic_models"] = [_path("prepare", model=name) for name in critics]
    return inputs


def _sample_evaluation(experiment: Experiment, job: Mapping[str, Any]) -> Inputs:
    policy = {"policy": _policy(job)} if job["method"] in _trained(experiment) else {}
    return {"eval": _eval(job), "train": _train(job), "models": _models(experiment), **policy}


def _evaluate(experiment: Experiment, job: Mapping[str, Any]) -> Inputs:
    return {"eval": _eval(job), "train": _train(job), "completions": _path("sample_evaluation", **job)}


def _export(experiment: Experiment, job: Mapping[str, Any]) -> Inputs:
    method = experiment.methods[job["method"]]
    adapters = isinstance(method, PolicyTraining) and method.lora is not None
    return {"policy": _policy(job), **({"models": _models(experiment)} if adapters else {})}


def _card(experiment: Experiment, job: Mapping[str, Any]) -> Inputs:
    untrained = [name for name in experiment.methods if name not in _trained(experiment)]
    inputs: Inputs = {"export": _path("export", **job), "metrics": _path("evaluate", 1, **job)}
    if untrained:
        inputs["base_metrics"] = _path("evaluate", 1, **{**job, "method": untrained[0]})
    return inputs


def _report(experiment: Experiment, job: Mapping[str, Any]) -> Inputs:
    def each(stage: str, number: int, kind: str, names: Sequence[str]) -> list[str]:
        all_of = product(names, experiment.seeds)
        return [_path(stage, number, **{**job, kind: name, "seed": seed, "round": "001"}) for name, seed in all_of]

    reward_models = list(used_reward_models(experiment))
    logs = each("optimize", 1, "method", _trained(experiment)) + each("reward", 1, "reward_model", reward_models)
    return {
        "evaluations": each("evaluate", 0, "method", list(experiment.methods)),
        "training_logs": logs,
        "reward_models": each("reward", 0, "reward_model", reward_models),
        "artifacts": _listed(experiment, job),
    }


def _listed(experiment: Experiment, job: Mapping[str, Any]) -> list[str]:
    """Further artifacts that the report tells of."""
    found = [*_models(experiment), _train(job), _eval(job)]
    found += [_validation(job)] if experiment.items.has_validation() else []
    used = {
        *(model.preferences for model in used_reward_models(experiment).values()),
        *(method.preferences for method in experiment.methods.values() if isinstance(method, Madpo)),
    }
    for seed in experiment.seeds:
        one = {**job, "seed": seed}
        for name in sorted(used):
            compared = _preferences(experiment, one, name)
            found += [compared["completions"], compared["rewards"], compared["pairs"]]
        found += [_path("export", **one, method=name) for name in _trained(experiment)]
        found += [_path("sample_evaluation", **one, method=name) for name in experiment.methods]
    return list(dict.fromkeys(found))


_READS: dict[str, Callable[[Experiment, Mapping[str, Any]], Inputs]] = {
    "sample": _sample,
    "score": _score,
    "pair": _pair,
    "replay": _replay,
    "refer": _refer,
    "reward": _reward,
    "optimize": _optimize,
    "sample_evaluation": _sample_evaluation,
    "evaluate": _evaluate,
    "export": _export,
    "card": _card,
    "report": _report,
}
