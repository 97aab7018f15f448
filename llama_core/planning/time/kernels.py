"""The time of a program's forward and backward on a device, kernel by kernel.

Matrix products run at a measured share of the device's peak, slower if a side is short. Attention runs at the rate of a
flash kernel, over the scores it does not skip. Everything else runs at the speed of memory, by the bytes its kernels
read and write. The kernels are this engine's on CUDA: norms in torch's fused kernel; rotation and activation in eager
kernels, or fused if the plan compiles; a linear cross-entropy that computes its gradients in the forward.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from llama_core.config.model_spec import OfBoth
from llama_core.config.run import RecomputeMode
from llama_core.planning.program.operations import (
    BACKWARD_PRODUCTS,
    FP32_BYTES,
    READ_BY_GRADIENT,
    SHARES_GRADIENT,
    WITHOUT_GRADIENT,
    Operation,
    Product,
)
from llama_core.planning.program.passes import Passes
from llama_core.planning.time.measured import MeasuredKernels, MeasuredTimes, Way
from llama_core.records.step_parts import ATTENTION, HOST, POINTWISE, PRODUCTS
from llama_core.schedules.actions import Kind

FP8_ROUNDING_BYTES = {False: 9, True: 5}
"""Bytes read and written to round one bf16 number to fp8, eager and compiled: read for the row's maximum, read again,
and written in one byte; in eager mode the scaled number is also written and read."""
FUSED = frozenset({"fused_norm", "gated"}).union(get_args(OfBoth))
"""Operations of which a compiled block makes all gradients in one kernel."""


class Pass(NamedTuple):
    """Seconds of a forward and of its backward."""

    forward: float
    backward: float

    def plus(self, other: "Pass") -> "Pass":
        """Return the seconds of both passes, one after the other."""
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def times(self, count: int) -> "Pass":
        """Return the seconds of ``count`` such passes."""
        return Pass(count * self.forward, count * self.backward)

    def of(self, kind: Kind) -> float:
        """Return the seconds of an action of this kind; either part of a split backward takes half of a whole one."""
        match kind:
            case Kind.FORWARD:
                return self.forward
            case Kind.BACKWARD:
                return self.backward
            case _:
                return self.backward / 2


NO_TIME = Pass(0.0, 0.0)


@dataclass(frozen=True)
class Rates:
    """How fast a device runs the kernels of a plan."""

    product_flops: float
    """FLOP/s of a large matrix product."""
    half_rate_dim: int
    """Shortest side at which a product reaches half of that."""
    fp8_flops: float | None
    """The same of a product with a whole matrix of a block, if that is in fp8."""
    attention_flops: float
    """FLOP/s of attention's kernel, over the scores that it computes."""
    visible_share: float
    """Share of the scores that it computes."""
    bandwidth: float
    """Bytes per second that kernels read or write."""
    compiles: bool
    """Whether blocks are compiled."""
    added_share: float
    """Share of microbatches whose gradients of weights are added to those of earlier ones."""
    launch_seconds: float
    """The time in which Python launches a kernel."""
    computes_meanwhile: bool
    """Whether the device computes while Python launches the next kernel."""


