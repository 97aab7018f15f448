"""Weights by the names of Hugging Face's ``LlamaForCausalLM``, there and back.

Both sides keep the same matrices, the rotary embedding's layout included, so this is a renaming and nothing else.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from llama_core.config.models import ModelSpec
from llama_core.errors import CheckpointError
from llama_core.models.llama import Llama

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_OUTSIDE_LAYERS = {"tok_embeddings.weight": _EMBEDDING, "norm.weight": "model.norm.weight", "output.weight": _HEAD}
_IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def hugging_face_name(name: str) -> str:
    """Return what Hugging Face calls our parameter ``name``, such as ``'layers.0.attention.wq.weight'``."""
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    _, index, part = name.removesuffix(".weight").split(".", 2)
    return f"model.layers.{index}.{_IN_LAYER[part]}.weight"


def matrix_name(path: str) -> str:
    """Return what Hugging Face calls a matrix of ours inside its layer: ``q_proj`` for ``'layers.0.attention.wq'``."""
    return hugging_face_name(f"{path}.weight").split(".")[-2]


def to_hugging_face(spec: ModelSpec, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our weights by Hugging Face's names; a tied head is left out, as in Hugging Face's files.

    Raises:
        CheckpointError: if a weight is missing, unknown or of another shape than ``spec`` has.
    """
    shapes = _parameter_shapes(spec)
    _check_shapes(spec, shapes, state_dict)
    return {hugging_face_name(name): state_dict[name] for name in shapes}


def from_hugging_face(spec: ModelSpec, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a ``LlamaForCausalLM`` by our names.

    A tied head and the rotary frequencies that old files carry are left out: the model has both already.

    Raises:
        CheckpointError: if a weight is missing, unknown or of another shape than ``spec`` has.
    """
    derived = {_HEAD} if spec.tied_embeddings else set()
    given = {
        name: weight
        for name, weight in state_dict.items()
        if name not in derived and not name.endswith("rotary_emb.inv_freq")
    }
    shapes = _parameter_shapes(spec)
    _check_shapes(spec, {hugging_face_name(name): shape for name, shape in shapes.items()}, given)
    return {name: given[hugging_face_name(name)] for name in shapes}


def _parameter_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Llama(spec).named_parameters()}


def _check_shapes(spec: ModelSpec, expected: Mapping[str, torch.Size], state_dict: Mapping[str, Tensor]) -> None:
    problems = [f"{name} is missing" for name in expected if name not in state_dict]
    problems += [f"{name} is unknown" for name in state_dict if name not in expected]
    for name, shape in expected.items():
        given = state_dict[name].shape if name in state_dict else shape
        if given != shape:
            hint = _kv_heads_hint(spec, name, given)
            problems.append(f"{name} is {list(given)} instead of {list(shape)}{hint}")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(
            f"these weights are not those of {spec.name}: {', '.join(problems[:3])}{more}; "
            "choose the model they were made for"
        )


def _kv_heads_hint(spec: ModelSpec, name: str, shape: torch.Size) -> str:
    if not name.endswith(("k_proj.weight", "v_proj.weight", "wk.weight", "wv.weight")):
        return ""
    return f" ({shape[0] / spec.head_dim:g} key/value heads instead of {spec.num_kv_heads})"
