"""A factor for each output of a matrix, as somebody would add it: its row, its module, its operations."""

from typing import ClassVar, Literal

import torch
from torch import nn

from llama_core.adapters.registry import ADAPTERS
from llama_core.adapters.traits import AdapterJson, AdapterType
from llama_core.models.layers import Linear, scale_outputs
from llama_core.weight_rows import Weight


class FactorsJson(AdapterJson):
    marks: ClassVar = {"peft_type": "FACTORS"}

    peft_type: Literal["FACTORS"]


FACTORS = AdapterType(
    "factors",
    module="toy_adapter",
    program="toy_adapter",
    weights=(Weight("factors", "factors.weight", ("outputs",), "adapted", "ones", decayed=False),),
    json=FactorsJson,
)


class ScaledLinear(Linear):
    def __init__(self, matrix, dtype):
        super().__init__(matrix.in_features, matrix.out_features)
        self.weight = matrix.weight.requires_grad_(False)
        self.factors = nn.Parameter(torch.empty(self.out_features, dtype=dtype))

    def product(self, x):
        return scale_outputs(super().product(x), self.factors)


def adapt(module, spec, lora, dtype):
    return ScaledLinear(module, dtype)


def merge(matrix_OI, adapter, lora):
    matrix_OI.mul_(adapter["factors"][:, None])


def linear(program, name, x, out):
    (factors,) = program.adapter(name)
    scaled = program.result("multiply", [out, program.cast(factors, program.itemsize)], program.sizes[out])
    program.end(x, out)
    return scaled


def register(adapter=FACTORS):
    """Add a kind of adapter to the registry of this process, as every rank of a test has to."""
    ADAPTERS[adapter.name] = adapter