class ProgramTime:
    """The time of a program's forward and backward.

    Args:
        passes: its forward and its backward.
        rates: of the device, from its data sheet.
        measured: the times of operations on a measured CPU: they count instead.
        kernels: the times of kernels on a measured GPU: each that is known counts instead.
    """

    def __init__(
        self,
        passes: Passes,
        rates: Rates,
        measured: MeasuredTimes | None = None,
        kernels: MeasuredKernels | None = None,
    ) -> None:
        self.passes = passes
        self.program = passes.program
        self.rates = rates
        self.measured = measured
        self.kernels = kernels

    def seconds(self, mode: RecomputeMode = "none") -> Pass:
        """Return the time of both, with recomputation in the backward, and with the launches that nothing hides."""
        repeated = self.passes.repeated(mode)
        forward, backward, again = self._forward(self.passes.operations), self._backward(), self._forward(repeated)
        if self.measured is not None:  # a measured time has its own launches
            return Pass(forward, backward + again)
        launches = self._launching(self.passes.operations)
        if self.rates.computes_meanwhile:
            return Pass(max(forward, launches), max(backward, 2 * launches) + again)
        return Pass(forward + launches, backward + 2 * launches + again + self._launching(repeated))

    def by_kind(self, mode: RecomputeMode = "none") -> dict[str, Pass]:
        """Return ``seconds`` by kind of work, as ``step_parts`` names them; ``HOST`` is the time of launches beyond."""
        forward: dict[str, float] = defaultdict(float)
        backward: dict[str, float] = defaultdict(float)
        for operation in self.passes.operations:
            forward[_kind(operation)] += self._forward_of(operation)
        for kind, seconds in self._gradients():
            backward[kind] += seconds
        for operation in self.passes.repeated(mode):
            backward[_kind(operation)] += self._forward_of(operation)
        whole = self.seconds(mode)
        forward[HOST] = max(0.0, whole.forward - sum(forward.values()))
        backward[HOST] = max(0.0, whole.backward - sum(backward.values()))
        return {kind: Pass(forward[kind], backward[kind]) for kind in {**forward, **backward}}

    def attention(self) -> Pass:
        """Return the time of attention's kernel alone."""
        if self.measured is not None:
            kernels = [operation for operation in self.passes.operations if operation.kind == "attention"]
            return Pass(
                sum(self.measured.attention(kernel, "forward") or 0.0 for kernel in kernels),
                sum(self.measured.attention(kernel, "backward") or 0.0 for kernel in kernels),
            )
        operations = self.passes.operations
        return Pass(sum(map(self._attending, operations)), sum(map(self._attending_backward, operations)))

    def _forward(self, operations: Iterable[Operation]) -> float:
        return sum(map(self._forward_of, operations))

    def _forward_of(self, operation: Operation) -> float:
        if self.measured is not None:
            return self.measured.forward(self.program, operation)
        if self.kernels is not None:
            whole = self.kernels.whole(self.program, operation, "forward")
            if whole is not None:
                return whole
        seconds = sum(self._multiplying(product, operation, "forward") for product in operation.products)
        seconds += self._attending(operation)
        if operation.traffic is not None:
            return seconds + self._copying(operation.traffic.forward)
        if operation.products:
            return seconds + self._rounding(operation.products, operation, operands=("x", "weight"))
        if not operation.outputs or operation.communicates:
            return seconds
        read = self._num_bytes(operation.inputs)
        written = self._num_bytes(operation.outputs)
        if self.rates.compiles and operation.kind == "add":
            written = 0  # the next norm has the sum at hand
        return seconds + self._copying(read + written)

    def _backward(self) -> float:
        """Return the time of a backward without recomputation."""
        return sum(seconds for _, seconds in self._gradients())

    def _gradients(self) -> Iterator[tuple[str, float]]:
        """Yield the kind and the time of all that a backward computes, without recomputation."""
        received: Counter[int] = Counter()
        for operation in reversed(self.passes.operations):
            needing = [place for place, tensor in enumerate(operation.inputs) if tensor in self.passes.needing]
            if not needing or not operation.outputs or operation.kind in WITHOUT_GRADIENT:
                continue
            yield _kind(operation), self._making_gradients(operation, needing)
            for place in needing:
                tensor = operation.inputs[place]
                received[tensor] += 1
                yield POINTWISE, self._adding_gradient(tensor, received[tensor])

    def _making_gradients(self, operation: Operation, needing: Sequence[int]) -> float:
        """Return the time to make the gradients of some inputs of an operation."""
        if self.measured is not None:
            return self.measured.backward(self.program, operation, needing)
        if self.kernels is not None:
            whole = self.kernels.whole(self.program, operation, "backward")
            if whole is not None:
                return whole
        seconds = self._attending_backward(operation)
        if operation.kind not in BACKWARD_PRODUCTS:
            seconds += self._products_of_gradients(operation, needing)
        if operation.traffic is not None:
            return seconds + self._copying(operation.traffic.backward)
        if operation.products:
            return seconds + self._rounding_for_gradients(operation, needing)
        if operation.communicates:
            return seconds
        return seconds + self._copying(self._moved_for_gradients(operation, needing))

    def _products_of_gradients(self, operation: Operation, needing: Sequence[int]) -> float:
        """Return the time of the products that make gradients, one for each input that needs one."""
        shares = SHARES_GRADIENT.get(operation.kind, ())
        # ``add_product`` adds its first input to a product of the next two
        first = len(shares) if operation.kind == "add_product" else 0
        seconds = 0.0
        for place in needing:
            if place not in shares:
                way: Way = "input" if place == first else "weight"
                seconds += sum(self._multiplying(product, operation, way) for product in operation.products)
        return seconds

    def _moved_for_gradients(self, operation: Operation, needing: Sequence[int]) -> int:
        """Return the bytes that the kernels of some gradients move: each reads what it needs, and writes one."""
        if operation.kind in SHARES_GRADIENT:
            return 0
        reads = READ_BY_GRADIENT.get(operation.kind)
        kernels = [{operation.tensors[read] for read in reads[place]} if reads else set() for place in needing]
        if self.rates.compiles and operation.kind in FUSED:
            kernels = [set().union(*kernels)]
        gradient = self._num_bytes(operation.outputs[:1])
        written = self._num_bytes(operation.inputs[place] for place in needing)
        return sum(gradient + self._num_bytes(kernel) for kernel in kernels) + written

    def _adding_gradient(self, tensor: int, count: int) -> float:
        """Return the time to add the ``count``-th gradient of a tensor to the one that is there."""
        if tensor in self.program.trained:  # that of an earlier microbatch
            return self.rates.added_share * self._copying(3 * FP32_BYTES * self.program.trained[tensor])
        if count == 1:
            return 0.0
        # in a compiled block, the kernel that reads the sum makes it
        return self._copying((1 if self.rates.compiles else 3) * self._num_bytes([tensor]))

    # --- rates

    def _launching(self, operations: Iterable[Operation]) -> float:
        """Return the time in which Python launches the kernels of operations."""
        num_kernels = sum(operation.num_kernels for operation in operations if operation.outputs)
        measured = None if self.kernels is None else self.kernels.launches(num_kernels)
        return self.rates.launch_seconds * num_kernels if measured is None else measured

    def _multiplying(self, product: Product, operation: Operation, way: Way) -> float:
        """Return the time of a matrix product, or of one of its gradients."""
        peak = self.rates.product_flops
        is_fp8 = bool(self.rates.fp8_flops) and self._is_of_matrix(operation)
        if self.kernels is not None:
            measured = self.kernels.product(product, way, is_fp8=is_fp8)
            if measured is not None:
                return measured
        if self.rates.fp8_flops and is_fp8:
            peak = self.rates.fp8_flops
        shortest = min(product.rows, product.columns, product.outputs)
        return product.flops / (peak * shortest / (shortest + self.rates.half_rate_dim))

    def _attending(self, operation: Operation) -> float:
        """Return the time of the scores of an operation, and of their products with the values."""
        measured = None if self.kernels is None else self.kernels.attention(operation, "forward")
        return self._attending_at_peak(operation) if measured is None else measured

    def _attending_backward(self, operation: Operation) -> float:
        """Return the time of the products of scores that make gradients."""
        measured = None if self.kernels is None else self.kernels.attention(operation, "backward")
        if measured is not None:
            return measured
        return BACKWARD_PRODUCTS.get(operation.kind, 0.0) * self._attending_at_peak(operation)

    def _attending_at_peak(self, operation: Operation) -> float:
        computed = self.rates.visible_share * operation.share_in_window * operation.scores
        return computed / self.rates.attention_flops

    def _rounding_for_gradients(self, operation: Operation, needing: Sequence[int]) -> float:
        """Return the time to round the operands of a product's gradients to fp8."""
        operands = ["result", "weight"]
        if operation.inputs[1] in map(operation.inputs.__getitem__, needing):
            operands += ["result", "x"]
        return self._rounding(operation.products, operation, operands=operands)

    def _rounding(self, products: Sequence[Product], operation: Operation, *, operands: Sequence[str]) -> float:
        """Return the time to round some operands of products to fp8."""
        if not self.rates.fp8_flops or not self._is_of_matrix(operation):
            return 0.0
        elements = 0.0
        for product in products:
            sizes = {
                "x": product.rows * product.columns,
                "weight": product.columns * product.outputs,
                "result": product.rows * product.outputs,
            }
            elements += sum(sizes[operand] for operand in operands)
        return self._copying(FP8_ROUNDING_BYTES[self.rates.compiles] * elements)

    def _is_of_matrix(self, operation: Operation) -> bool:
        return not self.program.matrix_products.isdisjoint(operation.outputs)

    def _copying(self, num_bytes: float) -> float:
        if self.measured is not None:
            return self.measured.moving(num_bytes)
        measured = None if self.kernels is None else self.kernels.moving(num_bytes)
        return num_bytes / self.rates.bandwidth if measured is None else measured

    def _num_bytes(self, tensors: Iterable[int]) -> int:
        """Return the bytes of tensors, weights among them."""
        return sum(self.program.sizes[tensor].num_bytes for tensor in tensors)


def _kind(operation: Operation) -> str:
    """Return the kind of work of an operation, with all that it copies and rounds."""
    if operation.scores:
        return ATTENTION
    return PRODUCTS if operation.products else POINTWISE
