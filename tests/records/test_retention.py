import shutil

from hypothesis import given
from hypothesis import strategies as st

from llama_core.records.checkpoints import checkpoint_name, list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.retention import Retention, by_held_out_loss

LOSSES = st.none() | st.floats(1, 3) | st.sampled_from([2.0, float("nan"), float("inf")])


def save(run, step, **state):
    path = run.checkpoints / checkpoint_name(step)
    path.mkdir(parents=True)
    write_json(path / "state.json", {"step": step, **state}, durable=False)


def keep_only(run, retention):
    for path in set(list_checkpoints(run)) - retention.kept(list_checkpoints(run)):
        shutil.rmtree(path)


def steps_on_disk(run):
    return [int(path.name[-8:]) for path in list_checkpoints(run)]


def is_loss(loss):
    return loss is not None and loss < 10


@given(
    saved=st.lists(st.tuples(st.integers(1, 300), LOSSES), min_size=1, max_size=12),
    newest=st.integers(1, 3),
    best=st.integers(0, 3),
    every=st.integers(0, 400),
    by=st.sampled_from(["", "code"]),
)
def test_what_is_left_on_disk_is_the_newest_the_best_and_the_milestones_of_all_ever_saved(
    tmp_path_factory, saved, newest, best, every, by
):
    """However many were deleted before each decision, which sees only those left."""
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    tokens = [0]
    for step, (more, loss) in enumerate(saved, start=1):
        tokens.append(tokens[-1] + more)
        losses = {"eval_losses": {"code": loss}} if by and loss is not None else {"eval_loss": loss}
        save(run, step, tokens=tokens[-1], **losses)
        keep_only(run, Retention(newest, best, by, every))

    steps = range(1, len(saved) + 1)
    expected = set(steps[-newest:])
    expected |= set(sorted((s for s in steps if is_loss(saved[s - 1][1])), key=lambda s: (saved[s - 1][1], s))[:best])
    multiples = range(every, tokens[-1] + 1, every) if every else ()
    expected |= {next(s for s in steps if tokens[s] >= multiple) for multiple in multiples}
    assert steps_on_disk(run) == sorted(expected)


def test_a_checkpoint_that_cannot_be_read_is_none_of_the_best(tmp_path):
    run = RunDirectory(tmp_path)
    save(run, 1, eval_loss=1.0)
    save(run, 2, eval_loss="low")
    save(run, 3, eval_loss=2.0)
    (run.checkpoints / checkpoint_name(1) / "state.json").write_text("{")
    assert [path.name for path in by_held_out_loss(list_checkpoints(run), "")] == [checkpoint_name(3)]


@given(
    newest=st.integers(1, 3),
    best=st.integers(0, 3),
    every=st.integers(1, 400),
    interval=st.integers(1, 5),
    num_steps=st.integers(1, 30),
)
def test_there_are_never_more_checkpoints_than_planned(newest, best, every, interval, num_steps):
    step_tokens = 100
    retention = Retention(newest, best, "", every)
    milestones = {step * step_tokens // every for step in range(interval, num_steps + 1, interval)} - {0}
    most = retention.most(num_steps * step_tokens, num_steps // interval + 1)
    assert newest + best + len(milestones) + 1 <= most
