"""Show the scores of a checkpoint where the metrics of its run are shown: TensorBoard, Weights & Biases."""

import time
from collections.abc import Callable, Sequence

from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import SCORE, Score
from llama_core.training.events import EventFile
from llama_core.training.metrics import open_wandb

PART = "evaluations"
"""Name of the scores' folder beside the ranks' events, and of their own run of Weights & Biases."""


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
    if config.tracking.tensorboard:
        try:
            events = EventFile(run.tensorboard / PART)
            events.write_scalars(step, by_tag, time.time())
            events.close()
        except OSError as error:
            tell(f"TensorBoard does not get the scores of step {step:,}: {error}")
    if config.tracking.wandb != "off":
        try:
            board = open_wandb(run, config, PART)
            # An evaluation that was repeated ends after those of later steps, and W&B's own steps only go up.
            board.define_metric(f"{SCORE}*", step_metric="tokens")
            board.log({"tokens": tokens, "step": step, **by_tag})
            board.finish()
        except EnvironmentMismatchError as error:
            tell(str(error))
        except Exception as error:  # of a service elsewhere, or of its client
            tell(f"Weights & Biases does not get the scores of step {step:,}: {type(error).__name__}: {error}")
