"""The parameters of a model: their names here and in Hugging Face, and their shapes."""

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_core.config.models import ModelSpec

EMBEDDING = "tok_embeddings.weight"
FINAL_NORM = "norm.weight"
HEAD = "output.weight"
_OUTSIDE_LAYERS = {EMBEDDING: "model.embed_tokens.weight", FINAL_NORM: "model.norm.weight", HEAD: "lm_head.weight"}
_IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_DENSE = {
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
ROUTER = "feed_forward.router"
_EXPERTS = {
    ROUTER: "block_sparse_moe.gate",
    **{f"feed_forward.experts.{matrix}": f"block_sparse_moe.experts.{{}}.{matrix}" for matrix in ("w1", "w2", "w3")},
}
_ANYWHERE = _IN_LAYER | _DENSE | _EXPERTS


def hugging_face_name(name: str) -> str:
    """Return Hugging Face's name for our parameter ``name``, such as ``'layers.0.attention.wq.weight'``.

    For a tensor of experts, it has ``{}`` in place of the expert's number.
    """
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    _, index, part = name.removesuffix(".weight").split(".", 2)
    return f"model.layers.{index}.{_ANYWHERE[part]}.weight"


def matrix_name(path: str) -> str:
    """Return Hugging Face's name for our matrix within its layer: ``q_proj`` for ``'layers.0.attention.wq'``."""
    return hugging_face_name(f"{path}.weight").split(".")[-2]


def parameter_shapes(spec: "ModelSpec") -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by our names, without adapters or a tied head."""
    table, norm = (spec.vocab_size, spec.hidden_size), (spec.hidden_size,)
    matrices = {name: (rows, columns) for name, (columns, rows) in spec.matrix_shapes.items()}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table}
    for layer in range(spec.num_layers):
        for part, theirs in _IN_LAYER.items():
            shapes[f"layers.{layer}.{part}.weight"] = matrices.get(theirs.rpartition(".")[2], norm)
        sparse = spec.moe if spec.moe and spec.moe.is_sparse(layer) else None
        if sparse:
            shapes[f"layers.{layer}.{ROUTER}.weight"] = (sparse.num_experts, spec.hidden_size)
        for part, theirs in _DENSE.items():
            shape = matrices[theirs.rpartition(".")[2]]
            if sparse:
                shapes[f"layers.{layer}.{part.replace('.', '.experts.')}.weight"] = (sparse.num_experts, *shape)
            else:
                shapes[f"layers.{layer}.{part}.weight"] = shape
    return shapes | {FINAL_NORM: norm} | ({} if spec.tied_embeddings else {HEAD: table})


def matches(name: str, pattern: str) -> bool:
    """Return whether a glob pattern matches our name or Hugging Face's of a parameter, with or without ``.weight``."""
    names = (name, hugging_face_name(name))
    return any(fnmatchcase(one, pattern) or fnmatchcase(one.removesuffix(".weight"), pattern) for one in names)


def is_of_experts(name: str) -> bool:
    """Return whether a parameter belongs to a mixture: its router, or a matrix of its experts."""
    return any(f".{part}." in name for part in _EXPERTS)
