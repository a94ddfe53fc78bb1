"""What each stage reads: exact settings per stage, and how they travel as strings.

A stage gets one of these models and nothing else of the configuration. Every field decides bytes, and a changed field
makes exactly that stage and what follows run again. On the command line and in Snakemake's record a setting is one
string, `stage.key=<json>`.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, Field

from comlrl_stages.config import (
    Compute,
    Episode,
    Items,
    Model,
    RewardTraining,
    Runtime,
    Sampling,
    SamplingCompute,
    Scoring,
    Task,
    TrainingCompute,
    Wandb,
)
from comlrl_stages.config_methods import (
    ActorCriticAlgorithm,
    ActorCriticTraining,
    GroupAlgorithm,
    GroupTraining,
    MadpoTraining,
    Reinforcement,
)
from comlrl_stages.config_values import Strict
from comlrl_stages.errors import UserError
from comlrl_stages.project import parse

# --- settings of each stage ---------------------------------------------------------------------------------------


class PrepareSettings(Model):
    """Settings of `prepare`. Its threads are fixed: a model serves experiments with other threads, too."""

    torch_threads: int = 2


class SplitSettings(Items):
    """Settings of `split`."""

    task: Task
    agents: int = 2


class TeamSettings(Strict):
    """How the agents' prompts are made and their models loaded, one entry per agent.

    `models` are names: two agents that change places are another team, though the set of their folders is the same.
    `share_weights` is true only where the agents were or are trained as one model.
    """

    agents: int = 2
    models: list[str] = []
    share_weights: bool = False
    system_prompts: list[str | None] = [None, None]
    prompt_formats: list[str] = ["auto", "auto"]
    template_arguments: list[dict[str, Any]] = [{}, {}]
    weights_dtypes: list[str] = ["float32", "float32"]
    attentions: list[str] = ["sdpa", "sdpa"]
    trust_remote_code: list[bool] = [False, False]


class SampleSettings(Strict):
    """Settings of `sample`."""

    seed: int = 0
    round: int = 1
    candidates: int = 16
    task: Task
    team: TeamSettings = TeamSettings()
    sampling: Sampling = Sampling()
    compute: SamplingCompute = SamplingCompute()


class EvaluationSampleSettings(Strict):
    """Settings of `sample-evaluation`.

    Of the `episode` only its turns count: what is sampled does not depend on rewards. `lora`: the policy is adapters.
    """

    seed: int = 0
    round: int = 1
    samples_per_task: int = 16
    train_samples_per_task: int = 0
    greedy: bool = True
    kl: bool = True
    lora: bool = False
    task: Task
    team: TeamSettings = TeamSettings()
    episode: Episode = Episode()
    sampling: Sampling = Sampling()
    compute: SamplingCompute = SamplingCompute()


class ScoreSettings(Scoring):
    """Settings of `score`."""

    task: Task
    agents: int = 2


class PairSettings(Strict):
    """Settings of `pair`."""

    seed: int = 0
    selection: str = "reward_gap"
    pairs_per_task: int = Field(16, ge=1)
    min_gap: float = 0.0


class ReplaySettings(Strict):
    """Settings of `replay`."""

    round: int = 1


class ReferSettings(Strict):
    """Settings of `refer`."""

    team: TeamSettings = TeamSettings()
    temperature: float = 1.0
    compute: TrainingCompute = TrainingCompute()


class RewardSettings(RewardTraining):
    """Settings of `reward`."""

    seed: int = 0
    trust_remote_code: bool = False
    compute: TrainingCompute = TrainingCompute()


class MadpoSettings(MadpoTraining):
    """Settings of `optimize` for MADPO."""

    algorithm: str = "madpo"
    seed: int = 0
    round: int = 1
    method: str = "madpo"
    team: TeamSettings = TeamSettings()
    temperature: float = 1.0
    compute: TrainingCompute = TrainingCompute()


class RewardedSettings(Reinforcement):
    """What the stage `optimize` is told of a run of reinforcement learning beside the method's own settings."""

    seed: int = 0
    round: int = 1
    method: str = ""
    task: Task
    scoring: Scoring = Scoring()
    team: TeamSettings = TeamSettings()
    episode: Episode = Episode()
    sampling: Sampling = Sampling()
    compute: Compute = Compute()


class GroupSettings(GroupTraining, RewardedSettings):
    """Settings of `optimize` for group methods."""


class ActorCriticSettings(ActorCriticTraining, RewardedSettings):
    """Settings of `optimize` for actor-critic methods.

    `critics` is a folder with saved critics to start from; `critic_trust_remote_code` has an entry per separate critic.
    """

    critics: str | None = None
    critic_trust_remote_code: list[bool] = []


class EvaluateSettings(Scoring):
    """Settings of `evaluate`."""

    seed: int = 0
    method: str = "base"
    task: Task
    agents: int = 2
    episode: Episode = Episode()
    bootstrap_replicates: int = 5000


class ExportSettings(Strict):
    """Settings of `export`. With `lora` the policy is adapters, which are merged into their base models."""

    agents: int = 2
    lora: bool = False
    trust_remote_code: list[bool] = [False, False]


