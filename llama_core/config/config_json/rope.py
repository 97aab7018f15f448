"""The rotary embedding in a ``config.json``: its keys, read as our scalings and written from them.

transformers 4 has the key ``rope_theta`` and, if positions are scaled, a mapping ``rope_scaling``.
transformers 5 has one mapping ``rope_parameters`` with both, or with a mapping each for layers with
and without a window, if they may rotate differently. A file may have all of them, since we write
them all, and people edit files for the version that they have; then they must agree.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from llama_core.config.rope import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    yarn_amplitude,
)
from llama_core.errors import ConfigError

Size = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
One = Annotated[float, Field(ge=1, le=1)]
"""The number 1, which a file may write as 1 or 1.0; ``Literal`` takes no floats."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
UNKNOWN_ROPE_TYPE = "rope_type"
"""Pydantic's type of the error for any other."""
STRICT = ConfigDict(strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
"""How a file is checked. The text below a key is the error message for a wrong value, so what a
reader of the code should know stands above it."""
_ORIGINAL_CONTEXT = "original_max_position_embeddings"
_THEIR_NAMES = {"kind": "rope_type", "original_context": _ORIGINAL_CONTEXT}
"""The keys of our settings; the others have the same name in both."""


class Rope(BaseModel):
    """A mapping of an unscaled rotary embedding.

    As in transformers, other keys are ignored; ``reading.ignored_settings`` names them. The mapping
    of Yarn-Llama-2-7b-128k has ``finetuned``, for example.
    """

    model_config = STRICT | ConfigDict(extra="allow")

    rope_type: str | None = None
    # what rope_type was called at first, and still is in the card of Qwen2.5-7B-Instruct
    type: str | None = None
    rope_theta: Positive | None = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: One = 1.0
    """Llama rotates the whole of every head"""

    def scaling(self, original_context: int) -> RopeScaling | None:
        """Return the scaling of a model; None without scaling.

        Args:
            original_context: the longest sequence that it was first trained on, in tokens.

        Raises:
            ConfigError: if its settings contradict each other.
        """
        return None


class _LinearRope(Rope):
    """A rotary embedding with all positions divided by a factor."""

    factor: Annotated[float, Field(ge=1)]

    def scaling(self, original_context: int) -> RopeScaling:
        return LinearScaling(self.factor)


class _Llama3Rope(_LinearRope):
    """A rotary embedding with long wavelengths stretched."""

    low_freq_factor: Positive
    high_freq_factor: Positive

    def scaling(self, original_context: int) -> RopeScaling:
        bands = (self.low_freq_factor, self.high_freq_factor)
        return Llama3Scaling(self.factor, original_context, *bands)


class YarnRope(_LinearRope):
    """A rotary embedding stretched by parts."""

    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool = True

    def scaling(self, original_context: int) -> RopeScaling:
        """Return the scaling of a model, with as much amplitude as the mapping says."""
        amplitude = self.attention_factor
        # both came with DeepSeek-V2; transformers reads them for every model, and only together
        if amplitude is None and self.mscale and self.mscale_all_dim:
            of_rotation = yarn_amplitude(self.factor, self.mscale)
            amplitude = of_rotation / yarn_amplitude(self.factor, self.mscale_all_dim)
        return YarnScaling(
            self.factor,
            original_context,
            beta_fast=self.beta_fast or 32.0,
            beta_slow=self.beta_slow or 1.0,
            attention_factor=amplitude,
            truncate=self.truncate,
        )


def rope_type(given: Any) -> Any:
    """Return the type that a mapping names, under its newer or older key; None of anything else."""
    if not isinstance(given, dict):
        return None
    return given.get("rope_type", given.get("type", "default"))


AnyRope = Annotated[
    Annotated[Rope, Tag("default")]
    | Annotated[_LinearRope, Tag("linear")]
    | Annotated[_Llama3Rope, Tag("llama3")]
    | Annotated[YarnRope, Tag("yarn")],
    Discriminator(
        rope_type,
        custom_error_type=UNKNOWN_ROPE_TYPE,
        custom_error_message=f"choose one of {', '.join(ROPE_TYPES)}",
    ),
]


class RopeByLayer(BaseModel):
    """The mappings of layers with a window and of those without, where these may rotate differently."""

    model_config = STRICT | ConfigDict(extra="forbid")

    full_attention: AnyRope | None = None
    sliding_attention: AnyRope | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_nothing_else(cls, given: Any) -> Any:
        others = sorted(given.keys() - cls.model_fields.keys()) if isinstance(given, dict) else []
        if others:
            raise ConfigError(
                f"rope_parameters has {', '.join(others)} outside of full_attention and sliding_attention, where "
                "some versions of transformers ignore it; give each of the two a mapping of its own"
            )
        return given


@dataclass(frozen=True)
class RopeInFile:
    """All that a file says about the rotary embedding, in as many places as it likes."""

    mappings: dict[str, Rope]
    """``rope_scaling``, ``rope_parameters`` or both, by their keys."""
    outer_key: str
    """The key of the base outside the mappings."""
    outer_theta: float | None
    """That base."""
    outer_original_context: int | None
    """``original_max_position_embeddings`` outside them."""
    max_context: int
    """``max_position_embeddings``."""

    @property
    def theta(self) -> float | None:
        """Base of the rotary embedding; None if the file leaves it to the default of its type."""
        return next((theta for _, theta in self._thetas()), None)

    @property
    def scaling(self) -> RopeScaling | None:
        """Scaling of the rotary embedding; all places that may give it agree."""
        return next(iter(self._scalings()), None)

    def contradictions(self) -> Iterator[str]:
        """Yield a sentence for each setting that transformers 4 and 5 would read differently.

        Raises:
            ConfigError: if the settings of one mapping contradict each other.
        """
        thetas = list(self._thetas())
        if len({theta for _, theta in thetas}) > 1:
            said = " contradicts ".join(f"{key}={theta:g}" for key, theta in thetas)
            yield f"{said}; keep the right one"
        for mapping, rope in self.mappings.items():
            yield from self._contradictions_of(mapping, rope)
        if len(set(self._scalings())) > 1:
            yield "rope_scaling contradicts rope_parameters; keep the right one"

    def _contradictions_of(self, mapping: str, rope: Rope) -> Iterator[str]:
        for key, value in (rope.model_extra or {}).items():
            # a mapping for each type of layers, as Gemma 3 has in transformers 5
            if isinstance(value, dict):
                yield f"{mapping}.{key}: not a setting of Llama's rotary embedding"
        contexts = self._original_contexts(mapping, rope)
        # two contexts that differ are no contradiction where the scaling does not depend on them
        if len({rope.scaling(context) for context in contexts.values()}) > 1:
            said = " contradicts ".join(f"{key}={context}" for key, context in contexts.items())
            yield f"{said}; keep the right one"

    def _thetas(self) -> Iterator[tuple[str, float]]:
        """Yield each base with the key that gives it."""
        for key, rope in self.mappings.items():
            if rope.rope_theta:
                yield f"{key}.rope_theta", rope.rope_theta
        if self.outer_theta:
            yield self.outer_key, self.outer_theta

    def _scalings(self) -> list[RopeScaling | None]:
        """Return the scaling of each mapping."""
        scalings = []
        for mapping, rope in self.mappings.items():
            context = next(iter(self._original_contexts(mapping, rope).values()))
            scalings.append(rope.scaling(context))
        return scalings

    def _original_contexts(self, mapping: str, rope: Rope) -> dict[str, int]:
        """Return the context before scaling by each key that gives it.

        The one outside the mapping comes first, as in transformers 5. Phi-3-mini-128k-instruct has
        it there; Llama 3.1 has it inside.
        """
        contexts = {}
        if self.outer_original_context is not None:
            contexts[_ORIGINAL_CONTEXT] = self.outer_original_context
        if rope.original_max_position_embeddings is not None:
            contexts[f"{mapping}.{_ORIGINAL_CONTEXT}"] = rope.original_max_position_embeddings
        return contexts or {"max_position_embeddings": self.max_context}


def rope_keys(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the keys that describe a rotary embedding, in the spellings of transformers 4 and 5.

    Args:
        theta: its base.
        scaling: its scaling; None without scaling.
    """
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else _keys_of_scaling(scaling),
        "rope_parameters": rope_mapping(theta, scaling),
    }


def rope_mapping(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the keys that describe a rotary embedding, in the spelling of transformers 5."""
    return {"rope_theta": theta} | ({"rope_type": "default"} if scaling is None else _keys_of_scaling(scaling))


def _keys_of_scaling(scaling: RopeScaling) -> dict[str, Any]:
    keys = {}
    for name, value in asdict(scaling).items():
        if value is not None:  # YaRN's amplitude: without the key, it is that of the paper
            keys[_THEIR_NAMES.get(name, name)] = value
    return keys
