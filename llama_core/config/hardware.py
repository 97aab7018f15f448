"""The devices a run can be planned for: peak rates, memory, links, and the share of the peak that programs reach.

Peaks come from the makers' data sheets, without sparsity. The share of the bf16 peak that matrix products reach is
measured: it is the "maximum achievable matmul FLOPS" of Bekman, *Machine Learning Engineering*, chapter Accelerators.
For PCIe cards it comes from github.com/mag-/gpu_benchmark, which runs the same search. The share that attention
reaches is that of a flash kernel, forward and backward, causal, head dim 128, sequence 8192: 58 % on Ampere (Dao
2023, arXiv:2307.08691, figures 4 to 6) and 31 % on Hopper, where torch uses the same kernel (Shah et al. 2024,
arXiv:2407.08608, figures 5 and 6). Ada takes Ampere's figure; Blackwell and AMD take Hopper's. On Hopper and Blackwell
torch computes a causal row with cuDNN's kernel, which reaches 50 % on Hopper (the same figures).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from llama_core.config.measured_rates import MeasuredRates
from llama_core.errors import ConfigError
from llama_core.units import GB, GIB, MIB, TFLOP, divisors

CONTEXT_BYTES = GIB
"""Memory a CUDA context, cuBLAS and cuDNN take before the first tensor; NCCL comes on top."""

PCIE_BANDWIDTH = 32 * GB
"""Bytes per second between host and device, each way: 16 lanes of PCIe 4."""
INTER_NODE_BANDWIDTH = 50 * GB
"""One NDR InfiniBand NIC per GPU, bytes per second each way."""
GPUS_PER_NODE = 8
KERNEL_SECONDS = 5e-6
"""Shortest time of a kernel on a GPU: its launch from Python, while the GPU computes."""
HALF_RATE_DIM = 128
"""Shortest side at which a matrix product reaches half of its rate on a GPU; at 4096 it reaches 97 %.

A product is computed in tiles of about this many rows and columns. NVIDIA 2023, *Matrix Multiplication Background
User's Guide*, sections 3 and 4.
"""
CPU_HALF_RATE_DIM = 16
"""The same on a CPU: with MKL on two cores with AVX2, a side of 64 leaves 75 % of the rate in fp32."""
CORE_FLOPS = 6e10
"""FLOP/s of a core of an unknown CPU in large fp32 products; machines differ by a factor of three."""
CORE_BANDWIDTH = 5 * GB
"""Bytes per second that a core of an unknown CPU reads and writes."""
CALL_SECONDS = 10e-6
"""Time of a call on a CPU besides its work: Python, autograd and the start of threads."""
ATTENTION_SHARE_OF_CPU = 0.5
"""Share of the rate of large matrix products that attention reaches on a CPU where it was not measured."""
LINK_SHARE_OF_CPU = 0.25
"""Bytes that gloo sends between two ranks of a machine, for each that a copy reads or writes meanwhile."""
MAX_DEVICES = 2**20
"""Most devices of a run: far more than any run has used."""


@dataclass(frozen=True)
class DeviceSpec:
    """One kind of accelerator."""

    name: str
    label: str
    """Name as the maker writes it."""
    bf16_flops: float
    """Peak dense bf16 rate in FLOP/s."""
    memory_bytes: int
    """Memory on the data sheet; see ``usable_bytes`` for what a program gets."""
    memory_bandwidth: float
    """Bytes per second from device memory."""
    link_bandwidth: float
    """Bytes per second to another device of the node, each way; 0 if only PCIe connects them."""
    reported_names: tuple[str, ...] = ()
    """Names that the driver reports for an installed device, without the maker's."""
    fp8_flops: float = 0.0
    """Peak dense fp8 rate in FLOP/s with sums in fp32; 0 if the engine has no fp8 products for it."""
    fp32_flops: float = 0.0
    """Peak fp32 rate in FLOP/s without tensor cores, as torch multiplies fp32 matrices."""
    matmul_share: float = 0.8
    """Share of its peak that large matrix products reach."""
    attention_share: float = 0.31
    """Share of its peak that flash attention reaches, counting only the scores it computes."""
    causal_share: float = 0.31
    """The same for rows that are one document each, for which torch may have a faster kernel."""
    gpus_per_node: int = GPUS_PER_NODE
    """Devices that ``link_bandwidth`` connects."""
    network_bandwidth: float = INTER_NODE_BANDWIDTH
    """Bytes per second per device to other nodes, each way."""
    workspace_bytes: int = 32 * MIB
    """Workspace that torch gives to a cuBLAS handle on a stream. Source: torch, ``CublasHandlePool.cpp``."""
    is_gpu: bool = True
    """Whether it runs CUDA's kernels; a CPU does not."""
    half_rate_dim: int = HALF_RATE_DIM
    """Shortest side at which a matrix product reaches half of its rate."""
    launch_seconds: float = KERNEL_SECONDS
    """What it takes Python to call a kernel. A GPU computes meanwhile, a CPU does not."""
    measured: Mapping[int, MeasuredRates] = field(default_factory=dict, compare=False, repr=False)
    """What its operations were measured to take, by the number of ranks that compute on a machine at once. Empty where
    all is from the data sheet."""
    watts: int = 0
    """Most power that it takes, without the rest of its machine; 0 if unknown."""
    source: str = "data sheet"
    """Where its rates are from, in words."""

    def rates(self, num_ranks: int) -> MeasuredRates | None:
        """Return what was measured with as many ranks on a machine, or with the nearest number; None for a sheet."""
        if not self.measured:
            return None
        return self.measured[min(self.measured, key=lambda measured: abs(measured - num_ranks))]

    @property
    def usable_bytes(self) -> int:
        """Bytes left to a training process after the driver's context and the maths libraries."""
        return self.memory_bytes - CONTEXT_BYTES

    @property
    def neighbour_bandwidth(self) -> float:
        """Bytes per second to another device of the node, each way, over the link or else PCIe."""
        return self.link_bandwidth or PCIE_BANDWIDTH


