"""Base class of all sections of a configuration."""

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticCustomError

LARGEST = 2**63 - 1
"""The largest number that a setting may be: floats, file formats and libraries hold no larger integer."""


class Section(BaseModel):
    """One section of a run configuration: immutable, and strict about types and keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_endless_integers(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > LARGEST:
            raise PydanticCustomError("endless", "input should be between -2**63 and 2**63")
        return value
