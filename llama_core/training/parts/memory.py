"""The memory of each step."""

from llama_core.training.measure import MemoryMeter
from llama_core.training.parts.part import LoopPart
from llama_core.training.reports import Reports

MEMORY_ALLOCATED = "memory_allocated_bytes"
MEMORY_PEAK = "memory_peak_bytes"
MEMORY_RESERVED = "memory_reserved_bytes"


class MemoryReport(LoopPart):
    """Reports the memory of the rank that has most: alive when the device was given the step, its peak, and taken.

    They are fields of every record.

    Args:
        meter: measures this rank's memory.
        reports: takes the numbers, in bytes.
    """

    def __init__(self, meter: MemoryMeter, reports: Reports) -> None:
        self._meter = meter
        self._report_allocated = reports.declare(MEMORY_ALLOCATED, "max", recorded=False)
        self._report_peak = reports.declare(MEMORY_PEAK, "max", recorded=False)
        self._report_reserved = reports.declare(MEMORY_RESERVED, "max", recorded=False)

    def step_begun(self) -> None:
        """Report what the meter says now."""
        self._report_allocated(self._meter.allocated())
        self._report_peak(self._meter.peak())
        self._report_reserved(self._meter.reserved())