def _device(
    name: str,
    label: str,
    tflops: tuple[float, float, float],
    memory: tuple[int, float],
    link: float,
    watts: int,
    shares: tuple[float, float, float],
    *reported: str,
    in_node: int = GPUS_PER_NODE,
    workspace_mib: float = 32,
) -> DeviceSpec:
    return DeviceSpec(
        name,
        label,
        bf16_flops=tflops[0] * TFLOP,
        memory_bytes=memory[0] * GB,
        memory_bandwidth=memory[1] * 1000 * GB,
        link_bandwidth=link * GB,
        watts=watts,
        reported_names=reported,
        fp8_flops=tflops[1] * TFLOP,
        fp32_flops=tflops[2] * TFLOP,
        matmul_share=shares[0],
        attention_share=shares[1],
        causal_share=shares[2],
        gpus_per_node=in_node,
        workspace_bytes=round(workspace_mib * MIB),
    )


class CpuRates(NamedTuple):
    """What little is known of all cores of a CPU together."""

    product_flops: float
    """FLOP/s of a large matrix product."""
    attention_flops: float
    """The same of attention, over the scores that it computes."""
    bandwidth: float
    """Bytes per second that a copy reads and writes."""

    @classmethod
    def of_cores(cls, number: int) -> Self:
        """Return what cores of an unknown CPU may have."""
        flops = number * CORE_FLOPS
        return cls(flops, ATTENTION_SHARE_OF_CPU * flops, number * CORE_BANDWIDTH)


def processor(label: str, rates: CpuRates, num_ranks: int) -> DeviceSpec:
    """Return a CPU as each of the ranks that share it has it.

    Args:
        label: its name.
        rates: of all its cores.
        num_ranks: the ranks that share it.
    """
    own_flops = rates.product_flops / num_ranks
    own_bandwidth = rates.bandwidth / num_ranks
    attention_share = rates.attention_flops / rates.product_flops
    return DeviceSpec(
        "cpu",
        label,
        bf16_flops=own_flops,
        fp32_flops=own_flops,
        memory_bytes=GIB,
        memory_bandwidth=own_bandwidth,
        link_bandwidth=own_bandwidth * LINK_SHARE_OF_CPU,
        matmul_share=1.0,
        attention_share=attention_share,
        causal_share=attention_share,
        gpus_per_node=num_ranks,
        is_gpu=False,
        half_rate_dim=CPU_HALF_RATE_DIM,
        launch_seconds=CALL_SECONDS,
    )


