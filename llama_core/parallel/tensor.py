"""Tensor and sequence parallelism: how every matrix is divided over the ranks.

Attention and feed-forward divide the outputs of their first matrices and the inputs of their last one, so the ranks
communicate twice: to gather the input, and to sum the output. With sequence parallelism, the residual stream between
the blocks is divided along the sequence, and an all-gather and a reduce-scatter replace each all-reduce: the same bytes
are sent, and a rank holds 1/tp of the stream and the norms' results. The vocabulary is divided too: a rank holds only
its own part of the embedding, the head and the logits.

Source: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198, for the sequence.
"""

# Shape suffixes: B batch, S sequence, D model dim, V vocabulary

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_reduce
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

from llama_core.config.model_weights import is_of_experts, weight_of
from llama_core.config.models import ModelSpec
from llama_core.models.attention import GroupedQueryAttention
from llama_core.models.head import HeadInputs
from llama_core.models.latent_attention import LatentAttention
from llama_core.models.layers import FeedForward, Linear, LowRank, NormOfHeads, TokenEmbedding, local_part
from llama_core.models.llama import Llama
from llama_core.models.moe import MixtureOfExperts, SharedExpert
from llama_core.parallel.vocabulary import vocab_parallel_embedding
from llama_core.weight_rows import INPUTS, OUTPUTS, Division, Weight


def tensor_parallel_styles(
    model: Llama, *, sequence_parallel: bool, whole_experts: bool = False
) -> dict[str, ParallelStyle]:
    """Return how each module of ``model`` is divided, by name: one with a weight as the weight's row says."""
    stream = _stream(sequence_parallel=sequence_parallel)
    kind = model.spec.lora.kind if model.spec.lora else None
    adapter = kind.weights if kind else ()
    of_weights: dict[Division, ParallelStyle] = {
        "vocabulary": VocabularyParallel(stream, adapter, kind.of_embedding if kind else ()),
        "outputs": Columns(adapter),
        "inputs": Rows(stream, adapter),
        "heads": SequenceParallel(sequence_dim=2, use_local_output=True),
        "latent": ToLatent(stream),
        # plain tensors again: whatever consumes them says how it wants them
        "stream": SequenceParallel(use_local_output=True) if sequence_parallel else Replicated(),
    }
    whole_tokens = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    of_modules: dict[type[nn.Module], ParallelStyle] = {
        GroupedQueryAttention: OwnHeads(stream, _weights_of_heads(model.spec)),
        LatentAttention: OwnHeadsOfLatents(stream, _weights_of_heads(model.spec)),
        FeedForward: whole_tokens,
        MixtureOfExperts: RoutedAlike(stream),
        NormOfHeads: SummedNorm(),
    }
    of_shared = of_weights
    if whole_experts:
        # a shared expert is divided as a feed-forward is
        of_modules |= {MixtureOfExperts: RoutedApart(), SharedExpert: whole_tokens}
    else:
        # what a shared expert writes is added to what this rank's part of the experts writes
        of_shared = of_weights | {"inputs": Rows(Partial(), adapter, use_local_output=False)}
    modules = dict(model.named_modules())
    styles = {name: of_modules[type(module)] for name, module in modules.items() if type(module) in of_modules}
    for name in model.spec.parameter_shapes:
        module, _, _ = name.rpartition(".")
        if module in modules and module not in styles and not is_of_experts(name):  # a mixture divides its own
            parent = modules[module.rpartition(".")[0]]
            styles[module] = (of_shared if isinstance(parent, SharedExpert) else of_weights)[weight_of(name).divided]
    # those inside a mixture first, which then replicates what is not divided
    return dict(reversed(styles.items()))


def _weights_of_heads(spec: ModelSpec) -> frozenset[str]:
    """Return the names of the weights that attention itself has, beside those of its matrices and norms."""
    places = [name.rpartition(".") for name in spec.parameter_shapes]
    return frozenset(weight for module, _, weight in places if module.endswith(".attention"))


