"""What ranks do together grows as the page says, by what is counted and not by the clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scale import LAWS, checkpoint_files, facts, growth, index, stragglers


@given(
    law=st.sampled_from(sorted(LAWS)),
    constant=st.floats(0, 10),
    slope=st.floats(1, 100),
    sizes=st.sampled_from([(16, 32, 64), (8, 32, 128), (512, 2048, 8192)]),
)
def test_a_law_without_noise_is_found_and_computed(law, constant, slope, sizes):
    values = [constant + slope * LAWS[law](size) + (law == "constant") for size in sizes]
    found = growth(sizes, values)
    expected = constant + slope * LAWS[law](8192) + (law == "constant")
    assert found.at(8192) == pytest.approx(expected, rel=0.4 if law == "log ranks" else 0.2)


def test_noise_does_not_change_a_law():
    assert growth((512, 2048, 8192), (2.3, 4.8, 32.0)).law == "ranks"
    assert growth((512, 2048, 8192), (8.8, 7.7, 7.1)).law == "constant"
    assert growth((512, 2048, 8192), (1.0, 17.0, 240.0)).law == "ranks²"


def test_only_a_look_at_stragglers_makes_a_step_carry_more_with_more_ranks():
    few, many = stragglers(64), stragglers(256)
    after_look = "bytes that travel with a step after a look at stragglers"
    assert (few[after_look], many[after_look]) == (8 + 64 * 16, 8 + 256 * 16)
    assert few["with any other step"] == many["with any other step"] == 8


@pytest.mark.parametrize(
    ("measured", "name"),
    [
        (facts, "facts that each rank gets at the start, bytes"),
        (facts, "environment.json, bytes"),
        (checkpoint_files, "its manifest, bytes"),
        (checkpoint_files, "files of a checkpoint"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_records_grow_no_faster_than_the_ranks(measured, name):
    assert measured(256)[name] <= 4 * measured(64)[name] * 1.05


def test_the_index_of_a_checkpoint_grows_with_the_ranks_of_a_shard_group():
    few, many = (index(size)["its parts in the index, bytes"] for size in (2, 8))
    assert many < 4 * few * 1.05
