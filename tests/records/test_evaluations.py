"""What checkpoints have scored, in the run's directory."""

from dataclasses import replace

import pytest

from llama_core.errors import RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import Score, read_scores, write_scores

SCORE = Score(
    step=100,
    tokens=4096,
    task="arithmetic",
    metric="acc",
    value=0.25,
    standard_error=0.01,
    higher_is_better=True,
    examples=40,
    version="1.0",
    settings="",
    time="2026-01-01T00:00:00+00:00",
)


def test_scores_come_back_by_task_metric_and_step(tmp_path):
    run = RunDirectory(tmp_path)
    assert read_scores(run) == []
    later = replace(SCORE, step=200, standard_error=None)
    loss = replace(SCORE, task="wiki", metric="loss", higher_is_better=False)
    few_shot = replace(SCORE, settings="5-shot")
    for scores in ([later], [SCORE, replace(SCORE, metric="acc_norm")], [loss], [few_shot]):
        write_scores(run, scores)
    assert read_scores(run) == [SCORE, later, replace(SCORE, metric="acc_norm"), few_shot, loss]


def test_a_task_evaluated_again_replaces_its_score(tmp_path):
    run = RunDirectory(tmp_path)
    write_scores(run, [SCORE])
    write_scores(run, [replace(SCORE, value=0.5)])
    assert [score.value for score in read_scores(run)] == [0.5]


@pytest.mark.parametrize("content", [b"", b"PAR1 and nothing more"])
def test_a_damaged_file_is_named(tmp_path, content):
    run = RunDirectory(tmp_path)
    path = write_scores(run, [SCORE])
    path.write_bytes(content)
    with pytest.raises(RunDirectoryError, match=path.name):
        read_scores(run)
