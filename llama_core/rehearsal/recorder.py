"""Record the calls of one rank to its communicators, as it would make them on CUDA, while the other ranks do not exist.

The process groups here transfer nothing, and every call returns at once. torch and this project issue their calls from
streams and make these wait for each other, also on a CPU, where torch's streams do nothing. Here they remember which
calls have ended. So a record has the streams on which ``fully_shard`` gathers and reduces, and every ``work.wait()``.

It lacks what makes no call wait: kernels, copies, and the stream on which inputs are copied. The backward runs in the
thread of its caller; on CUDA it has a thread of its own, for which the caller waits.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from llama_core.parallel import mesh, ranks
from llama_core.rehearsal.byte_counter import replaced
from llama_core.rehearsal.call_order import RECEIVE, SEND, Call, CalledOperation, Communicator

BACKEND = "recorded"
"""torch's name for these process groups."""
_ProcessGroup: Any = dist.ProcessGroup
"""As Any, because its methods are declared with overloads that nobody calls from here."""
_READS = ("item", "tolist", "__bool__", "__int__", "__float__")
"""Methods of a tensor for which the host waits for the current stream."""

_Ended = dict[Communicator, int]
"""The number of the last call to each communicator that has ended; those before it have ended too."""


def _add_later(ended: _Ended, others: _Ended) -> None:
    for communicator, number in others.items():
        ended[communicator] = max(number, ended.get(communicator, -1))


