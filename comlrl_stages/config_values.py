"""What every section of the configuration is made of: strictness, names, numbers, and errors that name their key."""

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

Name = Annotated[str, StringConstraints(pattern=r"^\w[\w.\-]*$")]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
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
