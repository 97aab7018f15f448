"""The model registry: every LLaMA variant, its sizes and its exact parameter count."""

from dataclasses import dataclass, field
from typing import Literal

from llama_core.config.strategy import EMBEDDING, HEAD, LoRA, MoE
from llama_core.errors import ConfigError, did_you_mean

Family = Literal["llama", "llama1", "llama2", "llama3", "code_llama"]
"""The generation of a variant; ``llama`` for a model from a folder, whose generation is unknown."""

LONGEST_DEFAULT = 8192
"""Upper limit on the default sequence length of a model from a folder, in tokens."""


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
"""Scaling of a rotary embedding, for sequences longer than the model was first trained on."""


@dataclass(frozen=True)
class ModelSpec:
    """The architecture of one model: enough to build it, count its parameters and plan for it.

    Raises:
        ConfigError: if ``moe`` names layers that do not exist, or both ``lora`` and ``moe`` are set.
    """

    name: str
    family: Family
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    max_context: int
    """Longest sequence the position embedding was made for, in tokens."""
    default_seq_len: int
    """Default sequence length of training, in tokens."""
    tied_embeddings: bool = False
    rope_scaling: RopeScaling | None = None
    instruct: bool = False
    """Whether the model is trained on conversations: same sizes, but another template and loss mask."""
    lora: LoRA | None = None
    """Adapters to train while all other weights are frozen; None without adapters."""
    moe: MoE | None = None
    """Experts that replace the feed-forward of some or all layers; None without experts."""

    def __post_init__(self) -> None:
        problems = list(self.moe.misfits(self.name, self.num_layers)) if self.moe else []
        if problems:
            raise ConfigError(*problems)
        if self.lora and self.moe:
            raise ConfigError("adapters over experts are not supported; use either lora or moe")

    @property
    def q_size(self) -> int:
        """Width of the queries of one layer."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or of the values) of one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding; an untied head has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """Columns and rows of each matrix of one layer, counting only one of its experts."""
        h, q, kv, ffn = self.hidden_size, self.q_size, self.kv_size, self.ffn_size
        attention = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h)}
        return attention | {"gate_proj": (h, ffn), "up_proj": (h, ffn), "down_proj": (ffn, h)}

    @property
    def target_shapes(self) -> dict[str, tuple[int, int]]:
        """Columns and rows of every matrix that can have an adapter; the embedding is a matrix over tokens."""
        tables = {EMBEDDING: (self.vocab_size, self.hidden_size), HEAD: (self.hidden_size, self.vocab_size)}
        return self.matrix_shapes | tables

    @property
    def layer_matmul_parameters(self) -> int:
        """Parameters of one dense layer that are multiplied with activations: attention and feed-forward matrices."""
        h = self.hidden_size
        return h * self.q_size + 2 * h * self.kv_size + self.q_size * h + 3 * h * self.ffn_size

    @property
    def layer_parameters(self) -> int:
        """All parameters of one dense layer, with its two norm vectors but without adapters."""
        return self.layer_matmul_parameters + 2 * self.hidden_size

    @property
    def expert_parameters(self) -> int:
        """Parameters of one feed-forward: that of a dense layer, or one expert."""
        return 3 * self.hidden_size * self.ffn_size

    @property
    def layer_adapter_parameters(self) -> int:
        """Parameters of the adapters of one layer."""
        if self.lora is None:
            return 0
        return self.lora.lora_rank * sum(sum(self.matrix_shapes[target]) for target in self.lora.in_layers)

    @property
    def trains_embedding(self) -> bool:
        """Whether the embedding, or an adapter on it, gets gradients."""
        return self.lora is None or EMBEDDING in self.lora.target_modules

    def table_adapter_parameters(self, table: str) -> int:
        """Return the parameters of the adapter on ``embed_tokens`` or ``lm_head``; 0 without one."""
        if self.lora is None or table not in self.lora.target_modules:
            return 0
        return self.lora.lora_rank * sum(self.target_shapes[table])

    @property
    def num_adapter_parameters(self) -> int:
        """Parameters of all adapters."""
        tables = self.table_adapter_parameters(EMBEDDING) + self.table_adapter_parameters(HEAD)
        return self.num_layers * self.layer_adapter_parameters + tables

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts in place of its feed-forward."""
        return self.moe is not None and self.moe.is_sparse(layer)

    def active_parameters(self, layer: int) -> int:
        """Return the parameters of a layer that one token uses, without adapters."""
        if self.moe is None or not self.has_experts(layer):
            return self.layer_parameters
        router = self.hidden_size * self.moe.num_experts
        return self.layer_parameters + router + (self.moe.experts_per_token - 1) * self.expert_parameters

    @property
    def num_sparse_layers(self) -> int:
        """Layers that have experts."""
        return sum(map(self.has_experts, range(self.num_layers))) if self.moe else 0

    @property
    def num_parameters(self) -> int:
        """All parameters of the model, adapters and experts included; a tied head counts once."""
        tables = 1 if self.tied_embeddings else 2
        dense = tables * self.embedding_parameters + self.num_layers * self.layer_parameters + self.hidden_size
        return dense + self.num_adapter_parameters + self._beside_one_expert(self.moe.num_experts if self.moe else 1)

    @property
    def num_trainable_parameters(self) -> int:
        """Parameters that get gradients and moments: the adapters if there are any, else all."""
        return self.num_adapter_parameters if self.lora else self.num_parameters

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: all except the experts that it is not routed to."""
        idle = self.moe.num_experts - self.moe.experts_per_token if self.moe else 0
        return self.num_parameters - self.num_sparse_layers * idle * self.expert_parameters

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters that every token is multiplied with: all layers and the head, but not the embedding look-up.

        The router and the experts that a token is routed to count. Adapters do not: see ``matmul_flops_per_token``.
        """
        dense = self.num_layers * self.layer_matmul_parameters + self.embedding_parameters
        return dense + self._beside_one_expert(self.moe.experts_per_token if self.moe else 1)

    @property
    def matmul_flops_per_token(self) -> int:
        """FLOPs of a token's products with parameters, forward and backward: 2 per parameter and product.

        A trained parameter takes part in three products. A frozen one has no gradient and takes part in two. For an
        adapter on the embedding, A is a look-up and counts no FLOPs.
        """
        adapters = self.num_adapter_parameters
        if self.lora and EMBEDDING in self.lora.target_modules:
            adapters -= self.lora.lora_rank * self.vocab_size
        return (4 if self.lora else 6) * self.num_matmul_parameters + 6 * adapters

    def _beside_one_expert(self, num_experts: int) -> int:
        """Return the parameters that experts add to dense layers: routers, and all but one of ``num_experts`` per layer."""
        router = self.hidden_size * self.moe.num_experts if self.moe else 0
        return self.num_sparse_layers * ((num_experts - 1) * self.expert_parameters + router)


