"""Which settings each job of an experiment gets: from the configuration to the models of `settings`, job by job."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from comlrl_stages.config import (
    Compute,
    Episode,
    Experiment,
    Model,
    SamplingCompute,
    TrainingCompute,
    critic_models_of,
    used_reward_models,
)
from comlrl_stages.config_methods import (
    ActorCritic,
    Base,
    Madpo,
    PolicyTraining,
    RewardedMethod,
)
from comlrl_stages.config_values import Strict
from comlrl_stages.project import Project
from comlrl_stages.settings import (
    OPTIMIZE_SETTINGS,
    CardSettings,
    EvaluateSettings,
    EvaluationSampleSettings,
    ExportSettings,
    MadpoSettings,
    PairSettings,
    PrepareSettings,
    ReferSettings,
    ReplaySettings,
    ReportSettings,
    RewardSettings,
    RunTracking,
    SampleSettings,
    ScoreSettings,
    SplitSettings,
    TeamSettings,
)


def settings_of(project: Project, stage: str, wildcards: Any) -> Strict | None:
    """Settings of a stage for one set of wildcards, or None where this stage has no such job."""
    if stage == "prepare":
        return _prepare(project, wildcards.model)
    experiment = project.experiments[wildcards.experiment]
    return _BUILDERS[stage](project, experiment, wildcards)


def _prepare(project: Project, name: str) -> PrepareSettings:
    return PrepareSettings(**project.models[name].model_dump())


def _split(project: Project, experiment: Experiment, wildcards: Any) -> SplitSettings:
    return SplitSettings(**experiment.items.model_dump(), task=experiment.task, agents=experiment.team.agents)


def _team(project: Project, experiment: Experiment, method: Any = None) -> TeamSettings:
    """The team as it is, or, with a `method`, as that trains it."""
    models = [project.models[name] for name in experiment.team.model_names()]
    return TeamSettings(
        agents=experiment.team.agents,
        models=experiment.team.model_names(),
        share_weights=experiment.team.share_weights and isinstance(method, PolicyTraining),
        system_prompts=experiment.team.per_agent("system_prompt"),
        prompt_formats=experiment.team.per_agent("prompt_format"),
        template_arguments=experiment.team.per_agent("template_arguments"),
        weights_dtypes=[model.dtype for model in models],
        attentions=[model.attention for model in models],
        trust_remote_code=[model.trust_remote_code for model in models],
    )


def _part(kind: type[Strict], compute: Compute) -> Any:
    """The fields of `compute` that a stage reads."""
    return kind(**compute.model_dump(include=set(kind.model_fields)))


def _sample(project: Project, experiment: Experiment, wildcards: Any) -> SampleSettings:
    collection = experiment.collections[wildcards.collection]
    return SampleSettings(
        seed=int(wildcards.seed),
        candidates=collection.candidates,
        task=experiment.task,
        team=_team(project, experiment),
        sampling=collection.sampling,
        compute=_part(SamplingCompute, experiment.compute),
    )


def _score(project: Project, experiment: Experiment, wildcards: Any) -> ScoreSettings:
    return ScoreSettings(**experiment.scoring.model_dump(), task=experiment.task, agents=experiment.team.agents)


def _pair(project: Project, experiment: Experiment, wildcards: Any) -> PairSettings:
    given = experiment.preferences[wildcards.preferences]
    return PairSettings(
        seed=int(wildcards.seed),
        selection=given.selection,
        pairs_per_task=given.pairs_per_task,
        min_gap=given.min_gap,
    )


def _replay(project: Project, experiment: Experiment, wildcards: Any) -> ReplaySettings:
    return ReplaySettings(round=int(wildcards.round))


def _refer(project: Project, experiment: Experiment, wildcards: Any) -> ReferSettings:
    return ReferSettings(
        team=_team(project, experiment),
        temperature=experiment.sampling.temperature or 1.0,
        compute=_part(TrainingCompute, experiment.compute),
    )


def _reward(project: Project, experiment: Experiment, wildcards: Any) -> RewardSettings:
    given = experiment.reward_models[wildcards.reward_model]
    backbone = project.models[given.model or experiment.team.model_names()[0]]
    return RewardSettings(
        **given.model_dump(exclude={"preferences", "model"}),
        seed=int(wildcards.seed),
        trust_remote_code=backbone.trust_remote_code,
        compute=_part(TrainingCompute, experiment.compute),
    )


def _optimize(project: Project, experiment: Experiment, wildcards: Any) -> Strict | None:
    method = experiment.methods[wildcards.method]
    common = {
        "seed": int(wildcards.seed),
        "round": int(wildcards.round),
        "method": wildcards.method,
        "team": _team(project, experiment, method),
    }
    if isinstance(method, Madpo):
        given = method.model_dump(exclude={"preferences"})
        compute = _part(TrainingCompute, experiment.compute)
        return MadpoSettings(**given, **common, compute=compute, temperature=experiment.sampling.temperature or 1.0)
    if isinstance(method, RewardedMethod):
        kind = OPTIMIZE_SETTINGS[method.algorithm]
        given = method.model_dump(include=set(kind.model_fields))
        parts = {key: getattr(experiment, key) for key in ("task", "scoring", "episode", "sampling", "compute")}
        return kind(**given, **common, **parts, **_critics(project, experiment, wildcards.experiment, method))
    return None


def _critics(project: Project, experiment: Experiment, name: str, method: RewardedMethod) -> dict[str, Any]:
    """What an actor-critic method is told of its critics beside its own keys."""
    if not isinstance(method, ActorCritic):
        return {}
    models = [project.models[model] for model in critic_models_of(method, experiment.team)]
    return {
        "critics": project.saved_critics(name, method),
        "critic_trust_remote_code": [model.trust_remote_code for model in models],
    }


def _is_lora(method: Any) -> bool:
    return isinstance(method, PolicyTraining) and method.lora is not None


def _sample_evaluation(project: Project, experiment: Experiment, wildcards: Any) -> EvaluationSampleSettings:
    given, method = experiment.evaluation, experiment.methods[wildcards.method]
    return EvaluationSampleSettings(
        seed=int(wildcards.seed),
        samples_per_task=given.samples_per_task,
        train_samples_per_task=given.train_samples_per_task,
        greedy=given.greedy,
        kl=given.kl and not isinstance(method, Base),
        lora=_is_lora(method),
        task=experiment.task,
        team=_team(project, experiment, method),
        episode=Episode(turns=experiment.episode.turns),
        sampling=experiment.sampling,
        compute=_part(SamplingCompute, experiment.compute),
    )


def _evaluate(project: Project, experiment: Experiment, wildcards: Any) -> EvaluateSettings:
    return EvaluateSettings(
        **experiment.scoring.model_dump(),
        seed=int(wildcards.seed),
        method=wildcards.method,
        task=experiment.task,
        agents=experiment.team.agents,
        episode=experiment.episode,
        bootstrap_replicates=experiment.evaluation.bootstrap_replicates,
    )


def _export(project: Project, experiment: Experiment, wildcards: Any) -> ExportSettings:
    models = [project.models[name] for name in experiment.team.model_names()]
    return ExportSettings(
        agents=experiment.team.agents,
        lora=_is_lora(experiment.methods[wildcards.method]),
        trust_remote_code=[model.trust_remote_code for model in models],
    )


def _card(project: Project, experiment: Experiment, wildcards: Any) -> CardSettings:
    return CardSettings(
        experiment=wildcards.experiment,
        description=experiment.description,
        method=wildcards.method,
        method_settings=experiment.methods[wildcards.method].model_dump(mode="json"),
        seed=int(wildcards.seed),
        task=experiment.task,
        models=[_source(project.models[name]) for name in experiment.team.model_names()],
        sampling=experiment.sampling,
    )


def _source(model: Model) -> str:
    return next(f"{key}: {value}" for key, value in model.model_dump().items() if value and key in _SOURCES)


_SOURCES = ("builtin", "hub", "path", "gguf")


def _report(project: Project, experiment: Experiment, wildcards: Any) -> ReportSettings:
    return ReportSettings(
        experiment=wildcards.experiment,
        description=experiment.description,
        methods=list(experiment.methods),
        seeds=experiment.seeds,
        bootstrap_replicates=experiment.evaluation.bootstrap_replicates,
    )


_BUILDERS = {
    "split": _split,
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


def tracking_of(project: Project, stage: str, wildcards: Any) -> RunTracking | None:
    """How a job is tracked, or None where the experiment does not ask for it."""
    wandb = project.experiments[wildcards.experiment].tracking.wandb
    if wandb is None:
        return None
    fitted = wildcards.reward_model if stage == "reward" else wildcards.method
    later_round = getattr(wildcards, "round", "001")
    parts = [wandb.name or wildcards.experiment, stage, fitted, f"seed{wildcards.seed}"]
    given = {
        **wandb.model_dump(),
        "name": "-".join(parts if later_round == "001" else [*parts, f"round{later_round}"]),
        "group": wildcards.experiment,
        "dir": wandb.dir or f"results/{wildcards.experiment}",
    }
    return RunTracking(**given)


def instances(project: Project, stage: str) -> Iterable[SimpleNamespace]:
    """Every set of wildcards for which a stage has a job."""
    if stage == "prepare":
        yield from (SimpleNamespace(model=name) for name in project.models)
        return
    for name, experiment in project.experiments.items():
        seeds = [None] if stage in ("split", "report") else experiment.seeds
        for seed in seeds:
            yield from (SimpleNamespace(experiment=name, seed=seed, **w) for w in _names(experiment, stage))


def _names(experiment: Experiment, stage: str) -> list[dict[str, str]]:
    """The wildcards beside experiment and seed."""
    trained = [name for name, method in experiment.methods.items() if not isinstance(method, Base)]
    return {
        "sample": [{"collection": name} for name in experiment.collections],
        "score": [{"collection": name} for name in experiment.collections],
        "pair": [{"preferences": name} for name in experiment.preferences],
        "reward": [{"reward_model": name} for name in used_reward_models(experiment)],
        "replay": [{"method": name, "round": "001"} for name in trained],
        "refer": [{"method": name, "round": "001"} for name in trained],
        "optimize": [{"method": name, "round": "001"} for name in trained],
        "sample_evaluation": [{"method": name} for name in experiment.methods],
        "evaluate": [{"method": name} for name in experiment.methods],
        "export": [{"method": name} for name in trained],
        "card": [{"method": name} for name in trained],
    }.get(stage, [{}])
