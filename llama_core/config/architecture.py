"""The architecture of a run's model: that of a variant or of a Hugging Face folder, and what is set to differ."""

from dataclasses import asdict, fields, replace
from typing import Any, Literal, Self

from pydantic import Field

from llama_core.config.hugging_face import absolute_path, folder_name, is_folder, read_folder
from llama_core.config.models import (
    LONGEST_DEFAULT,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    RopeScaling,
    model_spec,
)
from llama_core.config.section import Section
from llama_core.errors import ConfigError

_TRAITS = {trait.name for trait in fields(ModelSpec)}
_SCALINGS: dict[str, type[LinearScaling] | type[Llama3Scaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling}


class RopeScalingConfig(Section):
    """How the rotary embedding is stretched, for sequences longer than the model was first trained on."""

    kind: Literal["none", "linear", "llama3"] | None = None
    """none, linear (every wavelength) or llama3 (the long ones); default: the model's, or linear with a factor."""
    factor: float | None = Field(None, ge=1)
    """How many times longer sequences get; default: the model's. max_context grows with it unless it is set too."""
    low_freq_factor: float | None = Field(None, gt=0)
    """llama3 stretches wavelengths above original_context / low_freq_factor in full; default: the model's, or 1."""
    high_freq_factor: float | None = Field(None, gt=0)
    """llama3 keeps wavelengths below original_context / high_freq_factor; default: the model's, or 4."""
    original_context: int | None = Field(None, ge=1)
    """Tokens of llama3's longest sequence before the stretching; default: the model's, or its max_context."""

    def over(self, own: RopeScaling | None, max_context: int) -> RopeScaling | None:
        """Return the scaling of a model with what is set here.

        Args:
            own: the scaling that the model has.
            max_context: its longest sequence, in tokens.

        Raises:
            ConfigError: if a setting is missing or does not go with the kind.
        """
        given: dict[str, Any] = self.model_dump(exclude_none=True)
        if not given:
            return own
        kind = given.pop("kind", own.kind if own else "linear")
        scaling = _SCALINGS.get(kind)
        takes = {setting.name for setting in fields(scaling) if setting.init} if scaling else set()
        problems = [
            f"architecture.rope_scaling.{name}={value:g} has no effect with architecture.rope_scaling.kind={kind}; "
            "set another kind or leave it out"
            for name, value in given.items()
            if name not in takes
        ]
        defaults = {"original_context": max_context} | (asdict(own) if own else {})
        settings = {name: value for name, value in (defaults | given).items() if name in takes}
        if scaling and "factor" not in settings:
            problems.append(
                f"architecture.rope_scaling.kind={kind} needs architecture.rope_scaling.factor: how many times longer "
                "sequences get"
            )
        if problems:
            raise ConfigError(*problems)
        return scaling(**settings) if scaling else None


class ArchitectureConfig(Section):
    """Sizes and traits that differ from the model's own; the name then stands for the family."""

    hidden_size: int | None = Field(None, ge=1)
    """Width of the residual stream."""
    num_layers: int | None = Field(None, ge=1)
    """Transformer layers."""
    num_heads: int | None = Field(None, ge=1)
    """Query heads."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key/value heads; they divide the query heads."""
    head_dim: int | None = Field(None, ge=2, multiple_of=2)
    """Width of a head; even, since the rotary embedding turns pairs."""
    ffn_size: int | None = Field(None, ge=1)
    """Width of the feed-forward layers."""
    vocab_size: int | None = Field(None, ge=1)
    """Tokens in the vocabulary."""
    tied_embeddings: bool | None = None
    """Whether the head is the embedding."""
    norm_eps: float | None = Field(None, gt=0)
    """What the norms add to the mean square."""
    rope_theta: float | None = Field(None, gt=0)
    """Base of the rotary embedding; a larger one turns slower, for longer sequences."""
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    """How the rotary embedding is stretched."""
    max_context: int | None = Field(None, ge=2)
    """Longest sequence that may be trained at, in tokens; default: the model's, times what rope_scaling adds."""
    instruct: bool | None = None
    """Whether the model is trained on conversations; default: as the variant, or if a folder has a chat template."""

    recorded_from: str | None = None
    """The folder that a run has read all of this from, and need not open again. Written by runs, not by hand."""

    @classmethod
    def record(cls, folder: str, spec: ModelSpec) -> Self:
        """Return all of what the model in a folder is, from which ``spec`` makes it without the folder."""
        traits = {name: getattr(spec, name) for name in cls.model_fields if name in _TRAITS}
        scaling = asdict(spec.rope_scaling) if spec.rope_scaling else {"kind": "none"}
        traits["rope_scaling"] = RopeScalingConfig(**scaling)
        return cls(**traits, recorded_from=absolute_path(folder))

    def identity(self) -> dict[str, Any]:
        """Return what is set, as nested keys."""
        given = self.model_dump(exclude_none=True, exclude={"recorded_from"})
        return {key: value for key, value in given.items() if value != {}}

    def spec(self, model: str) -> ModelSpec:
        """Return the architecture of a variant, or of the model in a folder, with what is set here.

        The folder is not opened where a run has recorded what it held.

        Raises:
            ConfigError: if there is no such model, or it is unlike Llama, or the settings contradict each other or are
                on record for another folder.
        """
        folder = absolute_path(model) if is_folder(model) else None
        if self.recorded_from not in (None, folder):
            raise ConfigError(
                f"architecture was recorded from {self.recorded_from!r} and does not describe model={model!r}; keep "
                "that model, or leave architecture out"
            )
        if folder is None:
            return self._over(model_spec(model))
        is_whole = None not in dict(self).values() and self.rope_scaling.kind is not None
        return self._on_record(folder) if is_whole else self._over(read_folder(model))

    def _on_record(self, folder: str) -> ModelSpec:
        traits = {name: value for name, value in self if name in _TRAITS}
        traits["rope_scaling"] = self.rope_scaling.over(None, traits["max_context"])
        default_seq_len = min(traits["max_context"], LONGEST_DEFAULT)
        return ModelSpec(folder_name(folder), "llama", **traits, default_seq_len=default_seq_len)

    def _over(self, spec: ModelSpec) -> ModelSpec:
        own, max_context = spec.rope_scaling, spec.max_context
        scaling = self.rope_scaling.over(own, max_context)
        longer = (scaling.factor if scaling else 1) / (own.factor if own else 1)
        given = self.model_dump(exclude_none=True, exclude={"rope_scaling", "recorded_from"})
        traits = {"max_context": int(max_context * longer)} | given
        traits |= {"rope_scaling": scaling, "default_seq_len": min(spec.default_seq_len, traits["max_context"])}
        return replace(spec, **traits)
