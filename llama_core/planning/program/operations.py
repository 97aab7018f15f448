"""A forward as data: its operations, in the order in which they run, with the sizes of their tensors.

Nothing here knows what a layer is. A tensor is a number: its place in ``Program.sizes``. One table says what the
gradient of each input of an operation is computed from; ``passes`` derives the rest from it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from llama_core.config.model_spec import OfBoth, OfGate
from llama_core.config.settings import Precision
from llama_core.planning.transfers import NO_TRAFFIC, PassTraffic

FP32_BYTES = 4
INT32_BYTES = 4
INT64_BYTES = 8


def itemsize_of(precision: Precision) -> int:
    """Return the bytes per element of activations; ``auto`` counts as bf16."""
    return FP32_BYTES if precision == "fp32" else FP32_BYTES // 2


FIRST_OUTPUT = -1
SECOND_OUTPUT = -2
THIRD_OUTPUT = -3
FOURTH_OUTPUT = -4

READ_BY_GRADIENT: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "product": ((1,), (0,)),
    "add_product": ((), (2,), (1,)),  # of the tensor that is added to, of x, and of a weight
    "grouped_product": ((0, 1), (0, 1)),  # a custom operator saves all its inputs, whatever its backward reads
    "cast_product": ((2,), (0,), ()),  # of x, of a weight, and of its copy in the dtype of x
    "cast_grouped_product": ((2,), (0,), ()),
    "multiply": ((1,), (0,)),
    **dict.fromkeys(get_args(OfGate), ((0,),)),
    **dict.fromkeys(get_args(OfBoth), ((0, 1), (0, 1))),
    "gated": ((0, 1), (0,)),  # in one kernel, as compiled blocks have it
    "softmax": ((FIRST_OUTPUT,),),
    "sink_softmax": ((FIRST_OUTPUT,), (FIRST_OUTPUT,)),
    "exp": ((FIRST_OUTPUT,),),
    "tanh": ((FIRST_OUTPUT,),),
    "sigmoid": ((FIRST_OUTPUT,),),
    "softplus": ((0,),),
    "log_sum_exp": ((0, FIRST_OUTPUT),),
    "inverse_rms": ((0, FIRST_OUTPUT),),
    "fused_norm": ((0, 1, SECOND_OUTPUT), (0, 1, SECOND_OUTPUT)),
    "fused_plain_norm": ((0, SECOND_OUTPUT),),
    "attention": ((0, 1, 2, FIRST_OUTPUT, SECOND_OUTPUT),) * 4,  # of q, k, v and, if there are some, sinks
    "linear_loss": (
        (FIRST_OUTPUT,),
        (SECOND_OUTPUT,),
        (THIRD_OUTPUT,),
        (FOURTH_OUTPUT,),
    ),  # gradients, but for a factor
    "linear_losses": ((0, 1), (0, 1)),
    "frozen_linear_losses": ((0, 1), (0, 1)),
    "adapted_linear_losses": ((0, 1, 2, 3),) * 4,
    "look_up": ((1,),),  # the ids; the batch's own are there anyway
    "mask": ((1,), ()),
    "dropout": ((SECOND_OUTPUT,),),  # its mask
    "top": ((SECOND_OUTPUT,),),  # which were the largest
    "rearrange": ((1,), ()),
    "pick": ((1,), ()),
}
"""For each input of an operation, the tensors that autograd saves to compute its gradient.

Inputs count from 0. The gradients of other operations (add, cast, scale, rotate, gather) are computed from the gradient
of the output alone. Source: ``tools/autograd/derivatives.yaml`` in torch, and ``models`` for operators of our own.
"""
FLATTENS = frozenset({"product", "cast_product", "packed_product", "rearrange"})
"""Operations on a matrix with a row per token. The gradient of their first input is a view of that matrix's."""

