"""Tensor and sequence parallelism: how every matrix is divided over the ranks.

Attention and feed-forward divide the outputs of their first matrices and the inputs of their last one, so the ranks
communicate twice: to gather the input, and to sum the output. With sequence parallelism, the residual stream between
the blocks is divided along the sequence, and an all-gather and a reduce-scatter replace each all-reduce: the same bytes
are sent, and a rank holds 1/tp of the stream and the norms' results. The vocabulary is divided too: a rank holds only
its own part of the embedding, the head and the logits.

Source: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198, for the sequence.
"""

# Shape suffixes: B batch, S sequence, D model dim, V vocabulary

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from llama_core.config.models import Division, is_of_experts, weight_of
from llama_core.models.head import HeadInputs
from llama_core.models.layers import Attention, FeedForward, Linear, LowRank, TokenEmbedding, local_part
from llama_core.models.llama import Llama
from llama_core.models.lora import AdaptedEmbedding
from llama_core.models.moe import MixtureOfExperts
from llama_core.parallel.vocabulary import vocab_parallel_embedding


def tensor_parallel_styles(model: Llama, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Return how each module of ``model`` is divided, by name: one with a weight as the weight's row says."""
    stream = Shard(1) if sequence_parallel else Replicate()
    of_weights: dict[Division, ParallelStyle] = {
        "vocabulary": VocabularyParallel(stream),
        "outputs": Columns(),
        "inputs": Rows(output_layouts=stream),
        "stream": SequenceParallel() if sequence_parallel else Replicated(),
    }
    of_modules = {
        Attention: PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        FeedForward: PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        MixtureOfExperts: RoutedAlike(stream),
    }
    modules = dict(model.named_modules())
    styles = {name: of_modules[type(module)] for name, module in modules.items() if type(module) in of_modules}
    for name in model.spec.parameter_shapes:
        module, _, _ = name.rpartition(".")
        if module in modules and not is_of_experts(name):  # a mixture divides its own
            styles[module] = of_weights[weight_of(name).divided]
    return styles


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Divide the parameters of ``model`` over a mesh of one axis, and make it compute with its part.

    The parameters become DTensors. The stream between the blocks stays in plain tensors: whole, or with
    ``sequence_parallel`` this rank's part of the sequence.

    Args:
        model: the model, or a part of it, on the meta device or with the same values on every rank.
        mesh: the tensor-parallel ranks.
        sequence_parallel: divide the residual stream along the sequence.

    Raises:
        NotImplementedError: if a weight has no row that says how it is divided.
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    parallelize_module(model, mesh, tensor_parallel_styles(model, sequence_parallel=sequence_parallel))
    for name, parameter in model.named_parameters():  # these are new ones
        if not isinstance(parameter, DTensor):
            raise NotImplementedError(f"{name} is not divided: it has no row among the weights in config/models.py")
        parameter.requires_grad_(name not in frozen)
    model.sequence_shards = mesh.size() if sequence_parallel else 1
    model.head_inputs = partial(_divided_head, mesh)


class Columns(ColwiseParallel):
    """A matrix divided by rows, which give columns of the result; its adapter's A is whole on every rank."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _distribute(module, device_mesh, Replicate() if name == "lora_A" else Shard(0))


class Rows(RowwiseParallel):
    """A matrix divided by columns, as its input is; its adapter's B is whole on every rank.

    Matrix and adapter return partial sums, which are added up before the sum over the ranks.
    """

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _distribute(module, device_mesh, Replicate() if name == "lora_B" else Shard(1))


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    weight = distribute_tensor(module.get_parameter("weight"), mesh, [placement], src_data_rank=None)
    module.register_parameter("weight", nn.Parameter(weight))


class Replicated(ParallelStyle):
    """A module that every rank computes whole; its parameters are DTensors like all others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            input_fn=_as_replicated,  # type: ignore[arg-type]  # its result becomes the module's input
            output_fn=lambda _, output, mesh: output.to_local(),
        )


