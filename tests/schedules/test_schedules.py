"""Schedules run everything once, in an order that can run, and their messages never deadlock."""

from collections import Counter, defaultdict
from itertools import accumulate, product

import pytest
from any_schedule import CHIMERAS, any_schedule, build, chimera_schedules, even_ranks, microbatches, ranks
from hypothesis import given
from hypothesis import strategies as st

from llama_core.errors import PlanError
from llama_core.schedules.actions import Action, Kind
from llama_core.schedules.registry import build_schedule, schedule_names

MADE_BY = {Kind.SEND_F: {Kind.FORWARD}, Kind.SEND_B: {Kind.BACKWARD, Kind.INPUT_GRADIENT}}
PARTNER = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}

CHIMERA_4_4 = [
    "dF0 dF1 uF2 uB2 uF3 uB3 dB0 dB1",
    "dF0 uF2 dF1 uF3 uB2 dB0 uB3 dB1",
    "uF2 dF0 uF3 dF1 dB0 uB2 dB1 uB3",
    "uF2 uF3 dF0 dB0 dF1 dB1 uB2 uB3",
]
DOUBLING_4_8 = [
    "dF0 dF1 uF0 uB0a uB0b uF1 uB1a uB1b dB0a dB0b dB1a dB1b",
    "dF0 uF0 dF1 uF1 uB0a uB0b dB0a uB1a uB1b dB0b dB1a dB1b",
    "uF0 dF0 uF1 dF1 dB0a dB0b uB0a dB1a dB1b uB0b uB1a uB1b",
    "uF0 uF1 dF0 dB0a dB0b dF1 dB1a dB1b uB0a uB0b uB1a uB1b",
]


def in_letters(actions, rank):
    """Spell Chimera's actions on ``rank`` by direction, kind and microbatch."""
    return " ".join(f"{'d' if action.stage == rank else 'u'}{action.kind}{action.microbatch}" for action in actions)


def in_pairs(actions, rank):
    """Spell four pairs, two down and two up: both forwards of a pair as one, its backwards as a and b."""
    words = []
    for action in actions:
        direction = "d" if action.stage == rank else "u"
        pair, second = divmod(action.microbatch % 4, 2)
        part = "" if action.kind is Kind.FORWARD else "ab"[second]
        words.append(f"{direction}{action.kind}{pair}{part}")
    return " ".join(dict.fromkeys(words))


def expected_runs(schedule):
    """Return how often each (stage, microbatch) must run each kind; a schedule may split its backwards."""
    kinds = {kind for actions in schedule.actions for kind in {action.kind for action in actions}}
    sizes = range(schedule.num_stages), range(schedule.num_microbatches)
    return Counter(Action(stage, kind, microbatch) for stage, microbatch in product(*sizes) for kind in kinds)


def partner(message):
    """Return the other half of a message."""
    kind, step = PARTNER[message.kind]
    return Action(message.stage + step, kind, message.microbatch)


def needs_message(computation, num_stages):
    """Return whether a computation uses a received tensor where every stage has a rank of its own."""
    return computation.stage > 0 if computation.kind is Kind.FORWARD else computation.stage < num_stages - 1


def needs(action, last_stage):
    """Return the tensors that a rank must have before it takes ``action``."""
    sides = {
        Kind.FORWARD: {"input"} if action.stage else set(),
        Kind.BACKWARD: {"output"} if action.stage == last_stage else {"output", "output gradient"},
        Kind.INPUT_GRADIENT: {"output"} if action.stage == last_stage else {"output", "output gradient"},
        Kind.WEIGHT_GRADIENT: {"input gradient"},
        Kind.SEND_F: {"output"},
        Kind.SEND_B: {"input gradient"},
    }
    return {(side, action.stage, action.microbatch) for side in sides.get(action.kind, set())}


def brings(action):
    """Return the tensors that a rank has after ``action``, also for a neighbouring stage of the same rank."""
    gradients = [("input gradient", 0), ("output gradient", -1)]
    sides = {
        Kind.FORWARD: [("output", 0), ("input", 1)],
        Kind.BACKWARD: gradients,
        Kind.INPUT_GRADIENT: gradients,
        Kind.RECV_F: [("input", 0)],
        Kind.RECV_B: [("output gradient", 0)],
    }
    return {(side, action.stage + step, action.microbatch) for side, step in sides.get(action.kind, [])}


def run_with_blocking_sends(schedule):
    """Return the actions that each rank did not reach, and the tensors it lacked when it took an action.

    Every direction between two ranks has a queue, at both of its ends. A receive joins its queue and does not block. A
    send blocks until its receive has joined, and must find it at the head. So whoever waits less does not deadlock
    either: with sends that do not block, or that are waited for later.
    """
    lists = [list(actions) for actions in schedule.with_communication()]
    here = [set() for _ in lists]
    queues = defaultdict(list)
    too_early = []
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while actions:
                action = actions[0]
                if action.kind in MADE_BY:
                    receive = partner(action)
                    queue = queues[rank, schedule.rank_of(receive.stage, receive.microbatch)]
                    if not queue or queue[0] != receive:
                        break
                    here[schedule.rank_of(receive.stage, receive.microbatch)] |= brings(queue.pop(0))
                elif action.kind in PARTNER:
                    send = partner(action)
                    queues[schedule.rank_of(send.stage, send.microbatch), rank].append(action)
                elif needs(action, schedule.num_stages - 1) - here[rank]:
                    break  # it waits for a receive
                else:
                    here[rank] |= brings(action)
                too_early += needs(action, schedule.num_stages - 1) - here[rank]
                actions.pop(0)
                moved = True
    return lists, too_early


