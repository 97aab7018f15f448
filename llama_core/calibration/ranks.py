"""Starts the processes that measure, as many as the ranks of a run on this machine, and as they are started."""

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_core.calibration.profile import DeviceKind
from llama_core.config.measured_rates import Sizes
from llama_core.config.run import RunConfig
from llama_core.errors import TrainingFailedError
from llama_core.imports import safe_python
from llama_core.launch.rank.supervisor import worker_environment
from llama_core.planning.time.kernels import Pass
from llama_core.records.files import read_json, write_json

TIMEOUT_SECONDS = 900
"""How long the ranks may take beyond the time that they are given."""


@dataclass(frozen=True)
class RankTimes:
    """What the ranks measured: of each operation, the time of the rank where it took longest.

    What there was no time for is missing.
    """

    seconds: dict[tuple[str, Sizes], float]
    spread: dict[tuple[str, Sizes], float]
    layers: Pass | None
    ends: Pass | None
    failed: dict[tuple[str, Sizes], str] = field(default_factory=dict)
    """What the device refused, with its reason."""


def measure_on_ranks(
    num_ranks: int,
    queries: Sequence[tuple[str, Sizes]],
    *,
    whole: RunConfig | None = None,
    rows: int = 1,
    device: DeviceKind = "cpu",
    seconds: float | None = None,
) -> RankTimes:
    """Return what operations take while ``num_ranks`` processes share this machine's cores, or have a GPU each.

    Args:
        num_ranks: processes.
        queries: kinds and sizes of operations.
        whole: also time whole layers and ends of this run's model.
        rows: rows of a forward of it.
        device: where they compute.
        seconds: after which nothing new is begun; by default all is measured.

    Raises:
        TrainingFailedError: if a process fails; the message has the end of what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="calibrate-") as name:
        folder = Path(name)
        asked = None if whole is None else {"config": whole.model_dump(mode="json"), "rows": rows}
        until = None if seconds is None else time.monotonic() + seconds
        request = {"device": device, "queries": queries, "whole": asked, "until": until}
        write_json(folder / "request.json", request, durable=False)
        processes = [_start(folder, rank, num_ranks, device) for rank in range(num_ranks)]
        timeout = TIMEOUT_SECONDS + (seconds or 0)
        try:
            for rank, process in enumerate(processes):
                output, _ = process.communicate(timeout=timeout)
                if process.returncode:
                    last = (output.strip().splitlines() or ["it printed nothing"])[-1]
                    raise TrainingFailedError(f"rank {rank} of the measurement failed: {last}")
        except subprocess.TimeoutExpired as error:
            raise TrainingFailedError(f"the measurement took longer than {timeout:.0f} s") from error
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return _joined(queries, [read_json(folder / f"rank-{rank}.json") for rank in range(num_ranks)])


def _start(folder: Path, rank: int, num_ranks: int, device: DeviceKind) -> "subprocess.Popen[str]":
    environment = worker_environment(os.environ, device, num_ranks, folder)
    environment |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    return subprocess.Popen(
        [*safe_python("-m", "llama_core.calibration.worker"), str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _joined(queries: Sequence[tuple[str, Sizes]], answers: Sequence[dict[str, Any]]) -> RankTimes:
    seconds: dict[tuple[str, Sizes], float] = {}
    spread: dict[tuple[str, Sizes], float] = {}
    failed: dict[tuple[str, Sizes], str] = {}
    for place, query in enumerate(queries):
        taken = [answer["seconds"][place] for answer in answers]
        if None not in taken:
            seconds[query] = max(taken)
            spread[query] = max(answer["spread"][place] for answer in answers)
        elif reasons := [answer["failed"][place] for answer in answers if answer["failed"][place]]:
            failed[query] = reasons[0]
    wholes = [answer["whole"] for answer in answers if "whole" in answer]
    if not wholes:
        return RankTimes(seconds, spread, None, None, failed)
    layers, ends = (Pass(*(max(whole[part][way] for whole in wholes) for way in (0, 1))) for part in (0, 1))
    return RankTimes(seconds, spread, layers, ends, failed)
