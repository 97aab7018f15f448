"""Console output of a run: one line per step of the chain, and a progress bar during training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from llama_core.errors import safe
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed
from llama_core.records.length import ChosenLength
from llama_core.records.measurements import StepRecord
from llama_core.records.metrics import newest_evaluation
from llama_core.units import format_bytes, format_duration


class Announcer:
    """Prints one line per step, as ``say("estimate", "1.4 GiB ...")``; on a terminal the name is bold."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self._copy: Callable[[str], None] = lambda line: None

    def __call__(self, step: str, text: str) -> None:
        """Print ``text`` after the name of the step."""
        line = Text.assemble((f"{step:<10}", "bold"), safe(text))
        # A single print, so that a progress bar below is not redrawn in between.
        self.console.print(line)
        self._copy(line.plain)

    @property
    def can_redraw(self) -> bool:
        """Whether a bar can be redrawn in place; FORCE_COLOR makes rich take a pipe for a terminal."""
        return not self.console.quiet and self.console.is_interactive and self.console.file.isatty()

    @contextmanager
    def copied(self, copy: Callable[[str], None]) -> Iterator[None]:
        """Also call ``copy`` with each line inside the block, whether it is printed or not."""
        before = self._copy
        self._copy = copy
        try:
            yield
        finally:
            self._copy = before

    @contextmanager
    def silenced(self, quiet: bool) -> Iterator[None]:
        """Print nothing inside the block if ``quiet``."""
        before = self.console.quiet
        self.console.quiet = quiet
        try:
            yield
        finally:
            self.console.quiet = before


say = Announcer()


def say_output(rank: int, line: str) -> None:
    """Print a line of a rank's output."""
    say(f"rank {rank}", line)


@contextmanager
def watch(run: RunDirectory) -> Iterator[Callable[[StepRecord], None]]:
    """Show a progress bar with loss, tokens/s and memory, and yield the function to call with every step.

    Held-out losses are lines above the bar. If the output is not a terminal, print a line for the first step and at
    every tenth of the run instead, with the newest held-out loss and the time that is left.
    """
    if not say.can_redraw:
        yield _TenLines(run)
        return
    with Progress(
        TextColumn("[bold]train     "),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=False)),  # or the rest is cut off
        TimeRemainingColumn(),
        console=say.console,
        transient=True,
    ) as progress:
        task = progress.add_task("train", total=None, text=safe(f"starting; log in {run.logs}"))
        length = _Length(run)
        evaluations = _Evaluations(run)

        def show(record: StepRecord) -> None:
            length.heed(record)
            before = evaluations.found
            evaluated = evaluations.newest(record)
            if evaluated is not None and evaluated != before:
                say("evaluate", f"step {evaluated.step}/{evaluated.total_steps}  {evaluated.held_out}")
            text = safe(describe_step(record, with_held_out=False))
            progress.update(task, total=record.total_steps, completed=record.step, text=text)

        yield show


@contextmanager
def count_down(text: str) -> Iterator[Callable[[float], None]]:
    """Print ``text``; on a terminal, also show the seconds that are left, given to the yielded function."""
    say("stopping", text)
    if not say.can_redraw:
        yield lambda left: None
        return
    with Progress(
        TextColumn("[bold]stopping  "),
        TextColumn("{task.fields[text]}", markup=False),
        console=say.console,
        transient=True,
    ) as progress:
        task = progress.add_task("stop", total=None, text="")
        yield lambda left: progress.update(task, text=f"{left:.0f} s left")


class _Length:
    """Says once how many steps the run takes, if it has chosen them itself after its first ones."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._known: int | None = None

    def heed(self, record: StepRecord) -> bool:
        """Return whether the length is another one than that of the record before."""
        if record.total_steps == self._known:
            return False
        self._known = record.total_steps
        if self._run.length.exists():
            say("length", read_typed(self._run.length, ChosenLength).reason)
        return True


class _TenLines:
    """Prints the first record, and the one that completes each tenth of the run."""

    def __init__(self, run: RunDirectory) -> None:
        self._length = _Length(run)
        self._evaluations = _Evaluations(run)
        self._tenths = -1
        self._before: StepRecord | None = None
        """The step of the line before."""

    def __call__(self, record: StepRecord) -> None:
        if self._length.heed(record):
            self._tenths = -1
        tenths = record.step * 10 // record.total_steps
        if tenths > self._tenths:
            self._tenths = tenths
            line = describe_step(record, self._evaluations.newest(record))
            say("train", f"{line}{_time_left(self._before, record)}")
            self._before = record


class _Evaluations:
    """Finds the newest held-out loss. Whoever watches a run sees its newest step alone, and may miss the evaluated one.

    So it looks into the metrics too, at most at every hundredth of the run, for the steps since it last did.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.found: StepRecord | None = None
        """The newest so far."""
        self._run = run
        self._looked_at = 0

    def newest(self, record: StepRecord) -> StepRecord | None:
        """Return the newest record with a held-out loss, up to a step; None if no step was evaluated."""
        if self.found is not None and self.found.step > record.step:  # the run has gone back to a checkpoint
            self.found = None
        is_due = abs(record.step - self._looked_at) >= max(1, record.total_steps // 100)
        if is_due or record.step == record.total_steps:
            after = min(self._looked_at, record.step)
            self._looked_at = record.step
            newest = record if record.eval_loss is not None else newest_evaluation(self._run, after)
            self.found = newest or self.found
        return self.found


def _time_left(before: StepRecord | None, record: StepRecord) -> str:
    """Return the time to the last step at the pace since an earlier one, evaluations and checkpoints included."""
    if before is None or not before.step < record.step < record.total_steps:
        return ""
    seconds_per_step = (record.time - before.time) / (record.step - before.step)
    left = seconds_per_step * (record.total_steps - record.step)
    return f"  about {format_duration(left)} left" if left > 0 else ""  # a clock may have been set back


def describe_step(record: StepRecord, evaluated: StepRecord | None = None, *, with_held_out: bool = True) -> str:
    """Return a step's number, loss, speed and peak memory in one line, with what the run shows of its metrics.

    The peak is that so far, without what was alive before the model was built, as the estimate and the summary have it.

    Args:
        record: the step.
        evaluated: the newest evaluated step, whose held-out loss is named with it; default: this step, if it was.
        with_held_out: whether to name a held-out loss.
    """
    evaluated = evaluated or record
    parts = [f"step {record.step}/{record.total_steps}", f"loss {record.loss:.4f}"]
    if record.shown:
        parts.append(record.shown)
    if with_held_out and evaluated.held_out:
        when = "" if evaluated.step == record.step else f" after step {evaluated.step}"
        parts.append(f"{evaluated.held_out}{when}")
    parts.append(f"{record.tokens_per_second:,.0f} tokens/s")
    parts.append(f"peak {format_bytes(record.memory_added_bytes)}")
    return "  ".join(parts)
