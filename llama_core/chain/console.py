"""Console output of a run: one line per step of the chain, and a progress bar during training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from llama_core.errors import safe
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed
from llama_core.records.measurements import StepRecord
from llama_core.training.length import ChosenLength
from llama_core.units import format_bytes


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

    If the output is not a terminal, print a line for the first step and at every tenth of the run instead.
    """
    if not say.can_redraw:
        yield _TenLines(run)
        return
    with Progress(
        TextColumn("[bold]train     "),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[text]}", markup=False),
        TimeRemainingColumn(),
        console=say.console,
        transient=True,
    ) as progress:
        task = progress.add_task("train", total=None, text=f"starting; log in {run.logs}")
        length = _Length(run)

        def show(record: StepRecord) -> None:
            length.heed(record)
            progress.update(task, total=record.total_steps, completed=record.step, text=describe_step(record))

        yield show


@contextmanager
def count_down(text: str) -> Iterator[Callable[[float], None]]:
    """Print ``text``; on a terminal, also show the seconds that are left, given to the yielded function."""
    say("stopping", text)
    if not say.can_redraw:
        yield lambda left: None
        return
    with Progress(
        TextColumn("[bold]stopping  "), TextColumn("{task.fields[text]}"), console=say.console, transient=True
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
        self._tenths = -1

    def __call__(self, record: StepRecord) -> None:
        if self._length.heed(record):
            self._tenths = -1
        tenths = record.step * 10 // record.total_steps
        if tenths > self._tenths:
            self._tenths = tenths
            say("train", describe_step(record))


def describe_step(record: StepRecord) -> str:
    """Return a step's number, loss, speed and memory in one line."""
    return (
        f"step {record.step}/{record.total_steps}  loss {record.loss:.3f}  "
        f"{record.tokens_per_second:,.0f} tokens/s  {format_bytes(record.memory_allocated_bytes)}"
    )
