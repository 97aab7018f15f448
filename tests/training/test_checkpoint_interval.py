import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_trainer import trainer

from llama_core.config.run import RunConfig
from llama_core.records.checkpoints import checkpoint_step, list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json
from llama_core.training.parts import checkpoint_interval
from llama_core.training.parts.checkpoint_interval import CheckpointInterval, best_interval

seconds = st.floats(1e-3, 1e6)


def lost(every, save, mtbf):
    """The share of the time that goes to saves, and to half an interval for each failure."""
    return save / every + every / (2 * mtbf)


@given(seconds, seconds, st.floats(0.1, 10))
def test_no_other_interval_loses_less(save, mtbf, factor):
    best = best_interval(save, mtbf)
    assert lost(best, save, mtbf) <= lost(factor * best, save, mtbf) * (1 + 1e-9)


def test_more_nodes_and_longer_steps_mean_fewer_steps_between_checkpoints():
    def chosen(num_ranks=None, **launch):
        settings = {"training": {"checkpoint_every": "auto"}, "launch": {"node_mtbf_hours": 1000.0} | launch}
        settings["parallel"] = {"gpus": launch.get("nodes", 1)}
        interval = CheckpointInterval(RunConfig.from_mapping(settings), num_ranks or settings["parallel"]["gpus"])
        return interval.choose(100, save_seconds=2.0, step_seconds=10.0)

    assert chosen().num_steps == 379  # sqrt(2 * 2 s * 3.6e6 s) / 10 s
    assert chosen(nodes=4, launcher="slurm").num_steps == 190
    assert chosen(1, nodes=4, min_nodes=1, launcher="slurm").num_steps == 379
    assert (
        "fails every 250 h 00 min (launch.node_mtbf_hours=1000, nodes: 4)" in chosen(nodes=4, launcher="slurm").reason
    )


def test_an_automatic_run_saves_when_it_chose_to_and_continues_with_its_choice(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path / "run")
    run.create()
    monkeypatch.setattr(checkpoint_interval, "FIRST_STEPS", 2)
    monkeypatch.setattr(checkpoint_interval, "best_interval", lambda save, mtbf: 0.0)  # after every step from then on
    trainer(run, steps=5, checkpoint_every="auto", keep_checkpoints=9).fit()
    assert [checkpoint_step(path) for path in list_checkpoints(run)] == [2, 3, 4, 5]
    assert read_json(run.checkpoint_interval)["num_steps"] == 1
    assert trainer(run, steps=9, checkpoint_every="auto").saves.is_due(6)


@pytest.mark.parametrize("value", [-1, "often"])
def test_a_wrong_interval_is_one_line(value):
    with pytest.raises(
        ValueError, match=r"training\.checkpoint_every=.*: input should be 'auto' or an integer of at least 0"
    ):
        RunConfig.from_mapping({"training": {"checkpoint_every": value}})
