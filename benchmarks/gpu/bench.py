"""The device of a stage, its clock, and rows that may fail."""

import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.errors import in_one_line
from llama_core.units import GIB

Row = dict[str, Any]

WARM_UPS = 2


@dataclass(frozen=True)
class Bench:
    """The device and the time limit of a stage."""

    device: torch.device
    folder: Path
    """For files that are kept with the logs."""
    deadline: float
    """No row starts after this ``time.monotonic`` time."""
    ends: float
    """Shortly after this ``time.monotonic`` time the process is killed."""

    @property
    def is_tiny(self) -> bool:
        """Whether to use the tiny sizes, for a test on a CPU."""
        return self.device.type == "cpu"

    def size(self, full: Any, tiny: Any) -> Any:
        """Return the size for this device."""
        return tiny if self.is_tiny else full

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.is_tiny:
            torch.cuda.synchronize()

    def milliseconds(self, run: Callable[[], object], repeats: int = 10, at_once: int = 1) -> float:
        """Return the median time of ``run`` in ms, after two warm-up runs; on CUDA between two events.

        Args:
            run: what to time.
            repeats: how often.
            at_once: runs between two events, for kernels that take no longer than their launch.
        """
        for _ in range(self.size(WARM_UPS, 1)):
            run()
        once = self._on_cpu if self.is_tiny else self._between_events
        return statistics.median(once(run, self.size(at_once, 1)) for _ in range(self.size(repeats, 2)))

    def _between_events(self, run: Callable[[], object], times: int) -> float:
        begins: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ends: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begins.record()
        for _ in range(times):
            run()
        ends.record()
        ends.synchronize()
        return float(begins.elapsed_time(ends)) / times

    def _on_cpu(self, run: Callable[[], object], times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            run()
        return 1e3 * (time.perf_counter() - began) / times

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return normally distributed numbers on the device."""
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)

    def memory(self) -> tuple[float, float]:
        """Return the peak GiB allocated and reserved since the last call, and reset the peaks."""
        if self.is_tiny:
            return 0.0, 0.0
        peaks = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
        self.release()
        torch.cuda.reset_peak_memory_stats()
        return peaks

    def release(self) -> None:
        """Give memory that nothing uses back to the device."""
        gc.collect()
        if not self.is_tiny:
            torch.cuda.empty_cache()

    def attempted(self, row: Row, measure: Callable[..., Row], *arguments: Any, **settings: Any) -> Row:
        """Return ``row`` with the columns that ``measure`` returns, or with its error, whose traceback goes to the log.

        Then the device's memory is free for the next row.
        """
        try:
            row = row | measure(*arguments, **settings)
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            row = row | {"error": in_one_line(error)}
        # only now has the error let go of its frames, and these of their tensors
        self.release()
        return row


def prepared(device: str, folder: Path, deadline: float, ends: float) -> Bench:
    """Return the bench of this process, with its device set up."""
    if device == "cpu":
        torch.set_num_threads(1)
        # builds graphs but generates no code; torch 2.11 has no setting for it
        vars(torch)["compile"] = partial(torch.compile, backend="aot_eager")
    else:
        torch.cuda.set_device(0)
    return Bench(torch.device(device), folder, deadline, ends)


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module."""
    return str(dtype).removeprefix("torch.")
