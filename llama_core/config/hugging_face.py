"""Read and write the ``config.json`` of a Hugging Face folder: the architecture of a Llama or of a relative.

A relative is a Llama with traits; a class below says which. Keys have the meaning and the defaults of transformers'
``LlamaConfig``, or of the relative's own configuration, in the spelling of version 4 (``rope_theta``,
``rope_scaling``) or 5 (``rope_parameters``). A key that changes the function that the weights compute is refused. Other
keys are ignored: ``attention_dropout``, ``initializer_range`` and ``router_jitter_noise`` are training settings,
``use_cache`` is a generation setting, and ``pretraining_tp`` only splits a product into slices that are added up again.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from llama_core.config.model_types import (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    ModelType,
    stated_by_none,
)
from llama_core.config.models import LONGEST_DEFAULT, ModelSpec, model_names
from llama_core.config.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling, yarn_amplitude
from llama_core.config.strategy import MoE
from llama_core.errors import ConfigError, as_clause, why_unreadable
from llama_core.hub import folder_of, repository_in_cache
from llama_core.records.files import read_file

_CONFIG = "config.json"
_ADAPTERS = "adapter_config.json"
_THETA = 10_000.0
"""Default of ``rope_theta`` in transformers."""
_MIXTRAL_THETA = 1_000_000.0
"""The same for Mixtral."""

_WINDOW = "sliding_window"
_ROPE_KEYS = {"kind": "rope_type", "original_context": "original_max_position_embeddings"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The dtypes that weights can be written in, with transformers' names for them."""

_Size = Annotated[int, Field(ge=1)]
_Positive = Annotated[float, Field(gt=0)]
_Weight = Annotated[float, Field(ge=0)]
_One = Annotated[float, Field(ge=1, le=1)]


def is_folder(model: str) -> bool:
    """Return whether ``model`` is a path or a name of the Hub, and not a variant's name.

    A path has a separator, or holds a ``config.json``.
    """
    if os.sep in model or model in model_names():
        return os.sep in model
    try:
        return (Path(model) / _CONFIG).is_file()
    except OSError:  # the name is too long, or the folder is not accessible
        return False


def folder_name(model: str) -> str:
    """Return the name of the model in a folder: that of its repository if it comes from the Hub, else the folder's."""
    folder = folder_of(model).resolve()
    return (repository_in_cache(folder) or folder.name).rpartition("/")[2]


def absolute_path(model: str) -> str:
    """Return the absolute path of a folder."""
    return str(folder_of(model).absolute())


def read_folder(model: str) -> ModelSpec:
    """Return the architecture that a folder's ``config.json`` describes.

    The model counts as trained on conversations if its tokenizer has a chat template, since ``config.json`` does not
    say. Its context is ``max_position_embeddings`` as written, even with linear scaling, where some authors write the
    length before scaling.

    Args:
        model: the folder, where ``~`` is the home directory, or a name of the Hub.

    Raises:
        ConfigError: naming every key that is missing, wrong or unlike Llama, or saying why the folder holds no model.
        HubError: if a name stands for no folder.
    """
    folder = folder_of(model)
    _refuse_other_folders(folder, model)
    config = _read_config(folder / _CONFIG)
    return ModelSpec(
        folder_name(model),
        "llama",
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.width_of_head,
        ffn_size=config.width_of_feed_forward,
        vocab_size=config.vocab_size,
        rope_theta=config.theta,
        norm_eps=config.rms_norm_eps,
        max_context=config.max_position_embeddings,
        default_seq_len=min(config.max_position_embeddings, LONGEST_DEFAULT),
        tied_embeddings=config.tie_word_embeddings,
        rope_scaling=config.scaling,
        instruct=_has_chat_template(folder),
        moe=config.moe,
        **config.traits,
    )


def ignored_settings(model: str) -> list[str]:
    """Return a sentence on the settings of the rotary embedding in a folder that are ignored; none without any.

    Args:
        model: a model's name, or a folder that ``read_folder`` reads.
    """
    if not is_folder(model):
        return []
    file = folder_of(model) / _CONFIG
    ignored = {}
    for mapping, rope in _read_config(file).ropes().items():
        for key, value in (rope.model_extra or {}).items():
            ignored[f"{mapping}.{json.dumps(key)[1:-1]}"] = json.dumps(value)
    if not ignored:
        return []
    said = ", ".join(f"{key}={value}" for key, value in ignored.items())
    return [
        f"{file}: {said}: ignored, as in transformers; if the model was trained with it, set "
        "architecture.rope_scaling, such as its attention_factor"
    ]


