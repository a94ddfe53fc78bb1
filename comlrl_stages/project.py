"""From YAML files to a checked project: reading, overlays, and errors that say what to do."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from comlrl_stages.config import (
    ALGORITHMS,
    Experiment,
    Model,
    ProjectConfig,
    Strict,
    items_shorthand,
    models_of,
    task_shorthand,
    team_shorthand,
)
from comlrl_stages.errors import UserError, nearest

T = TypeVar("T", bound=Strict)


@dataclass(frozen=True)
class Project:
    """All experiments of a run and the models they name, checked."""

    experiments: dict[str, Experiment]
    models: dict[str, Model]
    folders: tuple[Path, ...]


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
    for name, experiment in experiments.items():
        for model in models_of(experiment):
            place = f"{_find(folders, 'experiments', name, origin)}: team or reward_models"
            models.setdefault(model, _read(Model, folders, "models", model, place, top.override.models.get(model, {})))
    return Project(experiments, models, tuple(folders))


def parse(model: type[T], values: Any, origin: str) -> T:
    """Validate `values`; turn pydantic's errors into one UserError with a line per problem."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
        places = {problem["loc"] for problem in problems}
        lines = [f"{origin}: {_explain(model, p)}" for p in problems if not _is_inherited(p["loc"], places)]
        raise UserError("\n".join(lines)) from None


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
    path = ".".join(str(part) for part in location) or "(top level)"
    if problem["type"] == "extra_forbidden":
        valid = _fields_at(model, problem["loc"][:-1])
        return f"{path}: unknown key{nearest(str(location[-1]), valid)}. Valid here: {', '.join(valid)}"
    if problem["type"] == "missing":
        return f"{path}: is missing and has no default"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":  # its text says what was found, and which key if several must agree
        return f"{path}: {message}" if location else message
    return f"{path}: {message} (found {problem['input']!r:.200})"


def _readable(model: type[BaseModel], location: tuple[Any, ...]) -> list[Any]:
    """The location without pydantic's union tags, which are no keys of the file."""
    readable: list[Any] = []
    for index, part in enumerate(location):
        tag = part in ALGORITHMS and index == 2 and location[0] == "methods"
        constraint = isinstance(part, str) and ("[" in part or part in ("str", "list", "none"))
        if not tag and not constraint:
            readable.append(part)
    return readable


def _fields_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Names of the keys that are valid at a location of a model."""
    current: Any = model
    for part in location:
        if isinstance(current, type) and issubclass(current, BaseModel) and part in current.model_fields:
            current = _strip(current.model_fields[part].annotation)
        elif get_origin(current) is dict:
            current = _strip(get_args(current)[1])
        elif get_origin(current) in (Union, UnionType):
            current = next((option for option in get_args(current) if _tag(option) == part), get_args(current)[0])
    if isinstance(current, type) and issubclass(current, BaseModel):
        return list(current.model_fields)
    return []


def _strip(annotation: Any) -> Any:
    """A type without Annotated and without None."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        options = [option for option in get_args(annotation) if option is not type(None)]
        return options[0] if len(options) == 1 else annotation
    return annotation


def _tag(option: Any) -> str | None:
    field = getattr(option, "model_fields", {}).get("algorithm")
    return field.default if field else None
