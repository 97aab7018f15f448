"""The devices a run may be planned for: peak rates, memory and links, from the makers' data sheets."""

from dataclasses import dataclass

from llama_core.errors import ConfigError, did_you_mean
from llama_core.units import GB, GIB, TFLOP


@dataclass(frozen=True)
class DeviceSpec:
    """One kind of accelerator."""

    name: str
    label: str
    """The name as its maker writes it."""
    bf16_flops: float
    """Peak dense bf16 rate in FLOP/s."""
    memory_bytes: int
    """Memory on the data sheet; see ``usable_bytes`` for what a program gets."""
    memory_bandwidth: float
    """Bytes per second from device memory."""
    link_bandwidth: float
    """Bytes per second to a neighbour in the node, each way; 0 where only PCIe connects them."""
    reported_names: tuple[str, ...] = ()
    """Fragments of the name its driver reports, by which an installed device is recognised."""

    @property
    def usable_bytes(self) -> int:
        """Bytes left to a training process after the driver's context and the maths libraries."""
        return self.memory_bytes - CONTEXT_BYTES


CONTEXT_BYTES = GIB
"""Memory a CUDA context, cuBLAS and cuDNN take before the first tensor; NCCL comes on top."""

PCIE_BANDWIDTH = 32 * GB
INTER_NODE_BANDWIDTH = 50 * GB
"""One NDR InfiniBand NIC per GPU, bytes per second each way."""


def _device(
    name: str, label: str, tflops: float, memory: int, bandwidth: float, link: float, *reported: str
) -> DeviceSpec:
    return DeviceSpec(
        name, label, tflops * TFLOP, memory * GB, bandwidth * 1000 * GB, link * GB, reported_names=reported
    )


# fmt: off
_DEVICES = (
    #       name          label                bf16   GB   TB/s  link   as reported by the driver
    _device("a100_40gb",  "A100 SXM 40 GB",     312,  40, 1.55, 300, "A100-SXM4-40GB"),
    _device("a100",       "A100 SXM 80 GB",     312,  80, 2.0,  300, "A100-SXM4-80GB", "A100"),
    _device("h100",       "H100 SXM 80 GB",     989,  80, 3.35, 450, "H100 80GB HBM3", "H100"),
    _device("h100_pcie",  "H100 PCIe 80 GB",    756,  80, 2.0,    0, "H100 PCIe"),
    _device("h200",       "H200 141 GB",        989, 141, 4.8,  450, "H200"),
    _device("b200",       "B200 180 GB",       2250, 180, 8.0,  900, "B200"),
    _device("gb200",      "GB200 186 GB",      2500, 186, 8.0,  900, "GB200"),
    _device("mi300x",     "MI300X 192 GB",     1307, 192, 5.3,  448, "MI300X"),
    _device("mi325x",     "MI325X 256 GB",     1307, 256, 6.0,  448, "MI325X"),
    _device("mi355x",     "MI355X 288 GB",     2500, 288, 8.0,  535, "MI355X"),
    _device("l40s",       "L40S 48 GB",         362,  48, 0.86,   0, "L40S"),
    _device("rtx4090",    "RTX 4090 24 GB",     165,  24, 1.0,    0, "RTX 4090"),
)
# fmt: on
_REGISTRY = {device.name: device for device in _DEVICES}

DEFAULT_GPU_TYPE = "h100"


def gpu_names() -> list[str]:
    """Return the names accepted as ``--gpu-type``."""
    return list(_REGISTRY)


def gpu_spec(name: str) -> DeviceSpec:
    """Return the device called ``name``.

    Raises:
        ConfigError: if there is no such device; the message names the nearest ones.
    """
    if name not in _REGISTRY:
        nearest = did_you_mean(name, _REGISTRY) or f"; choose one of {', '.join(_REGISTRY)}"
        raise ConfigError(f"unknown gpu type {name!r}{nearest}")
    return _REGISTRY[name]


def recognise_gpu(reported_name: str) -> DeviceSpec | None:
    """Return the device whose driver calls it ``reported_name``, or None if the table does not know it."""
    matches = [
        (len(fragment), device)
        for device in _DEVICES
        for fragment in device.reported_names
        if fragment in reported_name
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None
