"""Measure how often healthy ranks are named as slow, and what the looks cost: ``python -m benchmarks.slow_ranks``.

It has three parts, which ``--only`` selects:

* ``simulation``: what ranks of GPUs measure is drawn, with several kinds of noise, and judged as in a run: how many
  healthy ranks are named, and after how many looks a rank that has become slower.
* ``runs``: a tiny model trains again and again on ranks of this machine, some of the times beside busy processes.
* ``overhead``: one such run takes turns with and without looks.

Each has a table, in ``DIR`` of ``--out`` and on the page of ``--page``. The machine should have nothing else to do.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from benchmarks.busy_machine import neighbours
from benchmarks.pages import publish
from llama_core.chain.prepare import prepare_run
from llama_core.config.run import RunConfig
from llama_core.errors import TrainingInfraError
from llama_core.launch.jobs.handle import WORKER
from llama_core.launch.jobs.submission import submit
from llama_core.machine.detect import cpu_model
from llama_core.preflight.checks import PRODUCT
from llama_core.preflight.outliers import SIGMA_OF_MAD, deviations
from llama_core.preflight.stragglers import CORE_WAIT, FIRST_LOOKS, MIN_RANKS_FOR_SLOWDOWN, SIGNALS, Signal, window
from llama_core.records.directory import RunDirectory
from llama_core.records.files import now, read_json, write_json
from llama_core.records.metrics import read_metrics
from llama_core.records.preflight import read_preflights
from llama_core.records.stragglers import read_stragglers
from llama_core.rehearsal.byte_counter import replaced
from llama_core.runs.loading import load_config, load_plan
from llama_core.training.parts.part import FinishedStep
from llama_core.training.parts.stragglers import SLOWEST_DEVICE, StragglerWatch

# T looks, R ranks
Values = npt.NDArray[np.floating[Any]]

SIZES = (8, 64, 1024, 8192)
"""Numbers of simulated ranks."""
GPUS_OF_A_NODE = 8
LOOKS_OF_A_RUN = 500
SLOWER = (0.05, 0.10, 0.25, 0.50)
HEALTHY_LOOKS = 60
"""Looks before a rank becomes slower."""
LOOKS_TO_NAME = 100
"""Looks after which a rank that has not been named counts as never named."""
COLUMNS_AT_ONCE = 512
"""Ranks whose windows are in memory at once."""

MODEL = {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "head_dim": 8, "vocab_size": 512}
TRAINING = {"batch_size": 4, "seq_len": 64, "precision": "fp32", "eval_sequences": 1, "checkpoint_every": 0}
TURNS_FILE = "turns.json"


# --- simulation


@dataclass(frozen=True)
class Noise:
    """How long the product takes on healthy ranks, as a multiple of its median."""

    told: str
    each: float
    """Standard deviation of the logarithm, from look to look of each rank."""
    lasting: float = 0.0
    """The same from rank to rank, for as long as the run lasts."""
    of_node: float = 0.0
    """The same from look to look, for all ranks of a node together: other work on it."""
    last_stage: float = 0.0
    """The share by which every eighth rank is slower: those of a stage that has more to do, and runs hotter."""
    disturbed: float = 0.0
    """The share of looks that take twice as long."""
    in_a_row: int = 1
    """How many of them follow each other."""


NOISES = (
    Noise("1 %", 0.01),
    Noise("3 %", 0.03),
    Noise("10 %", 0.10),
    Noise("3 %, and 3 % from rank to rank", 0.03, lasting=0.03),
    Noise("3 %, and 10 % that the ranks of a node share", 0.03, of_node=0.10),
    Noise("3 %, and one of 8 stages is 5 % slower", 0.03, last_stage=0.05),
    Noise("3 %, and 1 % of looks take twice as long", 0.03, disturbed=0.01),
    Noise("3 %, and 5 % of looks take twice as long", 0.03, disturbed=0.05),
    Noise("3 %, and 1 % of looks take twice as long, 2 in a row", 0.03, disturbed=0.01, in_a_row=2),
)


def drawn(noise: Noise, looks: int, ranks: int, generator: np.random.Generator) -> Values:
    """Return how long the product takes in each look of each rank."""

    def normal(*shape: int) -> Values:
        return generator.standard_normal(shape, dtype=np.float32)

    logarithms_TR: Values = normal(looks, ranks) * np.float32(noise.each)
    logarithms_TR += np.float32(noise.lasting) * normal(1, ranks)
    if noise.of_node:
        nodes = -(-ranks // GPUS_OF_A_NODE)
        of_nodes_TR = np.repeat(normal(looks, nodes), GPUS_OF_A_NODE, axis=1)[:, :ranks]
        logarithms_TR += np.float32(noise.of_node) * of_nodes_TR
    values_TR: Values = np.exp(logarithms_TR)
    values_TR[:, 7::8] *= 1 + noise.last_stage
    begins_TR = generator.random((looks, ranks), dtype=np.float32) < noise.disturbed / noise.in_a_row
    disturbed_TR = begins_TR.copy()
    for later in range(1, noise.in_a_row):
        disturbed_TR[later:] |= begins_TR[:-later]
    values_TR[disturbed_TR] *= 2
    return values_TR


def behind(values_TR: Values, signal: Signal) -> npt.NDArray[np.bool_]:
    """Return which ranks ``StragglerJudge`` has as behind after each look; all looks and ranks are judged at once.

    Args:
        values_TR: what an even number of ranks have measured.
        signal: the limits, of shares alone.
    """
    num_ranks = values_TR.shape[1]
    looks = window(num_ranks)
    usual_TR = _lower_medians(values_TR, looks)
    behind_TR = np.zeros(values_TR.shape, bool)
    behind_TR[looks - 1 :] = _above_others(usual_TR, signal.share)
    if signal.slowdown and num_ranks >= MIN_RANKS_FOR_SLOWDOWN and len(values_TR) >= FIRST_LOOKS:
        first_1R = _lower_medians(values_TR[:FIRST_LOOKS], FIRST_LOOKS)
        slower_TR = usual_TR[FIRST_LOOKS - looks :] / first_1R
        behind_TR[FIRST_LOOKS - 1 :] |= _above_others(slower_TR, signal.slowdown)
    return behind_TR


def _above_others(values_TR: Values, share: float) -> npt.NDArray[np.bool_]:
    """Return which values ``outliers`` finds among those of each look."""
    # a value that is above the others leaves the lower half of them, and of their distances, as it is
    half = values_TR.shape[1] // 2 - 1
    of_others_T1 = np.partition(values_TR, half, axis=1)[:, half : half + 1]
    distances_TR = np.abs(values_TR - of_others_T1)
    sigma_T1 = SIGMA_OF_MAD * np.partition(distances_TR, half, axis=1)[:, half : half + 1]
    limit = deviations(values_TR.shape[1])
    above_TR: npt.NDArray[np.bool_] = values_TR > of_others_T1 + np.maximum(limit * sigma_T1, share * of_others_T1)
    return above_TR


def _lower_medians(values_TR: Values, looks: int) -> Values:
    """Return the lower median of each rank's last ``looks``, from the first look that has as many."""
    place = (looks - 1) // 2
    medians_TR = np.empty_like(values_TR[looks - 1 :])
    for first in range(0, values_TR.shape[1], COLUMNS_AT_ONCE):
        ranks = slice(first, first + COLUMNS_AT_ONCE)
        windows = np.lib.stride_tricks.sliding_window_view(values_TR[:, ranks], looks, axis=0)
        medians_TR[:, ranks] = np.partition(windows, place, axis=-1)[..., place]
    return medians_TR


