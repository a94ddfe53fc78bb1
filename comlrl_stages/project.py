"""From YAML files to a checked project: reading, overlays, and the models of all its experiments."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from comlrl_stages.config import (
    Experiment,
    Model,
    ProjectConfig,
    SavedTeam,
    items_shorthand,
    models_of,
    task_shorthand,
    team_shorthand,
)
from comlrl_stages.config_errors import told
from comlrl_stages.config_methods import ActorCritic
from comlrl_stages.config_values import Strict
from comlrl_stages.errors import UserError

T = TypeVar("T", bound=Strict)


@dataclass(frozen=True)
class Project:
    """All experiments of a run and the models they name, checked.

    `saved` are the folders of trained teams that experiments start from (`team.model: {path: ...}`), by experiment.
    """

    experiments: dict[str, Experiment]
    models: dict[str, Model]
    folders: tuple[Path, ...]
    saved: dict[str, str] = field(default_factory=dict)

    def saved_critics(self, experiment: str, method: ActorCritic) -> str | None:
        """The folder with the critics that `method` goes on from: they were trained beside the experiment's team."""
        if not method.restore_critics or method.critic == "shared" or method.critic_model is not None:
            return None
        critics = Path(self.saved.get(experiment, "")) / "critics"
        first = "critic" if method.algorithm == "maac" else "critic_0"
        return str(critics) if experiment in self.saved and (critics / first).is_dir() else None


def load_project(config: Mapping[str, Any], folders: Sequence[Path], origin: str = "config/config.yaml") -> Project:
    """Read and check everything that `config` names.

    `folders` hold `experiments/` and `models/`; the first one that has a file wins. Raises UserError that names the
    file, the key path, what was found and what is allowed.
    """
    top = parse(ProjectConfig, config, origin)
    for kind, names in (("experiments", top.override.experiments), ("models", top.override.models)):
        for name in names:
            _find(folders, kind, name, f"{origin}: override.{kind}.{name}")
    experiments: dict[str, Experiment] = {}
    mistakes = []
    for name in top.experiments:
        try:
            override = top.override.experiments.get(name, {})
            experiments[name] = _read(Experiment, folders, "experiments", name, origin, override)
        except UserError as error:
            mistakes.append(str(error))
    if mistakes:
        raise UserError("\n".join(mistakes))
    models: dict[str, Model] = {}
    saved = {name: e.team.model.path for name, e in experiments.items() if isinstance(e.team.model, SavedTeam)}
    for name, experiment in experiments.items():
        file = _find(folders, "experiments", name, origin)
        experiments[name], inline = _with_named_models(name, experiment, str(file), known_names(folders, "models"))
        models |= inline
        for model in models_of(experiments[name]):
            if model not in models:
                place = f"{file}: team, reward_models or methods"
                models[model] = _read(Model, folders, "models", model, place, top.override.models.get(model, {}))
    return Project(experiments, models, tuple(folders), saved)


# --- teams of earlier runs ----------------------------------------------------------------------------------------


def _with_named_models(
    name: str, experiment: Experiment, origin: str, known: Sequence[str]
) -> tuple[Experiment, dict[str, Model]]:
    """The experiment with names for the folders in its team, and these models: `<experiment>.agent_<i>`."""
    team = experiment.team
    folders = {agent: entry.path for agent, entry in enumerate(team.model_names()) if isinstance(entry, SavedTeam)}
    if not folders:
        return experiment, {}
    names = team.model_names()
    found: dict[str, str] = {}
    for agent, folder in folders.items():
        own = _folder_of_agent(folder, agent, team.agents, f"{origin}: team.{'models' if team.models else 'model'}")
        names[agent] = found.setdefault(own, f"{name}.agent_{agent}")
    if taken := set(found.values()) & set(known):
        raise UserError(
            f"{origin}: saved models of a team are called {', '.join(sorted(taken))}, and so is a file of models/; "
            "rename that file"
        )
    if team.share_weights and len(set(names)) > 1:
        raise UserError(
            f"{origin}: team.share_weights: needs one model for all agents, but {folders[0]} holds one for each; "
            f"name one of them, such as {folders[0]}/agent_0"
        )
    named = experiment.model_copy(update={"team": team.model_copy(update={"model": None, "models": names})})
    return named, {model: Model(path=folder) for folder, model in found.items()}


