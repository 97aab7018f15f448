"""Every rank's peak is in the figure: in a bar of its own or, of many, between the ends of its stage's line."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_run import DRY_RUN, ESTIMATE, SUMMARY

from llama_core.planning.memory.host import HostMemory
from llama_core.planning.memory.profile import MemoryProfile
from llama_core.records.files import write_json
from llama_core.units import GIB, MIB
from training_reports.by_rank import MAX_RANKS, draw, memory_by_rank, peaks_by_group
from training_reports.contents import RunContents

sizes = st.lists(st.integers(0, 2**40), min_size=1, max_size=8)


def stages(record, *peaks):
    ranks = [{"phases": {"backward": {"weights": peak}}, "peak_bytes": peak} for peak in peaks]
    return record | {"ranks": ranks}


def write_ranks(run, pp, per_stage, measured):
    write_json(run.plan, {"pp": pp, "num_microbatches": 2 * pp, "dp_replicate": per_stage})
    write_json(run.estimate, stages(ESTIMATE, *range(100, 100 + pp)))
    write_json(run.dry_run, stages(DRY_RUN, *range(200, 200 + pp)))
    write_json(run.training, replace(SUMMARY, memory_by_rank_bytes=measured))
    return RunContents.read(run)


def test_few_ranks_have_bars_of_their_own_beside_the_predictions_of_their_stage(run):
    groups = peaks_by_group(write_ranks(run, 2, 2, (7, 8, 9, 10)))
    assert {label: tuple(map(tuple, peaks.values())) for label, peaks in groups.items()} == {
        "0": ((100,), (200,), (7,)),
        "1": ((100,), (200,), (8,)),
        "2": ((101,), (201,), (9,)),
        "3": ((101,), (201,), (10,)),
    }


def test_many_ranks_are_grouped_by_stage_and_none_is_left_out(run):
    whole = 2 * MAX_RANKS
    contents = write_ranks(run, 4, whole // 4, tuple(range(whole)))
    groups = peaks_by_group(contents)
    assert list(groups) == ["0 to 7", "8 to 15", "16 to 23", "24 to 31"]
    assert [rank for peaks in groups.values() for rank in peaks["measured"]] == list(range(whole))
    (panel,) = memory_by_rank(contents)
    assert "ranks 8 to 15: estimated 101 B, rehearsed 201 B, measured 8 B to 15 B" in panel.summary


@settings(max_examples=20)
@given(st.lists(st.tuples(sizes, sizes, sizes), min_size=1, max_size=5))
def test_bars_reach_the_largest_peak_and_lines_the_smallest(peaks):
    kinds = ("estimated", "rehearsed", "measured")
    groups = {str(number): dict(zip(kinds, own, strict=True)) for number, own in enumerate(peaks)}
    figure = draw(groups, "rank")
    size = GIB if "GiB" in figure.layout.yaxis.title.text else MIB
    assert [trace.name for trace in figure.data] == list(kinds)
    for trace in figure.data:
        own = [groups[label][trace.name] for label in trace.x]
        down = trace.error_y.arrayminus if trace.error_y.arrayminus is not None else [0.0] * len(own)
        assert [height * size for height in trace.y] == pytest.approx([max(values) for values in own])
        assert [(y - d) * size for y, d in zip(trace.y, down, strict=True)] == pytest.approx(
            [min(values) for values in own], abs=1e-3
        )


def test_on_a_cpu_a_stage_is_predicted_with_its_own_checkpoint_copy(run):
    host = HostMemory(
        on_cuda=False,
        num_ranks=2,
        batches_bytes=5,
        offloaded_bytes=0,
        copies_states=True,
        copies_during_steps=True,
    )
    profiles = [
        MemoryProfile({"optimizer": {"weights": 4 * n, "gradients": 4 * n, "moments": 8 * n}}) for n in (10, 20)
    ]
    write_json(run.plan, {"pp": 2, "num_microbatches": 4})
    record = ESTIMATE | {"ranks": [profile.as_dict() for profile in profiles], "host": host.as_dict(profiles[1])}
    write_json(run.estimate, record)
    assert RunContents.read(run).stage_peaks("estimate") == [(16 + 12) * n + 5 for n in (10, 20)]


def test_a_kind_that_no_rank_has_is_named_and_one_rank_needs_no_panel(run):
    assert list(memory_by_rank(RunContents.read(run))) == []
    contents = write_ranks(run, 1, 2, ())
    (panel,) = memory_by_rank(contents)
    assert "No rank's own peak was measured, or another version recorded it." in panel.notes
    run.dry_run.unlink()
    (panel,) = memory_by_rank(RunContents.read(run))
    assert "No dry run yet: dry_run.json has not been written." in panel.notes
