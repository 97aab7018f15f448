"""The operations that the parts of a model share: norms, products with cast weights, adapters, collectives."""

import math

from llama_core.config.model_weights import DIVIDED_INPUTS, UNDIVIDED
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import LoRA
from llama_core.planning.program.operations import (
    FP32_BYTES,
    NOTHING,
    BothWays,
    Product,
    Program,
    Size,
)
from llama_core.planning.program.setting import Setting
from llama_core.planning.transfers import NO_TRAFFIC, Collective, PassTraffic, Traffic
from llama_core.weight_rows import INPUTS, OUTPUTS


class ModelProgram(Program):
    """A part of a model on one rank and microbatch.

    Args:
        spec: the architecture.
        setting: how it is divided, and which kernels run.
    """

    def __init__(self, spec: ModelSpec, setting: Setting) -> None:
        super().__init__()
        self.spec = spec
        self.setting = setting
        self.itemsize = setting.itemsize
        self.tokens = setting.tokens

    @property
    def weight_itemsize(self) -> int:
        """Bytes per element of a trained weight where it is read; ``fully_shard`` gathers in the activations' dtype."""
        return self.itemsize if self.setting.uses_fully_shard else FP32_BYTES

    @property
    def lora(self) -> LoRA:
        """The adapters of the model, if there are some."""
        assert self.spec.lora is not None
        return self.spec.lora

    def stream(self) -> int:
        """Return a new residual stream."""
        return self.tensor(Size(self.setting.stream_tokens * self.spec.hidden_size, self.itemsize))

    def local_shape(self, name: str) -> tuple[int, int]:
        """Return the columns and rows of a matrix on this rank."""
        columns, rows = self.spec.target_shapes[name]
        if name in UNDIVIDED:
            return columns, rows
        if name in DIVIDED_INPUTS:
            return columns // self.setting.tp, rows
        return columns, rows // self.setting.tp

    def norm(self, x: int, *, is_trained: bool) -> int:
        """Normalise every token, in fp32."""
        width = self.spec.hidden_size
        return self.normalise(x, width, is_trained=is_trained, is_partial=self.setting.sharded_sequence)

    def norm_of_heads(self, x: int, size: int, *, is_trained: bool) -> int:
        """Normalise every head of every token in fp32, or all as one; tensor-parallel ranks have some of them each."""
        tp = self.setting.tp
        if self.spec.qk_norm_width == "head":
            has_weight = self.spec.qk_norm_weights
            return self.normalise(x, size, is_trained=is_trained, is_partial=tp > 1, has_weight=has_weight)
        return self.normalise(x, size // tp, is_trained=is_trained, is_summed=tp > 1)

    def normalise(
        self,
        x: int,
        width: int,
        *,
        is_trained: bool,
        is_partial: bool = False,
        is_summed: bool = False,
        has_weight: bool = True,
    ) -> int:
        """Normalise every ``width`` numbers, in fp32.

        Args:
            x: the numbers.
            width: how many are normalised as one.
            is_trained: whether the norm's weight is trained.
            is_partial: whether tensor-parallel ranks sum the gradient of its weight.
            is_summed: whether they sum their squares, which no kernel of torch does.
            has_weight: whether the norm has a weight.
        """
        weights = []
        if has_weight:
            weights.append(self.cast(self.vector(width, is_trained=is_trained, is_partial=is_partial), self.itemsize))
        scales = Size(self.sizes[x].elements // width, FP32_BYTES)
        if self.setting.fuses_norms and not is_summed:
            kind = "fused_norm" if has_weight else "fused_plain_norm"
            out = self.result(kind, [x, *weights], self.sizes[x], scales)
            self.end(x)
            return out
        sends = self.tensor_parallel("all_reduce", "all_reduce", scales.num_bytes) if is_summed else NO_TRAFFIC
        wide = self.cast(x, FP32_BYTES)
        squares = self.num_bytes[wide]
        scale = self.result("inverse_rms", [wide], scales, workspace=BothWays(squares, 3 * squares), sends=sends)
        normalised = self.result("multiply", [wide, scale], self.sizes[wide])
        if has_weight:
            normalised = self.result("multiply", [normalised, *weights], self.sizes[wide])
        out = self.cast(normalised, self.itemsize)
        self.end(x, wide, scale)  # torch's function holds its own too
        return out

    def vector(self, length: int, *, is_trained: bool, is_partial: bool = False) -> int:
        """Return a weight that is no matrix: that of a norm, or a bias."""
        size = Size(length, self.weight_itemsize if is_trained else self.itemsize)
        return self.weight(size, is_trained=is_trained, is_partial=is_partial, is_vector=True)

    def adapter(self, name: str) -> list[int]:
        """Return the weights of a matrix's adapter, in the order of its rows."""
        columns, rows = self.local_shape(name)
        divided_side = INPUTS if name in DIVIDED_INPUTS else OUTPUTS
        weights = []
        for weight in self.lora.weights(name):
            size = Size(math.prod(self.lora.shape(weight, columns, rows)), self.weight_itemsize)
            # what is whole on every rank gets a part of its gradient on each
            is_partial = self.setting.tp > 1 and divided_side not in weight.shape
            if name in UNDIVIDED:
                is_partial = self.setting.sharded_sequence
            is_vector = len(weight.shape) == 1
            weights.append(self.weight(size, is_trained=True, is_partial=is_partial, is_vector=is_vector))
        return weights

    def dropped(self, x: int, fraction: float) -> int:
        """Drop a fraction of some inputs."""
        if not fraction:
            return x
        mask = Size(self.sizes[x].elements, 1)
        return self.result("dropout", [x], self.sizes[x], mask)

    def add_product(self, out: int, x: int, weight: int) -> int:
        """Return ``out`` plus the product of ``x`` and a matrix, made by one kernel."""
        columns = self.sizes[weight].elements * self.tokens // self.sizes[out].elements
        rows = self.sizes[weight].elements // columns
        product = Product(self.sizes[x].elements // columns, columns, rows)
        inputs = [out, x, self.cast(weight, self.itemsize)]
        # a product as narrow as an adapter's takes as long as reading and writing the result
        moved = BothWays(2 * self.sizes[out].num_bytes, 0)
        return self.result("add_product", inputs, self.sizes[out], products=(product,), traffic=moved)

    def add(self, x: int, y: int) -> int:
        """Add two tensors."""
        return self.result("add", [x, y], self.sizes[x])

    def add_bias(self, x: int, bias: int) -> int:
        """Add a vector to every row."""
        return self.result("add_bias", [x, self.cast(bias, self.itemsize)], self.sizes[x])

    def cast(self, x: int, itemsize: int) -> int:
        """Cast a tensor, unless it has that dtype."""
        if self.sizes[x].itemsize == itemsize:
            return x
        return self.result("cast", [x], Size(self.sizes[x].elements, itemsize))

    def casts(self, weight: int, x: int) -> bool:
        """Return whether a product casts its weight to the dtype of ``x``, which is narrower."""
        return self.sizes[weight].itemsize > self.sizes[x].itemsize

    def product(self, x: int, weight: int, outputs: int, *, groups: int = 0) -> int:
        """Multiply by a matrix, cast to the dtype of ``x``; with ``groups``, rows of each by a matrix of its own.

        The gradient of a wider weight is made in the weight's own dtype.
        """
        kind = "grouped_product" if groups else "product"
        num_matrices = groups or 1
        size = self.sizes[weight]
        columns = size.elements // (outputs * num_matrices)
        rows = self.sizes[x].elements // columns
        cast = Size(size.elements, self.itemsize)
        workspace = NOTHING
        if not self.casts(weight, x):
            inputs = [x, self.cast(weight, self.sizes[x].itemsize)]
        elif self.setting.splits_backward:  # it casts in the backward again
            inputs = [x, weight]
            workspace = BothWays(cast.num_bytes, cast.num_bytes)
        else:
            kind = f"cast_{kind}"
            inputs = [x, weight, self.result("copy", [weight], cast)]
        # CUDA multiplies half precision into fp32, but not in groups
        multiplies_into_fp32 = self.setting.on_cuda and not groups
        is_widened = (self.casts(weight, x) or weight in self.copied) and not multiplies_into_fp32
        return self.result(
            kind,
            inputs,
            Size(rows * outputs, self.sizes[x].itemsize),
            products=(Product(rows / num_matrices, columns, outputs, num_matrices),),
            workspace=workspace,
            cast_gradient=cast.num_bytes if is_widened and weight in self.trained else 0,
        )

    # --- between ranks

    def gather(self, x: int) -> int:
        """Gather the sequence; without sequence parallelism it is whole, but ranks sum its gradient."""
        tp = self.setting.tp
        if self.setting.sharded_sequence:
            whole = Size(self.sizes[x].elements * tp, self.itemsize)
            copy = BothWays(whole.num_bytes, whole.num_bytes)  # the sequence is not the outermost dim
            sends = self.tensor_parallel("all_gather", "reduce_scatter", whole.num_bytes)
            return self.result("gather", [x], whole, workspace=copy, sends=sends)
        if tp > 1:
            self.add_operation("share", [x], sends=self.tensor_parallel(None, "all_reduce", self.sizes[x].num_bytes))
        return x

    def scatter(self, x: int) -> int:
        """Sum the ranks' parts of a product, into this rank's part of the sequence."""
        num_bytes = self.num_bytes[x]
        if self.setting.sharded_sequence:
            part = Size(self.sizes[x].elements // self.setting.tp, self.itemsize)
            copy = BothWays(num_bytes, num_bytes)
            sends = self.tensor_parallel("reduce_scatter", "all_gather", num_bytes)
            return self.result("scatter", [x], part, workspace=copy, sends=sends)
        if self.setting.tp > 1:
            return self.result("sum", [x], self.sizes[x], sends=self.tensor_parallel("all_reduce", None, num_bytes))
        return x

    def tensor_parallel(self, forward: Collective | None, backward: Collective | None, num_bytes: int) -> PassTraffic:
        """Return a collective of the tensor-parallel ranks, and the one that its gradient takes."""

        def sent(collective: Collective | None) -> tuple[Traffic, ...]:
            return (Traffic(collective, "tp", self.setting.tp, 1, num_bytes),) if collective else ()

        return PassTraffic(sent(forward), sent(backward))

    def end(self, *held: int) -> None:
        """End a function, which has held its arguments and variables until here."""
        self.add_operation("end", held)