@given(st.integers(0, 99), st.sampled_from(Kind), st.integers(0, 999))
def test_a_written_action_reads_back_unchanged(stage, kind, microbatch):
    action = Action(stage, kind, microbatch)
    assert Action.parse(str(action)) == action


def test_an_action_is_spelled_as_in_torch():
    assert str(Action(0, Kind.FORWARD, 3)) == "0F3"
    assert str(Action(1, Kind.RECV_B, 12)) == "1RECV_B12"


@pytest.mark.parametrize("text", ["", "F3", "0F", "0X3", "0F3 ", "0SEND3"])
def test_text_that_is_not_an_action_is_refused_with_an_example(text):
    with pytest.raises(PlanError, match="such as 0F3"):
        Action.parse(text)


@given(any_schedule)
def test_every_stage_runs_every_microbatch_once_in_each_of_its_kinds(schedule):
    assert Counter(action for actions in schedule.actions for action in actions) == expected_runs(schedule)


@given(any_schedule)
def test_forward_and_backward_of_a_stage_run_on_one_rank_that_hosts_it(schedule):
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            assert schedule.rank_of(action.stage, action.microbatch) == rank
            assert action.stage in schedule.stages_of(rank)


@given(any_schedule)
def test_every_stage_lives_on_as_many_ranks_as_there_are_replicas(schedule):
    hosts = Counter(stage for rank in range(schedule.num_ranks) for stage in schedule.stages_of(rank))
    assert set(hosts) == set(range(schedule.num_stages))
    assert set(hosts.values()) == {schedule.num_replicas}


@given(any_schedule)
def test_blocking_sends_never_deadlock_and_deliver_everything_before_its_use(schedule):
    left, too_early = run_with_blocking_sends(schedule)
    assert left == [[]] * schedule.num_ranks
    assert too_early == []


@given(any_schedule)
def test_messages_do_not_change_the_order_of_computations(schedule):
    computed = tuple(
        tuple(action for action in actions if action.kind not in PARTNER) for actions in schedule.with_communication()
    )
    assert computed == schedule.actions


@given(any_schedule)
def test_a_rank_receives_messages_in_the_order_its_peer_sends_them(schedule):
    lists = schedule.with_communication()
    receiver = {action: rank for rank, actions in enumerate(lists) for action in actions if "RECV" in action.kind}
    sender = {action: rank for rank, actions in enumerate(lists) for action in actions if "SEND" in action.kind}
    assert {partner(send) for send in sender} == set(receiver)
    for one, other in product(range(schedule.num_ranks), repeat=2):
        sent = [a for a in lists[one] if a in sender and receiver[partner(a)] == other]
        received = [a for a in lists[other] if a in receiver and sender[partner(a)] == one]
        assert [partner(send) for send in sent] == received


@given(any_schedule)
def test_nothing_is_computed_between_a_result_and_its_send(schedule):
    for actions in schedule.with_communication():
        computed = accumulate(actions, lambda latest, action: latest if action.kind in PARTNER else action)
        sends = [(made, send) for made, send in zip(computed, actions, strict=True) if send.kind in MADE_BY]
        for made, send in sends:
            assert (made.stage, made.microbatch) == (send.stage, send.microbatch)
            assert made.kind in MADE_BY[send.kind]


@given(any_schedule)
def test_a_tensor_can_arrive_during_the_computation_before_its_use(schedule):
    for actions in schedule.with_communication():
        computations = [action for action in actions if action.kind not in PARTNER]
        before_first = set(actions[: actions.index(computations[0])])
        posted = dict.fromkeys(before_first, -1)
        started = -1
        for action in actions[len(before_first) :]:
            started += action.kind not in PARTNER
            posted[action] = started
        for receive in (action for action in actions if "RECV" in action.kind):
            use = next(
                place
                for place, action in enumerate(computations)
                if (action.stage, action.microbatch) == (receive.stage, receive.microbatch)
                and (action.kind is Kind.FORWARD) == (receive.kind is Kind.RECV_F)
            )
            assert posted[receive] <= max(-1, use - 2)


@given(st.sampled_from(["gpipe", "1f1b"]), ranks, microbatches)
def test_a_rank_expects_two_tensors_at_most(name, num_ranks, num_microbatches):
    for actions in build(name, num_ranks, num_microbatches).with_communication():
        used = [action.kind in {Kind.FORWARD, Kind.BACKWARD} and needs_message(action, num_ranks) for action in actions]
        expected = accumulate(("RECV" in action.kind and 1) or -use for action, use in zip(actions, used, strict=True))
        assert max(expected, default=0) <= 2