_SCALED_8 = Llama3Scaling(factor=8.0, original_context=8192)
_SCALED_32 = Llama3Scaling(factor=32.0, original_context=8192)

# fmt: off
_VARIANTS = (
    #         name                      family        hidden layers heads kv hd   ffn    vocab    theta eps   context  default
    ModelSpec("tiny_llama3_50m",       "llama3",       256,  16,   4,   2,  64,  1152, 128_256, 5e5, 1e-5,   2048,  2048, tied_embeddings=True),
    ModelSpec("tiny_llama3_150m",      "llama3",       768,   8,  12,   4,  64,  2048, 128_256, 5e5, 1e-5,   8192,  8192, tied_embeddings=True),
    ModelSpec("llama1_7b",             "llama1",      4096,  32,  32,  32, 128, 11008,  32_000, 1e4, 1e-6,   2048,  2048),
    ModelSpec("llama2_7b",             "llama2",      4096,  32,  32,  32, 128, 11008,  32_000, 1e4, 1e-5,   4096,  4096),
    ModelSpec("llama2_13b",            "llama2",      5120,  40,  40,  40, 128, 13824,  32_000, 1e4, 1e-5,   4096,  4096),
    ModelSpec("llama2_70b",            "llama2",      8192,  80,  64,   8, 128, 28672,  32_000, 1e4, 1e-5,   4096,  4096),
    ModelSpec("llama3_8b",             "llama3",      4096,  32,  32,   8, 128, 14336, 128_256, 5e5, 1e-5,   8192,  8192),
    ModelSpec("llama3_8b_instruct",    "llama3",      4096,  32,  32,   8, 128, 14336, 128_256, 5e5, 1e-5,   8192,  8192, instruct=True),
    ModelSpec("llama3_70b",            "llama3",      8192,  80,  64,   8, 128, 28672, 128_256, 5e5, 1e-5,   8192,  8192),
    ModelSpec("llama3_70b_instruct",   "llama3",      8192,  80,  64,   8, 128, 28672, 128_256, 5e5, 1e-5,   8192,  8192, instruct=True),
    ModelSpec("llama3_1_8b",           "llama3",      4096,  32,  32,   8, 128, 14336, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_8),
    ModelSpec("llama3_1_70b",          "llama3",      8192,  80,  64,   8, 128, 28672, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_8),
    ModelSpec("llama3_405b",           "llama3",     16384, 126, 128,   8, 128, 53248, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_8),
    ModelSpec("llama3_2_1b",           "llama3",      2048,  16,  32,   8,  64,  8192, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_32, tied_embeddings=True),
    ModelSpec("llama3_2_3b",           "llama3",      3072,  28,  24,   8, 128,  8192, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_32, tied_embeddings=True),
    ModelSpec("llama3_3_70b_instruct", "llama3",      8192,  80,  64,   8, 128, 28672, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_8, instruct=True),
    ModelSpec("code_llama_7b",         "code_llama",  4096,  32,  32,  32, 128, 11008,  32_016, 1e6, 1e-5,  16384, 16384),
    ModelSpec("code_llama_13b",        "code_llama",  5120,  40,  40,  40, 128, 13824,  32_016, 1e6, 1e-5,  16384, 16384),
    ModelSpec("code_llama_34b",        "code_llama",  8192,  48,  64,   8, 128, 22016,  32_000, 1e6, 1e-5,  16384, 16384),
)
# fmt: on
_REGISTRY = {spec.name: spec for spec in _VARIANTS}


def model_names() -> list[str]:
    """Return the names of all variants, in the registry's order."""
    return list(_REGISTRY)


def model_spec(name: str) -> ModelSpec:
    """Return the architecture of the variant called ``name``.

    Raises:
        ConfigError: if there is no such variant; the message names the nearest ones.
    """
    if name not in _REGISTRY:
        nearest = did_you_mean(name, _REGISTRY) or f"; choose one of {', '.join(_REGISTRY)}"
        raise ConfigError(f"unknown model {name!r}{nearest}")
    return _REGISTRY[name]