SHARES_GRADIENT: Mapping[str, tuple[int, ...]] = {
    "add": (0, 1),
    "add_bias": (0,),
    "add_product": (0,),
    "sum": (0,),
    "reduce": (0,),  # expanded
    "arrange": (0,),
    "join": (0, 1),  # parts of it
    "pad": (0,),
    "receive": (0,),  # of the first; the others came from elsewhere
}
"""The inputs of an operation whose gradient is that of the output itself, in the same memory."""
BACKWARD_PRODUCTS = {
    "attention": 2.5,
    "linear_loss": 0.0,
    "linear_losses": 3.0,
    "frozen_linear_losses": 2.0,
    "adapted_linear_losses": 2.0,
}
"""FLOPs of a backward over those of its forward; of other products, one for each gradient.

Attention's backward has five products, including the scores again, its forward two. A linear loss multiplies for its
gradients in its forward. Linear losses, of each token, compute their logits again in the backward.
"""
WITHOUT_GRADIENT = frozenset({"decide", "copy"})
"""Operations that pass no gradient on, such as sorting."""


class Size(NamedTuple):
    """The size of a tensor."""

    elements: int
    itemsize: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.elements * self.itemsize


class Product(NamedTuple):
    """A matrix product, or as many equal ones as there are groups: 2 * rows * columns * outputs FLOPs each."""

    rows: float
    columns: int
    outputs: int
    groups: int = 1

    @property
    def flops(self) -> float:
        """FLOPs of all groups."""
        return 2 * self.rows * self.columns * self.outputs * self.groups


class BothWays(NamedTuple):
    """A number of bytes in the forward, and in the backward."""

    forward: int = 0
    backward: int = 0


NOTHING = BothWays()


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a forward."""

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    workspace: BothWays = NOTHING
    """Bytes that it holds while it runs, beside inputs and outputs."""
    cast_gradient: int = 0
    """Bytes of its weight's gradient before that is cast to the weight's own dtype."""
    products: tuple[Product, ...] = ()
    """With weights."""
    scores: int = 0
    """FLOPs of its products with attention's scores, which are no product with a weight."""
    share_in_window: float = 1.0
    """Share of the causal scores inside a sliding window; a kernel may skip the others."""
    sends: PassTraffic = NO_TRAFFIC
    """What it sends to other ranks, and what its gradient sends."""
    traffic: BothWays | None = None
    """Bytes that its kernels read and write, if they do not follow from the sizes of its tensors."""
    num_kernels: int = 1
    """Kernels that it launches."""

    @property
    def flops(self) -> float:
        """FLOPs of the operation."""
        return self.scores + sum(product.flops for product in self.products)

    @property
    def communicates(self) -> bool:
        """Whether it sends something in the forward or the backward."""
        return bool(self.sends.forward or self.sends.backward)

    @property
    def tensors(self) -> tuple[int, ...]:
        """Inputs and outputs; ``READ_BY_GRADIENT`` counts outputs from behind, the first one last."""
        return self.inputs + self.outputs[::-1]


