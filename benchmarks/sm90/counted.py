"""``python -m benchmarks.sm90.counted NAME FILE``: compiles the blocks of a kind and writes what they launch, as JSON.

It runs in an environment with a CUDA build of torch, started by ``python -m benchmarks.sm90``.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
import triton
from torch._inductor import config as inductor
from torch._inductor.output_code import CompiledFxGraph
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.sm90.driverless import look_like_an_h100
from benchmarks.sm90.kinds import KINDS, NUM_DOCUMENTS, TOKENS, Kind
from llama_core.models.batch import Batch, Documents
from llama_core.training.engine import build_model

DEVICE = torch.device("cuda", 0)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
LOAD = re.compile(r"\bld\.global|\bcp\.async\.c[ag]")
WIDE_LOAD = re.compile(r"\bld\.global\S*\.(?:v4\.b32|v2\.b64)|\bcp\.async\.c[ag][^;]*, 0x10,")
NO_KERNEL = re.compile(
    r"^device$|empty|view|as_strided|alias|slice|select|transpose|permute|expand|detach|^t$|split|unsqueeze"
)
"""Operators that launch nothing: they make tensors, and views of them."""


@dataclass
class Configuration:
    """One of the ways in which a kernel was compiled, of which a GPU would choose the fastest."""

    registers: int
    stack_bytes: int
    """Of each thread, in the memory of the device: spilled registers, and arrays that are indexed by variables."""
    loads: int
    """Instructions that read the memory of the device."""
    wide_loads: int
    """Those that read 16 bytes."""


@dataclass
class Kernel:
    """A kernel that Inductor generated."""

    name: str
    launches: int
    """By one block."""
    num_bytes: int
    """Read and written by one launch, by Inductor's count: of a tensor that is read by indices, all of it."""
    configurations: list[Configuration]


@dataclass
class Pass:
    """What a forward or a backward launches."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    operators: Counter[str] = field(default_factory=Counter)
    """Operators with kernels of their own, such as products and attention."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it, kernels with the most bytes first."""
        kernels = sorted(self.kernels.values(), key=lambda one: -one.launches * one.num_bytes)
        return {"kernels": [asdict(kernel) for kernel in kernels], "operators": dict(sorted(self.operators.items()))}


class Counts:
    """Counts what the blocks launch that run now."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Forget all counts."""
        self.passes = {"forward": Pass(), "backward": Pass()}
        self.kept_bytes = 0
        """What forwards return, for others and for their backward, besides what they were given."""

    @property
    def now(self) -> Pass:
        """What runs now: a backward, if autograd is at work."""
        return self.passes["forward" if torch._C._current_graph_task_id() == -1 else "backward"]

    def launch(self, kernel: Any, _arguments: Sequence[Any]) -> None:
        """Count a launch of a kernel of Inductor."""
        name = kernel.fn.__name__
        counted = self.now.kernels
        if name not in counted:
            num_bytes = round(1e9 * kernel.inductor_meta["kernel_num_gb"])
            counted[name] = Kernel(name, 0, num_bytes, [_configuration(one) for one in kernel.compile_results])
        counted[name].launches += 1

    def run(self, graph: Any, inputs: Sequence[Any]) -> Any:
        """Run compiled code, count the operators that it calls, and what a forward keeps."""
        is_forward = self.now is self.passes["forward"]
        given = set(_storages(inputs))  # the code empties the list
        with Operators(self):
            results = _RUN(graph, inputs)
        if is_forward:
            made = _storages(results)
            self.kept_bytes += sum(num_bytes for storage, num_bytes in made.items() if storage not in given)
        return results


_RUN = CompiledFxGraph.__call__


def _storages(values: Sequence[Any]) -> dict[int, int]:
    """Return the bytes of each storage of the tensors."""
    found = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    return {storage._cdata: storage.nbytes() for storage in found}


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that generated code calls."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operator and run it on fake tensors."""
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if not NO_KERNEL.search(name):
            self.counts.now.operators[name] += 1
        # what an operator writes is there already, and not each that writes has a rule for fake tensors
        return kwargs["out"] if "out" in kwargs else function(*args, **kwargs)


def _configuration(result: Any) -> Configuration:
    binary = result.kernel
    registers, stack = resources(binary.asm["cubin"])
    code = binary.asm["ptx"]
    return Configuration(registers, stack, len(LOAD.findall(code)), len(WIDE_LOAD.findall(code)))


def resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of stack of a thread of the only kernel of a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2])


def packed_row() -> Batch:
    """Return a row of packed documents on the device; under ``FakeTensorMode``, where it has no numbers."""
    row_BS = torch.zeros(1, TOKENS, dtype=torch.int64, device=DEVICE)
    starts = torch.zeros(NUM_DOCUMENTS + 1, dtype=torch.int32, device=DEVICE)
    return Batch(row_BS, row_BS, row_BS, Documents(starts, TOKENS))


def blocks_of(kind: Kind, counts: Counts) -> Iterator[dict[str, Any]]:
    """Yield what the block of each of a kind's layers launches."""
    config = kind.config()
    model = build_model(config, kind.parallel_plan(), DEVICE)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.materialize()
        for layer, has_gradient in model.kinds_of_blocks():
            if layer not in kind.layers:
                continue
            counts.start()
            before = _num_graphs()
            model.compile_blocks(packed_row(), [(layer, has_gradient)])
            passes = {name: one.as_dict() for name, one in counts.passes.items()}
            yield {
                "layer": layer,
                "graphs": _num_graphs() - before,
                "kept_bytes": counts.kept_bytes,
                **passes,
            }


def _num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def main(name: str, file: str) -> None:
    """Write what the blocks of a kind launch."""
    counts = Counts()
    look_like_an_h100(counts.launch, lambda cubin: resources(cubin)[0])
    inductor.profile_bandwidth = True  # so that kernels know their bytes

    def run(graph: Any, inputs: Sequence[Any]) -> Any:  # a method must be a function
        return counts.run(graph, inputs)

    CompiledFxGraph.__call__ = run  # type: ignore[assignment, method-assign]
    blocks = list(blocks_of(KINDS[name], counts))
    found = {"name": name, "torch": torch.__version__, "triton": triton.__version__, "blocks": blocks}
    Path(file).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
