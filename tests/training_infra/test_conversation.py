"""A conversation in a terminal and with the lines of a file: what is asked, shown and survived."""

import io
import os
import pty

import pytest

from llama_core.errors import DataError
from training_infra.conversation import converse


@pytest.fixture
def typed(monkeypatch):
    """Return a function that types into a terminal, which becomes standard input."""
    parent, child = pty.openpty()
    terminal = os.fdopen(child)
    monkeypatch.setattr("sys.stdin", terminal)
    yield lambda keys: os.write(parent, keys)
    terminal.close()
    os.close(parent)


@pytest.fixture
def given(monkeypatch):
    """Return a function that puts a text on standard input."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))


class Model:
    """Answers each message with itself and an exclamation mark, or raises an error in the place of the mark."""

    def __init__(self, **instead):
        self.instead = instead
        self.asked = []
        self.num_ended = 0

    def answer(self, message):
        self.asked.append(message)
        try:
            yield message
            if message in self.instead:
                raise self.instead[message]
            yield "!"
        finally:
            self.num_ended += 1


def test_the_end_of_input_ends_a_conversation_in_a_terminal(typed, capsys):
    typed(b"one\n\n two \n\x04")
    converse(Model().answer)
    assert capsys.readouterr().out == "one!\ntwo!\n\n"


def test_an_interrupt_ends_the_answer_and_not_the_conversation_in_a_terminal(typed, capsys):
    typed(b"stop\nagain\n\x04")
    model = Model(stop=KeyboardInterrupt())
    converse(model.answer)
    assert model.asked == ["stop", "again"]
    assert capsys.readouterr() == ("stop\nagain!\n\n", "")


def test_an_interrupt_while_a_piece_is_shown_ends_the_answer_too(typed, monkeypatch):
    def interrupted(text):
        raise KeyboardInterrupt

    monkeypatch.setattr("training_infra.lines.print_text", interrupted)
    typed(b"one\ntwo\n\x04")
    model = Model()
    converse(model.answer)
    assert (model.asked, model.num_ended) == (["one", "two"], 2)


def test_each_line_of_a_file_is_a_message(given, capsys):
    given("one\n\ntwo é\r\nthree".encode())
    converse(Model().answer)
    assert capsys.readouterr().out == "one!\ntwo é!\nthree!\n"


def test_an_interrupt_ends_a_conversation_with_a_file(given):
    given(b"stop\nnever\n")
    model = Model(stop=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        converse(model.answer)
    assert model.asked == ["stop"]


def test_a_message_that_cannot_be_answered_is_one_line_and_the_next_is_answered(given, capsys):
    given(b"long\nshort\n")
    converse(Model(long=DataError("too long")).answer)
    shown = capsys.readouterr()
    assert shown.err == "error: too long\n"
    assert shown.out.endswith("short!\n")


def test_a_message_that_is_no_utf_8_reaches_the_check_of_texts(given):
    given(b"\xff\n")
    model = Model()
    converse(model.answer)
    assert model.asked == ["\udcff"]