def alarms(behind_TR: npt.NDArray[np.bool_]) -> int:
    """Return how often a rank is named."""
    return int(np.count_nonzero(behind_TR[1:] & ~behind_TR[:-1]) + np.count_nonzero(behind_TR[0]))


def false_alarms(noise: Noise, ranks: int, looks: int) -> int:
    """Return how many ranks are named in ``looks`` of runs of healthy ranks."""
    generator = np.random.default_rng(ranks)
    runs = [min(LOOKS_OF_A_RUN, looks - first) for first in range(0, looks, LOOKS_OF_A_RUN)]
    return sum(alarms(behind(drawn(noise, of_run, ranks, generator), SIGNALS["cuda"][PRODUCT])) for of_run in runs)


def looks_until_named(noise: Noise, ranks: int, slower: float, repeats: int) -> float | None:
    """Return the median of the looks after which a rank is named that becomes slower; None if it never is.

    Args:
        noise: that of all ranks.
        ranks: their number.
        slower: by what share it becomes slower.
        repeats: how many times the noise is drawn.
    """
    generator = np.random.default_rng(ranks)
    found = []
    for _ in range(repeats):
        values_TR = drawn(noise, HEALTHY_LOOKS + LOOKS_TO_NAME, ranks, generator)
        values_TR[HEALTHY_LOOKS:, 0] *= 1 + slower
        since_T = behind(values_TR, SIGNALS["cuda"][PRODUCT])[HEALTHY_LOOKS:, 0]
        found.append(int(np.argmax(since_T)) + 1 if since_T.any() else LOOKS_TO_NAME + 1)
    usual = statistics.median(found)
    return usual if usual <= LOOKS_TO_NAME else None


