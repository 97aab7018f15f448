"""The table of what passed before each new attempt."""

from llama_core.launch.recoveries import Recovery
from training_reports.goodput import recoveries_table


def test_a_row_for_each_part_says_what_shortens_it():
    columns, rows = recoveries_table(
        [
            Recovery(2, {"in the queue": 60.0, "starting": 5.0}),
            Recovery(3, {"starting": 4.0, "in the first step": 30.0}),
        ]
    )
    assert columns == ["Part", "Before attempt 2", "Before attempt 3", "What shortens it"]
    assert [row[:3] for row in rows] == [
        ["All", "1 min 05 s", "34.0 s"],
        ["In the queue", "1 min 00 s", ""],
        ["Starting", "5.0 s", "4.0 s"],
        ["In the first step", "", "30.0 s"],
    ]
    assert "launch.min_nodes" in rows[1][3]


def test_the_newest_recoveries_are_shown_and_a_run_without_one_has_no_table():
    columns, _ = recoveries_table([Recovery(attempt, {"starting": 1.0}) for attempt in range(2, 12)])
    assert columns[1:-1] == [f"Before attempt {attempt}" for attempt in range(6, 12)]
    assert recoveries_table([]) is None
