"""Who is told what happens to a run."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from llama_core.config.section import Key, Section
from llama_core.redaction import HIDDEN

NotifiedEvent = Literal["end", "fault", "requeue", "spike"]


def _name_of_variable(given: Any) -> Any:
    """Refuse what is no name without repeating it: it may be the address, which is a secret."""
    if isinstance(given, str) and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", given):
        text = "give the name of an environment variable that holds the address, not the address, which is a secret"
        problem: InitErrorDetails = {"type": PydanticCustomError("variable", text), "loc": (), "input": HIDDEN}
        raise ValidationError.from_exception_data("variable", [problem])
    return given


class NotifyConfig(Section):
    """Who is told what happens to the run."""

    every_key: ClassVar[Key] = Key(on_resume="allow", changes="nothing")

    webhook_variable: Annotated[str | None, BeforeValidator(_name_of_variable)] = None
    """Name of the environment variable with the address of a webhook, such as Slack's, that gets a POST of JSON."""
    command: tuple[str, ...] = Field((), strict=False)
    """A program and its arguments, as a list; it gets the same JSON on its standard input."""
    on: tuple[NotifiedEvent, ...] = Field(("end", "fault", "requeue", "spike"), strict=False)
    """What to tell: end (finished, or stopped when asked to), fault (any other end), requeue (its job starts again)
    and spike (a loss or gradient that jumped or is not finite)."""

    @field_validator("on", mode="before")
    @classmethod
    def _one_event(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def is_asked_for(self) -> bool:
        """Whether anybody is to be told of anything."""
        return bool(self.on and (self.webhook_variable or self.command))
