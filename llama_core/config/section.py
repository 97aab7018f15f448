"""What all sections of a configuration have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of a run configuration: immutable, and closed to keys it does not know."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