class RoutedAlike(ParallelStyle):
    """A mixture whose experts are divided: every rank routes all tokens, and its part of the experts returns a part.

    So the router and the input, which are whole, get a part of their gradients on every rank.

    Args:
        stream: placement of the residual stream.
    """

    def __init__(self, stream: Placement) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        router = module.get_submodule("router")
        router.__dict__["multiply"] = partial(_multiply_for_a_part, router.__dict__["multiply"])
        return distribute_module(
            module,
            device_mesh,
            input_fn=self._gathered,  # type: ignore[arg-type]  # its result becomes the module's input
            output_fn=self._summed,  # type: ignore[arg-type]
        )

    def _gathered(self, _: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> Tensor:
        stream = inputs[0] if isinstance(inputs[0], DTensor) else DTensor.from_local(inputs[0], mesh, [self.stream])
        return local_part(stream.redistribute(placements=[Replicate()]), Partial())

    def _summed(self, _: nn.Module, part: Tensor, mesh: DeviceMesh) -> Tensor:
        return DTensor.from_local(part, mesh, [Partial()]).redistribute(placements=[self.stream]).to_local()


class VocabularyParallel(ParallelStyle):
    """A table with one row per token, divided by rows; looking tokens up yields the residual stream.

    Of its adapter, the matrix with the token dim is divided, and the other one is whole.

    torch's row-wise embedding keeps a gradient of the whole table on every rank; this one keeps that of its own rows.

    Args:
        stream: placement of the residual stream.
    """

    def __init__(self, stream: Placement) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements: dict[str, Placement] = {"": Shard(0), "lora_A": Replicate(), "lora_B": Shard(0)}
        if isinstance(module, TokenEmbedding):
            placements |= {"lora_A": Shard(1), "lora_B": Replicate()}
            module.__dict__["forward"] = partial(_look_up, module, device_mesh, self.stream)
        for name, part in module.named_modules():
            _distribute(part, device_mesh, placements[name])
        return module


def _multiply_for_a_part(
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor], x: Tensor, weight: Tensor, cast_weight: Tensor | None
) -> Tensor:
    return multiply(x, local_part(weight, Partial()), cast_weight)


def _as_replicated(module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
    return (DTensor.from_local(inputs[0], mesh, [Replicate()]), *inputs[1:])


def _look_up(table: TokenEmbedding, mesh: DeviceMesh, stream: Placement, tokens_BS: Tensor) -> Tensor:
    part_BSD = _rows(table.weight, tokens_BS, mesh).to(table.out_dtype)
    if isinstance(table, AdaptedEmbedding):
        narrow_BSA = _rows(table.lora_A.weight.t(), tokens_BS, mesh).to(table.out_dtype) * table.scale
        # a rank multiplies only its own tokens by it, so its gradient is a partial sum
        whole_DA = local_part(table.lora_B.weight, Partial())
        part_BSD = part_BSD + F.linear(narrow_BSA, whole_DA.to(table.out_dtype))
    whole_BSD: Tensor = DTensor.from_local(part_BSD, mesh, [Partial()]).redistribute(placements=[stream]).to_local()
    return whole_BSD


def _rows(weight: Tensor, tokens_BS: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of the rows of a divided table: zeros for tokens of another rank."""
    return vocab_parallel_embedding(tokens_BS, local_part(weight), mesh.get_group())


def _divided_head(mesh: DeviceMesh, x_BSD: Tensor, table: Linear | TokenEmbedding) -> HeadInputs:
    whole_BSD = x_BSD if isinstance(x_BSD, DTensor) else DTensor.from_local(x_BSD, mesh, [Replicate()])
    whole_BSD = whole_BSD.redistribute(placements=[Replicate()])
    # a rank's gradient of the hidden states is a partial sum, over its part of the vocabulary
    hidden_TD = local_part(whole_BSD, Partial()).flatten(0, 1)
    adapter = table.beside(whole_BSD)
    if adapter is not None:
        adapter = LowRank(local_part(adapter.narrow, Partial()).flatten(0, 1), local_part(adapter.rows))
    return HeadInputs(hidden_TD, local_part(table.weight), adapter, mesh)
