"""What every section of the configuration is made of: strictness, names, numbers, and errors that name their key."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

#: A file name has at most 255 bytes, and the longest ending that a name gets has some sixty.
LONGEST_NAME = 100
#: Endings of what lies beside an artifact: a model `a.log` would be the log of the model `a`. Windows drops a last dot.
TAKEN_ENDINGS = (".", ".partial", ".lock", ".tmp", ".log", ".json", ".jsonl", ".parquet")
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}


def _file_name(text: str) -> str:
    """Names of experiments, models, methods and so on become files and folders, on any system."""
    stem = text.partition(".")[0].lower()
    rules = (
        (
            "holds only letters, digits, `_`, `.` and `-`, and begins with a letter, a digit or `_`",
            re.fullmatch(r"\w[\w.\-]*", text),
        ),
        (f"has at most {LONGEST_NAME} bytes", len(text.encode("utf-8", "replace")) <= LONGEST_NAME),
        (f"does not end in {', '.join(TAKEN_ENDINGS)}", not text.endswith(TAKEN_ENDINGS)),
        ("is no device of Windows (con, nul, com1, ...)", stem not in _DEVICES),
    )
    for rule, holds in rules:
        if not holds:
            raise ValueError(f"{text!r:.120} cannot be a name: a name {rule}")
    return text


def _whole(value: Any) -> Any:
    if isinstance(value, float):
        raise ValueError(f"a seed is a whole number (found {value})")
    return value


Name = Annotated[
    str,
    AfterValidator(_file_name),
    WithJsonSchema({"type": "string", "pattern": r"^\w[\w.\-]*$", "maxLength": LONGEST_NAME}),
]
Seed = Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(_whole)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Rate = Annotated[float, Field(gt=0.0)]


class WrongKey(ValueError):
    """A value that does not go with others; `key` is its path below the section that refuses it."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


class Strict(BaseModel):
    """A section of the configuration: unknown keys are errors, values do not change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, values: Any) -> Any:
        """A key that is left empty (null in YAML) takes its default, where null is no value of its own."""
        if not isinstance(values, Mapping):
            return values
        fields = cls.model_fields
        return {
            key: value
            for key, value in values.items()
            if value is not None or key not in fields or type(None) in get_args(fields[key].annotation)
        }

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, values: Any) -> Any:
        """Only switches are true or false; pydantic would read true as 1."""
        for key, field in cls.model_fields.items() if isinstance(values, Mapping) else ():
            given = values.get(key)
            is_switch = bool in (field.annotation, *get_args(field.annotation))
            if not is_switch and any(isinstance(one, bool) for one in _as_list(given)):
                raise WrongKey(key, f"cannot be true or false (found {given})")
        return values


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
