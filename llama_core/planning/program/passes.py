"""The forward and the backward of a program: what is kept, held at each instant, and run again.

A forward keeps what the backward of each operation reads. A backward walks the operations in
reverse and has, at any time, what is kept, the gradients that are still to be used, and the
gradients of weights that are complete.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from llama_core.config.run import RecomputeMode
from llama_core.planning.program.operations import (
    BACKWARD_PRODUCTS,
    FLATTENS,
    FP32_BYTES,
    READ_BY_GRADIENT,
    SHARES_GRADIENT,
    WITHOUT_GRADIENT,
    Operation,
    Program,
)
from llama_core.planning.transfers import PassTraffic, Traffic, merged


class Instant(NamedTuple):
    """The bytes alive while one operation runs."""

    kept: int
    """For the backward."""
    temporaries: int
    made: int
    """Parameters of the program whose gradients are complete. What one costs depends on
    how they are sharded."""
    making: int
    """Parameters whose gradients this operation makes."""


class Passes:
    """The forward and the backward of a program.

    Args:
        program: the program.
        follows_trained: whether weights before it are trained, which need the gradient of its
            input.
        splits_backward: whether gradients of the weights of products are deferred.
    """

    def __init__(
        self,
        program: Program,
        *,
        follows_trained: bool = True,
        splits_backward: bool = False,
    ) -> None:
        self.program = program
        self.splits_backward = splits_backward
        self.operations = program.operations
        self.needing = program.trained.keys() | program.borrowed_weights
        """Tensors that need a gradient."""
        if follows_trained:
            self.needing.add(program.input)
        self.saves = [self._saved_by(operation) for operation in self.operations]
        """The tensors that each operation saves for its backward."""
        self.saved = set[int]().union(*self.saves)
        self._frontiers: dict[tuple[str, RecomputeMode], tuple[Instant, ...]] = {}
        self._transfers: dict[RecomputeMode, PassTraffic] = {}
        begins = {program.input} | program.arguments
        begins.update(*self.saves[: program.first_in_block])
        self.keeps: dict[RecomputeMode, set[int]] = {
            "none": self.saved,
            "selective": begins | program.costly,
            "full": begins,
        }
        """The tensors that a forward keeps under each kind of recomputation."""

    def _saved_by(self, operation: Operation) -> set[int]:
        """Return what an operation saves, and note whether its outputs need gradients.

        They do if one of its inputs does.
        """
        needing = [place for place, tensor in enumerate(operation.inputs) if tensor in self.needing]
        if not needing or operation.kind in WITHOUT_GRADIENT:
            return set()
        self.needing.update(operation.outputs)
        reads = READ_BY_GRADIENT.get(operation.kind)
        if reads is None:
            return set()
        tensors = operation.tensors
        saved = set[int]()
        for place in needing:
            saved.update(tensors[read] for read in reads[place])
        return {self.program.views.get(tensor, tensor) for tensor in saved}

    def size_of(self, tensors: Iterable[int]) -> int:
        """Return the bytes of some tensors."""
        return sum(map(self.program.num_bytes.__getitem__, tensors))

    def kept(self, mode: RecomputeMode = "none") -> int:
        """Return the bytes that a forward keeps for its backward."""
        return self.size_of(self.keeps[mode])

    def keeps_input(self, mode: RecomputeMode) -> bool:
        """Return whether a forward keeps its input for its backward."""
        return self.program.input in self.keeps[mode]

    def repeated(self, mode: RecomputeMode) -> list[Operation]:
        """Return the operations that a backward runs again.

        They go up to the last one that saves, without those whose results are kept.
        """
        if mode == "none":
            return []
        last = 0
        for place, saves in enumerate(self.saves):
            if saves:
                last = place
        kept = self.keeps[mode]
        first = self.program.first_in_block
        return [one for one in self.operations[first:last] if not kept.intersection(one.outputs)]

    def forward(self, mode: RecomputeMode = "none") -> Iterator[Instant]:
        """Yield the instants of a forward."""
        return self._run(self.operations, keeps=self.keeps[mode], existing={self.program.input})

    def _run(
        self,
        operations: Sequence[Operation],
        *,
        keeps: set[int],
        existing: set[int],
        extra: int = 0,
    ) -> Iterator[Instant]:
        """Yield the instants of a forward's first operations.

        Args:
            operations: these operations.
            keeps: the tensors that are kept for the backward.
            existing: the tensors that exist already.
            extra: bytes held besides.
        """
        num_bytes = self.program.num_bytes
        kept = self.size_of(keeps & existing)
        temporaries = self.size_of(existing - keeps) + extra
        for operation, dying in zip(operations, self._dying, strict=False):
            for tensor in operation.outputs:
                # else it was kept, or is a view
                is_new = tensor not in existing and tensor not in operation.inputs
                if is_new and tensor in keeps:
                    kept += num_bytes[tensor]
                elif is_new:
                    temporaries += num_bytes[tensor]
            yield Instant(kept, temporaries + operation.workspace.forward, made=0, making=0)
            temporaries -= self.size_of(dying - keeps)

    @cached_property
    def _dying(self) -> list[set[int]]:
        """The tensors that each operation of a forward is the last to use."""
        last_use: dict[int, int] = {}
        for place, operation in enumerate(self.operations):
            used = [self.program.views.get(tensor, tensor) for tensor in operation.tensors]
            last_use |= dict.fromkeys(used, place)
        dying: list[set[int]] = [set() for _ in self.operations]
        for tensor, place in last_use.items():
            if tensor not in {self.program.input, self.program.output}:  # the caller holds these
                dying[place].add(tensor)
        return dying

    def backward(self, mode: RecomputeMode = "none") -> Iterator[Instant]:
        """Yield the instants of a backward, from the output's gradient to that of the input."""
        return _Backward(self, mode).instants()

    def frontier(
        self,
        way: Literal["forward", "backward"],
        mode: RecomputeMode,
    ) -> tuple[Instant, ...]:
        """Return the instants of which one has the peak, whatever gradients made by then cost."""
        if (way, mode) not in self._frontiers:
            instants = list(self.forward(mode) if way == "forward" else self.backward(mode))
            # a gradient costs bytes or, where it moves into a bucket that exists, frees some; while
            # it is made, it may lie beside the one that it is added to
            frontier = set[Instant]()
            for sign in (1, -1):
                for extra in (0, FP32_BYTES):
                    frontier.update(_highest(instants, sign=sign, extra=extra))
            self._frontiers[way, mode] = tuple(frontier)
        return self._frontiers[way, mode]

    def transfers(self, mode: RecomputeMode = "none") -> PassTraffic:
        """Return what a forward and its backward send to other ranks."""
        if mode not in self._transfers:
            forward: list[Traffic] = []
            backward: list[Traffic] = []
            for operation in self.operations:
                forward += operation.sends.forward
                if self.needing.intersection(operation.inputs):
                    backward += operation.sends.backward
            # a backward that runs a forward again also sends what that sends
            for operation in self.repeated(mode):
                backward += operation.sends.forward
            self._transfers[mode] = PassTraffic(merged(forward), merged(backward))
        return self._transfers[mode]

    def forward_flops(self) -> float:
        """Return the FLOPs of a forward."""
        return sum(operation.flops for operation in self.operations)

    def backward_flops(self, mode: RecomputeMode = "none") -> float:
        """Return the FLOPs of a backward, with those of what it runs again."""
        flops = sum(operation.flops for operation in self.repeated(mode))
        for operation in self.operations:
            shares = SHARES_GRADIENT.get(operation.kind, ())
            num_gradients = 0
            for place, tensor in enumerate(operation.inputs):
                if tensor in self.needing and place not in shares:
                    num_gradients += 1
            factor = BACKWARD_PRODUCTS.get(operation.kind, num_gradients)
            if num_gradients:
                flops += factor * operation.flops
        return flops

    @cached_property
    def read_last(self) -> list[set[int]]:
        """The saved tensors that no backward reads after that of each operation.

        These are the tensors that no earlier operation saved.
        """
        seen = set[int]()
        reads = []
        for saves in self.saves:
            reads.append(saves - seen)
            seen |= saves
        return reads

    @cached_property
    def deferred(self) -> "list[_Deferred]":
        """The weight gradients that a split backward defers, in its order."""
        if not self.splits_backward:
            return []
        backward = _Backward(self, "none")
        for _ in backward.instants():
            pass
        return backward.deferred

    @cached_property
    def kept_deferred(self) -> int:
        """Bytes that a split backward keeps for the gradients that it defers."""
        return self.held_for(self.deferred)

    @cached_property
    def num_deferred(self) -> int:
        """Parameters of the weights whose gradients a split backward defers."""
        return sum(self.program.trained[deferred.weight] for deferred in self.deferred)

    def weight_gradients(self) -> Iterator[Instant]:
        """Yield the instants at which the deferred gradients are made."""
        made = 0
        for place, deferred in enumerate(self.deferred):
            making = self.program.trained[deferred.weight]
            kept = self.held_for(self.deferred[place:])
            yield Instant(kept, deferred.operation.cast_gradient, made, making)
            made += making

    def held_for(self, deferred: "Sequence[_Deferred]") -> int:
        """Return the bytes kept for some deferred gradients.

        Kept are the inputs of products, and the gradients of their outputs.
        """
        # the products of one sum share its gradient
        gradients = {id(each.gradient): each.gradient.num_bytes for each in deferred}
        return self.size_of({each.input for each in deferred}) + sum(gradients.values())


