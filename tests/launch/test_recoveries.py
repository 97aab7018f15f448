"""What passes between the last step of an attempt and the first of the next."""

from llama_core.launch.attempts import RankExit
from llama_core.launch.recoveries import recoveries
from llama_core.records.activity import IN_PLACE, Activity
from llama_core.records.goodput import TakenStep

FIRST = [
    Activity("waiting in the queue", 10.0, "queue"),
    Activity("starting", 20.0),
    Activity("in the first step", 30.0, "steps"),
]


def next_attempt(start):
    """What the first rank of a restarted job does, which has queued since the attempt before."""
    return [
        Activity("waiting in the queue", 0.0, "queue"),
        Activity("starting", start),
        Activity("waiting for the other ranks", start + 8),
        Activity("reading the weights", start + 10),
        Activity("in step 4", start + 40, "steps"),
    ]


def steps(*ends):
    return [TakenStep(ended, 5.0, 0.0, counts=True) for ended in ends]


def ended(rank, time):
    return RankExit(rank, 1, None, oom_killed=False, stopped=rank > 0, num_ranks=2, ended_at=time)


def test_the_parts_of_a_recovery_add_up_to_the_time_between_two_steps():
    [found] = recoveries([*FIRST, *next_attempt(100.0)], steps(35, 40, 152, 157), [ended(1, 58.0), ended(0, 52.0)])
    assert found.attempt == 2
    assert found.parts == {
        "until a rank ended": 12.0,
        "until all ranks had ended": 6.0,
        "in the queue": 42.0,
        "starting": 8.0,
        "waiting for the other ranks": 2.0,
        "reading the weights": 30.0,
        "in the first step": 12.0,
    }
    assert found.seconds == 152 - 40


def test_a_run_that_somebody_submitted_again_was_in_the_queue_only_since_then():
    queued, *rest = next_attempt(100.0)
    [found] = recoveries([*FIRST, Activity("", 90.0, queued.part), *rest], steps(35, 40, 152), [ended(0, 52.0)])
    assert found.parts["until it was submitted again"] == 90 - 52
    assert found.parts["in the queue"] == 100 - 90
    assert found.seconds == 152 - 40


def test_ranks_that_their_job_started_again_were_in_no_queue():
    _, *rest = next_attempt(100.0)
    again = [Activity(IN_PLACE, 100.0, "queue"), *rest]
    [found] = recoveries([*FIRST, *again], steps(35, 40, 152), [ended(0, 52.0)])
    assert not {"in the queue", "until it was submitted again"}.intersection(found.parts)
    assert found.parts["until its job started ranks again"] == 100 - 52
    assert found.seconds == 152 - 40


def test_an_attempt_that_saved_and_stopped_is_recovered_from_its_end():
    stopped = Activity("ended", 50.0, "stopped")
    [found] = recoveries([*FIRST, stopped, *next_attempt(100.0)], steps(35, 40, 152), [ended(0, 51.0)])
    assert found.parts["until a rank ended"] == 1.0
    assert found.seconds == 152 - 50


def test_attempts_without_a_step_and_without_records_of_their_ranks_have_what_is_known():
    second, third = recoveries([*FIRST, *next_attempt(100.0)[:3], *next_attempt(200.0)], steps(35, 252), [])
    assert second.parts == {"in the queue": 65.0, "starting": 8.0, "waiting for the other ranks": 0.0}
    assert third.seconds == 252 - 108
    assert list(recoveries(FIRST, steps(35), [ended(0, 36.0)])) == []


def test_clocks_of_two_machines_that_differ_give_no_negative_time():
    [found] = recoveries([*FIRST, *next_attempt(35.0)], steps(35, 40, 90), [])
    assert min(found.parts.values()) >= 0.0
