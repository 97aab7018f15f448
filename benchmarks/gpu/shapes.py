"""The models of the measurement."""

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 128,
        "vocab_size": 512,
    },
    "30M": {
        "hidden_size": 512,
        "num_layers": 8,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 64,
        "ffn_size": 1536,
        "vocab_size": 512,
    },
    "1B": {
        "hidden_size": 2048,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 64,
        "ffn_size": 8192,
    },
    "3B": {
        "hidden_size": 3072,
        "num_layers": 28,
        "num_heads": 24,
        "num_kv_heads": 8,
        "head_dim": 128,
        "ffn_size": 8192,
    },
    "8B": {},
}
"""Keys of ``architecture``: two small models of bytes, Llama 3.2 1B and 3B with an untied head, and Llama 3 8B."""


def llama3(shape: str) -> dict[str, Any]:
    """Return the top of a configuration that trains a model of this shape."""
    return {"model": "llama3_8b", "architecture": SHAPES[shape]}
