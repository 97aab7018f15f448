"""What the ``config.json`` of several types may say of layers that differ: windows, and how they rotate."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from llama_core.config.config_json.llama import LlamaJson
from llama_core.config.config_json.rope import Positive, RopeByLayer, RopeInFile, Size, rope_mapping
from llama_core.config.models import ModelSpec


class LayerTypesJson(LlamaJson):
    """What types share that have a window in some layers, as ``layer_types`` says."""

    sliding_window: Size | None = 4096  # type: ignore[assignment]
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None

    @property
    def _windowed_by_default(self) -> list[int]:
        """The layers with a window in a file without ``layer_types``."""
        raise NotImplementedError

    @property
    def _windowed(self) -> list[int]:
        """The layers with a window."""
        if self.layer_types is not None:
            return [layer for layer, kind in enumerate(self.layer_types) if kind == "sliding_attention"]
        return self._windowed_by_default

    @property
    def _all_windowed(self) -> bool:
        """Whether all layers have a window."""
        return len(self._windowed) == self.num_hidden_layers

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of ``ModelSpec`` that tell this model from Llama, except for experts."""
        if not self._windowed:
            return super().traits
        return super().traits | {
            "sliding_window": self.sliding_window,
            "windowed_layers": () if self._all_windowed else tuple(self._windowed),
        }

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            yield f"layer_types has {len(self.layer_types)} entries, but num_hidden_layers={self.num_hidden_layers}"

    def _windows_without_size(self) -> Iterator[str]:
        if self._windowed and self.sliding_window is None:
            yield "sliding_window=null: layers with sliding_attention, of which this model has some, need its size"


def layer_types_of(spec: ModelSpec) -> list[str]:
    """Return the ``layer_types`` of a model."""
    return ["sliding_attention" if spec.window(layer) else "full_attention" for layer in range(spec.num_layers)]


class RopeByLayerJson(LayerTypesJson):
    """What types share whose layers with a window may rotate differently from the others."""

    default_windowed_theta: ClassVar[float]
    """Base of the rotary embedding of layers with a window where a file gives none."""

    # the mappings of transformers 5; in transformers 4, rope_scaling is of layers without a window
    rope_parameters: RopeByLayer | None = None  # type: ignore[assignment]
    # its key for the base of the others, if the type has one
    rope_local_base_freq: Positive | None = None

    @property
    def rope(self) -> RopeInFile:
        """All that the file says about the rotary embedding of layers without a window; of all, if all have one."""
        if self._all_windowed:
            return self._windowed_rope
        by_layer = self.rope_parameters or RopeByLayer()
        mappings = {"rope_scaling": self.rope_scaling, "rope_parameters.full_attention": by_layer.full_attention}
        return self._rope_of(mappings, "rope_theta", self.rope_theta)

    @property
    def theta(self) -> float:
        """Base of the rotary embedding of layers without a window; of all, if all have one."""
        return self._windowed_theta if self._all_windowed else super().theta

    @property
    def _windowed_rope(self) -> RopeInFile:
        """All that the file says about the rotary embedding of layers with a window."""
        by_layer = self.rope_parameters or RopeByLayer()
        mappings = {"rope_parameters.sliding_attention": by_layer.sliding_attention}
        return self._rope_of(mappings, "rope_local_base_freq", self.rope_local_base_freq)

    @property
    def _windowed_theta(self) -> float:
        """Base of the rotary embedding of layers with a window."""
        return self._windowed_rope.theta or self.default_windowed_theta

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of ``ModelSpec`` that tell this model from Llama, except for experts."""
        if self._all_windowed or not self._windowed or self._rotate_alike:
            return super().traits
        return super().traits | {"windowed_rope_theta": self._windowed_theta}

    @property
    def _rotate_alike(self) -> bool:
        """Whether layers with a window rotate as those without."""
        windowed = (self._windowed_theta, self._windowed_rope.scaling)
        return windowed == (self.theta, self.rope.scaling)

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if not self._windowed:
            return
        yield from self._windows_without_size()
        rope = self._windowed_rope
        if not self._all_windowed:
            yield from rope.contradictions()
            if rope.scaling is not None and not self._rotate_alike:
                yield "rope_parameters.sliding_attention: only the scaling of full_attention can be trained, or none"
        for mapping in rope.mappings.values():
            for key in mapping.model_extra or {}:
                yield f"rope_parameters.sliding_attention.{key}: not a setting of its rotary embedding"

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        layer_types = layer_types_of(spec)
        ropes = {kind: spec.rope(layer) for layer, kind in enumerate(layer_types)}
        mappings = {}
        for kind in ("full_attention", "sliding_attention"):
            rope = ropes.get(kind, spec.rope(0))  # transformers wants both, even if all layers are of one kind
            mappings[kind] = rope_mapping(rope.theta, rope.scaling)
        return {
            "attention_bias": False,
            # a number even if no layer has a window, since transformers makes the mask of one
            "sliding_window": spec.sliding_window or spec.max_context,
            "layer_types": layer_types,
            "rope_parameters": mappings,
        }
