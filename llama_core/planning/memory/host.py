"""The host memory of a node, from arithmetic: what its ranks hold beside their GPUs or, on the CPU, all they hold.

Each part of a rank follows from the code that holds it:

* checkpoint copy: ``training.saving`` copies the trained weights and the optimizer's states, and keeps that memory
  until training ends. DeepSpeed writes its states itself: torch moves one flat tensor after another to the host, the
  largest of which are the fp32 weights.
* batches: ``data.supply`` reads the rows of a step and stacks them, 24 bytes a token each time. On CUDA it then pins
  the microbatches; torch rounds pinned blocks up to a power of two.
* offloaded states: what ``parallel.deepspeed`` asks DeepSpeed to keep in host memory.
* kernels, on the CPU: oneDNN keeps what it has prepared for each product of matrices in half precision.
* gloo's copy, on the CPU: gloo reduces gradients into shards by summing up a copy of all of them.
* freed memory, on the CPU: the C library keeps it in the process.
* tokenising: ``data.shards.writing`` holds one batch of text and its tokens, and some 50 bytes for each document of a
  shard, in one process of a node, before the model is built.

The page cache of tokens, weights and checkpoints does not count, because the kernel can reclaim it. Neither does what
depends on the data: 24 bytes per conversation, and a dataloader of your own. Texts take nothing per document.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Self

from llama_core.config.parameter_counts import trained_parameters
from llama_core.config.run import RunConfig
from llama_core.machine.toolchain import COMPILE_WORKERS
from llama_core.planning.before import forwards_before_step
from llama_core.planning.memory.process import DEFAULT_PROCESS, KERNELS_KEPT, ProcessMemory
from llama_core.planning.memory.profile import MemoryProfile
from llama_core.planning.memory.weights import Counts
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.operations import FP32_BYTES, itemsize_of
from llama_core.planning.work import Work
from llama_core.units import GIB, MIB, format_bytes

STEPS_AHEAD = 2
"""Most steps whose batches ``data.supply`` reads before their turn."""
TOKEN_BYTES = 3 * 8
"""A token's id, target and position, int64."""
CUDA_PROCESS_BYTES = 3 * GIB
"""An allowance for the process of a rank on CUDA: interpreter, torch, the host side of CUDA and NCCL."""
COMPILERS_BYTES = 300 * MIB + COMPILE_WORKERS * 128 * MIB
"""What they take: the parent that they are forked from, and for each what Triton needs to compile a kernel; measured on
a CPU with torch 2.13 and Triton 3.7."""
FREED = "freed memory"
"""On the CPU, what a rank has freed and keeps: its heap never shrinks (``launch.rank.supervisor``)."""
KERNELS_PER_MATRIX = 6
"""Kernels that are kept for all matrices of one shape: forward and two gradients, each twice."""
KERNELS_OF_HEAD = 14
"""The same for the head, whose chunks have products of their own, and for a measurement of the CPU's rate."""
ATTENTION_BLOCK = 256
"""Queries that attention's backward takes at once, with all keys before them: every block has another size."""
KERNELS_PER_BLOCK = 10
TOKENISING_BYTES = 512 * MIB
"""An allowance for a tokenizer and a batch of 2**20 characters: the text, and the id, place and word of each token."""

_REMEDIES = {
    "process": "a larger launch.nodes, for fewer ranks on each",
    "checkpoint copy": "a larger launch.nodes, or more ranks that shard the states (parallel.zero_stage=1 or more)",
    "offloaded states": "a larger launch.nodes, or parallel.offload=none",
    "batches": "a larger launch.nodes, or a smaller training.batch_size",
}
"""What reduces the largest part of a node's memory beside GPUs."""


