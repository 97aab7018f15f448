"""What a part of the training loop can rely on, with a part that only takes notes in runs that are otherwise real."""

import pytest
from test_spikes import BAD, SPIKES, Texts
from test_trainer import trainer

from llama_core.errors import StoppedError
from llama_core.records.checkpoints import list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json
from llama_core.training.parts.part import LoopPart


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


class Notes(LoopPart):
    """Writes down every call, with the step that the loop is at."""

    def __init__(self, progress, due=()):
        self.progress = progress
        self.due = due
        self.calls = []
        self.finished = []
        self.loaded = None

    def note(self, name):
        self.calls.append(f"{name} {self.progress.step}")

    def begin(self):
        self.note("begin")

    def before_step(self):
        self.note("before")

    def step_begun(self):
        self.note("begun")

    def is_due(self, step):
        return step in self.due

    def after_step(self, step):
        self.note("after")
        self.finished.append(step)

    def before_checkpoint(self):
        self.note("checkpoint")

    def state_dict(self):
        return {"notes": len(self.finished)}

    def load_state_dict(self, state):
        self.note("load")
        self.loaded = state["notes"]

    def went_back(self, bad):
        self.note(f"from {bad.step} to")

    def end(self, error):
        self.note(type(error).__name__)


def noted(run, *, due=(), first=False, **settings):
    """Return a trainer, and the notes of a part that is the first or the last one."""
    one = trainer(run, **settings)
    notes = Notes(one.progress, due)
    one.parts = (notes, *one.parts) if first else (*one.parts, notes)
    return one, notes


def test_a_part_is_called_around_every_step_and_its_state_is_in_the_checkpoint(run):
    one, notes = noted(run, steps=3, checkpoint_every=2)
    one.fit()
    # the part comes after the one that saves, so a step is saved before the part is told of it
    assert notes.calls == [
        "begin 0",
        *("before 0", "begun 1", "after 1"),
        *("before 1", "begun 2", "checkpoint 2", "after 2"),
        *("before 2", "begun 3", "checkpoint 3", "after 3"),
        "NoneType 3",
    ]
    states = [read_json(path / "state.json")["notes"] for path in list_checkpoints(run)]
    assert states == [1, 2]


@pytest.mark.parametrize("due", [(), (2,), (2, 3)])
def test_no_step_begins_before_the_results_of_one_that_a_part_is_due_after(run, due):
    one, notes = noted(run, due=due, steps=5)
    one.runs_ahead = True
    one.fit()
    assert [step.step for step in notes.finished] == [1, 2, 3, 4, 5]
    # the first step is read at once: nobody knows yet how long steps take
    assert [step.step for step in notes.finished if step.is_newest] == sorted({1, *due, 5})


def test_every_part_ends_whatever_another_one_raises_and_the_first_error_is_not_lost(run):
    one, notes = noted(run, first=True)
    one.stop.should_stop = lambda: one.step == 2

    def fail(error):
        assert isinstance(error, StoppedError)
        raise OSError("a tracker is gone")

    one.saves.end = fail
    with pytest.raises(OSError, match="a tracker is gone") as raised:
        one.fit()
    assert isinstance(raised.value.__context__, StoppedError)
    assert notes.calls[-1] == "OSError 2"


def test_a_part_goes_back_with_the_run_after_a_bad_step(run):
    one, notes = noted(run, batches=Texts(poisoned={BAD}), on_bad_step="rollback", **SPIKES)
    one.fit()
    at = notes.calls.index("load 8")
    assert notes.calls[at - 1 : at + 3] == [f"after {BAD}", "load 8", f"from {BAD} to 8", "before 8"]
    assert notes.loaded == 7  # told of steps 1 to 7 when step 8 was saved
