"""Base class of all sections of a configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of a run configuration: immutable, and strict about types and keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
