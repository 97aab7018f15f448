"""Console output of a run: one line per step of the chain, and a progress bar during training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from llama_core.errors import safe
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import StepRecord
from llama_core.units import format_bytes


class Announcer:
    """Prints one line per step, as ``say("estimate", "1.4 GiB ...")``; on a terminal the name is bold."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)

    def __call__(self, step: str, text: str) -> None:
        """Print ``text`` after the name of the step."""
        # A single print, so that a progress bar below is not redrawn in between.
        self.console.print(Text.assemble((f"{step:<10}", "bold"), safe(text)))

    @property
    def can_redraw(self) -> bool:
        """Whether a bar can be redrawn in place; FORCE_COLOR makes rich take a pipe for a terminal."""
        return not self.console.quiet and self.console.is_interactive and self.console.file.isatty()

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
        yield _TenLines()
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
        yield lambda record: progress.update(task, total=record.total_steps, completed=record.step, text=_short(record))


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


class _TenLines:
    """Prints the first record, and the one that completes each tenth of the run."""

    def __init__(self) -> None:
        self._tenths = -1

    def __call__(self, record: StepRecord) -> None:
        tenths = record.step * 10 // record.total_steps
        if tenths > self._tenths:
            self._tenths = tenths
            say("train", _short(record))


def _short(record: StepRecord) -> str:
    return (
        f"step {record.step}/{record.total_steps}  loss {record.loss:.3f}  "
        f"{record.tokens_per_second:,.0f} tokens/s  {format_bytes(record.memory_allocated_bytes)}"
    )
