"""The grids of sizes that ``calibrate`` measures, between which the time of any other size is interpolated.

Those of a CPU cover one rank of the registry's small models under any plan: rows of a forward, widths and vocabularies,
divided or not. Those of a GPU cover its large ones, kernel by kernel. The kinds that a plan needs most come first.
"""

from collections.abc import Iterator, Mapping
from itertools import product

from llama_core.config.measured_rates import Measured, Sizes
from llama_core.planning.time.measured import EAGER_KERNELS, POINTWISE

_ROWS = (64, 512, 4096)
_WIDTHS = (128, 512, 2048)
_ELEMENTS = (2**12, 2**16, 2**20, 2**23)
_WAYS = ("forward", "backward")
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
_GPU_ROWS = (256, 2048, 16384)
_GPU_WIDTHS = (512, 2048, 8192)


class Grid:
    """Values of each size of a kind of operation, and the powers with which the work grows."""

    def __init__(self, growth: tuple[float, ...], *axes: tuple[int, ...]) -> None:
        self.growth = growth
        self.axes = axes

    def points(self) -> Iterator[Sizes]:
        """Yield the sizes at all points, the last size varying fastest."""
        return product(*self.axes)

    def coarse(self) -> "Grid":
        """Return the grid without every other value of each size, which is measured first."""
        return Grid(self.growth, *(axis if len(axis) < 3 else (*axis[:-1:2], axis[-1]) for axis in self.axes))

    def measured(self, seconds: Mapping[Sizes, float]) -> Measured:
        """Return what was measured at the points: on this grid or, if some of them are missing, on the coarse one.

        What is on no whole grid tells only of its own size.
        """
        for grid in (self, self.coarse()):
            points = tuple(grid.points())
            if all(sizes in seconds for sizes in points):
                others = {sizes: taken for sizes, taken in seconds.items() if sizes not in points}
                return Measured(others, grid.axes, tuple(seconds[sizes] for sizes in points), self.growth)
        return Measured(dict(seconds))


def in_order_of_need(of_kinds: Mapping[str, Grid]) -> list[tuple[str, Sizes]]:
    """Return the kinds and sizes of some grids, the coarse grids of all kinds first."""
    coarse = [(kind, sizes) for kind, grid in of_kinds.items() for sizes in grid.coarse().points()]
    rest = [(kind, sizes) for kind, grid in of_kinds.items() for sizes in grid.points()]
    return list(dict.fromkeys((*coarse, *rest)))


def gpu_grids(num_ranks: int, *, has_fp8: bool = True) -> dict[str, Grid]:
    """Return the grid of every kind of kernel, as ``planning.time.measured`` asks for those of CUDA.

    A kernel takes as long however many devices compute beside it, so several ranks measure only their links.

    Args:
        num_ranks: ranks that compute at once, each on its own GPU.
        has_fp8: whether they multiply in fp8.
    """
    if num_ranks > 1:
        sizes = (2**12, 2**16, 2**20, 2**24, 2**28)
        return {f"link {collective}": Grid((0, 1), (num_ranks,), sizes) for collective in _COLLECTIVES}
    products = Grid((1, 1, 1), _GPU_ROWS, _GPU_WIDTHS, _GPU_WIDTHS)
    attention = Grid((1, 1, 0, 2, 1), (1,), (8, 32), (8,), (512, 2048, 8192), (64, 128))
    elements = Grid((1,), (2**14, 2**18, 2**22, 2**26))
    found = {f"product bf16 {way}": products for way in ("forward", "input", "weight")}
    for told in ("none", "varlen"):
        found |= {f"attention {told} bf16 {way}": attention for way in _WAYS}
    found["copy"] = Grid((1,), (2**12, 2**16, 2**20, 2**24, 2**28, 2**31))
    found["launch"] = Grid((0,), (1,))
    for name in ("loss", "loss frozen"):
        found |= {f"{name} bf16 {way}": Grid((1, 1, 1), (512, 4096), (1024, 4096), (32000, 128256)) for way in _WAYS}
    found["update adamw"] = Grid((1,), (2**20, 2**24, 2**28))
    for kind in sorted(EAGER_KERNELS):
        found |= {f"{kind} bf16 {way}": elements for way in _WAYS}
    groups = Grid((1, 1, 1, 1), (8,), (128, 2048), (1024, 4096), (1024, 4096))
    ways = ("forward", "input", "weight")
    found |= {f"grouped product bf16 {way}": groups for way in ways}
    if has_fp8:
        found |= {f"product fp8 {way}": products for way in ways}
    found |= {f"packed bf16 {way}": Grid((1, 1, 1), (512, 4096), (1024, 4096), (1024, 4096)) for way in _WAYS}
    found |= {f"product fp32 {way}": products for way in ways}
    return found


def grids(num_ranks: int) -> dict[str, Grid]:
    """Return the grid of every kind of operation, as ``planning.time.measured`` asks for them.

    Args:
        num_ranks: ranks that compute at once, for the links between them.
    """
    found: dict[str, Grid] = {}
    products = Grid((1, 1, 1), _ROWS, _WIDTHS, _WIDTHS)
    losses = Grid((1, 1, 1), (128, 1024), (128, 1024), (2048, 32768))
    attention = Grid((1, 1, 0, 2, 1), (1,), (8,), (8,), (128, 512, 2048), (32, 64, 128))
    elements = Grid((1,), _ELEMENTS)
    found["update adamw"] = Grid((1,), (2**16, 2**20, 2**24))
    for ends in ("bf16 fp32", "fp32 bf16"):
        found[f"cast {ends}"] = elements
    found["sort int64"] = Grid((1,), (2**10, 2**16))
    if num_ranks > 1:
        for collective in _COLLECTIVES:
            found[f"link {collective}"] = Grid((0, 1), (num_ranks,), (2**12, 2**18, 2**24))
    for name in ("bf16", "fp32"):
        for way in _WAYS:
            found[f"linear {name} {way}"] = products
            found[f"loss {name} {way}"] = losses
            found[f"loss frozen {name} {way}"] = losses
            found[f"packed {name} {way}"] = Grid((1, 1, 1), (128, 1024), (256, 1024), (256, 1024))
            found[f"experts {name} {way}"] = Grid((1, 1, 1, 1), (4,), (64, 512), (128, 1024), (128, 1024))
            for told in ("none", "mask"):
                found[f"attention {told} {name} {way}"] = attention
            for kind in ("multiply", *sorted(POINTWISE)):
                found[f"{kind} {name} {way}"] = elements
        for way in ("forward", "input", "weight"):
            found[f"product {name} {way}"] = products
        found[f"orthogonalise {name}"] = Grid((1, 1), _WIDTHS, _WIDTHS)
    return found
