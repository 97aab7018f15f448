"""Scalings of the rotary embedding, for sequences longer than a model was first trained on."""

from dataclasses import dataclass, field
from typing import Literal

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
    ``original_context / high_freq_factor`` are kept, and those between are blended.

    Raises:
        ConfigError: unless ``factor >= 1`` and ``0 < low_freq_factor < high_freq_factor``.

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
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope_scaling.high_freq_factor={self.high_freq_factor:g} must be above "
                f"low_freq_factor={self.low_freq_factor:g}, and both above 0"
            )


def _refuse_to_shorten(factor: float) -> None:
    if factor < 1:
        raise ConfigError(f"rope_scaling.factor={factor:g} would shorten the context; use at least 1")


RopeScaling = LinearScaling | Llama3Scaling
