"""The times of a program's operations on a machine that was measured.

Each operation is looked up by the kind and the sizes under which ``calibration.operations`` measures it. On a CPU, an
operation of which nothing was measured moves its bytes at the speed of a measured multiplication. On a GPU, a kernel of
which nothing was measured takes as long as the data sheet says.
"""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

from llama_core.config.measured_rates import Sizes
from llama_core.config.model_spec import Activation
from llama_core.optimizers.traits import OptimizerType, Trained
from llama_core.planning.program.operations import FP32_BYTES, Operation, Product, Program
from llama_core.planning.work import Work

Direction = Literal["forward", "backward"]
Way = Literal["forward", "input", "weight"]
"""A product, or one of its gradients."""
Lookup = Callable[[str, Sizes], float | None]
"""Returns the seconds of a kind and sizes; None if nothing was measured that tells them."""

FLOAT_NAMES = {2: "bf16", 4: "fp32"}
POINTWISE = frozenset(
    {"add", "add_bias", "exp", "softmax", "tanh", "scale", "log_sum_exp", "rotate", "inverse_rms", "rearrange"}
).union(get_args(Activation))
"""Kinds of operations that were measured by the number of elements of their first input."""
WITH_PRODUCT = {"cast_product": "linear", "packed_product": "packed", "cast_grouped_product": "experts"}
"""Kinds of operations that were measured with the casts or the unpacking of their weights, and with what name."""
EAGER_KERNELS = frozenset({"fused_norm", "rotate"})
"""Kinds of operations of CUDA that were measured by the number of elements of their first input. A compiled block has
other kernels for them."""
LOSS_PRODUCTS = 3
"""Products of a loss whose head is trained."""
MULTIPLY_BYTES = 3 * FP32_BYTES
"""Bytes that a multiplication in fp32 reads and writes for each element."""