def simulation(options: argparse.Namespace) -> tuple[Any, str]:
    """Return the figures of all kinds of noise, and their table."""
    few, many = SIZES[0], SIZES[-1]
    rows: list[dict[str, Any]] = [
        {
            "noise": asdict(noise),
            "alarms": {ranks: false_alarms(noise, ranks, options.looks) for ranks in SIZES},
            "looks_until_named": {
                slower: [looks_until_named(noise, few, slower, 25), looks_until_named(noise, many, slower, 5)]
                for slower in SLOWER
            },
        }
        for noise in NOISES
    ]
    sizes = [f"{ranks:,}" for ranks in SIZES]
    sizes[0] += " ranks"
    names = [f"{100 * slower:.0f} % slower" for slower in SLOWER]
    lines = [
        f"Healthy ranks named in {options.looks:,} looks, and looks until a rank is named that becomes slower, among "
        f"{few} / {many:,}.",
        "",
        f"| noise | {' | '.join([*sizes, *names])} |",
        "|---" * (1 + len(sizes) + len(names)) + "|",
    ]
    for noise, row in zip(NOISES, rows, strict=True):
        cells = [f"{count:,}" for count in row["alarms"].values()]
        cells += [" / ".join(map(_looks, looks)) for looks in row["looks_until_named"].values()]
        lines.append(f"| {noise.told} | {' | '.join(cells)} |")
    return {"looks": options.looks, "rows": rows}, "\n".join(lines) + "\n"


def _looks(looks: float | None) -> str:
    return "never" if looks is None else f"{looks:.0f}"


# --- runs


@dataclass(frozen=True)
class CleanRun:
    """A run whose ranks are all healthy."""

    is_loaded: bool
    """Whether it trained beside busy processes."""
    busy_cores: float
    """Cores that other programs had, before it started."""
    seconds: float
    looks: int
    before_first_step: int
    """Ranks that are named before the first step."""
    by_product: int
    """How often a rank is named while it trains, by how long its product takes."""
    by_core_wait: int
    """The same by how long it was ready without a core."""
    told: tuple[str, ...]
    """A sentence about each, with the rank and the step."""

    @property
    def is_calm(self) -> bool:
        """Whether no rank is named."""
        return not self.told