# fmt: off
_DEVICES = (
    #       name          label                bf16,  fp8,  fp32    GB, TB/s    link    W  products, attention, causal row  driver's names
    _device("a100_40gb",  "A100 SXM 40 GB",   ( 312,    0,  19.5), ( 40, 1.55), 300,  400, (0.87, 0.58, 0.58), "A100-SXM4-40GB",
            workspace_mib=8.125),
    _device("a100",       "A100 SXM 80 GB",   ( 312,    0,  19.5), ( 80, 2.0),  300,  400, (0.87, 0.58, 0.58), "A100-SXM4-80GB",
            "A100-SXM-80GB", workspace_mib=8.125),
    _device("a100_pcie_40gb", "A100 PCIe 40 GB", (312,   0,  19.5), ( 40, 1.55),   0,  250, (0.82, 0.58, 0.58), "A100-PCIE-40GB",
            workspace_mib=8.125),
    _device("a100_pcie",  "A100 PCIe 80 GB",  ( 312,    0,  19.5), ( 80, 1.94),   0,  300, (0.82, 0.58, 0.58), "A100 80GB PCIe",
            "A100-PCIE-80GB", workspace_mib=8.125),
    _device("h100",       "H100 SXM 80 GB",   ( 989, 1979,  67.0), ( 80, 3.35), 450,  700, (0.80, 0.31, 0.50), "H100 80GB HBM3"),
    # capped at 500 W: matmul rate interpolated by power between the PCIe card (350 W) and the 700 W cards
    _device("h100_96gb",  "H100 SXM 96 GB",   ( 989, 1979,  67.0), ( 96, 2.4),  450,  500, (0.63, 0.31, 0.50)),
    _device("h100_pcie",  "H100 PCIe 80 GB",  ( 756, 1513,  51.0), ( 80, 2.0),    0,  350, (0.66, 0.31, 0.50), "H100 PCIe"),
    _device("h200",       "H200 141 GB",      ( 989, 1979,  67.0), (141, 4.8),  450,  700, (0.80, 0.31, 0.50), "H200"),
    _device("b200",       "B200 180 GB",      (2250, 4500,  75.0), (180, 8.0),  900, 1000, (0.78, 0.31, 0.50), "B200"),
    _device("gb200",      "GB200 186 GB",     (2500, 5000,  80.0), (186, 8.0),  900, 1200, (0.73, 0.31, 0.50), "GB200", in_node=72),
    # no published search of their products: the shares are those of the B200 and the GB200
    _device("b300",       "B300 270 GB",      (2250, 4500,  75.0), (270, 8.0),  900, 1100, (0.78, 0.31, 0.50), "B300 SXM6 AC",
            "B300"),
    _device("gb300",      "GB300 279 GB",     (2500, 5000,  80.0), (279, 8.0),  900, 1400, (0.73, 0.31, 0.50), "GB300", in_node=72),
    _device("mi300x",     "MI300X 192 GB",    (1307,    0, 163.4), (192, 5.3),  448,  750, (0.51, 0.31, 0.31), "MI300X"),
    _device("mi325x",     "MI325X 256 GB",    (1307,    0, 163.4), (256, 6.0),  448, 1000, (0.60, 0.31, 0.31), "MI325X"),
    _device("mi355x",     "MI355X 288 GB",    (2500,    0, 157.3), (288, 8.0),  535, 1400, (0.63, 0.31, 0.31), "MI355X"),
    _device("l40s",       "L40S 48 GB",       ( 362,  733,  91.6), ( 48, 0.86),   0,  350, (0.70, 0.58, 0.58), "L40S",
            workspace_mib=8.125),
    _device("rtx4090",    "RTX 4090 24 GB",   ( 165,  330,  82.6), ( 24, 1.0),    0,  450, (1.00, 0.58, 0.58), "RTX 4090",
            workspace_mib=8.125),
)
# fmt: on
_REGISTRY = {device.name: device for device in _DEVICES}

DEFAULT_GPU_TYPE = "h100"

_UNTOLD = frozenset(("NVIDIA", "GeForce", "AMD", "Instinct", "OAM", "VF"))
"""Words of reported names that do not tell one device from another."""


def gpu_names() -> list[str]:
    """Return the names accepted as ``--gpu-type``."""
    return list(_REGISTRY)


def gpu_spec(name: str) -> DeviceSpec:
    """Return the device called ``name``, here or elsewhere: ``a100``, ``a100-80gb``, ``NVIDIA A100-SXM4-80GB``.

    If several devices match, it is the one with the shortest name here.

    Raises:
        ConfigError: if there is no such device; the message lists the known ones.
    """
    if name in _REGISTRY:
        return _REGISTRY[name]
    asked = set(_words(name))
    suited = [device for device in _DEVICES if _words(device.name)[0] in asked and asked <= _all_words(device)]
    if not suited:
        raise ConfigError(f"unknown GPU type {name!r}; choose one of {', '.join(_REGISTRY)}")
    return min(suited, key=lambda device: len(device.name))


def fewest_nodes(gpus: int, device: DeviceSpec) -> int:
    """Return on how few nodes of ``device`` there can be ``gpus`` of them, as many on each."""
    return next(nodes for nodes in divisors(gpus) if gpus <= nodes * device.gpus_per_node)


def _all_words(device: DeviceSpec) -> set[str]:
    """Return every word that a spelling of the device may have."""
    return {word for name in (device.name, device.label, *device.reported_names) for word in _words(name)}


def _words(name: str) -> list[str]:
    """Return the words that tell a device from others: ``a100`` and ``80gb`` of ``NVIDIA A100-SXM4-80GB``."""
    text = re.sub(r"nvidia|amd|instinct|geforce|tesla|\bsxm\d?|[ _-]+", " ", name.lower().replace("_", " "))
    words = re.findall(r"rtx ?\d+|\d+ ?g?b?|[a-z]+\d*[a-z]*|\S", text)
    return [f"{word.rstrip(' gb')}gb" if word[0].isdigit() else word.replace(" ", "") for word in words]


def recognise_gpu(reported_name: str) -> DeviceSpec | None:
    """Return the device that a driver reports as ``reported_name``, or None if it is not in the table.

    A name with one more word is another device: the H100 NVL and the GH200 have other memory and links than the H100
    and the H200, and a MIG slice has less of both.
    """
    name = " ".join(word for word in reported_name.split() if word not in _UNTOLD)
    return next((device for device in _DEVICES if name in device.reported_names), None)
