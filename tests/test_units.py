import pytest

from llama_core.units import format_bytes, format_count, format_duration, listed, parse_count, parse_whole_count


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (80 * 10**9, "74.51 GiB"), (2**41, "2.00 TiB")],
)
def test_bytes_are_written_in_binary_units(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(("count", "text"), [(999, "999"), (8_030_261_248, "8.03B"), (50_143_488, "50.14M")])
def test_counts_are_written_in_decimal_units(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.21, "3.2 s"), (59.99, "60.0 s"), (61, "1 min 01 s"), (7325, "2 h 02 min")]
)
def test_durations_are_written_as_people_say_them(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("32k", 32_000), ("32K", 32_000), ("32Ki", 32_768), ("0.5mi", 2**19), ("1.1B", 1_100_000_000), ("3e4", 30_000)],
)
def test_a_count_with_a_suffix_is_exact(text, count):
    assert parse_whole_count(text) == count
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "k", "-2k", "0k", "0.0005k", "12q", "nan", "infk", "1e400", "0x10k", "1e999999999"]
)
def test_what_is_no_count_is_refused(text):
    with pytest.raises(ValueError):
        parse_whole_count(text)


def test_of_a_long_list_the_first_items_are_told_and_the_number_of_the_others():
    assert [listed(range(number), 2) for number in range(4)] == ["", "0", "0 and 1", "0 and 1 and 1 more"]
    assert listed("abc", 1, between="; ") == "a; 2 more"