def _folder_of_agent(folder: str, agent: int, agents: int, place: str) -> str:
    """`folder/agent_i` where agents lie in it, in role order; else the folder itself."""
    found = len(list(_agent_folders(Path(folder))))
    if not found:
        return folder
    if found != agents:
        raise UserError(
            f"{place}: {folder} holds a team of {found} agents (agent_0 to agent_{found - 1}), but this team has "
            f"{agents}. Change team.agents, or name the agents one by one in team.models, such as {folder}/agent_0."
        )
    return f"{folder}/agent_{agent}"


def _agent_folders(folder: Path) -> Iterator[Path]:
    """agent_0, agent_1, ... as far as they are there."""
    number = 0
    while (folder / f"agent_{number}").is_dir():
        yield folder / f"agent_{number}"
        number += 1


# --- reading ------------------------------------------------------------------------------------------------------


def parse(model: type[T], values: Any, origin: str) -> T:
    """Validate `values`; turn pydantic's errors into one UserError with a line per problem."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(f"{origin}: {line}" for line in told(model, error))) from None


def _read(model: type[T], folders: Sequence[Path], kind: str, name: str, origin: str, override: Mapping[str, Any]) -> T:
    path = _find(folders, kind, name, origin)
    values = read_yaml(path)
    shown = f"{path} (with override.{kind}.{name})" if override else str(path)
    return parse(model, _overlaid(values, override), shown)


def known_names(folders: Sequence[Path], kind: str) -> list[str]:
    """Names of all "experiments" or "models" that have a file."""
    return sorted({path.stem for folder in folders for path in (folder / kind).glob("*.yaml")})


def _find(folders: Sequence[Path], kind: str, name: str, origin: str) -> Path:
    for folder in folders:
        if (folder / kind / f"{name}.yaml").is_file():
            return folder / kind / f"{name}.yaml"
    known = known_names(folders, kind)
    places = " or ".join(str(folder / kind / f"{name}.yaml") for folder in folders)
    raise UserError(f"{origin}: no {kind[:-1]} {name!r} ({places} not found); known: {', '.join(known)}")


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key may stand once."""


def _unique_mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value if not key.tag.endswith(":merge")]
    twice = [key for key in keys if keys.count(key) > 1]
    if twice:
        raise yaml.constructor.ConstructorError(None, None, f"key {twice[0]!r} stands twice", node.start_mark)
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; raises UserError with file and line."""
    try:
        values = _parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 ({error})") from None
    if not isinstance(values, dict):
        found = "an empty file" if values is None else type(values).__name__
        raise UserError(f"{path}: expected a mapping of keys to values, found {found}")
    return values


def from_command_line(entries: Sequence[str]) -> dict[str, Any]:
    """Values of `--config key=value ...`, each value read as YAML with its types; raises UserError for broken YAML.

    Snakemake itself takes every number and `false` inside a value for text, and broken YAML for one long text.
    """
    values: dict[str, Any] = {}
    for entry in entries:
        key, _, text = entry.partition("=")
        values = merge(values, {key: _parse_yaml(text.strip("'\""), f"--config {key}=...")})
    return values


def _parse_yaml(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        told = " ".join(part for part in (error.context, error.problem) if part)
        hint = "; indent with spaces, not with tabs" if "'\\t'" in told else ""
        place = f"line {mark.line + 1}, column {mark.column + 1}"
        raise UserError(f"{origin}: is not valid YAML: {told} ({place}){hint}") from None
    except (yaml.YAMLError, ValueError) as error:  # a ValueError is an impossible date
        raise UserError(f"{origin}: is not valid YAML: {' '.join(str(error).split())}") from None


def _methods_by_name(value: Any) -> Any:
    names = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return {name: {} for name in value} if names else value


#: What the short forms of an experiment stand for.
_SHORTHANDS = {
    "task": task_shorthand,
    "items": items_shorthand,
    "team": team_shorthand,
    "methods": _methods_by_name,
}


def _overlaid(values: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Lay an override on a file's values; keys can be laid on a short form as on the section it stands for."""
    overlaid = [key for key in _SHORTHANDS if key in values and isinstance(override.get(key), Mapping)]
    return merge({**values, **{key: _SHORTHANDS[key](values[key]) for key in overlaid}}, override)


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `over` on `under`, mapping by mapping; anything else is replaced."""
    merged = dict(under)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = merge(old, value) if both else value
    return merged