@dataclass(frozen=True)
class HostMemory:
    """The host memory that the ranks of a node take, beside their GPUs or in all."""

    on_cuda: bool
    num_ranks: int
    """Ranks on a node."""
    batches_bytes: int
    """Rows that a rank has read, stacked or pinned for steps to come."""
    offloaded_bytes: int
    """States that DeepSpeed keeps in host memory for a rank."""
    copies_states: bool
    """Whether a checkpoint is a copy of all states; DeepSpeed writes one tensor after another."""
    copies_during_steps: bool
    """Whether the copy exists while a step runs; otherwise the only checkpoint comes after the last step."""
    compilers_bytes: int = 0
    """What the processes that compile a rank's blocks take."""
    kernels_bytes: int = 0
    """What a library on the CPU keeps of its kernels."""
    copied_bytes: int = 0
    """What gloo copies of the gradients that it reduces into shards at once."""
    process: ProcessMemory = DEFAULT_PROCESS
    """What was measured of a process on the CPU."""
    available_bytes: int | None = None
    """Memory of a node for these ranks; None if unknown."""
    available_where: str = ""
    """Whose memory that is."""

    def parts(self, profile: MemoryProfile) -> dict[str, int]:
        """Return the host bytes of a rank at their peak, by part.

        Args:
            profile: the tensors of the rank, or of the fullest rank.
        """
        update = profile.phases.get("optimizer", {})
        weights = update.get("gradients", 0)  # the trained ones, as the update has a gradient for each
        copy = weights if self.on_cuda else 0
        if self.copies_states:
            copy = weights + update.get("moments", 0)
        parts = {"process": CUDA_PROCESS_BYTES}
        if not self.on_cuda:
            parts["process"] = self.process.process_bytes
            states = update.get("weights", 0) + update.get("moments", 0)
            passing = profile.peak_bytes - states
            parts |= {"tensors": profile.peak_bytes, FREED: int(self.process.freed_share * passing)}
            # the copy is made in the backward, which need not have the peak of the tensors
            backward = sum(profile.phases.get("backward", {}).values())
            parts["gloo's copy"] = max(0, backward + self.copied_bytes - profile.peak_bytes)
            if not self.copies_during_steps:  # what comes and goes in a step has gone when the copy is made
                copy = max(0, copy - passing)
        parts |= {
            "compilers": self.compilers_bytes,
            "kernels": self.kernels_bytes,
            "checkpoint copy": copy,
            "batches": self.batches_bytes,
            "offloaded states": self.offloaded_bytes,
        }
        return {name: size for name, size in parts.items() if size}

    def alive_bytes(self, profile: MemoryProfile) -> int:
        """Return the bytes of ``parts`` that a rank on the CPU uses for its model, tensors among them."""
        return sum(size for name, size in self.parts(profile).items() if name not in {"process", "compilers", FREED})

    def rank_bytes(self, profile: MemoryProfile) -> int:
        """Return the host bytes of a rank at their peak."""
        return sum(self.parts(profile).values())

    def node_bytes(self, profile: MemoryProfile) -> int:
        """Return the host bytes of all ranks of a node at their peak, which may be while one of them tokenises."""
        parts = self.parts(profile)
        process = parts["process"]
        return self.num_ranks * process + max(TOKENISING_BYTES, self.num_ranks * (sum(parts.values()) - process))

    def headroom_bytes(self, profile: MemoryProfile) -> int | None:
        """Return how much of a node's memory is left; None if it is unknown."""
        return None if self.available_bytes is None else self.available_bytes - self.node_bytes(profile)

    def problem(self, profile: MemoryProfile) -> str:
        """Return why the ranks do not fit a node's memory, and what to do; empty if they do or it is unknown."""
        headroom = self.headroom_bytes(profile)
        if headroom is None or headroom >= 0:
            return ""
        parts = {name: size for name, size in self.parts(profile).items() if name in _REMEDIES}
        largest = max(parts, key=lambda name: parts[name])
        return (
            f"host memory: {self.summary(profile)}, {format_bytes(-headroom)} more than {self.available_where}; "
            f"most of it is the {largest}; use {_REMEDIES[largest]}"
        )

    def summary(self, profile: MemoryProfile) -> str:
        """Return the memory of a node's ranks and the parts of a rank's in one line."""
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.parts(profile).items())
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        return f"about {format_bytes(self.node_bytes(profile))} for {ranks} on a node ({parts} each)"

    def as_dict(self, profile: MemoryProfile) -> dict[str, Any]:
        """Return the memory as a record, with its parts for readers."""
        return asdict(self) | {"parts": self.parts(profile), "node_bytes": self.node_bytes(profile)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Return the memory that ``as_dict`` recorded."""
        derived = {"parts", "node_bytes", "process"}
        process = ProcessMemory(**record.get("process", {}))
        return cls(**{name: value for name, value in record.items() if name not in derived}, process=process)


def host_memory(config: RunConfig, plan: ParallelPlan, process: ProcessMemory = DEFAULT_PROCESS) -> HostMemory:
    """Return the host memory of the ranks of a node, whose own memory is unknown.

    Args:
        config: the configuration.
        plan: its plan.
        process: what was measured of a process on the CPU.
    """
    on_cuda = config.launch.device != "cpu"
    training = config.training
    return HostMemory(
        on_cuda=on_cuda,
        num_ranks=-(-plan.world_size // config.num_nodes),
        batches_bytes=_batches(config, plan, on_cuda),
        offloaded_bytes=_offloaded(config, plan, on_cuda),
        copies_states=plan.zero_backend == "native",
        copies_during_steps=training.checkpoint_every == "auto"
        or 0 < training.checkpoint_every < (training.steps or float("inf")),
        compilers_bytes=COMPILERS_BYTES if on_cuda and plan.compile else 0,
        kernels_bytes=0 if on_cuda else _kernels(config, process),
        copied_bytes=0 if on_cuda else _copied(config, plan),
        process=process,
    )


def _kernels(config: RunConfig, process: ProcessMemory) -> int:
    """Return what oneDNN keeps of its kernels on a rank, or MKL for its products.

    It prepares a kernel for each product of other sizes; oneDNN and torch both keep what they made for it, up to their
    limit. Experts reach it, because the rows of each differ from step to step. Products in fp32 are MKL's, which keeps
    only the blocks that it packs.
    """
    if itemsize_of(config.training.precision) == FP32_BYTES:
        return process.packed_bytes
    most = 2 * KERNELS_KEPT
    if config.spec.moe is not None:
        return most * process.kernel_bytes
    of_layers = len(set(config.spec.matrix_shapes.values())) * KERNELS_PER_MATRIX
    of_attention = ceil(config.seq_len / ATTENTION_BLOCK) * KERNELS_PER_BLOCK
    return min(most, of_layers + KERNELS_OF_HEAD + of_attention) * process.kernel_bytes


def _copied(config: RunConfig, plan: ParallelPlan) -> int:
    """Return the bytes of the largest gradients that are reduced into shards at once: in fp32, those of a unit.

    Source: ``reduce_scatter_tensor_coalesced`` of torch 2.13's ``ProcessGroupGloo.cpp``.
    """
    if not plan.uses_fully_shard or plan.num_shards == 1:
        return 0
    largest = 0
    for stage in Work.of(config, plan).stages:
        trained = Counts.of(stage.units, lambda program: program.num_trained)
        largest = max(largest, *trained.layers, trained.head, trained.root, trained.embedding)
    return FP32_BYTES * largest


def _batches(config: RunConfig, plan: ParallelPlan, on_cuda: bool) -> int:
    """Return the bytes of a rank's rows, besides those that a step on the CPU computes on."""
    rows = -(-config.batch_size // plan.dp)
    numbers = sum(config.objective.values_per_token.values())
    step = (TOKEN_BYTES + FP32_BYTES * numbers) * config.seq_len * rows
    read = 2 * step  # row by row, then stacked
    others = 1 + forwards_before_step(config.objective)  # and the rows that are measured before
    step *= others
    if on_cuda:
        num_forwards = others * -(-rows // plan.rows_per_forward)
        tokens = config.seq_len * plan.rows_per_forward
        values = [_pinned(FP32_BYTES * number * tokens) for number in config.objective.values_per_token.values()]
        return read + num_forwards * (3 * _pinned(TOKEN_BYTES // 3 * tokens) + sum(values))
    return read + STEPS_AHEAD * step if config.data.num_workers else step


def _offloaded(config: RunConfig, plan: ParallelPlan, on_cuda: bool) -> int:
    """Return the bytes that DeepSpeed keeps in host memory for a rank.

    Source: DeepSpeed 0.19's ``runtime/zero/stage_1_and_2.py`` and ``stage3.py``.
    """
    if plan.offload == "none":
        return 0
    pinned = _pinned if on_cuda else int
    itemsize = itemsize_of(config.training.precision)
    trained = ceil(config.spec.num_trainable_parameters / plan.dp)
    fp32 = FP32_BYTES * trained
    states = ceil(config.optimizer.states_of(trained_parameters(config.spec)) / plan.dp)
    if plan.zero_stage == 3:  # weights, two buffers of gradients, states
        held = fp32 + 2 * pinned(fp32) + states
    else:  # weights, gradients, states, and the updated weights on their way to the GPU
        held = 2 * pinned(fp32) + states + pinned(itemsize * trained)
        if plan.num_microbatches > 1:
            held += pinned(itemsize * trained)
    if plan.offload == "parameters":
        held += pinned(itemsize * ceil(config.spec.num_parameters / plan.dp))
    return held


def _pinned(num_bytes: int) -> int:
    """Return the size of the pinned block that torch takes for a tensor: the next power of two."""
    return 1 << (num_bytes - 1).bit_length()
