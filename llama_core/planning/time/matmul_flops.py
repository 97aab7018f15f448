"""The FLOPs of a token's products with parameters: 2 for each parameter and product.

Attention's products of queries, keys and values with each other come on top: see
``step_time.flops_per_token``.
"""

import math
from functools import lru_cache

from llama_core.config.model_spec import ModelSpec
from llama_core.config.model_weights import is_look_up, layer_of, weight_of
from llama_core.config.trained_ends import trains_head
from llama_core.weight_rows import Weight


def matmul_flops_per_token(spec: ModelSpec) -> int:
    """Return those of a forward and a backward.

    A trained parameter takes part in three products. A frozen one has no gradient and takes part in
    two.
    """
    adapters = _adapter_matmul_parameters(spec)
    return 4 * num_matmul_parameters(spec) + 2 * _trained_matmul_parameters(spec) + 6 * adapters


def forward_matmul_flops_per_token(spec: ModelSpec) -> int:
    """Return those of a forward, which are a third of them if all parameters are trained."""
    return 2 * (num_matmul_parameters(spec) + _adapter_matmul_parameters(spec))


def num_matmul_parameters(spec: ModelSpec) -> int:
    """Return how many parameters every token is multiplied with: those of all layers and the head.

    Each prediction module counts with a pass of the head.

    The embedding is a look-up and does not count. The router counts, and the experts that a token
    is routed to. Adapters do not: see ``matmul_flops_per_token``.
    """
    num_dense = spec.num_layers - spec.num_sparse_layers
    total = spec.embedding_parameters + num_dense * layer_matmul_parameters(spec)
    if spec.num_sparse_layers:
        total += spec.num_sparse_layers * layer_matmul_parameters(spec, sparse=True)
    for block in range(spec.num_layers, spec.num_blocks):
        of_module = layer_matmul_parameters(spec, sparse=spec.has_experts(block), predicts=True)
        total += of_module + spec.embedding_parameters
    return total


def layer_matmul_parameters(spec: ModelSpec, *, sparse: bool = False, predicts: bool = False) -> int:
    """Return the parameters of the matrices of one layer that a token is multiplied with.

    Args:
        spec: the architecture.
        sparse: of a layer with experts, instead of a dense one.
        predicts: of a prediction module, instead of a layer.
    """
    return sum(_matmul_parameters(spec, weight) for weight in spec.weights_of_layer(sparse=sparse, predicts=predicts))


def _matmul_parameters(spec: ModelSpec, weight: Weight) -> int:
    """Return the parameters of a weight that a token is multiplied with: of experts, those of the token's own."""
    if not weight.is_matrix:
        return 0
    held = math.prod(spec.shape_of(weight))
    if spec.moe is None or not weight.is_of_each_expert:
        return held
    return held // spec.moe.num_experts * spec.moe.experts_per_token


@lru_cache(maxsize=64)  # the plans of a search share a model
def _adapter_matmul_parameters(spec: ModelSpec) -> int:
    """Return how many parameters of adapters a token is multiplied with: matrices, no look-up."""
    total = 0
    for name, shape in spec.adapter_shapes.items():
        if len(shape) == 2 and not is_look_up(name):
            total += math.prod(shape)
    return total


@lru_cache(maxsize=64)
def _trained_matmul_parameters(spec: ModelSpec) -> int:
    """Return those of ``num_matmul_parameters`` that are trained in full."""
    if spec.lora is None:
        return num_matmul_parameters(spec)
    total = spec.embedding_parameters if trains_head(spec) else 0
    for name in spec.trained_in_full:
        if layer_of(name) is not None:
            total += _matmul_parameters(spec, weight_of(name))
    return total
