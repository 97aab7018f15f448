"""The architecture of a run's model: a variant or a Hugging Face folder, plus the settings that override it."""

from dataclasses import MISSING, asdict, fields, replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from llama_core.config.config_json.reading import absolute_path, folder_name, is_folder, read_folder
from llama_core.config.model_spec import Activation, NormPlacement, NormWidth
from llama_core.config.models import LONGEST_DEFAULT, ModelSpec, model_spec
from llama_core.config.rope import LinearScaling, Llama3Scaling, RopePairs, RopeScaling, YarnScaling
from llama_core.config.section import Key, Section
from llama_core.errors import ConfigError

_TRAITS = {trait.name for trait in fields(ModelSpec)}
_REQUIRED = {trait.name for trait in fields(ModelSpec) if trait.default is MISSING}
"""Traits in every record of a model. Another may be newer than a record, which then means its default."""
_SCALINGS: dict[str, type[RopeScaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


class RopeScalingConfig(Section):
    """Scaling of the rotary embedding, for sequences longer than the model was first trained on."""

    kind: Literal["none", "linear", "llama3", "yarn"] | None = None
    """none, linear (all wavelengths), llama3 or yarn (long ones); default: the model's, or linear if factor is set."""
    factor: float | None = Field(None, ge=1)
    """How many times longer sequences get; default: the model's. max_context grows in proportion, unless it is set."""
    low_freq_factor: float | None = Field(None, gt=0)
    """llama3 fully stretches wavelengths above original_context / low_freq_factor; default: the model's, or 1."""
    high_freq_factor: float | None = Field(None, gt=0)
    """llama3 keeps wavelengths below original_context / high_freq_factor unchanged; default: the model's, or 4."""
    original_context: int | None = Field(None, ge=1)
    """Context before llama3's or yarn's scaling, in tokens; default: the model's, or its max_context."""
    beta_fast: float | None = Field(None, gt=0)
    """yarn keeps pairs that turn more often than this within original_context; default: the model's, or 32."""
    beta_slow: float | None = Field(None, gt=0)
    """yarn fully slows down pairs that turn less often than this within it; default: the model's, or 1."""
    attention_factor: float | None = Field(None, gt=0)
    """yarn's factor on cosines and sines; default: the model's, or 0.1 ln(factor) + 1."""
    truncate: bool | None = None
    """Whether yarn's blend begins and ends at whole pairs; default: the model's, or true."""

    def over(self, own: RopeScaling | None, max_context: int) -> RopeScaling | None:
        """Return a model's scaling with these settings applied.

        Args:
            own: the model's own scaling.
            max_context: the model's longest sequence, in tokens.

        Raises:
            ConfigError: if a setting is missing or has no effect with this kind.
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
    """Sizes and traits that override the model's own. The model's name then stands for its family."""

    hidden_size: int | None = Field(None, ge=1)
    """Width of the residual stream."""
    num_layers: int | None = Field(None, ge=1)
    """Transformer layers."""
    num_heads: int | None = Field(None, ge=1)
    """Query heads."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key/value heads; must divide the query heads."""
    head_dim: int | None = Field(None, ge=2, multiple_of=2)
    """Width of a head; must be even, since the rotary embedding rotates pairs."""
    ffn_size: int | None = Field(None, ge=1)
    """Width of the feed-forward layers."""
    vocab_size: int | None = Field(None, ge=1)
    """Tokens in the vocabulary."""
    tied_embeddings: bool | None = None
    """Whether the output head shares the embedding's weights."""
    scaled_embedding: bool | None = None
    """Whether the residual stream begins as the embedding times the root of hidden_size, as in Gemma."""
    qkv_bias: bool | None = None
    """Whether the projections to queries, keys and values have biases, as in Qwen2."""
    o_bias: bool | None = None
    """Whether the projection of attention's output has a bias, as in GPT-OSS."""
    qk_norm: bool | None = None
    """Whether queries and keys are normalised before they are rotated, as in Qwen3."""
    qk_norm_width: NormWidth | None = None
    """What qk_norm normalises as one: each head, as in Qwen3, or all heads of a query or a key, as in OLMo 2."""
    qk_norm_weights: bool | None = None
    """Whether these norms multiply by weights; without, only layers that rotate have them, as in Llama 4."""
    mtp_layers: int | None = Field(None, ge=0)
    """Modules after the last layer that each predict one token further ahead, as in DeepSeek-V3; 0 for none."""
    norms: NormPlacement | None = None
    """Where the norms of a block are: pre (before attention and feed-forward), post (on what they add), or both."""
    sliding_window: int | None = Field(None, ge=0)
    """Tokens that a query sees, itself included, as in Mistral; 0 for all earlier ones."""
    windowed_layers: tuple[int, ...] | None = Field(None, strict=False)
    """The layers with the sliding window; default: the model's, or all."""
    windowed_rope_theta: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Base of the unscaled rotary embedding of windowed_layers, as in OLMo 3; 0 if they rotate as the others do."""
    attention_chunk: int | None = Field(None, ge=0)
    """Tokens of a chunk, outside of which queries of layers that rotate see nothing, as in Llama 4; 0 for none."""
    query_pre_attn_scalar: int | None = Field(None, ge=0)
    """Attention's scores are divided by the root of this, as in Gemma 3 27B; 0 for head_dim."""
    score_factor: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Factor on attention's scores beside that, as DeepSeek-V3 has with YaRN; 1 for none."""
    attention_soft_cap: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Cap on attention's scores, cap * tanh(scores / cap), as in Gemma 2; 0 for none."""
    attention_sinks: bool | None = None
    """Whether each head has a learned logit that takes a share of attention and has no value, as in GPT-OSS."""
    kv_rank: int | None = Field(None, ge=0)
    """Width of the latent that keys and values of all heads are made from, as in DeepSeek-V3; 0 for none."""
    query_rank: int | None = Field(None, ge=0)
    """Width of the latent that queries are made from, with kv_rank; 0 for none."""
    rope_dim: int | None = Field(None, ge=0, multiple_of=2)
    """With kv_rank, how many numbers of a head are rotated, the last ones, which all heads of a key share."""
    value_dim: int | None = Field(None, ge=0)
    """With kv_rank, width of a head's values; 0 for head_dim."""
    activation: Activation | None = None
    """What is made of a feed-forward's gate: silu (SwiGLU), or GELU by its tanh formula (GeGLU), as in Gemma; or of
    gate and up at once: clamped_swiglu, as in GPT-OSS."""
    norm_eps: float | None = Field(None, gt=0)
    """Epsilon that the norms add to the mean square."""
    rope_theta: float | None = Field(None, gt=0)
    """Base of the rotary embedding; a larger base rotates slower, for longer sequences."""
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    """Scaling of the rotary embedding."""
    rope_pairs: RopePairs | None = None
    """What is rotated together: i and i + head_dim / 2 (halves), or 2i and 2i + 1 (adjacent), as in Llama 4."""
    nope_layers: tuple[int, ...] | None = Field(None, strict=False)
    """The layers that do not rotate queries and keys, as in Llama 4; default: the model's, or none."""
    query_temperature_scale: float | None = Field(None, ge=0, allow_inf_nan=False)
    """How fast a factor on the queries of nope_layers grows with their positions, as in Llama 4; 0 for none."""
    query_temperature_floor: int | None = Field(None, ge=1)
    """After how many tokens of a document that factor first grows; default: the model's, or 8192."""
    max_context: int | None = Field(None, ge=2)
    """Longest sequence allowed in training, in tokens; default: the model's, extended by rope_scaling."""
    instruct: bool | None = None
    """Whether it is trained on conversations; default: the variant's, or true if the folder has a chat template."""

    recorded_from: Annotated[str | None, Key(on_resume="allow")] = None
    """Folder that a run read the architecture from and need not open again. Written by runs, not by hand."""

    @classmethod
    def record(cls, folder: str, spec: ModelSpec) -> Self:
        """Return every trait of the model in a folder, so that ``spec`` can rebuild it without the folder."""
        traits = {name: getattr(spec, name) for name in cls.model_fields if name in _TRAITS}
        scaling = asdict(spec.rope_scaling) if spec.rope_scaling else {"kind": "none"}
        traits["rope_scaling"] = RopeScalingConfig(**scaling)
        return cls(**traits, recorded_from=absolute_path(folder))

    def identity(self) -> dict[str, Any]:
        """Return the keys that are set, nested."""
        given = self.model_dump(exclude_none=True, exclude=self.free_keys())
        return {key: value for key, value in given.items() if value != {}}

    def spec(self, model: str) -> ModelSpec:
        """Return the architecture of a variant, or of the model in a folder, with these settings applied.

        If a run has recorded the folder's traits, the folder is not opened.

        Raises:
            ConfigError: if the model does not exist or is not a Llama, or if the settings contradict each other or were
                recorded from another folder.
        """
        folder = absolute_path(model) if is_folder(model) else None
        if self.recorded_from not in (None, folder):
            raise ConfigError(
                f"architecture was recorded from {self.recorded_from!r} and does not describe model={model!r}; keep "
                "that model, or leave architecture out"
            )
        if folder is None:
            return self._over(model_spec(model))
        lacking = {name for name, value in self if value is None}
        is_whole = not lacking & {"recorded_from", *_REQUIRED} and self.rope_scaling.kind is not None
        return self._on_record(folder) if is_whole else self._over(read_folder(model))

    def _on_record(self, folder: str) -> ModelSpec:
        traits = {name: value for name, value in self if name in _TRAITS and value is not None}
        traits["rope_scaling"] = self.rope_scaling.over(None, traits["max_context"])
        default_seq_len = min(traits["max_context"], LONGEST_DEFAULT)
        return ModelSpec(folder_name(folder), "llama", **traits, default_seq_len=default_seq_len)

    def _over(self, spec: ModelSpec) -> ModelSpec:
        spec = spec.shortened(self.num_layers)
        own = spec.rope_scaling
        max_context = spec.max_context
        scaling = self.rope_scaling.over(own, max_context)
        longer = (scaling.factor if scaling else 1) / (own.factor if own else 1)
        given = self.model_dump(exclude_none=True, exclude={"rope_scaling", "recorded_from"})
        traits = {"max_context": int(max_context * longer)} | given
        traits |= {"rope_scaling": scaling, "default_seq_len": min(spec.default_seq_len, traits["max_context"])}
        return replace(spec, **traits)


_NOT_SET_HERE = {"name", "family", "default_seq_len", "lora", "moe", "trainable", "base"}
"""Traits that follow from the model's name, or have sections of their own."""
if _NOT_SET_HERE | ArchitectureConfig.model_fields.keys() - {"recorded_from"} != _TRAITS:
    raise NotImplementedError("a trait of ModelSpec has no key in ArchitectureConfig, so a run would not record it")
