"""Makes a machine without a driver look like an H100 to torch's compiler.

All stand-ins are here. They say which device there is, and they receive the launches of kernels. Whatever makes the
code is torch's and Triton's own: Dynamo, AOTAutograd, Inductor, Triton, ptxas. Tensors on the device are fake: they
have a shape, but no memory. The process must have been started with ``no_driver.c`` loaded before all others.
"""

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.device_interface
import torch._inductor.config
import torch._inductor.fx_passes.fuse_attention
import torch._inductor.fx_passes.joint_graph
import torch._inductor.fx_passes.misc_patterns
import torch._inductor.fx_passes.pad_mm
import torch._inductor.runtime.triton_helpers
import torch._inductor.runtime.triton_heuristics
import torch._subclasses.fake_tensor
import torch.cuda.random
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

NUM_DEVICES = 8
"""More than one: torch's guard of a build without devices says that it has several."""
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    L2_cache_size=50 * 2**20,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    is_integrated=0,
    is_multi_gpu_board=0,
    gcnArchName="",
    uuid="",
)
"""Properties of the device. Source: NVIDIA, CUDA C++ Programming Guide, technical specifications of 9.0."""

OnLaunch = Callable[[Any, Sequence[Any]], None]
"""Is given a kernel of Inductor, with the binaries of all its configurations, and the arguments of a launch."""


def returns(value: Any) -> Callable[..., Any]:
    """Return a function that takes anything and returns ``value``."""
    return lambda *_arguments, **_named: value


class _Nothing:
    """A device, stream or guard that switches nothing."""

    stream_id = device_index = cuda_stream = 0
    device_type = 1
    device = torch.device("cuda", 0)

    def __init__(self, *_arguments: Any, **_named: Any) -> None:
        pass

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_raised: object) -> None:
        pass


class _Driver:
    """What Triton asks of a driver to compile a kernel; nothing is loaded or launched."""

    utils = SimpleNamespace(
        get_device_properties=returns(
            {
                "max_shared_mem": H100.shared_memory_per_block_optin,
                "multiprocessor_count": H100.multi_processor_count,
                "max_num_regs": H100.regs_per_multiprocessor,
                "warpSize": H100.warp_size,
            }
        )
    )
    get_current_target = staticmethod(returns(GPUTarget("cuda", 10 * H100.major + H100.minor, H100.warp_size)))
    get_current_device = staticmethod(returns(0))
    get_current_stream = staticmethod(returns(0))
    get_device_capability = staticmethod(returns((H100.major, H100.minor)))
    get_active_torch_device = staticmethod(returns(_Nothing.device))


def look_like_an_h100(on_launch: OnLaunch, registers: Callable[[bytes], int]) -> None:
    """Replace, in this process, whatever would ask a driver.

    Args:
        on_launch: takes the place of each launch of a Triton kernel.
        registers: returns the registers of a thread of the kernel of a binary, as a driver that has loaded it would.
    """
    torch._C._ensureCUDADeviceGuardSet()
    ctypes.CDLL(None).set_num_devices(NUM_DEVICES)
    _answer_in_torch()
    _answer_in_dynamo()
    driver.set_active(_Driver())
    _answer_in_inductor(on_launch, registers)


def _answer_in_torch() -> None:
    cuda = torch.cuda
    none = returns(None)
    for owner, answers in (
        (
            cuda,
            {
                "is_available": returns(True),
                "is_initialized": returns(False),
                "is_current_stream_capturing": returns(False),
                "device_count": returns(1),
                "current_device": returns(0),
                "get_device_properties": returns(H100),
                "get_device_capability": returns((H100.major, H100.minor)),
                "get_device_name": returns(H100.name),
                "current_stream": returns(_Nothing()),
                # a class each, for Dynamo has a table of what it traces by itself
                "device": type("device", (_Nothing,), {}),
                "_DeviceGuard": type("_DeviceGuard", (_Nothing,), {}),
                "set_device": none,
                "synchronize": none,
                "_lazy_init": none,
            },
        ),
        (torch.accelerator, {"current_device_index": returns(0), "current_stream": returns(_Nothing())}),
        # recomputation and the compiler keep the state of the device's generator
        (cuda, {"get_rng_state": _generator_state, "set_rng_state": none}),
        (cuda.random, {"get_rng_state": _generator_state, "set_rng_state": none, "_lazy_init": none}),
        (
            torch._C,
            {
                "_accelerator_getDeviceIndex": returns(0),
                "_accelerator_setDeviceIndex": none,
                "_accelerator_exchangeDevice": returns(0),
                "_accelerator_maybeExchangeDevice": returns(0),
                "_accelerator_synchronizeDevice": none,
                "_cuda_getDevice": returns(0),
                "_cuda_exchangeDevice": returns(0),
                "_cuda_maybeExchangeDevice": returns(0),
                "_cuda_getCurrentRawStream": returns(0),
            },
        ),
        (torch._subclasses.fake_tensor, {"init_gpu_context": none}),
    ):
        _replace(owner, answers)