def config_json(
    spec: ModelSpec, dtype: str = "fp32", *, bos_id: int | None = None, eos_id: int | list[int] | None = None
) -> dict[str, Any]:
    """Return ``config.json`` for transformers 4 and 5, with the rotary embedding and the dtype under both their keys.

    Args:
        spec: the architecture.
        dtype: dtype of the weights beside it, one of ``DTYPES``.
        bos_id: the token that begins a document; None if unknown.
        eos_id: the token that ends a text, or all that do; None if unknown.

    Raises:
        ConfigError: if transformers has no model with these traits, naming them.
    """
    kind = _kind_of(spec)
    scaling = None
    if spec.rope_scaling is not None:
        given = {name: value for name, value in asdict(spec.rope_scaling).items() if value is not None}
        scaling = {_ROPE_KEYS.get(name, name): value for name, value in given.items()}
    return {
        "architectures": [kind.architecture()],
        "model_type": kind.row.name,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_context,
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": spec.rope_theta} | (scaling or {"rope_type": "default"}),
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "dtype": DTYPES[dtype],
        "torch_dtype": DTYPES[dtype],
    } | kind.keys_of(spec)


def _kind_of(spec: ModelSpec) -> "type[_LlamaJson]":
    """Return the kind of file that states every trait of ``spec``.

    Raises:
        ConfigError: if none does.
    """
    kind = _KINDS[spec.model_type.name]
    unknown = stated_by_none(spec.traits)
    lacking = unknown or kind.row.lacking(spec.traits)
    if lacking:
        named = " or ".join(f"{trait}={spec.traits[trait]}" for trait in sorted(lacking))
        which = "no model there has" if unknown else f"{kind.architecture()} is the nearest there, and has no"
        raise ConfigError(f"transformers cannot describe {spec.name}: {which} {named}")
    return kind


def _refuse_other_folders(folder: Path, model: str) -> None:
    try:
        problem = _what_is_wrong(folder)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if problem:
        raise ConfigError(
            f"model={model!r} {problem}; give a folder with a {_CONFIG}, or a name that `training-infra models` lists"
        )


def _what_is_wrong(folder: Path) -> str:
    """Return why a folder holds no model; empty if it holds one."""
    if (folder / _CONFIG).is_file():
        return ""
    if not folder.exists():
        return "is not a folder here"
    if not folder.is_dir():
        return "is a file"
    if not (folder / _ADAPTERS).is_file():
        return f"has no {_CONFIG}"
    base = _read_json(folder / _ADAPTERS).get("base_model_name_or_path") or "another model"
    return f"holds adapters for {base} ({_ADAPTERS}), but no model"


def _read_config(file: Path) -> "_LlamaJson":
    """Return what a ``config.json`` describes.

    Raises:
        ConfigError: as ``read_folder``.
    """
    # a window that is null is none; of other keys, null is the default
    given = {key: value for key, value in _read_json(file).items() if value not in (None, {}) or key == _WINDOW}
    model_type = str(given.get("model_type", "llama"))
    kind = _KINDS.get(model_type, _LlamaJson)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        problems = [problem for detail in error.errors() for problem in _describe(detail, kind)]
        if model_type not in _KINDS:  # other models name their sizes differently
            problems = [problem for problem in problems if not problem.endswith(_MISSING)]
        raise ConfigError(*(f"{file}: {problem}" for problem in problems)) from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_file(file))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8
        raise ConfigError(f"{file} is not JSON: {why_unreadable(error)}; copy it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not a mapping of keys to values; copy it again")
    return value


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(_read_json(file).get("chat_template"))


