"""A tracker as somebody would add it: its row, its settings, and what it does. It keeps values in a file of lines."""

import json

from llama_core.trackers.traits import TrackerSettings, TrackerType


class ToySettings(TrackerSettings):
    project: str
    """The project that gets the values."""
    fails_at: int | None = None
    """The step at which its service goes away."""


class Toy:
    def __init__(self, run, settings):
        folder = run.directory.tracker("toy")
        folder.mkdir(exist_ok=True)
        self._lines = (folder / f"{run.part or 'steps'}.jsonl").open("a")
        self._settings = settings
        self._say(opened=settings.project, run=run.fingerprint(), resumed_at=run.resumed_at)

    def write(self, step, values, time):
        if step == self._settings.fails_at:
            raise ConnectionError("the service is away")
        self._say(step=step, loss=values["loss"])

    def write_scores(self, step, tokens, scores, time):
        self._say(step=step, tokens=tokens, scores=dict(scores))

    def flush(self):
        self._say(flushed=True)

    def close(self):
        self._say(closed=True)
        self._lines.close()

    def _say(self, **line):
        self._lines.write(json.dumps(line) + "\n")


def problems(settings):
    if settings.project == "closed":
        yield "tracking.trackers.toy.project=closed takes no more runs; choose another one"


def where(run, settings):
    return f"cat {run.tracker('toy')}/steps.jsonl" if run.tracker("toy").exists() else ""


TOY = TrackerType(
    "toy", "Toy", settings=ToySettings, open=Toy, where=where, problems=problems, variables=("TOY_TOKEN",)
)
