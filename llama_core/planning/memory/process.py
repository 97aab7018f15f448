"""What a rank's process on the CPU takes beside its tensors: figures of a machine, its torch and its C library."""

from dataclasses import dataclass

from llama_core.units import MIB

KERNELS_KEPT = 256
"""Most kernels that oneDNN keeps in a rank's process on the CPU, and torch beside it (``launch.rank.supervisor``).

Their own limit, 1024, is reached where sizes differ in every step, and is then 0.5 GiB. Dense layers and attention need
more than 256 from 10,000 tokens a row on, where making a kernel again is no cost beside its product.
"""


@dataclass(frozen=True)
class ProcessMemory:
    """Measured bytes; the defaults are those of an AMD EPYC with torch 2.13 and glibc 2.36 (docs/memory.md)."""

    process_bytes: int = 525 * MIB
    """Resident bytes of a process that has imported all that a run imports and taken a step, without what the step
    allocated: libraries, Python's objects, threads."""
    kernel_bytes: int = 258_376
    """What oneDNN, or torch beside it, keeps of a kernel in half precision. They keep one for each size of product."""
    packed_bytes: int = 6 * MIB
    """What MKL keeps of the blocks that it packs for products in fp32, on two threads; half of it on one."""
    freed_share: float = 0.25
    """Freed memory that the C library keeps, over the bytes of what comes and goes in a step."""


DEFAULT_PROCESS = ProcessMemory()
