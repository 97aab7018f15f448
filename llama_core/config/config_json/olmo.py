"""What the ``config.json`` of OLMo's types may say."""

from collections.abc import Iterator
from typing import Any, Literal

from llama_core.config.config_json.layer_types import RopeByLayerJson
from llama_core.config.config_json.llama import LlamaJson
from llama_core.config.config_json.rope import Positive
from llama_core.config.model_types import OLMO2, OLMO3
from llama_core.config.models import ModelSpec


class Olmo2Json(LlamaJson):
    """The same with norms after attention and feed-forward, and of all heads of a query or a key as one.

    It has the defaults of ``Olmo2Config``.
    """

    row = OLMO2

    model_type: Literal["olmo2"]  # type: ignore[assignment]
    architectures: list[Literal["Olmo2ForCausalLM"]] = []  # type: ignore[assignment]
    """only Olmo2ForCausalLM can be trained"""
    rms_norm_eps: Positive = 1e-5

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        return {"attention_bias": False}


class Olmo3Json(RopeByLayerJson):
    """An OLMo 2 with windows in some layers, which may rotate differently, with the defaults of ``Olmo3Config``."""

    row = OLMO3
    default_theta = 500_000.0
    default_windowed_theta = default_theta

    model_type: Literal["olmo3"]  # type: ignore[assignment]
    architectures: list[Literal["Olmo3ForCausalLM"]] = []  # type: ignore[assignment]
    """only Olmo3ForCausalLM can be trained"""
    rms_norm_eps: Positive = 1e-5
    rope_local_base_freq: None = None
    """not a key of OLMo 3"""

    @property
    def _windowed_by_default(self) -> list[int]:
        """The layers with a window in a file without ``layer_types``: all but every fourth."""
        return [layer for layer in range(self.num_hidden_layers) if layer % 4 != 3]

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self._windowed and self._windowed_rope.theta is None and self.rope_theta not in {None, self.default_theta}:
            yield (
                f"rope_theta={self.rope_theta:g} is read by transformers 4 for all layers, and by 5 for those without "
                "a window; add rope_parameters.sliding_attention.rope_theta"
            )
