"""The strips of ranks that were behind their peers."""

from dataclasses import replace

from llama_core.records.stragglers import Straggler
from training_reports.slow_ranks import draw, spans_by_rank

SLOW = Straggler(1, "n1", "a device", "product", "takes 3 ms, and 1 ms on its peers", since_step=20, step=50)
OVER = replace(SLOW, since_step=80, step=110, is_over=True)


def test_a_rank_is_behind_until_it_has_caught_up_or_to_the_newest_step():
    other = replace(SLOW, rank=2, signal="core wait", since_step=60, step=90)
    assert spans_by_rank([SLOW, OVER, other], 200) == {
        "rank 1 on n1": [(20, 80, SLOW.finding)],
        "rank 2 on n1": [(60, 200, SLOW.finding)],
    }


def test_a_rank_that_is_behind_again_or_by_two_signals_has_a_strip_for_each():
    again = replace(SLOW, since_step=150, step=180)
    waits = replace(SLOW, signal="core wait", since_step=160, step=190)
    spans = spans_by_rank([SLOW, OVER, again, waits], 200)["rank 1 on n1"]
    assert [span[:2] for span in spans] == [(20, 80), (150, 200), (160, 200)]


def test_a_strip_begins_and_ends_where_the_rank_was_behind():
    (bars,) = draw(spans_by_rank([SLOW, OVER], 200), 200).data
    assert (list(bars.y), list(bars.base), list(bars.x)) == (["rank 1 on n1"], [20], [60])