@dataclass
class Program:
    """The operations of a forward on one rank."""

    operations: list[Operation] = field(default_factory=list)
    sizes: list[Size] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    """Bytes of every tensor; 0 for a weight, which is there anyway."""
    trained: dict[int, int] = field(default_factory=dict)
    """Parameters of every weight that gets a gradient."""
    vectors: set[int] = field(default_factory=set)
    """Weights that are no matrices: of norms, and biases."""
    partial: dict[int, int] = field(default_factory=dict)
    """Those of them whose gradient is a sum over the tensor-parallel ranks."""
    copied: set[int] = field(default_factory=set)
    """Weights with a lasting copy in the activations' dtype."""
    of_experts: set[int] = field(default_factory=set)
    """Weights of experts, which fewer ranks share than other weights."""
    transposed: set[int] = field(default_factory=set)
    """Weights whose gradient comes transposed, so that autograd copies it."""
    matrix_products: set[int] = field(default_factory=set)
    """Results of products with whole matrices of a block, which can be computed in fp8."""
    costly: set[int] = field(default_factory=set)
    """Results that selective recomputation keeps."""
    borrowed_weights: set[int] = field(default_factory=set)
    """Weights of another program, whose gradients this one makes too."""
    first_in_block: int = 0
    """The first operation that recomputation may run again."""
    arguments: set[int] = field(default_factory=set)
    """What the operations from there on read beside the input."""
    num_held: int = 0
    """Parameters of all weights; of a matrix that is held in fewer bits, as many as its bytes would hold."""
    views: dict[int, int] = field(default_factory=dict)
    """Tensors without bytes of their own, and which tensor they are a part of."""
    undivided_bytes: int = 0
    """Bytes beside such matrices that every rank holds whole."""
    input: int = -1
    output: int = -1

    @property
    def num_trained(self) -> int:
        """Parameters of the weights that get gradients."""
        return sum(self.trained.values())

    @property
    def num_trained_in_matrices(self) -> int:
        """Those of them that are elements of matrices."""
        return sum(elements for weight, elements in self.trained.items() if weight not in self.vectors)

    @property
    def largest_trained(self) -> int:
        """Parameters of the largest weight that gets a gradient."""
        return max(self.trained.values(), default=0)

    @property
    def largest_trained_vector(self) -> int:
        """Parameters of the largest weight that gets a gradient and is no matrix."""
        return max((elements for weight, elements in self.trained.items() if weight in self.vectors), default=0)

    @property
    def num_copied(self) -> int:
        """Parameters of the weights that have a lasting copy."""
        return sum(self.sizes[weight].elements for weight in self.copied)

    @property
    def num_of_experts(self) -> int:
        """Parameters of the weights of experts."""
        return sum(self.sizes[weight].elements for weight in self.of_experts)

    def tensor(self, size: Size) -> int:
        """Return a new tensor."""
        self.sizes.append(size)
        self.num_bytes.append(size.num_bytes)
        return len(self.sizes) - 1

    def weight(self, size: Size, *, is_trained: bool, is_partial: bool = False, is_vector: bool = False) -> int:
        """Return a new weight; ``is_partial`` says that tensor-parallel ranks sum its gradient."""
        weight = self.tensor(size)
        if is_vector:
            self.vectors.add(weight)
        self.num_bytes[weight] = 0
        self.num_held += size.elements
        if is_trained:
            self.trained[weight] = size.elements
            if is_partial:
                self.partial[weight] = size.elements
        return weight

    def borrowed(self, size: Size) -> int:
        """Return a weight that another program has, and whose gradient this one makes too."""
        weight = self.tensor(size)
        self.num_bytes[weight] = 0
        self.borrowed_weights.add(weight)
        return weight

    def outside_block(self, *arguments: int) -> None:
        """Begin, with these arguments beside the input, what recomputation may run again."""
        self.first_in_block = len(self.operations)
        self.arguments.update(arguments)

    def add_operation(self, kind: str, inputs: Iterable[int], *outputs: Size, **details: object) -> tuple[int, ...]:
        """Append an operation, and return its outputs, which are new tensors of these sizes."""
        made = tuple(map(self.tensor, outputs))
        self.operations.append(Operation(kind, tuple(inputs), made, **details))  # type: ignore[arg-type]
        return made

    def split(self, x: int, *sizes: Size) -> tuple[int, ...]:
        """Return parts of a tensor along its last dim, which are views; its gradient is put together from theirs."""
        held = sum(size.num_bytes for size in sizes)
        parts = self.add_operation("split", [x], *sizes, workspace=BothWays(0, held), traffic=BothWays(0, 2 * held))
        for part in parts:
            self.num_bytes[part] = 0
            self.views[part] = x
        return parts

    def result(self, kind: str, inputs: Iterable[int], size: Size, *more: Size, **details: object) -> int:
        """Append an operation, and return its first output."""
        return self.add_operation(kind, inputs, size, *more, **details)[0]