class _Deferred(NamedTuple):
    """The product whose weight's gradient a split backward defers."""

    operation: Operation
    gradient: "_Gradient"
    """Of its output."""

    @property
    def input(self) -> int:
        """The tensor that is multiplied."""
        return self.operation.inputs[0]

    @property
    def weight(self) -> int:
        """The weight that it is multiplied with."""
        return self.operation.inputs[1]


class _Backward:
    """The state of a backward while it walks the operations in reverse.

    Args:
        passes: the passes of the program.
        mode: what is recomputed.
    """

    def __init__(self, passes: Passes, mode: RecomputeMode) -> None:
        self.passes = passes
        self.program = passes.program
        self.mode: RecomputeMode = mode
        self.is_recomputed = mode == "none"
        self.last_read = next((place for place, saves in enumerate(passes.saves) if saves), 0)
        """The operation whose backward is the last to read a saved tensor."""
        self.kept = passes.kept(mode)
        output = passes.program.output
        self.temporaries = passes.program.num_bytes[output]
        self.gradients = {output: _Gradient(self.temporaries)}
        """Gradients that have arrived and were not used yet, by tensor."""
        self.made = 0
        self.made_before: set[int] = set()
        """Weights with a gradient, to which another operation adds."""
        self.deferred: list[_Deferred] = []

    def instants(self) -> Iterator[Instant]:
        """Yield the instants."""
        for place in reversed(range(len(self.passes.operations))):
            operation = self.passes.operations[place]
            arrived = self._arrived(operation)
            if not arrived:  # nothing needs its gradient
                continue
            # autograd asks for the last saved tensor first, and that starts the recomputation
            if not self.is_recomputed and self.passes.saves[place]:
                yield from self._recomputation(place)
            fresh = self._gradients_of_inputs(operation, arrived[0])
            weights = [tensor for tensor in operation.inputs if tensor in self.program.trained]
            workspace = operation.workspace.backward + self._unsummed(operation)
            if self.passes.splits_backward and operation.products and weights:
                self.deferred.append(_Deferred(operation, arrived[0].shared()))
                weights = []
            else:
                workspace += operation.cast_gradient
            making = sum(self.program.trained[weight] for weight in weights)
            yield Instant(self.kept, self.temporaries + workspace, self.made, making)
            self.made += sum(self.program.trained[weight] for weight in weights if weight not in self.made_before)
            self.made_before.update(weights)
            self.temporaries -= sum(gradient.dropped() for gradient in arrived)
            held_on = {deferred.input for deferred in self.deferred}
            self.kept -= self.passes.size_of(self.passes.read_last[place] - held_on)
            if self.mode != "none" and place == self.last_read:
                # checkpointing holds the input, saved or not, as long as it may have to recompute
                self.kept -= self.passes.size_of({self.program.input} - self.passes.saved)
            for tensor, gradient in fresh:
                yield from self._accumulate(tensor, gradient)
            copied = 0
            for weight in weights:
                if weight in self.program.transposed:
                    copied += self.program.sizes[weight].num_bytes
            if copied:
                yield Instant(self.kept, self.temporaries + copied, self.made, making=0)

    def _arrived(self, operation: Operation) -> "list[_Gradient]":
        """Return the gradients of an operation's outputs, and give them up to its backward."""
        outputs = [tensor for tensor in operation.outputs if tensor in self.gradients]
        return [self.gradients.pop(tensor) for tensor in outputs]

    def _recomputation(self, place: int) -> Iterator[Instant]:
        """Yield the instants of the forward that runs again, up to the operation at ``place``."""
        passes = self.passes
        keeps = passes.saved | {self.program.input}
        self.is_recomputed = True
        existing = passes.keeps[self.mode]
        operations = passes.operations[:place]
        yield from passes._run(operations, keeps=keeps, existing=existing, extra=self.temporaries)
        self.kept = passes.size_of(keeps)

    def _gradients_of_inputs(
        self,
        operation: Operation,
        arrived: "_Gradient",
    ) -> list[tuple[int, "_Gradient"]]:
        """Return the gradients that an operation makes, but for those of weights."""
        shares = SHARES_GRADIENT.get(operation.kind, ())
        fresh = []
        for place, tensor in enumerate(operation.inputs):
            if tensor not in self.passes.needing or tensor in self.program.trained:
                continue
            if place in shares or tensor in operation.outputs:
                fresh.append((tensor, arrived.shared()))
            else:
                num_bytes = self.program.num_bytes[tensor]
                is_view = place == 0 and operation.kind in FLATTENS
                fresh.append((tensor, _Gradient(num_bytes, is_view=is_view)))
                self.temporaries += num_bytes
        return fresh

    def _unsummed(self, operation: Operation) -> int:
        """Return the bytes of gradients of smaller factors, made as large as the product at first.

        Then they are summed.
        """
        if operation.kind != "multiply":
            return 0
        num_bytes = self.program.num_bytes
        whole = num_bytes[operation.outputs[0]]
        needing = [tensor for tensor in operation.inputs if tensor in self.passes.needing]
        return sum(whole for tensor in needing if num_bytes[tensor] < whole)

    def _accumulate(self, tensor: int, gradient: "_Gradient") -> Iterator[Instant]:
        """Add a gradient to the one that another operation has made for the same tensor, if any."""
        earlier = self.gradients.get(tensor)
        if earlier is None:
            self.gradients[tensor] = gradient
            return
        if earlier.owners == 1 and not earlier.is_view:  # autograd adds in place
            self.temporaries -= gradient.dropped()
            return
        num_bytes = self.program.num_bytes[tensor]
        self.temporaries += num_bytes  # two gradients and their sum
        yield Instant(self.kept, self.temporaries, self.made, making=0)
        self.temporaries -= gradient.dropped() + earlier.dropped()
        self.gradients[tensor] = _Gradient(num_bytes)


