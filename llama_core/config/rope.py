"""The rotary embedding of a layer, and its scalings for sequences longer than a model was first trained on."""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from llama_core.errors import ConfigError


@dataclass(frozen=True)
class LinearScaling:
    """Scaling of the rotary embedding that divides all positions by ``factor``.

    Raises:
        ConfigError: if ``factor`` is below 1.

    Source: Chen et al. 2023, arXiv:2306.15595 (position interpolation).
    """

    kind: Literal["linear"] = field(default="linear", init=False)
    """Its ``rope_type`` in Hugging Face."""
    factor: float

    def __post_init__(self) -> None:
        _refuse_to_shorten(self.factor)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's frequency-dependent stretching of the rotary embedding.

    Wavelengths above ``original_context / low_freq_factor`` are stretched by ``factor``, those below
    ``original_context / high_freq_factor`` are kept, and those between are blended. In Llama 4 the two factors are
    equal, and there are none.

    Raises:
        ConfigError: unless ``factor >= 1`` and ``0 < low_freq_factor <= high_freq_factor``.

    Source: Meta's llama-models reference code, ``apply_scaling``.
    """

    kind: Literal["llama3"] = field(default="llama3", init=False)
    """Its ``rope_type`` in Hugging Face."""
    factor: float
    original_context: int
    """Longest sequence before the stretching, in tokens."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        _refuse_to_shorten(self.factor)
        if not 0 < self.low_freq_factor <= self.high_freq_factor:
            raise ConfigError(
                f"rope_scaling.high_freq_factor={self.high_freq_factor:g} must be at least "
                f"low_freq_factor={self.low_freq_factor:g}, and both above 0"
            )


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's stretching of the rotary embedding by parts, which also makes attention sharper.

    Pairs that turn less than ``beta_slow`` times within ``original_context`` are slowed down by ``factor``, those that
    turn more than ``beta_fast`` times are kept, and those between are blended. Cosines and sines are multiplied by
    ``amplitude``.

    Raises:
        ConfigError: unless ``factor >= 1``, ``0 < beta_slow < beta_fast`` and ``attention_factor > 0``.

    Source: Peng et al. 2023, arXiv:2309.00071, sections 3.2 to 3.4.
    """

    kind: Literal["yarn"] = field(default="yarn", init=False)
    """Its ``rope_type`` in Hugging Face."""
    factor: float
    original_context: int
    """Longest sequence before the stretching, in tokens."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """The amplitude; None for the one of the paper."""
    truncate: bool = True
    """Whether the blend begins and ends at whole pairs."""

    def __post_init__(self) -> None:
        _refuse_to_shorten(self.factor)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ConfigError(
                f"rope_scaling.beta_fast={self.beta_fast:g} must be above "
                f"beta_slow={self.beta_slow:g}, and both above 0"
            )
        if self.attention_factor is not None and self.attention_factor <= 0:
            raise ConfigError(f"rope_scaling.attention_factor={self.attention_factor:g} must be above 0")

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines."""
        return yarn_amplitude(self.factor) if self.attention_factor is None else self.attention_factor

    def blend(self, head_dim: int, rope_theta: float) -> tuple[float, float]:
        """Return the pairs, counted from 0, between which frequencies go from kept to slowed down."""

        def pair_with(turns: float) -> float:
            return head_dim * math.log(self.original_context / (2 * math.pi * turns)) / (2 * math.log(rope_theta))

        first = pair_with(self.beta_fast)
        last = pair_with(self.beta_slow)
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, head_dim - 1)
        return first, last if last != first else first + 0.001


def yarn_amplitude(factor: float, weight: float = 1.0) -> float:
    """Return the factor of YaRN on cosines and sines, for sequences ``factor`` times longer."""
    return 0.1 * weight * math.log(factor) + 1.0


def _refuse_to_shorten(factor: float) -> None:
    if factor < 1:
        raise ConfigError(f"rope_scaling.factor={factor:g} would shorten the context; use at least 1")


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
RopePairs = Literal["halves", "adjacent"]
"""Which numbers of a head of H are rotated together: i and i + H/2, or 2i and 2i + 1."""


class RotaryEmbedding(NamedTuple):
    """The rotary embedding of a layer; layers with equal ones share their cosines and sines."""

    head_dim: int
    theta: float
    """Its base."""
    scaling: RopeScaling | None


class QueryTemperature(NamedTuple):
    """A factor on the queries of a layer without rotation, which grows with their positions.

    At position p it is ``1 + scale * log(1 + floor((p + 1) / floor))``.

    Source: Nakanishi 2025, arXiv:2501.19399 (scalable softmax), and transformers' ``Llama4TextAttention``.
    """

    scale: float
    floor: int
    """In tokens."""