def _stream(*, sequence_parallel: bool) -> Placement:
    """Return how the residual stream is divided, and all that is computed from its tokens alone."""
    return Shard(1) if sequence_parallel else Replicate()


def apply_tensor_parallel(
    model: Llama, mesh: DeviceMesh, *, sequence_parallel: bool, whole_experts: bool = False
) -> None:
    """Divide the parameters of ``model`` over a mesh of one axis, and make it compute with its part.

    The parameters become DTensors. The stream between the blocks stays in plain tensors: whole, or with
    ``sequence_parallel`` this rank's part of the sequence.

    Args:
        model: the model, or a part of it, on the meta device or with the same values on every rank.
        mesh: the tensor-parallel ranks.
        sequence_parallel: divide the residual stream along the sequence.
        whole_experts: leave experts whole, and let each rank route the tokens of its part of the sequence.

    Raises:
        NotImplementedError: if a weight has no row that says how it is divided.
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    styles = tensor_parallel_styles(model, sequence_parallel=sequence_parallel, whole_experts=whole_experts)
    parallelize_module(model, mesh, styles)
    for name, parameter in model.named_parameters():  # these are new ones
        if not isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"{name} is not divided: it has no row among the weights in config/model_weights.py"
            )
        parameter.requires_grad_(name not in frozen)
    model.sequence_shards = mesh.size() if sequence_parallel else 1
    model.head_inputs = partial(_divided_head, mesh, _stream(sequence_parallel=sequence_parallel))


class Columns(ColwiseParallel):
    """A matrix divided by rows, which give columns of the result, and its bias.

    Args:
        adapter: the rows of the weights of its adapter, if it has one.
    """

    def __init__(self, adapter: Sequence[Weight] = ()) -> None:
        super().__init__()
        self.placements = {"bias": Shard(0), **_placements(Shard(0), OUTPUTS, adapter)}

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _distribute(name, module, device_mesh, self.placements)


class Rows(RowwiseParallel):
    """A matrix divided by columns, as its input is.

    Matrix and adapter return partial sums, which are added up before the sum over the ranks. A bias is whole on every
    rank and added after that sum, to this rank's part of the stream: with sequence parallelism it gets a part of its
    gradient, which the ranks sum up like that of a norm.

    Args:
        stream: placement of the residual stream, or of what is left of the sum.
        adapter: the rows of the weights of its adapter, if it has one.
        use_local_output: whether the result is a plain tensor.
    """

    def __init__(self, stream: Placement, adapter: Sequence[Weight] = (), *, use_local_output: bool = True) -> None:
        super().__init__(output_layouts=stream, use_local_output=use_local_output)
        self.stream = stream
        self.placements = {"bias": Replicate(), **_placements(Shard(1), INPUTS, adapter)}

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _distribute(name, module, device_mesh, self.placements)
        if isinstance(module, Linear) and module.bias is not None:
            module.sum_over_ranks = self._summed

    def _summed(self, part: Tensor) -> Tensor:
        assert isinstance(part, DTensor)
        return part.redistribute(placements=[self.stream])


def _placements(own: Placement, divided_side: str, adapter: Sequence[Weight]) -> dict[str, Placement]:
    """Return how a matrix and its adapter are divided, by the names of their weights within the module.

    Args:
        own: placement of the matrix.
        divided_side: its side that is divided. A weight of the adapter that lacks it is whole on every rank.
        adapter: the rows of these weights.
    """
    placements: dict[str, Placement] = {"weight": own}
    for weight in adapter:
        is_divided = divided_side in weight.shape
        placements[weight.name] = Shard(weight.shape.index(divided_side)) if is_divided else Replicate()
    return placements


def _distribute(path: str, module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    """Divide the parameters of a module, but not those of modules inside it; ``path`` is its name in the whole."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        own_name = f"{path}.{name}" if path else name
        if own_name not in placements:
            raise NotImplementedError(f"{own_name} is not divided: neither its matrix nor the adapter has a row for it")
        divided = distribute_tensor(parameter, mesh, [placements[own_name]], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


class OwnHeads(PrepareModuleInput):
    """Attention, which gets whole tokens and has some of the heads.

    Args:
        stream: placement of the residual stream.
        weights: the names of its own weights, whose entries belong to one head each and are divided as the heads are.
    """

    def __init__(self, stream: Placement, weights: Collection[str]) -> None:
        super().__init__(input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None))
        self.placements: dict[str, Placement] = dict.fromkeys(weights, Shard(0))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.placements:
            _distribute("", module, device_mesh, self.placements)
        return super()._apply(module, device_mesh)


