"""The traits of a kind of adapter. Each states its own, so no other code asks for its name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from llama_core.weight_rows import INPUTS, OUTPUTS, Weight


class AdapterJson(BaseModel):
    """The keys that we read of PEFT's ``adapter_config.json``; a ``Literal`` lists the values that we support.

    The fields have PEFT's defaults. A key that is no field is refused if it changes what adapters compute.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    marks: ClassVar[Mapping[str, Any]]
    """The keys and values by which a folder tells this kind from others."""
    settings: ClassVar[Mapping[str, str]] = {}
    """Our setting for each key that decides what the adapters compute; a run that starts from them takes it over."""
    of_training: ClassVar[Mapping[str, str]] = {}
    """Our setting for each key that only training reads; a run that starts from them may have another."""
    written: ClassVar[Mapping[str, Any]] = {}
    """What else a folder that we write says."""

    task_type: Literal["CAUSAL_LM"] | None = None
    target_modules: list[str] | str
    base_model_name_or_path: str | None = None
    revision: str | None = None
    """Of the base, if that is a repository."""


@dataclass(frozen=True)
class AdapterType:
    """A way to train a few weights in place of a frozen matrix, with its traits."""

    name: str
    """Value of ``lora.method``."""
    module: str
    """The module whose ``adapt`` makes the module of an adapted matrix, and whose ``merge`` makes it a plain matrix
    again; a string, so that planning needs no torch."""
    program: str
    """The module whose ``linear`` says what an adapted matrix does in a layer."""
    weights: tuple[Weight, ...]
    """The weights of the adapter of a matrix."""
    json: type[AdapterJson]
    """How PEFT's folders spell it."""
    of_embedding: tuple[Weight, ...] = ()
    """Those of the embedding, a matrix over tokens; none if it cannot be adapted. If it can, ``program`` has
    ``embedding``."""
    adapts_head: bool = False
    """Whether the head can be adapted. If it can, ``program`` has ``head`` and the module ``low_rank``: the loss takes
    what an adapter adds to the logits as two factors."""
    keys: tuple[str, ...] = ()
    """The settings of ``lora`` that it takes, beside ``target_modules``."""

    @property
    def sizes(self) -> frozenset[str]:
        """The settings of ``lora`` that are sizes of its weights, such as a rank."""
        return frozenset(size for weight in self.weights for size in weight.shape) - {INPUTS, OUTPUTS}