@given(ranks, microbatches)
def test_stages_on_one_rank_hand_over_without_a_message(num_ranks, num_microbatches):
    turn = build("zbv", num_ranks, num_microbatches).with_communication()[-1]
    kinds = {stage: {action.kind for action in turn if action.stage == stage} for stage in (num_ranks - 1, num_ranks)}
    assert not kinds[num_ranks - 1] & {Kind.SEND_F, Kind.RECV_B}
    assert not kinds[num_ranks] & {Kind.RECV_F, Kind.SEND_B}


def test_chimera_of_one_unit_is_the_published_one():
    schedule = build("chimera", 4, 4)
    assert [in_letters(actions, rank) for rank, actions in enumerate(schedule.actions)] == CHIMERA_4_4


def test_forward_doubling_of_one_unit_is_the_published_one():
    schedule = build("chimera_doubling", 4, 8)
    assert [in_pairs(actions, rank) for rank, actions in enumerate(schedule.actions)] == DOUBLING_4_8


@given(even_ranks, st.integers(1, 4))
def test_chimera_follows_its_table_of_slots(num_ranks, num_units):
    d, schedule = num_ranks, build("chimera", num_ranks, num_ranks * num_units)
    for p, actions in enumerate(schedule.actions):
        table = {}
        for u, j in product(range(num_units), range(d // 2)):
            down, up = u * d + j, u * d + d // 2 + j
            table[2 * d * u + p + 2 * j] = Action(p, Kind.FORWARD, down)
            table[2 * d * u + 2 * d - 1 - p + 2 * j] = Action(p, Kind.BACKWARD, down)
            table[2 * d * u + d - 1 - p + 2 * j] = Action(d - 1 - p, Kind.FORWARD, up)
            table[2 * d * u + d + p + 2 * j] = Action(d - 1 - p, Kind.BACKWARD, up)
        assert [table[slot] for slot in sorted(table)] == list(actions)


@given(even_ranks, microbatches)
def test_an_incomplete_unit_sends_the_odd_microbatch_down(num_ranks, num_microbatches):
    schedule = build("chimera", num_ranks, num_microbatches)
    last_unit = range((num_microbatches - 1) // num_ranks * num_ranks, num_microbatches)
    down = [microbatch for microbatch in last_unit if schedule.rank_of(0, microbatch) == 0]
    assert down == list(last_unit)[: -(-len(last_unit) // 2)]


@given(even_ranks, microbatches)
def test_halving_is_doubling_over_the_halves(num_ranks, num_microbatches):
    halves = build("chimera_halving", num_ranks, num_microbatches)
    pairs = build("chimera_doubling", num_ranks, 2 * num_microbatches)
    assert halves.actions == pairs.actions
    assert (halves.num_microbatches, halves.parts_per_microbatch) == (2 * num_microbatches, 2)
    assert pairs.parts_per_microbatch == 1


@given(even_ranks, microbatches)
def test_the_halves_of_a_microbatch_go_the_same_way(num_ranks, num_microbatches):
    schedule = build("chimera_halving", num_ranks, num_microbatches)
    for microbatch in range(num_microbatches):
        assert schedule.rank_of(0, 2 * microbatch) == schedule.rank_of(0, 2 * microbatch + 1)


@given(chimera_schedules)
def test_every_rank_of_chimera_hosts_a_down_stage_and_an_up_stage(schedule):
    assert [schedule.stages_of(p) for p in range(schedule.num_ranks)] == [
        (p, schedule.num_ranks - 1 - p) for p in range(schedule.num_ranks)
    ]


def test_every_name_builds():
    chunks = {"interleaved": 2}
    built = [
        build_schedule(name, num_ranks=4, num_microbatches=8, num_chunks=chunks.get(name, 1)).name
        for name in schedule_names()
    ]
    assert built == list(schedule_names())


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        (("chimaera", 4, 4, 1), "schedule='chimaera' is not one of gpipe, .*; did you mean 'chimera'"),
        (("1f1b", 0, 4, 1), "num_ranks=0 is not at least 1"),
        (("1f1b", 4, 0, 1), "num_microbatches=0 is not at least 1"),
        (("interleaved", 4, 4, 0), "num_chunks=0 is not at least 1"),
        (("interleaved", 4, 4, 1), "num_chunks=1 interleaves nothing; use at least 2, or schedule=1f1b"),
        (("interleaved", 4, 10, 2), "num_microbatches=10 is not a multiple of the 4 ranks .*; use 8 or 12"),
        (("interleaved", 4, 3, 2), "num_microbatches=3 is not a multiple of the 4 ranks .*; use 4$"),
        (("gpipe", 4, 4, 2), "num_chunks=2 needs schedule=interleaved; use 1 with gpipe"),
        *(((name, 3, 4, 1), "num_ranks=3 is odd, .*; use 2 or 4") for name in CHIMERAS),
        (("chimera", 1, 4, 1), "num_ranks=1 is odd, .*; use 2$"),
    ],
)
def test_sizes_that_a_schedule_cannot_take_are_refused_with_those_it_can(sizes, complaint):
    with pytest.raises(PlanError, match=complaint):
        build(*sizes)