class CardSettings(Strict):
    """Settings of `card`."""

    experiment: str = ""
    description: str = ""
    method: str = ""
    method_settings: dict[str, Any] = {}
    seed: int = 0
    task: Task
    models: list[str] = []
    sampling: Sampling = Sampling()


class ReportSettings(Strict):
    """Settings of `report`."""

    experiment: str = ""
    description: str = ""
    methods: list[str] = []
    seeds: list[int] = [0]
    seed: int = 0
    confidence: float = 0.95
    bootstrap_replicates: int = 5000


class RunTracking(Wandb):
    """Weights & Biases for one job: the experiment's options, filled in, and the group of its run."""

    group: str | None = None
    dir: str = "results"


class StageRuntime(Runtime):
    """What a stage is given that decides no byte."""

    tracking: RunTracking | None = None
    keep_checkpoints: bool = False


OPTIMIZE_SETTINGS: dict[str, type[Strict]] = {
    "madpo": MadpoSettings,
    **dict.fromkeys(get_args(GroupAlgorithm), GroupSettings),
    **dict.fromkeys(get_args(ActorCriticAlgorithm), ActorCriticSettings),
}
SETTINGS: dict[str, type[Strict]] = {
    "prepare": PrepareSettings,
    "split": SplitSettings,
    "sample": SampleSettings,
    "score": ScoreSettings,
    "pair": PairSettings,
    "replay": ReplaySettings,
    "refer": ReferSettings,
    "reward": RewardSettings,
    "sample_evaluation": EvaluationSampleSettings,
    "evaluate": EvaluateSettings,
    "export": ExportSettings,
    "card": CardSettings,
    "report": ReportSettings,
}

# --- settings as strings ------------------------------------------------------------------------------------------


def flatten(stage: str, settings: Strict) -> dict[str, str]:
    """`{"stage.section.key": json}` for every field; free mappings and lists are leaves."""
    flat: dict[str, str] = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            flat |= flatten(f"{stage}.{name}", value)
        else:
            plain = settings.model_dump(mode="json", include={name})[name]
            flat[f"{stage}.{name}"] = json.dumps(plain, sort_keys=True, ensure_ascii=False)
    return flat


def parse_settings(stage: str, strings: Iterable[str]) -> tuple[Strict, dict[str, Any], dict[str, str]]:
    """Read `key=json` strings of the command line.

    Returns the stage's settings, the runtime values, and what identifies the work: every string but the runtime's.
    """
    values: dict[str, Any] = {}
    runtime: dict[str, Any] = {}
    tracked: dict[str, str] = {}
    for string in strings:
        key, found, text = string.partition("=")
        if not found:
            raise UserError(f"setting {string!r}: expected key=value, for example {stage}.seed=0")
        section = key.partition(".")[0]
        if section == "runtime":
            _place(runtime, key, _json(key, text))
            continue
        tracked[key] = text
        if section == stage:
            _place(values, key, _json(key, text))
        elif key != "code" and section not in ("versions", "schema", "task_code", "data"):
            raise UserError(f"setting {key!r}: stage {stage} reads keys that begin with {stage}. or runtime.")
    given = parse(StageRuntime, runtime, f"runtime settings of {stage}").model_dump(exclude_unset=True)
    return parse(_class_of(stage, values), values, f"settings of {stage}"), given, tracked


def _class_of(stage: str, values: Mapping[str, Any]) -> type[Strict]:
    if stage != "optimize":
        return SETTINGS[stage]
    algorithm = values.get("algorithm", "")
    if algorithm not in OPTIMIZE_SETTINGS:
        raise UserError(f"optimize.algorithm: {algorithm!r} is none of {', '.join(OPTIMIZE_SETTINGS)}")
    return OPTIMIZE_SETTINGS[algorithm]


def _place(values: dict[str, Any], key: str, value: Any) -> None:
    """Put the value of `stage.section.key` at `values[section][key]`."""
    *sections, last = key.split(".")[1:] or [""]
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UserError(f"setting {key}: {section} has a value of its own already; give it whole or key by key")
    values[last] = value


def _json(key: str, text: str) -> Any:
    """A JSON value; what is no JSON is taken as text, which is handy by hand (`pair.selection=random`)."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def describe_settings(stage: str) -> str:
    """All settings of a stage with their defaults, one per line, for the command line's help."""
    kinds = list(OPTIMIZE_SETTINGS.values()) if stage == "optimize" else [SETTINGS[stage]] if stage in SETTINGS else []
    if not kinds:
        raise UserError(f"no stage {stage!r}; stages: optimize, {', '.join(SETTINGS)}")
    return "\n".join(line for kind in kinds for line in _describe(stage, kind))


def _describe(prefix: str, kind: type[BaseModel]) -> Iterable[str]:
    for name, field in kind.model_fields.items():
        options = [option for option in get_args(field.annotation) or (field.annotation,) if _is_section(option)]
        for inner in options:
            yield from _describe(f"{prefix}.{name}", inner)
        if _is_section(field.annotation):
            continue
        default = "needed" if field.is_required() else f"default {json.dumps(field.get_default(), default=str)}"
        yield f"{prefix}.{name}  ({default})  {field.description or ''}".rstrip()


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
