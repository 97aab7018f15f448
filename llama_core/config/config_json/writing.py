"""Write the ``config.json`` that describes an architecture, for transformers 4 and 5."""

from dataclasses import replace
from typing import Any

from llama_core.config.config_json.families import FAMILIES
from llama_core.config.config_json.llama import LlamaJson
from llama_core.config.config_json.rope import rope_keys
from llama_core.config.model_types import stated_by_none
from llama_core.config.models import ModelSpec
from llama_core.errors import ConfigError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The dtypes that weights can be written in, with transformers' names for them."""


def config_json(
    spec: ModelSpec,
    dtype: str = "fp32",
    *,
    bos_id: int | None = None,
    eos_id: int | list[int] | None = None,
) -> dict[str, Any]:
    """Return ``config.json``, with rotary embedding and dtype under the keys of both versions.

    Args:
        spec: the architecture.
        dtype: dtype of the weights beside it, one of ``DTYPES``.
        bos_id: the token that begins a document; None if unknown.
        eos_id: the token that ends a text, or all that do; None if unknown.

    Raises:
        ConfigError: if transformers has no model with these traits, naming them.
    """
    family = _family_of(spec)
    sizes = {
        "architectures": [family.architecture()],
        "model_type": family.row.name,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        # even where it divides hidden_size: without the key, a Qwen3 has heads of 128
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        # settings of a training, on which the weights do not depend: transformers' own defaults
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_context,
    }
    rest = {
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "dtype": DTYPES[dtype],  # of transformers 5
        "torch_dtype": DTYPES[dtype],  # of transformers 4
    }
    return sizes | rope_keys(spec.rope_theta, spec.rope_scaling) | rest | family.keys_of(spec)


def without_unstated_modules(spec: ModelSpec) -> ModelSpec:
    """Return ``spec``, without its prediction modules if the type with its other traits does not state them."""
    without = replace(spec, mtp_layers=0)
    return without if "mtp_layers" in without.model_type.lacking(spec.traits) else spec


def _family_of(spec: ModelSpec) -> type[LlamaJson]:
    """Return the family whose files state every trait of ``spec``.

    Raises:
        ConfigError: if none does.
    """
    family = FAMILIES[spec.model_type.name]
    unknown = stated_by_none(spec.traits)
    lacking = unknown or family.row.lacking(spec.traits)
    if lacking:
        named = " or ".join(f"{trait}={spec.traits[trait]}" for trait in sorted(lacking))
        which = "no model there has" if unknown else f"{family.architecture()} is the nearest there, and has no"
        raise ConfigError(f"transformers cannot describe {spec.name}: {which} {named}")
    return family