def _generator_state(*_arguments: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


def _answer_in_dynamo() -> None:
    interface = torch._dynamo.device_interface.CudaInterface
    answers = {
        "is_available": returns(True),
        "device_count": returns(1),
        "current_device": returns(0),
        "get_device_properties": returns(H100),
        "get_compute_capability": returns(10 * H100.major + H100.minor),
        "exchange_device": returns(0),
        "maybe_exchange_device": returns(0),
        "set_device": returns(None),
        "synchronize": returns(None),
        "is_triton_capable": returns(True),
        "raise_if_triton_unavailable": returns(None),
    }
    _replace(interface, {name: staticmethod(answer) for name, answer in answers.items()})
    of_workers = ("current_device", "get_device_properties")
    _replace(interface.Worker, {name: staticmethod(answers[name]) for name in of_workers})


def _answer_in_inductor(on_launch: OnLaunch, registers: Callable[[bytes], int]) -> None:
    passes = torch._inductor.fx_passes
    # these trace their patterns on small tensors of the device; those of attention match no block of ours
    _replace(passes.fuse_attention, {"_sfdp_init": returns(None)})
    for module, name in ((passes.pad_mm, "_pad_mm_init"), (passes.misc_patterns, "_misc_patterns_init")):
        _replace(module, {name: _without_a_device(getattr(module, name))})
    _replace(passes.pad_mm, {"should_pad_bench": returns(False)})  # it would time both
    folder = passes.joint_graph.UniformValueConstantFolder
    _replace(folder, {name: _with_constants_on_the_host(getattr(folder, name)) for name in ("__init__", "run")})
    _replace(torch._inductor.runtime.triton_helpers, {"set_driver_to_gpu": returns(None)})
    # generated code makes its tensors by functions that know no fake ones
    _replace(
        torch._C._dynamo.guards,
        {"_empty_strided_cuda": _empty_strided, "_reinterpret_tensor": torch.as_strided},
    )
    heuristics = torch._inductor.runtime.triton_heuristics

    def launcher(result: Any) -> Any:
        # with many registers, Inductor adds a configuration of smaller blocks
        result.kernel.n_regs = registers(result.kernel.asm["cubin"])
        return SimpleNamespace(config=result.config, n_regs=result.kernel.n_regs, n_spills=None, store_cubin=False)

    _replace(heuristics.TritonCompileResult, {"make_launcher": launcher})
    for kind in (heuristics.CachingAutotuner, heuristics.DebugAutotuner):
        _replace(kind, {"run": lambda kernel, *arguments, **_named: on_launch(kernel, arguments)})
    for name in ("use_static_cuda_launcher", "use_static_triton_launcher"):
        if hasattr(torch._inductor.config, name):
            setattr(torch._inductor.config, name, False)


class _ConstantsOnTheHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes tensors of one number on the host that the compiler would make on the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, where the host can."""
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return function(*args, **kwargs)


def _with_constants_on_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        with _ConstantsOnTheHost():  # type: ignore[no-untyped-call]
            return function(*arguments, **named)

    return call


def _without_a_device(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        torch.cuda.is_available = returns(False)
        try:
            return function(*(torch.device("cpu") for _ in arguments))
        finally:
            torch.cuda.is_available = returns(True)

    return call


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=_Nothing.device)


def _replace(owner: Any, answers: dict[str, Any]) -> None:
    for name, answer in answers.items():
        setattr(owner, name, answer)
