"""What is measured before the first step, how much of it, and from when on a rank counts as slow."""

from collections.abc import Mapping
from dataclasses import dataclass

from llama_core.units import MIB


@dataclass(frozen=True)
class Check:
    """One measurement."""

    told: str
    """What took the time, as the subject of a sentence."""
    share: float
    """How much slower than the median of its peers a rank must be at least, as a share of that median."""
    least_seconds: float = 0.0
    """By how many seconds it must be slower at least."""
    slows_training: bool = True
    """Whether other ranks wait for it in every step."""


PRODUCT = "product"
COPY = "copy"
EXCHANGE_INSIDE = "exchange inside"
EXCHANGE_ACROSS = "exchange across"
WRITE = "write"


@dataclass(frozen=True)
class Amounts:
    """How much is measured on a device."""

    product_side: int
    """Rows and columns of the matrices that are multiplied."""
    copy_bytes: int
    exchange_bytes: int
    """What two ranks send each other, each way."""
    write_bytes: int
    repeats: int
    """How often a product and a copy are repeated; the best counts."""
    in_repeat: int
    """Products in one repeat."""
    exchanges: int
    """How often an exchange is repeated; the best counts."""
    checks: Mapping[str, Check]


def _checks(product: float, copy: float, exchange: float, least_exchange: float = 0.0) -> Mapping[str, Check]:
    return {
        PRODUCT: Check("a product of matrices", product),
        COPY: Check("a copy in its memory", copy),
        EXCHANGE_INSIDE: Check("an exchange with another rank of its node", exchange, least_exchange),
        EXCHANGE_ACROSS: Check("an exchange with a rank of another node", exchange, least_exchange),
        WRITE: Check("a write to the run's folder", 3.0, least_seconds=1.0, slows_training=False),
    }


AMOUNTS = {
    # A product takes some milliseconds on an H100 and all of them a third of a second: long enough for a GPU that is
    # too hot to lower its clocks. GPUs of one kind differ by a few percent.
    "cuda": Amounts(8192, 256 * MIB, 64 * MIB, 4 * MIB, 10, 10, 10, _checks(0.2, 0.2, 0.5)),
    # Milliseconds in all, so that short runs stay short. Ranks share caches, memory and cores with other work. A rank
    # that waits for a core delays an exchange by some milliseconds; a link that fell back to 100 Mbit/s, by 80.
    "cpu": Amounts(256, 4 * MIB, MIB, MIB, 12, 1, 4, _checks(1.5, 3.0, 4.0, least_exchange=0.03)),
}
"""By type of device."""

CLOCK_SECONDS = 1.0
"""By how much a host's clock may differ from the others. Hosts that synchronise their clocks differ by milliseconds; a
busy rank may read its own a moment late."""

BEYOND_PROFILE = {"cuda": 1.5, "cpu": 3.0}
"""How many times as long as on the measured machine a product may take, by type of device."""
BEYOND_SHEET = 2.5
"""How many times as long as by a GPU's data sheet. A capped or consumer GPU may reach half of the sheet's rate."""