class OwnHeadsOfLatents(ParallelStyle):
    """Latent attention, which makes latents of the tokens whose stream a rank has, and has some of the heads.

    What its heads take of all tokens is gathered, and its gradient is summed: latents, which are narrower than the
    stream, and the part of a key that all heads share.

    Args:
        stream: placement of the residual stream.
        weights: the names of its own weights, whose entries belong to one head each and are divided as the heads are.
    """

    def __init__(self, stream: Placement, weights: Collection[str]) -> None:
        self.stream = stream
        self.placements: dict[str, Placement] = dict.fromkeys(weights, Shard(0))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, LatentAttention)
        _distribute("", module, device_mesh, self.placements)
        module.gathered = partial(_gathered, device_mesh, self.stream)
        return module


def _gathered(mesh: DeviceMesh, stream: Placement, x: Tensor) -> Tensor:
    """Return whole tokens, whose gradient is a part on every rank, given those of the stream that a rank has."""
    return DTensor.from_local(x, mesh, [stream]).redistribute(placements=[Replicate()])


class ToLatent(ParallelStyle):
    """A matrix that every rank holds whole and multiplies with the tokens whose stream it has.

    With sequence parallelism it gets a part of its gradient, like a norm. So does its adapter.

    Args:
        stream: placement of the residual stream.
    """

    def __init__(self, stream: Placement) -> None:
        self.gradient = Partial() if stream.is_shard() else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in module.modules():
            assert isinstance(part, Linear)
            part.multiply = partial(_multiply_whole, part.multiply, self.gradient)
            part.own_bias = partial(local_part, gradient=self.gradient)
            whole: dict[str, Placement] = {name: Replicate() for name, _ in part.named_parameters(recurse=False)}
            _distribute("", part, device_mesh, whole)
        return module


class Replicated(ParallelStyle):
    """A module that every rank computes whole; its parameters are DTensors like all others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            input_fn=_as_replicated,  # type: ignore[arg-type]  # its result becomes the module's input
            output_fn=lambda _, output, mesh: output.to_local(),
        )


class SummedNorm(ParallelStyle):
    """A norm of all heads, of which every rank has some: the ranks sum their squares, and the gradients of the sums."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, NormOfHeads)
        _distribute("", module, device_mesh, {"weight": Shard(0)})
        module.sum_over_ranks = partial(_sum_both_ways, device_mesh.get_group())
        return module


def _sum_both_ways(group: ProcessGroup, own: Tensor) -> Tensor:
    total: Tensor = _SumBothWays.apply(own, group)  # type: ignore[no-untyped-call]
    return total


class _SumBothWays(torch.autograd.Function):
    """Sums a tensor over ranks; each rank computes something else of the sum, so the gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total: Tensor = all_reduce(own, "sum", group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, "sum", ctx.group), None


class RoutedAlike(ParallelStyle):
    """A mixture whose experts are divided: every rank routes all tokens, and its part of the experts returns a part.

    So the router and the input, which are whole, get a part of their gradients on every rank.

    Args:
        stream: placement of the residual stream.
    """

    def __init__(self, stream: Placement) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MixtureOfExperts)
        _give_part_of_gradient(module)
        return distribute_module(
            module,
            device_mesh,
            input_fn=self._gathered,  # type: ignore[arg-type]  # its result becomes the module's input
            output_fn=self._summed,  # type: ignore[arg-type]
        )

    def _gathered(self, _: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(inputs[0], mesh, [self.stream]).redistribute(placements=[Replicate()])

    def _summed(self, _: nn.Module, part: Tensor, mesh: DeviceMesh) -> Tensor:
        return DTensor.from_local(part, mesh, [Partial()]).redistribute(placements=[self.stream]).to_local()


class RoutedApart(ParallelStyle):
    """A mixture whose experts are whole: every rank routes the tokens whose stream it has.

    So the router gets a part of its gradient on every rank, and the tokens of a row are counted over the ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MixtureOfExperts)
        _give_part_of_gradient(module)
        module.count_rows = partial(all_reduce, reduceOp="sum", group=device_mesh.get_group())
        return distribute_module(module, device_mesh)


