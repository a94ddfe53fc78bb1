"""What is said of values that do not fit: one line per problem, with the key path as it stands in the file."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from comlrl_stages.config_methods import ActorCritic, Base, GroupMethod, Madpo, Marlhf
from comlrl_stages.config_values import WrongKey
from comlrl_stages.errors import nearest


def told(model: type[BaseModel], error: ValidationError) -> list[str]:
    """Return a line per problem of `values` that were no `model`: key path, what is wrong, what is allowed."""
    problems = error.errors()
    places = {problem["loc"] for problem in problems}
    own = [problem for problem in problems if not _is_inherited(problem["loc"], places)]
    return list(dict.fromkeys(_explain(model, problem) for problem in _of_meant_kinds(model, own)))


def _is_inherited(place: tuple[Any, ...], places: Set[tuple[Any, ...]]) -> bool:
    """Collections inherit `sampling`, mistakes included; those are told once."""
    inherits = len(place) > 2 and place[0] == "collections" and place[2] == "sampling"
    return inherits and ("sampling", *place[3:]) in places


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