class Recorder:
    """The calls of one rank, in the order in which its host makes them.

    Args:
        rank: the global rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[Call] = []
        self.where = ""
        """The part of the run that makes the next calls."""
        self.content = ""
        """What the next calls send, where that is known."""
        self.stream = _Stream(self)
        """The stream from which calls are issued now."""
        self.ended_with_backward: _Ended = {}
        """The calls that the stream waits for when the backward under way ends."""
        self._ended_for_any: _Ended = {}
        self._ended_for_host: _Ended = {}
        self._host_waited: set[int] = set()
        self._batch: list[CalledOperation] | None = None
        self._numbers: Counter[tuple[int, ...]] = Counter()
        self._makes_gloo = False

    def group(self, members: Sequence[int]) -> "_Group":
        """Return a new group of global ranks, this one included."""
        communicator = Communicator(tuple(members), self._numbers[tuple(members)])
        self._numbers[tuple(members)] += 1
        return _Group(self, communicator, on_host=self._makes_gloo)

    def stream_waits(self, ended: _Ended, stream: "_Stream | None" = None) -> None:
        """Make a stream wait for calls, by default the one from which calls are issued now."""
        _add_later((stream or self.stream).ended, ended)
        _add_later(self._ended_for_any, ended)

    def host_waits(self, ended: _Ended) -> None:
        """Make the host wait for calls."""
        self._host_waited |= {
            number for communicator, number in ended.items() if number > self._ended_for_host.get(communicator, -1)
        }
        _add_later(self._ended_for_host, ended)

    def call(self, communicator: Communicator, operation: CalledOperation) -> _Ended:
        """Record an operation, and return what has ended once it has; a rank alone calls nobody."""
        if len(communicator.ranks) == 1:
            return {}
        number = len(self.calls)
        if self._batch is None:
            self._record(communicator, (operation,))
        else:
            self._batch.append(operation)
        return {communicator: number}

    def _record(self, communicator: Communicator, operations: tuple[CalledOperation, ...]) -> None:
        after, behind = (tuple(sorted(ended.values())) for ended in (self.stream.ended, self._ended_for_any))
        self.calls.append(
            Call(communicator, operations, after, tuple(sorted(self._host_waited)), behind, where=self.where)
        )
        self._host_waited.clear()

    @contextmanager
    def sending(self, content: str) -> Iterator[None]:
        """Name what the calls in the block send."""
        before = self.content
        self.content = content
        yield
        self.content = before

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of the block, where process groups are made of ``BACKEND`` and arranged as on CUDA."""
        with ExitStack() as stack:
            for owner, name, value in self._replacements():
                stack.enter_context(replaced(owner, name, value))
            _recorders.append(self)
            stack.callback(_recorders.pop)
            yield

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        yield torch.cpu, "Stream", lambda priority=0: _Stream(self)
        yield torch.cpu, "Event", lambda: _Event(self)
        for owner in (torch.cpu, torch.accelerator):
            yield owner, "current_stream", lambda device=None: self.stream
        yield torch.cpu, "stream", self._on_stream
        for name in _READS:
            yield Tensor, name, self._reading(getattr(Tensor, name))
        yield torch.autograd, "backward", self._to_its_end(torch.autograd.backward)
        for owner in (mesh, ranks):
            yield owner, "has_bound_device", lambda: True
        yield dist, "split_group", self._splitting(dist.split_group, dist.new_group)
        yield dist, "new_group", self._making(dist.new_group)
        yield dist, "batch_isend_irecv", self._launching_together(dist.batch_isend_irecv)
        for name in ("foreach_all_gather", "foreach_reduce"):
            yield _fsdp_param_group, name, self._of_parameters(getattr(_fsdp_param_group, name))

    @contextmanager
    def _on_stream(self, stream: "_Stream | None") -> Iterator[None]:
        before = self.stream
        self.stream = stream or self.stream
        yield
        self.stream = before

    def _reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def read_on_host(tensor: Tensor, *args: Any) -> Any:
            self.host_waits(self.stream.ended)
            return read(tensor, *args)

        return read_on_host

    def _to_its_end(self, backward: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            backward(*args, **options)
            self.stream_waits(self.ended_with_backward)
            self.ended_with_backward.clear()

        return run

    def _splitting(self, split: Callable[..., Any], make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(split)  # its parameters show what this torch can do
        def split_recorded(split_ranks: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
            self._meet(f"split into {split_ranks}")
            own = [members for members in split_ranks if self.rank in members]
            return make(own[0], backend=BACKEND, use_local_synchronization=True) if own else None

        return split_recorded

    def _making(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def make_recorded(members: list[int] | None = None, backend: str | None = None, **_: Any) -> Any:
            self._meet(f"new group of ranks {members or 'all'}")
            self._makes_gloo = backend == "gloo"
            made = make(members, backend=BACKEND)
            self._makes_gloo = False
            return made

        return make_recorded

    def _meet(self, what: str) -> None:
        """Record that all ranks do something for which their hosts wait."""
        everyone = Communicator(tuple(range(dist.get_world_size())))
        self.host_waits(self.call(everyone, CalledOperation(what)))

    def _launching_together(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def launch_recorded(operations: list[dist.P2POp]) -> Any:
            self._batch = []
            works = launch(operations)
            together = self._batch
            self._batch = None
            group = operations[0].group
            if together and isinstance(group, _Group):
                self._record(group.communicator, tuple(together))
            return works

        return launch_recorded

    def _of_parameters(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(parameters: list[Any], *args: Any, **options: Any) -> Any:
            name = getattr(parameters[0], "_param_fqn", None)
            with self.sending(f"from {name} on") if name else nullcontext():
                return function(parameters, *args, **options)

        return run


class _Event:
    """What has ended at a point of a stream."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.ended: _Ended = {}

    def record(self, stream: "_Stream | None" = None) -> None:
        self.ended = (stream or self._recorder.stream).ended.copy()

    def wait(self, stream: "_Stream | None" = None) -> None:
        (stream or self._recorder.stream).wait_event(self)


class _Stream:
    """A queue of work on the device, and the calls that have ended before what is issued from it next."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.ended: _Ended = {}

    def wait_stream(self, stream: "_Stream") -> None:
        self._recorder.stream_waits(stream.ended, self)

    def wait_event(self, event: _Event) -> None:
        self._recorder.stream_waits(event.ended, self)

    def record_event(self) -> _Event:
        event = _Event(self._recorder)
        event.record(self)
        return event


class _Work(dist.Work):
    """A call under way."""

    def __init__(self, recorder: Recorder, ended: _Ended, tensors: Sequence[Tensor], *, on_host: bool) -> None:
        super().__init__()
        self._recorder = recorder
        self._ended = ended
        self._tensors = list(tensors)
        self._on_host = on_host

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait, or with gloo the host."""
        if self._on_host:
            self._recorder.host_waits(self._ended)
        else:
            self._recorder.stream_waits(self._ended)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the result for ``DistributedDataParallel``, which waits for it when the backward ends."""
        _add_later(self._recorder.ended_with_backward, self._ended)
        result: torch.futures.Future[Any] = torch.futures.Future()
        result.set_result(self._tensors)
        return result


class _Group(_ProcessGroup):  # type: ignore[misc]  # of the type Any
    """A process group that records what it is asked for.

    Tensors keep what they hold. Where a program depends on what arrives, all members seem to have passed what this rank
    passes.
    """

    def __init__(self, recorder: Recorder, communicator: Communicator, *, on_host: bool) -> None:
        super().__init__(communicator.ranks.index(recorder.rank), len(communicator.ranks))
        self._recorder = recorder
        self.communicator = communicator
        self._on_host = on_host

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    @property
    def group_name(self) -> str:
        """The name under which torch finds the group."""
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def _call(self, name: str, tensors: Sequence[Tensor], elements: Sequence[int] = (), **options: Any) -> _Work:
        dtype = " + ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
        sizes = tuple(elements or (tensor.numel() for tensor in tensors))
        operation = CalledOperation(name, dtype, sizes, content=self._recorder.content, **options)
        ended = self._recorder.call(self.communicator, operation)
        return _Work(self._recorder, ended, tensors, on_host=self._on_host)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Work:
        return self._call(f"all_reduce ({_reduction(opts)})", tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Work:
        for parts, own in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(own)
        return self._call("all_gather", inputs)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> _Work:
        return self._call("all_gather", [own])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        return self._call("all_gather", inputs)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any) -> _Work:
        return self._call(f"reduce_scatter ({_reduction(opts)})", [whole])

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> _Work:
        return self._call(f"reduce_scatter ({_reduction(opts)})", inputs)

    def all_to_all_single(
        self, output: Tensor, own: Tensor, to_receive: list[int], to_send: list[int], opts: Any = None
    ) -> _Work:
        size = self.size()
        rank = self.rank()
        if not to_send:
            to_send = to_receive = [len(own) // size] * size
            # as if every member sent to the one after it what this rank sends to the one after it, and so on
            parts = own.chunk(size)
            output.copy_(torch.cat([parts[(2 * rank - member) % size] for member in range(size)]))
        row = own.stride(0) if own.dim() > 1 else 1
        sent, received = ([rows * row for rows in split] for split in (to_send, to_receive))
        return self._call("all_to_all", [own], sent, received=tuple(received))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        return self._call(f"broadcast from rank {self.communicator.ranks[opts.rootRank]}", tensors)

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> _Work:
        return self._call(SEND, tensors, peer=self.communicator.ranks[target])

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Work:
        return self._call(RECEIVE, tensors, peer=self.communicator.ranks[source])

    allreduce_coalesced = allreduce
    # the names before torch 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _reduction(options: Any) -> str:
    return str(options.reduceOp.op).rpartition(".")[2].lower()


_recorders: list[Recorder] = []


def _make_group(options: Any, _: Any) -> _Group:
    return _recorders[-1].group(options.global_ranks_in_group or range(options.group_size))


dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu"])
