"""Show the scores of a checkpoint where the metrics of its run are shown: in its trackers."""

import time
from collections.abc import Callable, Sequence

from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import Score
from llama_core.trackers.guarded import GuardedTracker
from llama_core.trackers.traits import EVALUATIONS
from llama_core.training.metrics import tracked_run


def show_scores(run: RunDirectory, config: RunConfig, scores: Sequence[Score], tell: Callable[[str], None]) -> None:
    """Add the scores of one checkpoint to what ``config.tracking`` asks for. A failure costs only what is shown.

    Args:
        run: the run.
        config: its configuration.
        scores: at least one; they are recorded already.
        tell: called with a line if they cannot be shown.
    """
    step = scores[0].step
    tokens = scores[0].tokens
    by_tag = {score.tag: score.value for score in scores}
    tracked = tracked_run(run, config, part=EVALUATIONS)
    for asked in config.tracking.asked_trackers():
        try:
            tracker = GuardedTracker(asked, tracked, f"does not get the scores of step {step:,}", tell)
        except EnvironmentMismatchError as error:  # a run refuses it before its first step, an evaluation does not
            tell(str(error))
            continue
        tracker.write_scores(step, tokens, by_tag, time.time())
        tracker.close()
