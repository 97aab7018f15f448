"""The weights of a model, one row each, and what is asked of the rows.

A row of a layer stands for that weight in every layer. Rows stand in the order in which the modules
are made.
"""

from fnmatch import fnmatchcase

from llama_core.adapters.registry import ADAPTERS
from llama_core.config.model_types import LLAMA, Layout, ModelType
from llama_core.optimizers.traits import LAYERS
from llama_core.weight_rows import INPUTS, Division, Weight


def _norm(
    name: str, stored_name: str, size: str = "hidden_size", divided: Division = "stream", only_with: str | None = None
) -> Weight:
    """Return the row of a norm, which is not decayed, since zero is not its neutral value."""
    return Weight(name, stored_name, (size,), divided, "ones", decayed=False, only_with=only_with)


def _bias(
    name: str, stored_name: str, *shape: str, divided: Division = "outputs", only_with: str = "qkv_bias"
) -> Weight:
    """Return the row of a bias; default: that of a projection to queries, keys or values."""
    return Weight(name, stored_name, shape, divided, "zeros", decayed=False, only_with=only_with)


def _part(weight: Weight) -> str:
    return weight.stored_name.removesuffix(".weight").removeprefix("self_attn.").removeprefix("mlp.")


# fmt: off
EMBEDDING_WEIGHT = Weight(
    "tok_embeddings.weight", "model.embed_tokens.weight", ("vocab_size", "hidden_size"), "vocabulary"
)
FINAL_NORM_WEIGHT = _norm("norm.weight", "model.norm.weight")
HEAD_WEIGHT = Weight("output.weight", "lm_head.weight", ("vocab_size", "hidden_size"), "vocabulary")
_ATTENTION = (
    _norm("attention_norm.weight", "input_layernorm.weight", only_with="norms_before"),
    Weight("attention.sinks", "self_attn.sinks", ("num_heads",), "heads", "zeros", decayed=False,
           only_with="attention_sinks"),
    Weight("attention.wq.weight", "self_attn.q_proj.weight", ("q_size", "hidden_size"), "outputs",
           only_with="has_query_matrix"),
    _bias("attention.wq.bias", "self_attn.q_proj.bias", "q_size"),
    Weight("attention.wk.weight", "self_attn.k_proj.weight", ("kv_size", "hidden_size"), "outputs",
           only_with="has_key_matrix"),
    _bias("attention.wk.bias", "self_attn.k_proj.bias", "kv_size"),
    Weight("attention.wv.weight", "self_attn.v_proj.weight", ("kv_size", "hidden_size"), "outputs",
           only_with="has_key_matrix"),
    _bias("attention.wv.bias", "self_attn.v_proj.bias", "kv_size"),
    # named as in DeepSeek-V3; the first of the two for keys and values also makes the part of a key that heads share
    Weight("attention.wq_a.weight", "self_attn.q_a_proj.weight", ("query_rank", "hidden_size"), "latent",
           only_with="query_rank"),
    _norm("attention.q_a_norm.weight", "self_attn.q_a_layernorm.weight", "query_rank", only_with="query_rank"),
    Weight("attention.wq_b.weight", "self_attn.q_b_proj.weight", ("q_size", "query_rank"), "outputs",
           only_with="query_rank"),
    Weight("attention.wkv_a.weight", "self_attn.kv_a_proj_with_mqa.weight", ("kv_down_size", "hidden_size"), "latent",
           only_with="kv_rank"),
    _norm("attention.kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", "kv_rank", only_with="kv_rank"),
    Weight("attention.wkv_b.weight", "self_attn.kv_b_proj.weight", ("kv_up_size", "kv_rank"), "outputs",
           only_with="kv_rank"),
    Weight("attention.wo.weight", "self_attn.o_proj.weight", ("hidden_size", "attended_size"), "inputs", "residual"),
    _bias("attention.wo.bias", "self_attn.o_proj.bias", "hidden_size", divided="stream", only_with="o_bias"),
    _norm("attention.q_norm.weight", "self_attn.q_norm.weight", "q_norm_size", "heads", only_with="has_qk_weights"),
    _norm("attention.k_norm.weight", "self_attn.k_norm.weight", "k_norm_size", "heads", only_with="has_qk_weights"),
    _norm("attention_post_norm.weight", "post_self_attn_layernorm.weight", only_with="norms_after"),
    # named for what it follows in a Llama; what it normalises is the feed-forward's input
    _norm("ffn_norm.weight", "post_attention_layernorm.weight", only_with="norms_before"),
)
_FEED_FORWARD = (
    Weight("feed_forward.w1.weight", "mlp.gate_proj.weight", ("ffn_size", "hidden_size"), "outputs"),
    Weight("feed_forward.w2.weight", "mlp.down_proj.weight", ("hidden_size", "ffn_size"), "inputs", "residual"),
    Weight("feed_forward.w3.weight", "mlp.up_proj.weight", ("ffn_size", "hidden_size"), "outputs"),
)
# named as in Mixtral; what Qwen3's mixtures call them is in the row of their type
_MIXTURE = (
    Weight("feed_forward.router.weight", "block_sparse_moe.gate.weight", ("num_experts", "hidden_size"), "router"),
    _bias("feed_forward.router.bias", "block_sparse_moe.gate.bias", "num_experts",
          divided="router", only_with="expert_biases"),
    Weight("feed_forward.experts.w1.weight", "block_sparse_moe.experts.{}.w1.weight",
           ("num_experts", "expert_size", "hidden_size"), "outputs"),
    _bias("feed_forward.experts.w1.bias", "block_sparse_moe.experts.{}.w1.bias", "num_experts", "expert_size",
          only_with="expert_biases"),
    Weight("feed_forward.experts.w2.weight", "block_sparse_moe.experts.{}.w2.weight",
           ("num_experts", "hidden_size", "expert_size"), "inputs", "residual"),
    _bias("feed_forward.experts.w2.bias", "block_sparse_moe.experts.{}.w2.bias", "num_experts", "hidden_size",
          divided="share", only_with="expert_biases"),
    Weight("feed_forward.experts.w3.weight", "block_sparse_moe.experts.{}.w3.weight",
           ("num_experts", "expert_size", "hidden_size"), "outputs"),
    _bias("feed_forward.experts.w3.bias", "block_sparse_moe.experts.{}.w3.bias", "num_experts", "expert_size",
          only_with="expert_biases"),
)
BALANCE_BIAS = Weight(
    "feed_forward.balance_bias", "mlp.gate.e_score_correction_bias", ("num_experts",), "router", "zeros", decayed=False
)
"""The only weight that is no parameter: it moves by what experts got, without a gradient. Named as in DeepSeek-V3."""
# named as in DeepSeek-V3, whose several shared experts are one of their widths together
_SHARED = (
    Weight("feed_forward.shared.w1.weight", "mlp.shared_experts.gate_proj.weight",
           ("shared_size", "hidden_size"), "outputs", only_with="shared_size"),
    Weight("feed_forward.shared.w2.weight", "mlp.shared_experts.down_proj.weight",
           ("hidden_size", "shared_size"), "inputs", "residual", only_with="shared_size"),
    Weight("feed_forward.shared.w3.weight", "mlp.shared_experts.up_proj.weight",
           ("shared_size", "hidden_size"), "outputs", only_with="shared_size"),
)
_AFTER_FEED_FORWARD = (
    _norm("ffn_post_norm.weight", "post_mlp_layernorm.weight", only_with="norms_after"),
)
# named as in DeepSeek-V3, whose files also have copies of the embedding and the head in each module
_PREDICTION = (
    _norm("enorm.weight", "enorm.weight"),
    _norm("hnorm.weight", "hnorm.weight"),
    Weight("eh_proj.weight", "eh_proj.weight", ("hidden_size", "joined_size"), "stream"),
    _norm("head_norm.weight", "shared_head.norm.weight"),
)
# fmt: on
ATTENTION_NORM, FFN_NORM = "input_layernorm", "post_attention_layernorm"
"""The norms before attention and feed-forward, as Hugging Face calls them in a Llama."""
ATTENTION_POST_NORM, FFN_POST_NORM = "post_self_attn_layernorm", "post_mlp_layernorm"
"""The norms after them, as it calls them in a GLM-4, which has all four."""