def runs(options: argparse.Namespace) -> tuple[Any, str]:
    """Train again and again; return the figures of all runs, and their table."""
    beside = max(1, _cores() // 2)
    made = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(options.runs):
            is_loaded = number >= options.runs - options.beside
            made.append(_clean_run(folder, number, options, beside if is_loaded else 0))
            sys.stdout.write(f"run {number + 1}: {made[-1]}\n")
            sys.stdout.flush()
    lines = [
        f"{_machine()}; {now()[:10]}. {options.ranks} ranks, {options.steps:,} steps.",
        "",
        "| the machine | cores that others have, mean | runs | looks | named before the first step | by the product "
        "| by the wait for a core | runs with an alarm, at most (95 %) |",
        "|---" * 8 + "|",
    ]
    busy = "a busy process" if beside == 1 else f"{beside} busy processes"
    for told, is_loaded in (("as it is", False), (f"beside {busy}", True)):
        of_kind = [one for one in made if one.is_loaded == is_loaded]
        if of_kind:
            lines.append(f"| {told} | {' | '.join(_cells(of_kind))} |")
    return [asdict(one) for one in made], "\n".join(lines) + "\n"


def _cells(made: Sequence[CleanRun]) -> Iterator[str]:
    yield f"{statistics.mean(one.busy_cores for one in made):.1f}"
    yield str(len(made))
    yield f"{sum(one.looks for one in made):,}"
    for name in ("before_first_step", "by_product", "by_core_wait"):
        yield str(sum(getattr(one, name) for one in made))
    disturbed = sum(not one.is_calm for one in made)
    yield f"{100 * disturbed / len(made):.0f} %, {100 * upper_bound(disturbed, len(made)):.0f} %"


def upper_bound(found: int, tried: int, error: float = 0.05) -> float:
    """Return the largest share that explains ``found`` of ``tried`` with a probability of at least ``error``.

    For none found it is about ``3 / tried``, the rule of three. Source: Clopper and Pearson 1934, one-sided.
    """
    if found == tried:
        return 1.0
    low, high = found / tried, 1.0
    for _ in range(60):
        share = (low + high) / 2
        at_most = sum(
            comb(tried, number) * share**number * (1 - share) ** (tried - number) for number in range(found + 1)
        )
        low, high = (share, high) if at_most > error else (low, share)
    return high


def _clean_run(folder: Path, number: int, options: argparse.Namespace, num_busy: int) -> CleanRun:
    psutil.cpu_percent()
    time.sleep(1)
    busy_cores = psutil.cpu_percent() / 100 * (os.cpu_count() or 1)
    began = time.monotonic()
    with neighbours(num_busy) if num_busy else nullcontext():
        run = _trained(folder, f"run-{number}", options.ranks, options.steps)
    named = [one for one in read_stragglers(run) if not one.is_over]
    before = [one for record in read_preflights(run) for one in record.named]
    return CleanRun(
        is_loaded=num_busy > 0,
        busy_cores=busy_cores,
        seconds=time.monotonic() - began,
        looks=sum(value is not None for value in read_metrics(run).column(SLOWEST_DEVICE).to_pylist()),
        before_first_step=len(before),
        by_product=sum(one.signal == PRODUCT for one in named),
        by_core_wait=sum(one.signal == CORE_WAIT for one in named),
        told=tuple(map(str, (*before, *named))),
    )


def _trained(folder: Path, name: str, ranks: int, steps: int, worker: tuple[str, ...] = WORKER) -> RunDirectory:
    """Train a tiny model to the end.

    Raises:
        RuntimeError: if it does not finish.
    """
    config = RunConfig.from_mapping(
        {
            "architecture": MODEL,
            "training": TRAINING | {"batch_size": 2 * ranks, "steps": steps},
            "parallel": {"gpus": ranks, "tp": 1, "pp": 1},
            "data": {"cache_dir": str(folder / "cache")},
            "launch": {"device": "cpu"},
            "tracking": {"tensorboard": False},
            "benchmark": {"steps": 0},
        }
    )
    run = prepare_run(config, folder / name)
    handle = submit(run, load_config(run), load_plan(run).world_size, worker=worker)
    try:
        outcome = handle.wait()
    finally:
        if handle.is_running():
            handle.cancel(grace_seconds=0)
    if outcome.status != "finished":
        raise RuntimeError(f"the run ended as {outcome.status}: {outcome.reason}")
    return run


# --- overhead


def overhead(options: argparse.Namespace) -> tuple[Any, str]:
    """Take turns with looks and without; return the ratios of all pairs, and their table."""
    each = options.turn_steps
    worker = (sys.executable, "-m", "benchmarks.slow_ranks", "--turn-steps", str(each), "--take-turns")
    with tempfile.TemporaryDirectory() as name:
        steps = 2 * each * (options.pairs + 1) + 1  # the first pair warms up, and the last step has no next one
        run = _trained(Path(name), "turns", options.ranks, steps, worker)
        turns = read_json(run.logs / TURNS_FILE)
        looks = sum(value is not None for value in read_metrics(run).column(SLOWEST_DEVICE).to_pylist())
    ratios = ratios_of_pairs(turns["began"], each)[1:]
    low, high = median_bounds(ratios)
    usual = statistics.median(ratios)
    step_ms = 1e3 * (turns["began"][-1] - turns["began"][0]) / (len(turns["began"]) - 1)
    lines = [
        f"{_machine()}; {now()[:10]}. {options.ranks} ranks.",
        "",
        "| pairs of turns | steps of each | a step, ms | steps between looks | CPU of looks | time with looks over "
        "without: median | at least | at most (95 %) |",
        "|---" * 8 + "|",
        f"| {len(ratios)} | {each} | {step_ms:.3g} | {steps / 2 / max(1, looks):.0f} "
        f"| {100 * turns['share_of_cpu']:.2f} % | {usual:.4f} | {low:.4f} | {high:.4f} |",
    ]
    figures = {"ratios": ratios, "step_ms": step_ms, "looks": looks, "share_of_cpu": turns["share_of_cpu"]}
    return figures, "\n".join(lines) + "\n"


def with_looks(step: int, steps_of_a_turn: int) -> bool:
    """Whether a step is one with looks. The order is off, on, on, off, so that no drift makes either of them slower."""
    return step // steps_of_a_turn % 4 in (1, 2)


def ratios_of_pairs(began: Sequence[float], steps_of_a_turn: int) -> list[float]:
    """Return the time of each turn with looks over that of the turn without beside it.

    Args:
        began: when each step, in order, began; the last whole turn needs the beginning of the step after it.
        steps_of_a_turn: as it says.
    """
    ends = began[::steps_of_a_turn]
    turns = [end - begin for begin, end in pairwise(ends)]
    pairs = zip(turns[::2], turns[1::2], strict=False)
    return [
        second / first if with_looks((2 * number + 1) * steps_of_a_turn, steps_of_a_turn) else first / second
        for number, (first, second) in enumerate(pairs)
    ]


def median_bounds(values: Iterable[float], error: float = 0.05) -> tuple[float, float]:
    """Return values between which the median lies but for a probability of ``error``, whatever the distribution.

    They are the least and the greatest if there are too few values to say so.
    """
    ordered = sorted(values)
    place = 0
    tail = 2 * 0.5 ** len(ordered)
    while place + 1 < len(ordered) / 2:
        tail += 2 * comb(len(ordered), place + 1) * 0.5 ** len(ordered)
        if tail > error:
            break
        place += 1
    return ordered[place], ordered[-1 - place]


def take_turns(folder: Path, steps_of_a_turn: int) -> int:
    """Be a rank of a run that looks at slow ranks in some turns only, and write when each step began."""
    from llama_core.launch.rank import worker

    began: list[float] = []
    cpu: list[float] = []
    cpu_of_looks = 0.0

    def timed(do: Callable[..., None], *args: Any) -> None:
        nonlocal cpu_of_looks
        before = time.thread_time()
        do(*args)
        cpu_of_looks += time.thread_time() - before

    look = StragglerWatch.step_begun
    judge = StragglerWatch.after_step

    def begin(watch: StragglerWatch) -> None:
        began.append(time.perf_counter())
        cpu.append(time.process_time())
        if with_looks(len(began) - 1, steps_of_a_turn):
            timed(look, watch)

    def end(watch: StragglerWatch, step: FinishedStep) -> None:
        timed(judge, watch, step)

    with replaced(StragglerWatch, "step_begun", begin), replaced(StragglerWatch, "after_step", end):
        code = worker.main([str(folder)])
    if os.environ["RANK"] == "0":
        # half of the steps have looks
        share = 2 * cpu_of_looks / (cpu[-1] - cpu[0])
        write_json(RunDirectory(folder).logs / TURNS_FILE, {"began": began, "share_of_cpu": share})
    return code


# --- all parts

PARTS: dict[str, Callable[[argparse.Namespace], tuple[Any, str]]] = {
    "simulation": simulation,
    "runs": runs,
    "overhead": overhead,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print the tables, and return the exit code: 1 if a run failed."""
    options = _options(arguments)
    if options.take_turns is not None:
        return take_turns(options.take_turns, options.turn_steps)
    for part in options.only:
        try:
            figures, table = PARTS[part](options)
        except (RuntimeError, TrainingInfraError) as error:
            sys.stderr.write(f"error: {part}: {error}\n")
            return 1
        publish(f"slow ranks {part}", figures, table, folder=options.out, page=options.page)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_ranks", description=description)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the results; made if not there")
    parser.add_argument("--page", type=Path, help="a page whose tables are rewritten, such as docs/reliability.md")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, help="parts; default: all")
    parser.add_argument("--looks", type=int, default=1000, help="simulated looks of each kind of noise")
    parser.add_argument("--runs", type=int, default=50, help="clean runs")
    parser.add_argument(
        "--beside", type=int, default=0, help="how many of them train beside processes on half the cores"
    )
    parser.add_argument("--steps", type=int, default=600, help="steps of a run")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a run")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of turns")
    parser.add_argument("--turn-steps", type=int, default=400, help="steps with looks, or without, of a turn")
    parser.add_argument("--take-turns", type=Path, metavar="RUN", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name, least in (
        ("looks", 1),
        ("runs", 1),
        ("beside", 0),
        ("steps", 1),
        ("ranks", 2),
        ("pairs", 1),
        ("turn_steps", 1),
    ):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least {least}")
    if options.beside > options.runs:
        parser.error(f"--beside is {options.beside}, but there are only {options.runs} runs; raise --runs")
    return options


def _machine() -> str:
    return f"{cpu_model()}, {_cores()} cores, Python {platform.python_version()}"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    sys.exit(main())
