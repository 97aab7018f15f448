"""Counts of a model's parameters: in some layers, for a token, trained, frozen.

``ModelSpec`` itself has the counts that users read, such as ``num_parameters``.
"""

import math
from functools import lru_cache

from llama_core.config.model_spec import ModelSpec
from llama_core.config.model_weights import is_on_embedding, layer_of, weight_of
from llama_core.optimizers.traits import Trained
from llama_core.units import format_count


def num_parameters_of(spec: ModelSpec, layers: range) -> int:
    """Return the parameters, adapters included, of the part with some consecutive layers.

    The first layer brings the embedding, and the last one the final norm and the head, even a tied
    one.
    """
    is_first = layers.start == 0
    is_last = layers.stop == spec.num_blocks
    own = 0
    for name, shape in (spec.parameter_shapes | spec.adapter_shapes).items():
        layer = layer_of(name)
        if layer is not None:
            is_held = layer in layers
        elif is_on_embedding(name):
            is_held = is_first or (is_last and spec.embeds_at_end)
        else:
            is_held = is_last
        if is_held:
            own += math.prod(shape)
    return own


def active_parameters(spec: ModelSpec, layer: int) -> int:
    """Return the parameters of a layer that one token uses, without adapters."""
    sparse = spec.has_experts(layer)
    rows = spec.weights_of_layer(sparse=sparse, predicts=layer >= spec.num_layers)
    held = sum(math.prod(spec.shape_of(weight)) for weight in rows)
    return held - spec.idle_parameters if sparse else held


def num_trained_in_full(spec: ModelSpec) -> int:
    """Return the parameters that are trained themselves: all but adapters and frozen ones."""
    return spec.num_trainable_parameters - spec.num_adapter_parameters


def num_frozen_parameters(spec: ModelSpec) -> int:
    """Return the parameters that get no gradients."""
    return spec.num_parameters - spec.num_trainable_parameters


def counts_in_words(spec: ModelSpec) -> str:
    """Return which parameters are trained and how many, as a phrase."""
    if spec.lora is None:
        return "all trained"
    in_full = num_trained_in_full(spec)
    whole = f"{format_count(in_full)} trained in full, " if in_full else ""
    adapters = format_count(spec.num_adapter_parameters)
    frozen = format_count(num_frozen_parameters(spec))
    return f"{adapters} in adapters, {whole}{frozen} frozen"


@lru_cache(maxsize=64)  # plans of a search ask for it many times
def trained_matrices(spec: ModelSpec) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the shapes of the trained matrices of each layer: experts if any, rows, columns."""
    of_layers: list[list[tuple[int, ...]]] = [[] for _ in range(spec.num_blocks)]
    for name, shape in (spec.parameter_shapes | spec.adapter_shapes).items():
        layer = layer_of(name)
        is_trained = name in spec.trained_in_full or name in spec.adapter_shapes
        if is_trained and layer is not None and weight_of(name).is_matrix:
            of_layers[layer].append(shape)
    return tuple(map(tuple, of_layers))


def trained_parameters(spec: ModelSpec) -> Trained:
    """Return the numbers of trained parameters, as optimizers tell them apart."""
    matrices = 0
    for shapes in trained_matrices(spec):
        matrices += sum(map(math.prod, shapes))
    return Trained(matrices, spec.num_trainable_parameters - matrices)