_IN_LAYERS = {
    weight.name: weight
    for weight in (
        *(*_ATTENTION, *_FEED_FORWARD, *_MIXTURE, BALANCE_BIAS, *_SHARED),
        *(*_AFTER_FEED_FORWARD, *_PREDICTION),
    )
}
_OUTSIDE_LAYERS = {weight.name: weight for weight in (EMBEDDING_WEIGHT, FINAL_NORM_WEIGHT, HEAD_WEIGHT)}
SHOWN_BY_NAMES = frozenset(weight.only_with for weight in _IN_LAYERS.values() if weight.only_with is not None)
"""The traits of models that have weights which others lack."""
_ON_EMBEDDING = EMBEDDING_WEIGHT.name.removesuffix("weight")
_OF_EXPERTS = frozenset(weight.name for weight in (*_MIXTURE, BALANCE_BIAS))
DIVIDED_INPUTS = frozenset({"embed_tokens"}).union(
    _part(weight) for weight in (*_ATTENTION, *_FEED_FORWARD, *_SHARED) if weight.divided == "inputs"
)
"""The matrices whose inputs tensor-parallel ranks divide, by ``part_name``; of the others they divide
the outputs, but for those of ``UNDIVIDED``. The embedding is a matrix over tokens."""
UNDIVIDED = frozenset(_part(weight) for weight in _ATTENTION if weight.divided == "latent")
"""The matrices that every one of these ranks holds whole."""


