"""From YAML files to a checked project: reading, overlays, and errors that say what to do."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

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
from comlrl_stages.config_methods import ActorCritic, Base, GroupMethod, Madpo, Marlhf
from comlrl_stages.config_values import Strict, WrongKey
from comlrl_stages.errors import UserError, nearest

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
    experiments = {
        name: _read(Experiment, folders, "experiments", name, origin, top.override.experiments.get(name, {}))
        for name in top.experiments
    }
    models: dict[str, Model] = {}
    saved = {name: e.team.model.path for name, e in experiments.items() if isinstance(e.team.model, SavedTeam)}
    for name, experiment in experiments.items():
        file = _find(folders, "experiments", name, origin)
        experiments[name], inline = _with_named_models(name, experiment, str(file))
        models |= inline
        for model in models_of(experiments[name]):
            if model not in models:
                place = f"{file}: team, reward_models or methods"
                models[model] = _read(Model, folders, "models", model, place, top.override.models.get(model, {}))
    return Project(experiments, models, tuple(folders), saved)


# --- teams of earlier runs ----------------------------------------------------------------------------------------


def _with_named_models(name: str, experiment: Experiment, origin: str) -> tuple[Experiment, dict[str, Model]]:
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
        problems = error.errors()
        places = {problem["loc"] for problem in problems}
        told = [p for p in problems if not _is_inherited(p["loc"], places)]
        lines = [f"{origin}: {_explain(model, p)}" for p in _of_meant_kinds(model, told)]
        raise UserError("\n".join(dict.fromkeys(lines))) from None


def _is_inherited(place: tuple[Any, ...], places: Set[tuple[Any, ...]]) -> bool:
    """Collections inherit `sampling`, mistakes included; those are told once."""
    inherits = len(place) > 2 and place[0] == "collections" and place[2] == "sampling"
    return inherits and ("sampling", *place[3:]) in places


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


# --- error texts --------------------------------------------------------------------------------------------------


def _explain(model: type[BaseModel], problem: Mapping[str, Any]) -> str:
    """One line: key path, what is wrong, what is allowed."""
    location = _readable(model, problem["loc"])
    reason = problem.get("ctx", {}).get("error")
    if isinstance(reason, WrongKey):
        location.append(reason.key)
    path = ".".join(str(part) for part in location) or "(top level)"
    if problem["type"] == "extra_forbidden":
        valid = _fields_at(model, problem["loc"][:-1])
        return f"{path}: {_unknown_key(location, problem['loc'], valid)}. Valid here: {', '.join(valid)}"
    if problem["type"] == "missing":
        return f"{path}: is missing and has no default"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":  # its text says what was found, and which key if several must agree
        return f"{path}: {message}" if location else message
    return f"{path}: {message} (found {problem['input']!r:.200})"


def _unknown_key(readable: Sequence[Any], location: Sequence[Any], valid: Sequence[str]) -> str:
    """What is said of a key that is not valid; a method's key may belong to other algorithms."""
    key = str(readable[-1])
    if len(location) == 4 and location[0] == "methods":
        owners = [name for kind in _METHOD_KINDS if key in kind.model_fields for name in _tags(kind)]
        if owners:
            return f"belongs to {', '.join(owners)}, the algorithm here is {location[2]}"
    return f"unknown key{nearest(key, valid)}"


_METHOD_KINDS = (Base, Madpo, GroupMethod, ActorCritic, Marlhf)


def _of_meant_kinds(model: type[BaseModel], problems: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Where a key takes values of several kinds, only the problems of the kind that the value comes nearest to."""
    best: dict[tuple[Any, ...], int] = {}
    rated = []
    for problem in problems:
        place = _Place.of(model, problem["loc"])
        kind = problem["type"] if place.is_kind else ""
        distance = 2 if kind.endswith("_type") else 1 if kind.endswith(("_parsing", "literal_error")) else 0
        best[place.choice] = min(distance, best.get(place.choice, distance))
        rated.append((problem, place.choice, distance))
    return [problem for problem, choice, distance in rated if choice == () or distance == best[choice]]


@dataclass(frozen=True)
class _Place:
    """Where pydantic found a problem.

    Attributes:
        keys: the keys of the file that lead there, without pydantic's names of kinds.
        annotation: the type there.
        choice: the keys of the last one that takes values of several kinds, () if none does.
        is_kind: the problem is one of a kind as a whole.
    """

    keys: tuple[Any, ...]
    annotation: Any
    choice: tuple[Any, ...] = ()
    is_kind: bool = False

    @classmethod
    def of(cls, model: type[BaseModel], location: Sequence[Any]) -> "_Place":
        place = cls((), model)
        for part in location:
            place = place._next(part)
        return place

    def _next(self, part: Any) -> "_Place":
        options = _options(self.annotation)
        if len(options) > 1:
            chosen = next((option for option in options if _is_called(option, str(part))), options[0])
            tagged = bool(_tags(chosen))
            return _Place(self.keys, chosen, self.choice if tagged else self.keys, not tagged)
        return _Place((*self.keys, part), _inside(_strip(self.annotation), part), self.choice)


def _inside(annotation: Any, part: Any) -> Any:
    """The type of what lies under a key of a section, a mapping or a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation.model_fields[part].annotation if part in annotation.model_fields else Any
    inner = get_args(annotation)
    return inner[-1] if get_origin(annotation) in (dict, list) and inner else Any


def _is_called(option: Any, kind: str) -> bool:
    """Whether pydantic calls a kind of values so: `list[...]`, `literal[...]`, a class, an algorithm, `float`."""
    option = _strip(option)
    origin = get_origin(option)
    if origin is not None:
        return kind.startswith(f"{getattr(origin, '__name__', str(origin).rpartition('.')[2]).lower()}[")
    return kind in _tags(option) or kind.rpartition("-")[2] == getattr(option, "__name__", "")


def _readable(model: type[BaseModel], location: tuple[Any, ...]) -> list[Any]:
    """The location without pydantic's names of kinds, which are no keys of the file."""
    return list(_Place.of(model, location).keys)


def _fields_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Names of the keys that are valid at a location of a model."""
    found = _strip(_Place.of(model, location).annotation)
    return list(found.model_fields) if isinstance(found, type) and issubclass(found, BaseModel) else []


def _options(annotation: Any) -> list[Any]:
    """The kinds of values that a type allows beside null."""
    annotation = _strip(annotation)
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [option for option in options if option is not type(None)]


def _strip(annotation: Any) -> Any:
    """A type without Annotated and without None."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        options = [option for option in get_args(annotation) if option is not type(None)]
        return _strip(options[0]) if len(options) == 1 else annotation
    return annotation


def _tags(option: Any) -> tuple[str, ...]:
    """The algorithms of a class of methods."""
    field = getattr(option, "model_fields", {}).get("algorithm")
    return get_args(field.annotation) if field else ()