class _Gradient:
    """The memory of a gradient, which several tensors may share.

    Args:
        num_bytes: its bytes.
        is_view: whether it is a view, which holds on to what it is a view of.
    """

    def __init__(self, num_bytes: int, *, is_view: bool = False) -> None:
        self.num_bytes = num_bytes
        self.is_view = is_view
        self.owners = 1

    def shared(self) -> "_Gradient":
        """Return this gradient as that of one more tensor."""
        self.owners += 1
        return self

    def dropped(self) -> int:
        """Give up one tensor's share, and return the bytes that this frees."""
        self.owners -= 1
        return 0 if self.owners else self.num_bytes


def _highest(instants: Iterable[Instant], *, sign: int, extra: int) -> Iterator[Instant]:
    """Yield the instants with more bytes than any other that has as many gradients.

    Args:
        instants: the instants.
        sign: 1 if gradients cost bytes, -1 if they free some.
        extra: bytes per parameter whose gradient is being made.
    """

    def height(instant: Instant) -> int:
        return instant.kept + instant.temporaries + extra * instant.making

    def order(instant: Instant) -> tuple[int, int]:
        return sign * (instant.made + instant.making), height(instant)

    most = -1
    # from those whose gradients cost most: one whose cost less counts only if it is higher
    for instant in sorted(instants, key=order, reverse=True):
        if height(instant) > most:
            most = height(instant)
            yield instant
