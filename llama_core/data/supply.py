"""The supply of a training loop: batches are read, cut and copied to the device while it trains on earlier ones."""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from llama_core.models.batch import Batch
from llama_core.planning.memory.host import STEPS_AHEAD


class BatchSource(Protocol):
    """An endless stream of batches whose position can be saved and restored."""

    def next_batch(self) -> Batch:
        """Return the next batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position that ``state_dict`` returned."""


@dataclass(frozen=True, eq=False)
class _Step:
    microbatches: list[Batch]
    position: dict[str, Any]
    """The source's position after this step."""
    copied: torch.cuda.Event | None
    """When the copies to the GPU are done; None if there are none."""


class Supply:
    """The microbatches of one step after another, on the device, with a position to save.

    A thread that reads ahead shares the process's random state with training and must not communicate with other
    ranks: its messages would cross those of the step. So only a source of our own data may be read ahead.

    Args:
        source: the batches.
        split: cuts a batch into the microbatches of a step, in host memory.
        device: where the microbatches go.
        reads_ahead: read up to ``STEPS_AHEAD`` steps ahead in a thread; otherwise read a step when it is asked for.
    """

    def __init__(
        self,
        source: BatchSource,
        split: Callable[[Batch], list[Batch]],
        device: torch.device,
        *,
        reads_ahead: bool = False,
    ) -> None:
        self.source = source
        self.split = split
        self.device = device
        self.reads_ahead = reads_ahead
        self._reader: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[_Step]] = deque()
        self._position: dict[str, Any] | None = None
        """The position after the last step handed out; None if the source itself is at that position."""
        on_gpu = reads_ahead and device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def next_step(self) -> list[Batch]:
        """Return the microbatches of the next step; raises the source's errors."""
        if not self.reads_ahead:
            return self._copied(self.split(self.source.next_batch()))
        reader = self._reader or self._start()
        try:
            step = self._ahead.popleft().result()
        except BaseException:
            self.stop()
            raise
        self._ahead.append(reader.submit(self._read))
        self._position = step.position
        if step.copied is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(step.copied)
            for tensor in (tensor for microbatch in step.microbatches for tensor in microbatch.tensors()):
                tensor.record_stream(computing)  # the copying stream owns its memory and must not reuse it earlier
        return step.microbatches

    def stop(self) -> None:
        """End the thread and drop what it has read ahead; the next step is then read again."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
            self._reader = None
            self._ahead.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step that was handed out, whatever has been read ahead."""
        return self.source.state_dict() if self._position is None else self._position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position that ``state_dict`` returned."""
        self.stop()
        self.source.load_state_dict(state)
        self._position = None

    def _start(self) -> ThreadPoolExecutor:
        if self._position is None:
            self._position = self.source.state_dict()
        else:
            self.source.load_state_dict(self._position)
        self._reader = ThreadPoolExecutor(1, "supply")
        self._ahead.extend(self._reader.submit(self._read) for _ in range(STEPS_AHEAD))
        return self._reader

    def _read(self) -> _Step:
        microbatches = self.split(self.source.next_batch())
        position = self.source.state_dict()
        if self._copies is None:
            return _Step(self._copied(microbatches), position, None)
        with torch.cuda.device(self.device), torch.cuda.stream(self._copies):
            return _Step(self._copied(microbatches), position, self._copies.record_event())

    def _copied(self, microbatches: list[Batch]) -> list[Batch]:
        """Return the microbatches on the device; a GPU copies them on the current stream while the process goes on."""
        if self.device.type != "cuda":
            return [microbatch.to(self.device) for microbatch in microbatches]
        # torch keeps the pinned memory until the copies from it are done
        return [microbatch.pinned().to(self.device, non_blocking=True) for microbatch in microbatches]