def _give_part_of_gradient(mixture: MixtureOfExperts) -> None:
    """Let the router of a mixture, which is whole on every rank, get a part of its gradient."""
    # nothing that is another object for each router, or each block would be compiled anew
    mixture.router.multiply = partial(_multiply_whole, mixture.router.multiply, Partial())
    mixture.router.own_bias = partial(local_part, gradient=Partial())


class VocabularyParallel(ParallelStyle):
    """A table with one row per token, divided by rows; looking tokens up yields the residual stream.

    torch's row-wise embedding keeps a gradient of the whole table on every rank; this one keeps that of its own rows.

    Args:
        stream: placement of the residual stream.
        of_head: the rows of the weights of an adapter, if the table is a head that has one.
        of_embedding: the same of an embedding, which is a matrix over tokens.
    """

    def __init__(self, stream: Placement, of_head: Sequence[Weight] = (), of_embedding: Sequence[Weight] = ()) -> None:
        self.stream = stream
        self.placements_of_head = _placements(Shard(0), OUTPUTS, of_head)
        self.placements_of_embedding = _placements(Shard(0), INPUTS, of_embedding)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements = self.placements_of_head
        if isinstance(module, TokenEmbedding):
            placements = self.placements_of_embedding
            module.look_up = partial(_own_rows, device_mesh)
            module.__dict__["forward"] = partial(_summed, module.forward, device_mesh, self.stream)
        for name, part in module.named_modules():
            _distribute(name, part, device_mesh, placements)
        return module


def _multiply_whole(
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    gradient: Placement,
    x: Tensor,
    weight: Tensor,
    cast_weight: Tensor | None,
) -> Tensor:
    """Multiply by a matrix that is whole on every rank, and gets a gradient with a placement: a part, or the whole."""
    return multiply(x, local_part(weight, gradient), cast_weight)


def _as_replicated(module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
    return (DTensor.from_local(inputs[0], mesh, [Replicate()]), *inputs[1:])


def _own_rows(mesh: DeviceMesh, tokens_BS: Tensor, table: Tensor) -> Tensor:
    """Return this rank's part of the rows of a divided table: zeros for tokens of another rank."""
    return vocab_parallel_embedding(tokens_BS, local_part(table), mesh.get_group())


def _summed(forward: Callable[[Tensor], Tensor], mesh: DeviceMesh, stream: Placement, tokens_BS: Tensor) -> Tensor:
    """Return the residual stream, of which an embedding's forward returns this rank's part."""
    part_BSD = forward(tokens_BS)
    whole_BSD: Tensor = DTensor.from_local(part_BSD, mesh, [Partial()]).redistribute(placements=[stream]).to_local()
    return whole_BSD


def _divided_head(mesh: DeviceMesh, stream: Placement, x_BSD: Tensor, table: Linear | TokenEmbedding) -> HeadInputs:
    whole_BSD = DTensor.from_local(x_BSD, mesh, [stream]).redistribute(placements=[Replicate()])
    # a rank's gradient of the hidden states is a partial sum, over its part of the vocabulary
    hidden_TD = local_part(whole_BSD, Partial()).flatten(0, 1)
    adapter = table.low_rank(whole_BSD)
    if adapter is not None:
        adapter = LowRank(local_part(adapter.inner, Partial()).flatten(0, 1), local_part(adapter.rows))
    return HeadInputs(hidden_TD, local_part(table.weight), adapter, mesh)
