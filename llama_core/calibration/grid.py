"""The grids of sizes that ``calibrate`` measures, between which the time of any other size is interpolated.

They cover one rank of the registry's small models under any plan: rows of a forward, widths and vocabularies, divided
or not.
"""

from collections.abc import Iterator, Mapping
from itertools import product

from llama_core.config.measured_rates import Measured, Sizes
from llama_core.planning.time.measured import POINTWISE

_ROWS = (64, 512, 4096)
_WIDTHS = (128, 512, 2048)
_ELEMENTS = (2**12, 2**16, 2**20, 2**23)
_WAYS = ("forward", "backward")


class Grid:
    """Values of each size of a kind of operation, and the powers with which the work grows."""

    def __init__(self, growth: tuple[float, ...], *axes: tuple[int, ...]) -> None:
        self.growth = growth
        self.axes = axes

    def points(self) -> Iterator[Sizes]:
        """Yield the sizes at all points, the last size varying fastest."""
        return product(*self.axes)

    def measured(self, seconds: Mapping[Sizes, float]) -> Measured:
        """Return what was measured at the points."""
        return Measured(axes=self.axes, grid=tuple(seconds[sizes] for sizes in self.points()), growth=self.growth)


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
    for ends in ("bf16 fp32", "fp32 bf16"):
        found[f"cast {ends}"] = elements
    found["sort int64"] = Grid((1,), (2**10, 2**16))
    found["update adamw"] = Grid((1,), (2**16, 2**20, 2**24))
    if num_ranks > 1:
        for collective in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"):
            found[f"link {collective}"] = Grid((0, 1), (num_ranks,), (2**12, 2**18, 2**24))
    return found
