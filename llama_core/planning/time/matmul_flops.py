"""The FLOPs of a token's products with parameters: 2 for each parameter and product.

Attention's products of queries, keys and values with each other come on top: see
``step_time.flops_per_token``.
"""

import math
from functools import lru_cache

from llama_core.config.model_spec import ModelSpec
from llama_core.config.model_weights import is_look_up
from llama_core.config.strategy import FEED_FORWARD_MATRICES
from llama_core.config.trained_ends import trains_head


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

    The embedding is a look-up and does not count. The router counts, and the experts that a token
    is routed to. Adapters do not: see ``matmul_flops_per_token``.
    """
    dense = spec.num_layers * layer_matmul_parameters(spec) + spec.embedding_parameters
    if spec.moe is None:
        return dense
    # a dense layer has one feed-forward, which stands for the first of the token's experts
    other_experts = (spec.moe.experts_per_token - 1) * spec.expert_parameters
    return dense + spec.num_sparse_layers * (other_experts + _router_parameters(spec))


def layer_matmul_parameters(spec: ModelSpec) -> int:
    """Return the parameters of the matrices of one dense layer: attention and feed-forward."""
    return sum(map(math.prod, spec.matrix_shapes.values()))


@lru_cache(maxsize=64)  # the plans of a search share a model
def _adapter_matmul_parameters(spec: ModelSpec) -> int:
    """Return how many parameters of adapters a token is multiplied with: matrices, no look-up."""
    total = 0
    for name, shape in spec.adapter_shapes.items():
        if len(shape) == 2 and not is_look_up(name):
            total += math.prod(shape)
    return total


def _trained_matmul_parameters(spec: ModelSpec) -> int:
    """Return those of ``num_matmul_parameters`` that are trained in full."""
    if spec.lora is None:
        return num_matmul_parameters(spec)
    total = spec.embedding_parameters if trains_head(spec) else 0
    for layer in spec.layers:
        copies = spec.moe.experts_per_token if spec.moe and layer.sparse else 1
        for matrix in layer.trained.intersection(spec.matrix_shapes):
            is_of_feed_forward = matrix in FEED_FORWARD_MATRICES
            total += math.prod(spec.matrix_shapes[matrix]) * (copies if is_of_feed_forward else 1)
        if layer.sparse:
            total += _router_parameters(spec)
    return total


def _router_parameters(spec: ModelSpec) -> int:
    """Return the parameters of the router of a layer with experts."""
    return spec.hidden_size * spec.num_experts