def weight_of(name: str) -> Weight:
    """Return the row of the parameter that we call ``name``, such as ``'layers.0.attention.wq.weight'``.

    Raises:
        NotImplementedError: if it has none.
    """
    row = _find_weight(name)
    if row is None:
        raise NotImplementedError(f"{name} has no row among the weights in config/model_weights.py, nor in adapters")
    return row


def adapter_weight(name: str) -> tuple[str, Weight] | None:
    """Return the matrix of an adapter's parameter, and its row; None for other parameters."""
    for kind in ADAPTERS.values():
        for weight in kind.of_embedding if is_on_embedding(name) else kind.weights:
            if name.endswith(f".{weight.name}"):
                return f"{name.removesuffix(weight.name)}weight", weight
    return None


def rows_of_layer(*, sparse: bool, predicts: bool = False) -> tuple[Weight, ...]:
    """Return the rows of a layer with experts, or of a dense one, optional ones included; or of a prediction module."""
    of_block = (*_ATTENTION, *((*_MIXTURE, *_SHARED) if sparse else _FEED_FORWARD), *_AFTER_FEED_FORWARD)
    return (*of_block, *_PREDICTION) if predicts else of_block


def is_decayed(name: str) -> bool:
    """Return whether a parameter is subject to weight decay."""
    row = _find_weight(name)
    return row is None or row.decayed


def is_of_experts(name: str) -> bool:
    """Return whether a parameter belongs to a mixture: its router, or a matrix of its experts."""
    return name not in _OUTSIDE_LAYERS and _in_layer(name) in _OF_EXPERTS


def is_on_embedding(name: str) -> bool:
    """Return whether a parameter is the embedding, or an adapter on it."""
    return name.startswith(_ON_EMBEDDING)


def is_look_up(name: str) -> bool:
    """Return whether an adapter's parameter is looked up by token, not multiplied with."""
    return is_on_embedding(name) and INPUTS in weight_of(name).shape


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a parameter is in; None if it is outside the layers."""
    return int(name.split(".")[1]) if name.startswith(LAYERS) else None


def hugging_face_name(name: str, model_type: ModelType = LLAMA) -> str:
    """Return Hugging Face's name for our parameter ``name``, such as ``'layers.0.attention.wq.weight'``.

    For a tensor of experts, it has ``{}`` in place of the expert's number.

    Args:
        name: our name.
        model_type: the type of the model; it may be left out for matrices that it calls as a Llama's.
    """
    stored_name = weight_of(name).stored_name
    if name in _OUTSIDE_LAYERS:
        return stored_name
    return f"model.layers.{name.split('.')[1]}.{model_type.names.get(_in_layer(name), stored_name)}"


def name_in_layer(weight: str, model_type: ModelType) -> str:
    """Return Hugging Face's name within a layer for its weight, such as ``'feed_forward.router.weight'``."""
    return model_type.names.get(weight, _IN_LAYERS[weight].stored_name)


def layout_of(name: str, model_type: ModelType) -> Layout:
    """Return how files of a type lay out the parameter that we call ``name``."""
    if model_type.norms_less_one and weight_of(name).begins == "ones":
        return Layout(less_one=True)
    return model_type.layouts.get(_in_layer(name), Layout())


def matrix_name(path: str) -> str:
    """Return Hugging Face's name for our matrix within its layer: ``q_proj`` for ``'layers.0.attention.wq'``."""
    return hugging_face_name(f"{path}.weight").split(".")[-2]


def part_name(name: str) -> str:
    """Return Hugging Face's name for a norm, a matrix or a bias within its layer: ``q_proj``, ``q_proj.bias``."""
    return _part(weight_of(name))


def matches(name: str, pattern: str, model_type: ModelType) -> bool:
    """Return whether a glob matches our name or Hugging Face's, with or without ``.weight``."""
    for one in (name, hugging_face_name(name, model_type)):
        if fnmatchcase(one, pattern) or fnmatchcase(one.removesuffix(".weight"), pattern):
            return True
    return False


def _find_weight(name: str) -> Weight | None:
    row = _OUTSIDE_LAYERS.get(name) or _IN_LAYERS.get(_in_layer(name))
    if row is not None:
        return row
    of_adapter = adapter_weight(name)
    return None if of_adapter is None else of_adapter[1]


def _in_layer(name: str) -> str:
    """Return the part of a weight's name after the number of its layer."""
    return name.split(".", 2)[-1]