class _Json(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class _Rope(_Json, extra="allow"):
    """An unscaled rotary embedding. As in transformers, other keys are ignored; ``ignored_settings`` names them."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: _Positive | None = None
    original_max_position_embeddings: _Size | None = None
    partial_rotary_factor: _One = 1.0
    """Llama rotates the whole of every head"""

    def scaling(self, original_context: int) -> RopeScaling | None:
        """Return the scaling of a model that was first trained on ``original_context`` tokens; None without scaling."""
        return None


class _LinearRope(_Rope):
    """A rotary embedding with all positions divided by a factor."""

    factor: Annotated[float, Field(ge=1)]

    def scaling(self, original_context: int) -> RopeScaling:
        return LinearScaling(self.factor)


class _Llama3Rope(_LinearRope):
    """A rotary embedding with long wavelengths stretched."""

    low_freq_factor: _Positive
    high_freq_factor: _Positive

    def scaling(self, original_context: int) -> RopeScaling:
        return Llama3Scaling(self.factor, original_context, self.low_freq_factor, self.high_freq_factor)


class _YarnRope(_LinearRope):
    """A rotary embedding stretched by parts."""

    beta_fast: _Positive | None = None
    beta_slow: _Positive | None = None
    attention_factor: _Positive | None = None
    mscale: _Positive | None = None
    mscale_all_dim: _Positive | None = None
    truncate: bool = True

    def scaling(self, original_context: int) -> RopeScaling:
        amplitude = self.attention_factor
        if amplitude is None and self.mscale and self.mscale_all_dim:
            amplitude = yarn_amplitude(self.factor, self.mscale) / yarn_amplitude(self.factor, self.mscale_all_dim)
        return YarnScaling(
            self.factor,
            original_context,
            beta_fast=self.beta_fast or 32.0,
            beta_slow=self.beta_slow or 1.0,
            attention_factor=amplitude,
            truncate=self.truncate,
        )


_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_UNKNOWN_ROPE = "rope_type"
_MISSING = " is missing"


def _rope_type(given: Any) -> Any:
    return given.get("rope_type", given.get("type", "default")) if isinstance(given, dict) else None


_AnyRope = Annotated[
    Annotated[_Rope, Tag("default")]
    | Annotated[_LinearRope, Tag("linear")]
    | Annotated[_Llama3Rope, Tag("llama3")]
    | Annotated[_YarnRope, Tag("yarn")],
    Discriminator(
        _rope_type, custom_error_type=_UNKNOWN_ROPE, custom_error_message=f"choose one of {', '.join(_ROPE_TYPES)}"
    ),
]


def _only_nf4(given: dict[str, Any]) -> dict[str, Any]:
    """Refuse quantised weights of another kind than those that ``models.quantised`` reads."""
    kind = given.get("quant_method", "an unnamed format")
    if kind == "bitsandbytes":
        kind = "int8" if given.get("load_in_8bit") else given.get("bnb_4bit_quant_type", "fp4")  # transformers' default
    if kind != "nf4":
        raise ConfigError(
            f"quantization_config: weights in {json.dumps(kind)} cannot be read, only those in bitsandbytes' nf4; "
            "give the folder of the unquantised model"
        )
    return given


class _LlamaJson(_Json):
    """The values that a ``config.json`` may have; the text below a key is the error message for any other value."""

    row: ClassVar[ModelType] = LLAMA
    """The traits that these models have: ``traits`` reads them, and ``keys_of`` writes them."""

    model_type: Literal["llama"]
    architectures: list[Literal["LlamaForCausalLM"]] = []
    """only LlamaForCausalLM can be trained"""
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    rms_norm_eps: _Positive = 1e-6
    max_position_embeddings: Annotated[int, Field(ge=2)] = 2048
    tie_word_embeddings: bool = False
    rope_theta: _Positive | None = None
    rope_scaling: _AnyRope | None = None
    rope_parameters: _AnyRope | None = None
    original_max_position_embeddings: _Size | None = None
    hidden_act: Literal["silu", "swish"] = "silu"
    """the feed-forward of Llama is SwiGLU, with silu"""
    attention_bias: Literal[False] = False
    """Llama's attention has no biases"""
    mlp_bias: Literal[False] = False
    """Llama's feed-forward has no biases"""
    sliding_window: None = None
    """Llama attends to all earlier tokens"""
    partial_rotary_factor: _One = 1.0
    """Llama rotates the whole of every head"""
    quantization_config: Annotated[dict[str, Any], AfterValidator(_only_nf4)] | None = None
    """is not a mapping of keys to values"""

    @classmethod
    def architecture(cls) -> str:
        """Return the name of transformers' class for these models."""
        (names,) = get_args(cls.model_fields["architectures"].annotation)
        return str(*get_args(names))

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        return {"attention_bias": False, "mlp_bias": False}

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of ``ModelSpec`` that tell this model from Llama; experts are not among them."""
        return {name: value for name, value in self.row.always.items() if name != "moe"}

    @property
    def moe(self) -> MoE | None:
        """The experts in place of every feed-forward; None without experts."""
        return None

    @property
    def width_of_head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def width_of_feed_forward(self) -> int:
        """Width of a feed-forward, or of an expert in its place."""
        return self.intermediate_size

    @property
    def theta(self) -> float:
        """Base of the rotary embedding."""
        return next((theta for _, theta in self._thetas()), _THETA)

    @property
    def scaling(self) -> RopeScaling | None:
        """Scaling of the rotary embedding; all places that may give it agree."""
        return next(iter(self._scalings()), None)

    def ropes(self) -> dict[str, _Rope]:
        """Return the mappings that describe the rotary embedding, by their keys."""
        ropes = {"rope_scaling": self.rope_scaling, "rope_parameters": self.rope_parameters}
        return {key: rope for key, rope in ropes.items() if rope is not None}

    def _thetas(self) -> Iterator[tuple[str, float]]:
        for key, rope in self.ropes().items():
            if rope.rope_theta:
                yield f"{key}.rope_theta", rope.rope_theta
        if self.rope_theta:
            yield "rope_theta", self.rope_theta

    def _original_contexts(self, mapping: str, rope: _Rope) -> dict[str, int]:
        """Return the context before scaling by each key that gives it, the one that transformers 5 prefers first."""
        name = "original_max_position_embeddings"
        contexts = {name: self.original_max_position_embeddings}
        contexts[f"{mapping}.{name}"] = rope.original_max_position_embeddings
        given = {key: context for key, context in contexts.items() if context is not None}
        return given or {"max_position_embeddings": self.max_position_embeddings}

    def _scalings(self) -> list[RopeScaling | None]:
        """Return the scaling of each mapping."""
        scalings = []
        for mapping, rope in self.ropes().items():
            context = next(iter(self._original_contexts(mapping, rope).values()))
            scalings.append(rope.scaling(context))
        return scalings

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        problems = list(self._contradictions())
        if problems:
            raise ConfigError(*problems)
        return self

    def _contradictions(self) -> Iterator[str]:
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads
        if kv_heads and heads % kv_heads:
            yield f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}"
        if self.head_dim is None and self.hidden_size % heads:
            yield f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={heads}; add head_dim"
        elif self.width_of_head % 2:
            yield f"head_dim={self.width_of_head} is odd, but the rotary embedding rotates pairs"
        thetas = list(self._thetas())
        if len({theta for _, theta in thetas}) > 1:
            yield f"{' contradicts '.join(f'{key}={theta:g}' for key, theta in thetas)}; keep the right one"
        try:
            yield from self._contradictions_of_ropes()
        except ConfigError as error:
            yield from error.problems

    def _contradictions_of_ropes(self) -> Iterator[str]:
        for mapping, rope in self.ropes().items():
            for key, value in (rope.model_extra or {}).items():
                if isinstance(value, dict):  # transformers may rotate each type of layers in another way
                    yield f"{mapping}.{key}: not a setting of Llama's rotary embedding"
            contexts = self._original_contexts(mapping, rope)
            if len({rope.scaling(context) for context in contexts.values()}) > 1:
                said = " contradicts ".join(f"{key}={context}" for key, context in contexts.items())
                yield f"{said}; keep the right one"
        if len(set(self._scalings())) > 1:
            yield "rope_scaling contradicts rope_parameters; keep the right one"


class _MixtralJson(_LlamaJson):
    """The same for a mixture of experts, with the defaults of transformers' ``MixtralConfig``."""

    row = MIXTRAL

    model_type: Literal["mixtral"]  # type: ignore[assignment]
    architectures: list[Literal["MixtralForCausalLM"]] = []  # type: ignore[assignment]
    """only MixtralForCausalLM can be trained"""
    num_key_value_heads: _Size | None = 8
    rms_norm_eps: _Positive = 1e-5
    max_position_embeddings: Annotated[int, Field(ge=2)] = 131_072
    num_local_experts: _Size = 8
    num_experts_per_tok: _Size = 2
    router_aux_loss_coef: _Weight = 0.001
    sliding_window: _Size | None = None  # type: ignore[assignment]

    @property
    def moe(self) -> MoE:
        """The experts."""
        return MoE(
            num_experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
            balance_loss_coefficient=_balance_loss_coefficient(self),
        )

    @property
    def theta(self) -> float:
        """Base of the rotary embedding."""
        return next((theta for _, theta in self._thetas()), _MIXTRAL_THETA)

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        assert spec.moe is not None
        return {
            "num_local_experts": spec.moe.num_experts,
            "num_experts_per_tok": spec.moe.experts_per_token,
            "router_aux_loss_coef": _router_aux_loss_coef(spec),
            "router_jitter_noise": 0.0,
            "sliding_window": spec.sliding_window or None,
        }

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of ``ModelSpec`` that tell this model from Llama; experts are not among them."""
        return super().traits | {"sliding_window": self.sliding_window or 0}


class _MistralJson(_LlamaJson):
    """The same with a window in every layer, with the defaults of transformers' ``MistralConfig``."""

    row = MISTRAL

    model_type: Literal["mistral"]  # type: ignore[assignment]
    architectures: list[Literal["MistralForCausalLM"]] = []  # type: ignore[assignment]
    """only MistralForCausalLM can be trained"""
    num_key_value_heads: _Size | None = 8
    max_position_embeddings: Annotated[int, Field(ge=2)] = 131_072
    sliding_window: _Size | None = 4096  # type: ignore[assignment]

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of ``ModelSpec`` that tell this model from Llama; experts are not among them."""
        return {"sliding_window": self.sliding_window or 0}

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        return {"sliding_window": spec.sliding_window or None}


class _QwenJson(_LlamaJson):
    """What the types of Qwen share: a window in some layers, which has to be switched on."""

    num_key_value_heads: _Size | None = 32
    max_position_embeddings: Annotated[int, Field(ge=2)] = 32_768
    attention_bias: Literal[False] = False
    """only the biases of Qwen2 can be trained"""
    use_sliding_window: bool = False
    sliding_window: _Size | None = 4096  # type: ignore[assignment]
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None

    @property
    def _windowed(self) -> list[int]:
        """The layers with a window."""
        layers = range(self.num_hidden_layers)
        if self.layer_types is not None:
            return [layer for layer, kind in enumerate(self.layer_types) if kind == "sliding_attention"]
        return list(layers[self.max_window_layers :]) if self.use_sliding_window and self.sliding_window else []

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of ``ModelSpec`` that tell this model from Llama; experts are not among them."""
        windowed = self._windowed
        if not windowed:
            return super().traits
        in_all = len(windowed) == self.num_hidden_layers
        return super().traits | {
            "sliding_window": self.sliding_window,
            "windowed_layers": () if in_all else tuple(windowed),
        }

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            yield f"layer_types has {len(self.layer_types)} entries, but num_hidden_layers={self.num_hidden_layers}"
        if self._windowed and not (self.use_sliding_window and self.sliding_window):
            yield "layer_types has sliding_attention, but use_sliding_window or sliding_window says that there is none"

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        if not spec.sliding_window:
            return {"use_sliding_window": False, "sliding_window": None}
        windowed = [spec.window(layer) > 0 for layer in range(spec.num_layers)]
        return {
            "use_sliding_window": True,
            "sliding_window": spec.sliding_window,
            "max_window_layers": windowed.index(True),  # for readers that know no layer_types
            "layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in windowed],
        }


class _Qwen2Json(_QwenJson):
    """The same with biases of queries, keys and values, with the defaults of transformers' ``Qwen2Config``."""

    row = QWEN2

    model_type: Literal["qwen2"]  # type: ignore[assignment]
    architectures: list[Literal["Qwen2ForCausalLM"]] = []  # type: ignore[assignment]
    """only Qwen2ForCausalLM can be trained"""


class _Qwen3Json(_QwenJson):
    """The same with norms of queries and keys, with the defaults of transformers' ``Qwen3Config``."""

    row = QWEN3

    model_type: Literal["qwen3"]  # type: ignore[assignment]
    architectures: list[Literal["Qwen3ForCausalLM"]] = []  # type: ignore[assignment]
    """only Qwen3ForCausalLM can be trained"""
    head_dim: _Size | None = 128

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        return super().keys_of(spec) | {"attention_bias": False}


class _Qwen3MoeJson(_QwenJson):
    """The same for a mixture of experts, with the defaults of transformers' ``Qwen3MoeConfig``."""

    row = QWEN3_MOE

    model_type: Literal["qwen3_moe"]  # type: ignore[assignment]
    architectures: list[Literal["Qwen3MoeForCausalLM"]] = []  # type: ignore[assignment]
    """only Qwen3MoeForCausalLM can be trained"""
    intermediate_size: _Size = 6144
    num_key_value_heads: _Size | None = 4
    moe_intermediate_size: _Size = 768
    num_experts: _Size = Field(128, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: _Size = 8
    router_aux_loss_coef: _Weight = 0.001
    norm_topk_prob: bool = False
    decoder_sparse_step: Literal[1] = 1
    """only mixtures with experts in every layer can be trained"""
    mlp_only_layers: Annotated[list[int], Field(max_length=0)] = []
    """only mixtures with experts in every layer can be trained"""

    @property
    def moe(self) -> MoE:
        """The experts."""
        return MoE(
            num_experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
            gate_softmax="chosen" if self.norm_topk_prob else "all",
            balance_loss_coefficient=_balance_loss_coefficient(self),
        )

    @property
    def width_of_feed_forward(self) -> int:
        """Width of a feed-forward, or of an expert in its place."""
        return self.moe_intermediate_size

    @property
    def _windowed(self) -> list[int]:
        return list(range(self.num_hidden_layers)) if self.use_sliding_window and self.sliding_window else []

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        assert spec.moe is not None
        return {
            "attention_bias": False,
            "use_sliding_window": spec.sliding_window > 0,
            "sliding_window": spec.sliding_window or None,
            "moe_intermediate_size": spec.ffn_size,
            "num_experts": spec.moe.num_experts,
            "num_experts_per_tok": spec.moe.experts_per_token,
            "norm_topk_prob": spec.moe.gate_softmax == "chosen",
            "router_aux_loss_coef": _router_aux_loss_coef(spec),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


def _balance_loss_coefficient(config: _MixtralJson | _Qwen3MoeJson) -> float:
    """Return the weight of our balance loss that stands for a file's ``router_aux_loss_coef``.

    transformers has one loss over the tokens of all layers together, which is K for even experts. Ours is a sum over
    layers, each 1 for even experts.
    """
    return config.router_aux_loss_coef * config.num_experts_per_tok / config.num_hidden_layers


def _router_aux_loss_coef(spec: ModelSpec) -> float:
    """Return the inverse: transformers' weight for that of ``spec``."""
    assert spec.moe is not None
    return spec.moe.balance_loss_coefficient * spec.num_sparse_layers / spec.moe.experts_per_token


_KINDS: dict[str, type[_LlamaJson]] = {
    kind.row.name: kind for kind in (_LlamaJson, _MixtralJson, _MistralJson, _Qwen2Json, _Qwen3Json, _Qwen3MoeJson)
}
"""The types of models that can be read and written, by ``model_type``."""


def _describe(detail: ErrorDetails, kind: type[_LlamaJson]) -> Iterator[str]:
    """Yield the problems in one of Pydantic's error details, with keys spelled as in the file."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        yield from cause.problems
        return
    path = [part for part in detail["loc"] if isinstance(part, str) and part not in _ROPE_TYPES]
    key = ".".join(path)
    value = detail["input"]
    if detail["type"] == "missing":
        yield f"{key}{_MISSING}"
        return
    message = detail["msg"]
    if detail["type"] == _UNKNOWN_ROPE and not isinstance(value, dict):
        message = "is not a mapping of keys to values"
    elif detail["type"] == _UNKNOWN_ROPE:
        key = f"{key}.rope_type"
        value = _rope_type(value)
        if value == "dynamic":
            message = f"a text's length would change all its frequencies, those of cached keys too; {message}"
    elif key == "model_type":
        message = f"only {', '.join(_KINDS)} can be trained"
    else:
        owner = _Rope if len(path) > 1 else kind
        field = owner.model_fields.get(path[-1])
        message = (field and field.description) or as_clause(message)
    shown = "" if isinstance(value, dict | list) else f"={json.dumps(value)}"
    yield f"{key}{shown}: {message}"
