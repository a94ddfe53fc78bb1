"""Documents made from the configuration's models: the JSON schema for editors and the reference of all keys."""

import json
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema
from pydantic_core import PydanticUndefined

from comlrl_stages.config import Experiment, Model, ProjectConfig
from comlrl_stages.config_methods import ActorCritic, Base, GroupMethod, Madpo, Marlhf

FILES: tuple[tuple[str, type[BaseModel]], ...] = (
    ("config/config.yaml", ProjectConfig),
    ("config/models/<name>.yaml", Model),
    ("config/experiments/<name>.yaml", Experiment),
)
METHODS: tuple[type[BaseModel], ...] = (Base, Madpo, GroupMethod, ActorCritic)
#: Sections that stand for others.
SHORT_FORMS: tuple[type[BaseModel], ...] = (Marlhf,)


def json_schema() -> str:
    """One JSON schema for the three kinds of files."""
    kinds = [(model, "validation") for _, model in FILES]
    by_model, schema = models_json_schema(kinds, title="comlrl_stages configuration")
    schema["anyOf"] = [by_model[kind] for kind in kinds]
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def markdown() -> str:
    """A table per section: key, type, default, meaning."""
    lines: list[str] = []
    for file, model in FILES:
        lines += [f"## `{file}`", "", _sentence(model), ""]
        lines += _section("", model, {})
    return "\n".join(lines).rstrip() + "\n"


def _section(prefix: str, model: type[BaseModel], seen: dict[type[BaseModel], str]) -> Iterator[str]:
    """The table of one section, then its subsections; `seen` are the sections that were shown, by name."""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        meaning = (field.description or "").replace("|", "\\|")
        yield f"| `{prefix}{name}` | {_type(field.annotation)}{_limits(field)} | {_default(field, seen)} | {meaning} |"
        inner += [(f"{prefix}{name}{suffix}", section) for suffix, section in _subsections(field.annotation)]
    yield ""
    for path, section in inner:
        if section in seen:
            continue
        seen[section] = path
        yield from (f"### `{path}`", "", _sentence(section), "")
        yield from _section(f"{path.split(' ')[0]}.", section, seen)


def _subsections(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    annotation = _bare(annotation)
    options = [option for option in _options(annotation) if option is not type(None)]
    sections = [option for option in options or [annotation] if _is_section(option)]
    if sections:
        yield from (("", section) for section in sections)
    elif get_origin(annotation) is dict:
        value = _bare(get_args(annotation)[1])
        if _is_section(value):
            yield ".<name>", value
        elif set(_options(value)) == set(METHODS):
            yield from ((f".<name> (algorithm: {_algorithms(method)})", method) for method in (*METHODS, *SHORT_FORMS))


def _algorithms(method: type[BaseModel]) -> str:
    return ", ".join(get_args(method.model_fields["algorithm"].annotation))


def _sentence(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _bare(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()


def _type(annotation: Any) -> str:
    annotation = _bare(annotation)
    if annotation is type(None):
        return "null"
    if _is_section(annotation):
        return "section"
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{option}`" for option in get_args(annotation))
    if _options(annotation):
        return " or ".join(_type(option) for option in _options(annotation))
    if get_origin(annotation) is list:
        kind = _type(get_args(annotation)[0])
        return f"list of ({kind})" if " or " in kind else f"list of {kind}"
    if get_origin(annotation) is tuple:
        return f"{len(get_args(annotation))} × {_type(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "mapping"
    names = {str: "text", int: "integer", float: "number", bool: "`true`, `false`"}
    return names.get(annotation, "any")


def _limits(field: FieldInfo) -> str:
    """The limits of a number, such as ", ≥ 1"."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    rules = [(sign, getattr(rule, name, None)) for rule in field.metadata for name, sign in signs.items()]
    return "".join(f", {sign} {limit:.10g}" for sign, limit in rules if limit is not None)


def _default(field: FieldInfo, seen: dict[type[BaseModel], str]) -> str:
    if _is_section(field.annotation) and field.annotation in seen:
        return f"as `{seen[field.annotation]}`"
    if field.default is PydanticUndefined:
        return "needed"
    if isinstance(field.default, BaseModel):
        return "see below"
    if isinstance(field.default, dict) and field.default:
        return "`default`"
    return f"`{json.dumps(field.default)}`"
