"""The shapes of models that other frameworks train: LLaMA variants and others.

Only sizes that affect memory are here. LLaMA variants come from this project's registry. The others are transcribed
from their authors' published configurations and reproduce the published parameter counts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from llama_core.config.model_spec import NormWidth
from llama_core.config.models import ModelSpec, model_names, model_spec
from llama_core.errors import ConfigError


@dataclass(frozen=True)
class RoutedExperts:
    """A mixture of experts that replaces the feed-forward of most layers."""

    count: int
    top_k: int
    """RoutedExperts that each token passes through."""
    ffn_size: int
    shared_ffn_size: int = 0
    """Width of the expert that every token passes through."""
    num_dense_layers: int = 0
    """First layers, which have a plain feed-forward."""


@dataclass(frozen=True)
class LatentProjections:
    """Multi-head latent attention: low-rank projections of queries, keys and values.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    query_rank: int
    """Width of compressed queries; 0 if they are not compressed."""
    kv_rank: int
    rope_dim: int
    """Rotated part of each head, in addition to ``head_dim``."""


@dataclass(frozen=True)
class Architecture:
    """The sizes of one model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool = False
    """Whether the head is tied to the embedding."""
    gated: bool = True
    """Whether the feed-forward is gated and has three matrices; otherwise it has two."""
    num_norms: int = 2
    """Norms per layer, each with an input of ``hidden_size``."""
    norms_queries: bool = False
    """Whether queries and keys are normalised."""
    qk_norm_width: NormWidth = "head"
    """What of them is normalised as one."""
    experts: RoutedExperts | None = None
    latent: LatentProjections | None = None

    @property
    def query_size(self) -> int:
        """Width of the queries of one layer."""
        return self.num_heads * (self.head_dim + (self.latent.rope_dim if self.latent else 0))

    @property
    def key_size(self) -> int:
        """Width of the keys of one layer, as used by attention."""
        return self.query_size if self.latent else self.num_kv_heads * self.head_dim

    @property
    def value_size(self) -> int:
        """Width of the values of one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def output_size(self) -> int:
        """Width of attention's output."""
        return self.num_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention."""
        h = self.hidden_size
        if self.latent is None:
            return h * (self.query_size + self.key_size + self.value_size + self.output_size)
        rank = self.latent.query_rank
        kv_rank = self.latent.kv_rank
        rope = self.latent.rope_dim
        queries = rank * (h + self.query_size) if rank else h * self.query_size
        return queries + h * (kv_rank + rope) + kv_rank * 2 * self.value_size + self.output_size * h

    def ffn_parameters(self, width: int) -> int:
        """Return the parameters of a feed-forward of ``width``."""
        return (3 if self.gated else 2) * self.hidden_size * width

    @property
    def num_expert_layers(self) -> int:
        """Layers whose feed-forward is a mixture of experts."""
        return self.num_layers - self.experts.num_dense_layers if self.experts else 0

    @property
    def table_parameters(self) -> int:
        """Parameters of the embedding, or of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters of the model, except for biases."""
        h = self.hidden_size
        experts = self.experts
        total = (1 if self.tied else 2) * self.table_parameters + h
        norms = self.num_norms * h
        if self.norms_queries:
            norms += 2 * self.head_dim if self.qk_norm_width == "head" else self.query_size + self.key_size
        if self.latent:
            norms += self.latent.query_rank + self.latent.kv_rank
        total += self.num_layers * (self.attention_parameters + norms)
        total += (self.num_layers - self.num_expert_layers) * self.ffn_parameters(self.ffn_size)
        if experts:
            each = experts.count * (self.ffn_parameters(experts.ffn_size) + h)
            total += self.num_expert_layers * (each + self.ffn_parameters(experts.shared_ffn_size))
        return total


def from_spec(spec: ModelSpec) -> Architecture:
    """Return the shape of a registered variant."""
    experts = None
    if spec.moe:
        num_dense_layers = spec.num_layers - spec.num_sparse_layers
        experts = RoutedExperts(
            spec.moe.num_experts,
            spec.moe.experts_per_token,
            spec.expert_size,
            shared_ffn_size=spec.shared_size,
            num_dense_layers=num_dense_layers,
        )
    return Architecture(
        spec.hidden_size,
        spec.num_layers,
        spec.num_heads,
        spec.num_kv_heads,
        spec.value_head_dim,
        spec.ffn_size,
        spec.vocab_size,
        tied=spec.tied_embeddings,
        num_norms=2 * (spec.norms_before + spec.norms_after),
        norms_queries=spec.has_qk_weights,
        qk_norm_width=spec.qk_norm_width,
        experts=experts,
        latent=LatentProjections(spec.query_rank, spec.kv_rank, spec.rope_dim) if spec.kv_rank else None,
    )


# fmt: off
_OTHERS = {
    #                     hidden layers heads kv  hd  ffn    vocab
    "llama3_1b":  from_spec(model_spec("llama3_2_1b")),
    "llama3_3b":  from_spec(model_spec("llama3_2_3b")),
    "tinyllama":  Architecture( 2048,  22,  32,  4,  64,  5632,  32_000),
    "qwen2_0.5b":from_spec(model_spec("qwen2_5_0_5b")),
    "qwen2_1.5b":from_spec(model_spec("qwen2_5_1_5b")),
    "qwen2_3b":  from_spec(model_spec("qwen2_5_3b")),
    "qwen2_7b":  from_spec(model_spec("qwen2_5_7b")),
    "qwen2_14b": from_spec(model_spec("qwen2_5_14b")),
    "qwen2_32b": from_spec(model_spec("qwen2_5_32b")),
    "qwen2_72b": from_spec(model_spec("qwen2_5_72b")),
    "qwen3_0.6b":from_spec(model_spec("qwen3_0_6b")),
    "qwen3_1.7b":from_spec(model_spec("qwen3_1_7b")),
    "qwen3_4b":  from_spec(model_spec("qwen3_4b")),
    "qwen3_8b":  from_spec(model_spec("qwen3_8b")),
    "qwen3_14b": from_spec(model_spec("qwen3_14b")),
    "qwen3_32b": from_spec(model_spec("qwen3_32b")),
    "qwen3_30b_a3b": Architecture(
        2048, 48, 32, 4, 128, 6144, 151_936, norms_queries=True, experts=RoutedExperts(128, 8, 768)
    ),
    "qwen3_235b_a22b": Architecture(
        4096, 94, 64, 4, 128, 12288, 151_936, norms_queries=True, experts=RoutedExperts(128, 8, 1536)
    ),
    "gemma_2b":   Architecture( 2048,  18,   8,  1, 256, 16384, 256_000, tied=True),
    "gemma_7b":   Architecture( 3072,  28,  16, 16, 256, 24576, 256_000, tied=True),
    "gemma2_2b":  Architecture( 2304,  26,   8,  4, 256,  9216, 256_000, tied=True, num_norms=4),
    "gemma2_9b":  Architecture( 3584,  42,  16,  8, 256, 14336, 256_000, tied=True, num_norms=4),
    "gemma2_27b": Architecture( 4608,  46,  32, 16, 128, 36864, 256_000, tied=True, num_norms=4),
    "falcon_7b":  Architecture( 4544,  32,  71,  1,  64, 18176,  65_024, tied=True, gated=False, num_norms=1),
    "falcon_40b": Architecture( 8192,  60, 128,  8,  64, 32768,  65_024, tied=True, gated=False),
    "phi_2":      Architecture( 2560,  32,  32, 32,  80, 10240,  51_200, gated=False, num_norms=1),
    "phi_3":      Architecture( 3072,  32,  32, 32,  96,  8192,  32_064),
    "phi_4":      Architecture( 5120,  40,  40, 10, 128, 17920, 100_352),
    "stablelm_base_alpha_3b": Architecture(4096, 16, 32, 32, 128, 16384, 50_688, gated=False, num_norms=1),
    "stablelm_base_alpha_7b": Architecture(6144, 16, 48, 48, 128, 24576, 50_688, gated=False, num_norms=1),
    "gpt3_15b":   Architecture( 6144,  32,  48,  8, 128, 24576, 256_000, gated=False),
    "gpt3_175b":  Architecture(12288,  96,  96, 96, 128, 49152,  51_200, tied=True, gated=False),
    "mixtral_8x7b":  Architecture(4096, 32, 32, 8, 128, 14336, 32_000, experts=RoutedExperts(8, 2, 14336)),
    "mixtral_8x22b": Architecture(6144, 56, 48, 8, 128, 16384, 32_768, experts=RoutedExperts(8, 2, 16384)),
    "deepseek_v3_16b": Architecture(
        2048, 27, 16, 16, 128, 10944, 102_400,
        experts=RoutedExperts(64, 6, 1408, shared_ffn_size=2816, num_dense_layers=1),
        latent=LatentProjections(0, 512, 64),
    ),
    "deepseek_v3_671b": Architecture(
        7168, 61, 128, 128, 128, 18432, 129_280,
        experts=RoutedExperts(256, 8, 2048, shared_ffn_size=2048, num_dense_layers=3),
        latent=LatentProjections(1536, 512, 64),
    ),
}
# fmt: on
_ALIASES = {
    "deepseek_v2_lite": "deepseek_v3_16b",
    "deepseek_v3": "deepseek_v3_671b",
    "tiny_llama": "tinyllama",
    "qwen2.5": "qwen2",
    "llama3.1": "llama3",
    "llama3.2": "llama3",
    "llama3.3": "llama3",
    "code_llama": "codellama",
}
_KNOWN = {name: from_spec(model_spec(name)) for name in model_names()} | _OTHERS


def _normalised(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _longest_match(spelling: str) -> str | None:
    """Return the longest known name that ``spelling`` starts with."""
    return max((known for known in _KNOWN if spelling.startswith(_normalised(known))), key=len, default=None)


def _without_alias(spelling: str) -> str:
    for alias, known in _ALIASES.items():
        if spelling.startswith(_normalised(alias)):
            return _normalised(known) + spelling.removeprefix(_normalised(alias))
    return spelling


def published_architecture(name: str, num_parameters: float | None, described: str) -> tuple[Architecture, str]:
    """Return the shape of a model, and the assumption made about it (an empty string if none).

    Args:
        name: the model's name in the source, such as ``llama-3.1-8b``.
        num_parameters: the number of parameters in the source, if given.
        described: a remark that may give the shape, such as ``L16 h2048 H32 ffn8192 tied; vocab 131072``.

    Raises:
        ConfigError: if the shape follows from neither name, remark nor number of parameters.
    """
    spelled_out = _parse_shape(described)
    if spelled_out is not None:
        return spelled_out, ""
    known = _longest_match(_normalised(name)) or _longest_match(_without_alias(_normalised(name)))
    if known:
        return _KNOWN[known], ""
    if num_parameters is None:
        raise ConfigError(f"model {name!r} is not in the table of architectures and its size is not given")
    return _llama_of_size(num_parameters), f"{name} is not in the table of architectures: a LLaMA of its size"


def _parse_shape(described: str) -> Architecture | None:
    """Return the shape given in a remark, or None."""
    sizes = re.search(r"L(\d+) h(\d+) H(\d+) ffn(\d+)", described)
    vocab = re.search(r"vocab (\d+)", described)
    if not sizes or not vocab:
        return None
    layers, hidden, heads, ffn = map(int, sizes.groups())
    kv = re.search(r"\bkv(\d+)", described)
    kv_heads = int(kv.group(1)) if kv else heads
    tied = "untied" not in described and "tied" in described
    return Architecture(hidden, layers, heads, kv_heads, hidden // heads, ffn, int(vocab.group(1)), tied=tied)


def _dense() -> Iterator[Architecture]:
    return (model for name, model in _KNOWN.items() if name.startswith("llama") and not model.tied)


def _llama_of_size(num_parameters: float) -> Architecture:
    """Return the LLaMA variant nearest to a size, with its number of layers adjusted to that size."""
    nearest = min(_dense(), key=lambda model: abs(model.num_parameters - num_parameters))
    one_layer = (nearest.num_parameters - 2 * nearest.table_parameters) / nearest.num_layers
    num_layers = max(1, round((num_parameters - 2 * nearest.table_parameters) / one_layer))
    return replace(nearest, num_layers=num_layers)
