"""DoRA: LoRA with a trained length for every row of a matrix; its row and source are in ``adapters/dora.py``."""

# Shape suffixes: I columns of a matrix, O its rows

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from llama_core.config.models import ModelSpec
from llama_core.config.strategy import LoRA
from llama_core.models.layers import Linear, TokenEmbedding, local_part, scale_outputs, unchanged
from llama_core.models.lora import AdaptedLinear
from llama_core.models.lora import merge as merge_lora
from llama_core.weight_rows import Weight


class DoraLinear(AdaptedLinear):
    """A frozen matrix W with an adapter that changes its direction: ``m / |V| * (x @ V.T)``, ``V = W + scale * B A``.

    The lengths ``|V|`` of the rows get no gradient, as in section 4.3. Dropout affects the adapter's input alone; with
    dropout, PEFT also drops a part of the matrix's own input.

    Args:
        matrix: the matrix to freeze.
        lora: the adapters.
        dtype: dtype of the weights that are trained.
    """

    def __init__(self, matrix: Linear, lora: LoRA, dtype: torch.dtype) -> None:
        super().__init__(matrix, lora, dtype)
        self.lora_magnitude_vector = nn.Parameter(torch.empty(self.out_features, dtype=dtype))

    def product(self, x: Tensor) -> Tensor:
        """Return the product with the changed matrix, in the dtype of ``x``."""
        magnitude = self.lora_magnitude_vector
        own_O = self.own_bias(magnitude)  # of a matrix that every rank holds whole
        if self.own_bias is unchanged:
            is_whole = isinstance(magnitude, DTensor) and magnitude.placements[0].is_replicate()
            own_O = local_part(magnitude, Partial() if is_whole else None)
        return scale_outputs(super().product(x), own_O * self.inverse_lengths())

    @torch.no_grad()
    def inverse_lengths(self) -> Tensor:
        """Return one over the length of each row of the changed matrix, [rows held here], in fp32 or wider."""
        a = local_part(self.lora_A.weight)
        b = local_part(self.lora_B.weight)
        matrix_OI = local_part(self.weight)
        changed_OI = matrix_OI.to(torch.promote_types(matrix_OI.dtype, torch.float32), copy=True)
        changed_OI.addmm_(b.to(changed_OI.dtype), a.to(changed_OI.dtype), alpha=self.scale)
        lengths_O = torch.linalg.vector_norm(changed_OI, dim=1)
        if isinstance(self.weight, DTensor) and self.weight.placements[0].is_shard(1):
            squares = DTensor.from_local(lengths_O.square(), self.weight.device_mesh, [Partial()])
            lengths_O = squares.redistribute(placements=[Replicate()]).to_local().sqrt()
        inverse_O: Tensor = lengths_O.reciprocal()
        return inverse_O


def adapt(module: Linear | TokenEmbedding, spec: ModelSpec, lora: LoRA, dtype: torch.dtype) -> DoraLinear:
    """Return a matrix with an adapter in its place."""
    assert isinstance(module, Linear)
    return DoraLinear(module, lora, dtype)


def merge(matrix_OI: Tensor, adapter: Mapping[str, Tensor], lora: LoRA) -> None:
    """Add to a matrix what its adapter adds, and give its rows their lengths."""
    merge_lora(matrix_OI, adapter, lora)
    lengths_O = torch.linalg.vector_norm(matrix_OI, dim=1)
    matrix_OI.mul_((adapter["lora_magnitude_vector"] / lengths_O)[:, None])


def begin(weight: Weight, matrix_OI: Tensor) -> Tensor:
    """Return the lengths of a matrix's rows, which B, being zero, does not change."""
    lengths_O: Tensor = torch.linalg.vector_norm(matrix_OI, dim=1)
    return lengths_O
