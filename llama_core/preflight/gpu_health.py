"""What a GPU reports of itself through NVML: memory errors, and why its clocks are lowered.

NVML is read with the package nvidia-ml-py (``pynvml``), if it is installed.
"""

from typing import Any

import torch

SLOWDOWNS = {
    0x08: "a hardware slowdown",
    0x20: "a thermal slowdown by its driver",
    0x40: "a thermal slowdown by its hardware",
    0x80: "a power brake",
}
"""Reasons for lowered clocks that no healthy GPU has under load, by their bits in NVML. A power cap is none of them:
large products reach it on every GPU."""


class HealthReader:
    """Reads the state of a GPU.

    Args:
        device: the GPU.
    """

    faults: list[str]
    """What is wrong with it, as far as was looked."""
    unread: str
    """Why nothing can be read; empty if it can."""

    def __init__(self, device: torch.device) -> None:
        self.faults = []
        self.unread = ""
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml
        except ImportError:
            self.unread = (
                "memory errors and lowered clocks, because NVML's package is missing (pip install nvidia-ml-py)"
            )
            return
        try:
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._nvml = pynvml
        except pynvml.NVMLError as error:
            self.unread = f"memory errors and lowered clocks, because NVML says: {error}"

    def look_at_clocks(self) -> None:
        """Note why the clocks are lowered now; to be called while the GPU computes."""
        if self._nvml is None:
            return
        name = "nvmlDeviceGetCurrentClocksEventReasons"  # of older packages: ThrottleReasons
        read = getattr(self._nvml, name, None) or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        reasons = self._asked(read, default=0)
        found = [told for bit, told in SLOWDOWNS.items() if reasons & bit]
        if found:
            self.faults.append(f"its clocks are lowered by {' and '.join(found)}")

    def look_at_memory(self) -> None:
        """Note uncorrected memory errors, and rows of memory that were not replaced."""
        if self._nvml is None:
            return
        uncorrected = (self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._nvml.NVML_VOLATILE_ECC)
        errors = self._asked(self._nvml.nvmlDeviceGetTotalEccErrors, *uncorrected, default=0)
        if errors:
            self.faults.append(f"{errors} uncorrected memory errors (ECC) since its driver was loaded")
        *_, is_pending, has_failed = self._asked(self._nvml.nvmlDeviceGetRemappedRows, default=(0, 0))
        if has_failed:
            self.faults.append("a faulty row of its memory could not be replaced")
        elif is_pending:
            self.faults.append("a faulty row of its memory is replaced only when the GPU is reset")

    def _asked(self, read: Any, *arguments: Any, default: Any) -> Any:
        """Return what NVML tells; ``default`` if the GPU has no such thing."""
        try:
            return read(self._handle, *arguments)
        except self._nvml.NVMLError:
            return default