class _Measured:
    """What was measured that a rank of a machine asks for, whatever its device.

    Args:
        work: the model, the plan and the sequences.
        lookup: what was measured.
    """

    def __init__(self, work: Work, lookup: Lookup) -> None:
        self.work = work
        self.lookup = lookup

    def attention(self, operation: Operation, direction: Direction) -> float | None:
        """Return the time of attention's kernel, at the share of the scores inside its window, of a rank's share."""
        setting = self.work.setting
        spec = self.work.spec
        kernel = f"attention {self.work.kernel.told} {FLOAT_NAMES[setting.itemsize]} {direction}"
        heads = max(1, spec.num_heads // setting.tp)
        key_heads = max(1, spec.num_kv_heads // setting.tp)
        sizes = (setting.rows, heads, key_heads, setting.seq_len, spec.head_dim)
        seconds = self.lookup(kernel, sizes)
        return None if seconds is None else operation.share_in_window * seconds / setting.cp

    def _as_a_whole(self, program: Program, operation: Operation, direction: Direction) -> float | None:
        """Return the time of an operation that was measured as a whole; None for another one."""
        question = _question(program, operation, direction)
        return None if question is None else self.lookup(*question)


class MeasuredTimes(_Measured):
    """The times of operations on a rank of a measured CPU."""

    def forward(self, program: Program, operation: Operation) -> float:
        """Return the time of an operation's forward."""
        if not operation.outputs or operation.kind == "copy":  # the copy is made within ``linear``
            return 0.0
        whole = self._whole(program, operation, "forward")
        if whole is not None:
            return whole
        if operation.products:
            return sum(self._multiplying(operation, product, "forward") for product in operation.products)
        if operation.communicates:
            return 0.0
        moved = sum(program.sizes[tensor].num_bytes for tensor in (*operation.inputs, *operation.outputs))
        if operation.traffic is not None:
            moved = operation.traffic.forward
        return self.moving(moved)

    def backward(self, program: Program, operation: Operation, needing: Sequence[int]) -> float:
        """Return the time to make the gradients of some inputs of an operation."""
        whole = self._whole(program, operation, "backward")
        if whole is not None:
            return whole
        if operation.products:
            return sum(self._gradients(operation, product, needing) for product in operation.products)
        if operation.communicates:
            return 0.0
        gradient = sum(program.sizes[tensor].num_bytes for tensor in operation.outputs[:1])
        moved = 2 * gradient + sum(program.sizes[operation.inputs[place]].num_bytes for place in needing)
        if operation.traffic is not None:
            moved = operation.traffic.backward
        return self.moving(moved)

    def moving(self, num_bytes: float) -> float:
        """Return the time to read and write so many bytes."""
        if num_bytes <= 0:
            return 0.0
        elements = max(1, round(num_bytes / MULTIPLY_BYTES))
        return self.lookup("multiply fp32 forward", (elements,)) or 0.0

    def update(self, updated: Trained) -> float:
        """Return the time to clip and update parameters, each the rank's share."""
        optimizer = self.work.update
        if optimizer.others is not None:  # what is computed on whole matrices is timed apart
            others = self._updating(optimizer.others, updated.others)
            clipped = 3 * FP32_BYTES * updated.matrices
            return others + self.moving(clipped + optimizer.moved_for(Trained(updated.matrices, 0)))
        return self._updating(optimizer, sum(updated))

    def _updating(self, optimizer: OptimizerType, num_parameters: float) -> float:
        return self.lookup(f"update {optimizer.name}", (max(1, round(num_parameters)),)) or 0.0

    def orthogonalising(self, rows: int, columns: int) -> float:
        """Return the time in which Muon makes the direction of a matrix."""
        kind = f"orthogonalise {'bf16' if self.work.itemsize == 2 else 'fp32'}"
        return (self.lookup(kind, (rows, columns)) or 0.0) / 2

    def _whole(self, program: Program, operation: Operation, direction: Direction) -> float | None:
        """Return the time of an operation that was measured with all that belongs to it; None for another one."""
        if operation.kind == "attention":
            return self.attention(operation, direction)
        return self._as_a_whole(program, operation, direction)

    def _multiplying(self, operation: Operation, product: Product, way: str) -> float:
        """Return the time of a product, or of one of its gradients: the input's or the weight's."""
        return self.lookup(*_multiplication(product, FLOAT_NAMES[self.work.itemsize], way)) or 0.0

    def _gradients(self, operation: Operation, product: Product, needing: Sequence[int]) -> float:
        # of a product, the first input is multiplied by the second; ``add_product`` adds a first one
        first = 1 if operation.kind == "add_product" else 0
        seconds = 0.0
        for place in needing:
            if place == first:
                seconds += self._multiplying(operation, product, "input")
            elif place == first + 1:
                seconds += self._multiplying(operation, product, "weight")
        return seconds


class MeasuredKernels(_Measured):
    """The times of CUDA's kernels on a rank of a measured GPU; None for those of which nothing was measured."""

    def product(self, product: Product, way: Way, *, is_fp8: bool) -> float | None:
        """Return the time of a product, or of one of its gradients, without the rounding of its operands."""
        name = "fp8" if is_fp8 else FLOAT_NAMES[self.work.itemsize]
        return self.lookup(*_multiplication(product, name, way))

    def attention(self, operation: Operation, direction: Direction) -> float | None:
        """Return the time of attention's kernel; None for another operation, and for kernels that were not measured."""
        kernel = self.work.kernel
        if operation.kind != "attention" or kernel.holds_scores or kernel.told == "mask":
            return None
        return super().attention(operation, direction)

    def whole(self, program: Program, operation: Operation, direction: Direction) -> float | None:
        """Return the time of a loss, of a product that unpacks its matrix, or of an eager kernel."""
        compiles = self.work.plan.compile
        if operation.kind == "linear_loss" or (operation.kind == "packed_product" and not compiles):
            return self._as_a_whole(program, operation, direction)
        if compiles or operation.kind not in EAGER_KERNELS:
            return None
        size = program.sizes[operation.inputs[0]]
        name = FLOAT_NAMES.get(size.itemsize, "fp32")
        return self.lookup(f"{operation.kind} {name} {direction}", (max(1, size.elements),))

    def moving(self, num_bytes: float) -> float | None:
        """Return the time to read and write so many bytes."""
        return 0.0 if num_bytes <= 0 else self.lookup("copy", (max(1, round(num_bytes)),))

    def launches(self, num_kernels: int) -> float | None:
        """Return the time in which Python launches so many kernels."""
        seconds = self.lookup("launch", (1,))
        return None if seconds is None else num_kernels * seconds

    def update(self, updated: Trained) -> float | None:
        """Return the time to clip and update parameters, each the rank's share."""
        optimizer = self.work.update
        if optimizer.others is not None:
            return None
        return self.lookup(f"update {optimizer.name}", (max(1, round(sum(updated))),))


def _multiplication(product: Product, name: str, way: str) -> tuple[str, Sizes]:
    kind = "grouped product" if product.groups > 1 else "product"
    return f"{kind} {name} {way}", _sizes(product)


def _question(program: Program, operation: Operation, direction: Direction) -> tuple[str, Sizes] | None:
    """Return the kind and the sizes under which a pass of an operation was measured; None if it was not, as a whole."""
    kind = operation.kind
    size = program.sizes[(*operation.inputs, *operation.outputs)[0]]
    name = FLOAT_NAMES.get(size.itemsize, "fp32")
    elements = size.elements
    asked = ""
    if len(operation.products) == 1 and (kind in WITH_PRODUCT or kind == "linear_loss"):
        (product,) = operation.products
        if kind in WITH_PRODUCT:
            return f"{WITH_PRODUCT[kind]} {name} {direction}", _sizes(product)
        # its groups are the products of a forward: the logits, and the gradients of what is trained
        trained = "loss" if product.groups == LOSS_PRODUCTS else "loss frozen"
        return f"{trained} {name} {direction}", _sizes(product._replace(groups=1))
    if kind == "cast":
        ends = [name, FLOAT_NAMES.get(program.sizes[operation.outputs[0]].itemsize, "fp32")]
        asked = " ".join(("cast", *(reversed(ends) if direction == "backward" else ends)))
    elif kind == "multiply":
        elements = max(program.sizes[tensor].elements for tensor in operation.inputs)
        asked = f"multiply {name} {direction}"
    elif kind == "decide" and operation.inputs:
        elements = program.sizes[operation.outputs[0]].elements
        asked = "sort int64"
    elif kind in POINTWISE:
        asked = f"{kind} {name} {direction}"
    return (asked, (max(1, elements),)) if asked else None


def _sizes(product: Product) -> Sizes:
    """Return the rows, columns and outputs of a product, after the number of its groups if there are some."""
    sizes = (max(1, round(product.rows)), product.columns, product.outputs)
    return (product.groups, *sizes) if product.groups > 1 else sizes
