"""The scores of a run's checkpoints."""

from dataclasses import asdict

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from llama_core.chain import steps
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import Score
from tasks.announce import unless_the_server_is_away


@task(name="evaluate", cache_policy=NO_CACHE)
def evaluate(run: RunDirectory) -> list[Score]:
    """Evaluate the checkpoints that still wait for it, and show the scores of all as a table."""
    scores = steps.evaluate(run)
    if scores:
        with unless_the_server_is_away():
            create_table_artifact([asdict(score) for score in scores], key="evaluations")
    return scores
