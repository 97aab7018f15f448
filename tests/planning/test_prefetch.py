from hypothesis import given
from hypothesis import strategies as st

from llama_core.planning.memory.prefetch import Prefetch, Prefetches
from llama_core.schedules.actions import Kind
from llama_core.schedules.one_way import interleaved, one_f_one_b

NOTHING = Prefetch()


def follow(actions, *, has_root=False, single_groups=(), closed=()):
    prefetches = Prefetches(has_root=has_root, single_groups=single_groups, closed=())
    return [prefetches.enter(action.stage, action.kind) for action in actions]


@given(st.booleans(), st.integers(1, 8))
def test_with_one_microbatch_in_flight_later_backwards_prefetch_only_without_a_root(has_root, num_microbatches):
    """On the last rank of 1F1B a backward begins as soon as its forward ends."""
    found = follow(one_f_one_b(1, num_microbatches).actions[0], has_root=has_root)
    assert found[:2] == [NOTHING, NOTHING]
    again = NOTHING if has_root else Prefetch(ahead=0)
    assert found[3::2] == [again] * (num_microbatches - 1)


@given(st.integers(2, 4), st.integers(1, 3), st.integers(2, 3), st.booleans())
def test_a_prefetched_stage_waits_until_it_runs(num_ranks, rounds, num_chunks, has_root):
    actions = interleaved(num_ranks, rounds * num_ranks, num_chunks).actions[0]
    found = follow(actions, has_root=has_root)
    for (action, before), after in zip(zip(actions, found, strict=True), found[1:], strict=False):
        fetched = set() if before.ahead is None else {before.ahead}
        assert after.waiting >= (before.waiting - {action.stage}) | fetched
        assert before.ahead not in before.waiting - {action.stage}


@given(st.integers(2, 8))
def test_a_layer_in_use_is_not_prefetched(num_microbatches):
    actions = one_f_one_b(2, num_microbatches).actions[0]
    assert follow(actions, single_groups=(0,)) == [NOTHING] * len(actions)


def test_without_a_root_a_backward_prefetches_the_stage_that_ran_before_its_forward():
    prefetches = Prefetches(has_root=False, single_groups=(), closed=())
    for stage in (0, 1):
        prefetches.enter(stage, Kind.FORWARD)
    assert prefetches.enter(1, Kind.BACKWARD) == Prefetch(ahead=0)
    assert prefetches.enter(0, Kind.BACKWARD) == Prefetch(waiting=frozenset({0}))


def test_with_a_root_a_backward_begins_with_the_stage_of_the_newest_forward():
    prefetches = Prefetches(has_root=True, single_groups=(), closed=())
    for stage in (1, 0):
        prefetches.enter(stage, Kind.FORWARD)
    assert prefetches.enter(1, Kind.BACKWARD) == Prefetch(waiting=frozenset({0}))
