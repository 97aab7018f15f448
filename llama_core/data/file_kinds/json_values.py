"""Files of JSON that is not one value a line: an array of records, or records one after another over any lines.

Only the text of one value is held at a time, and what has been read with it.
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path

from llama_core.data.files.raw_record import RawRecord, already_read, unusable
from llama_core.data.files.source_file import MAX_BYTES_OF_RECORD, Digest, SourceFile, Stream, opened, too_large
from llama_core.data.formats import FieldNames
from llama_core.errors import DataError, why_unreadable
from llama_core.units import MIB

_SPACE = re.compile(r"[ \t\r\n]*")
_REST_OF_NUMBER = re.compile(r"[0-9.eE+-]*\Z")
"""What may belong to a number before it: of a text that ends in ``0.``, the decoder takes 0 and leaves the point."""
_UNTERMINATED = "Unterminated string"
"""How the decoder's error begins if a string has no end."""
_LONGEST_LITERAL = len("-Infinity")
"""No part of JSON but a string is longer and cannot be read until it is complete."""


def json_records(file: SourceFile, names: FieldNames, content: Digest | None) -> Iterator[RawRecord]:
    """Yield the elements of the array in a file, or else the values in it one after another.

    Raises:
        DataError: if the array is not valid JSON, or a value is too large.
    """
    with opened(file, content) as stream:
        values = _Values(file.path, stream)
        yield from _array(values) if values.next_character() == "[" else _sequence(values)


def _array(values: "_Values") -> Iterator[RawRecord]:
    values.step()
    if values.next_character() == "]":
        values.step()
    else:
        yield from _elements(values)
    if values.next_character():
        raise DataError(f"{values.path}:{values.line}: something follows the array; keep one array in a file")


def _elements(values: "_Values") -> Iterator[RawRecord]:
    """Yield the elements of an array. After an error in one, nobody can say where the next one begins."""
    number = 0
    separator = ","
    while separator == ",":
        number += 1
        values.next_character()
        place = f":{values.line} (record {number})"
        try:
            value = values.take()
            separator = values.next_character()
            if separator not in {",", "]"}:
                raise ValueError(
                    f"no comma after it, on line {values.line}" if separator else "the file ends before its array"
                )
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{values.path}{place}: invalid JSON ({why_unreadable(error)}); correct it, for what follows "
                "cannot be read"
            ) from None
        values.step()
        yield RawRecord(place, values.position, already_read(value))


def _sequence(values: "_Values") -> Iterator[RawRecord]:
    """Yield values one after another; one that is not valid JSON is left out up to the end of its line."""
    while values.next_character():
        place = f":{values.line}"
        try:
            value = values.take()
        except (ValueError, RecursionError) as error:
            values.skip_line()
            yield RawRecord(place, values.position, unusable("invalid JSON", why_unreadable(error)))
        else:
            yield RawRecord(place, values.position, already_read(value))


class _Values:
    """The values in a file, of which as much text is held as the next one needs."""

    def __init__(self, path: Path, stream: Stream) -> None:
        self.path = path
        self.line = 1
        """The line of what comes next."""
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._take = json.JSONDecoder().raw_decode
        self._text = ""
        self._at = 0
        """Where in the text the next value begins."""
        self._num_characters = 0
        """Characters of the file that have been decoded."""
        self._ended = False

    @property
    def position(self) -> int:
        """Bytes of the file that the values so far take, compressed if it is."""
        if not self._num_characters:
            return 0
        left = len(self._text) - self._at
        return self._stream.raw.tell() * (self._num_characters - left) // self._num_characters

    def next_character(self) -> str:
        """Return the first character of what comes next; empty at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None  # it matches everywhere
            self._go_to(space.end())
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read_on()

    def step(self) -> None:
        """Go past the character that comes next."""
        self._go_to(self._at + 1)

    def skip_line(self) -> None:
        """Go to the next line."""
        while (end := self._text.find("\n", self._at)) < 0 and not self._ended:
            self._go_to(len(self._text))
            self._read_on()
        self._go_to(len(self._text) if end < 0 else end + 1)

    def take(self) -> object:
        """Return the next value.

        Raises:
            ValueError, RecursionError: if it is not valid JSON.
            DataError: if it is too large.
        """
        while True:
            try:
                value, end = self._take(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or not self._may_be_cut(error):
                    raise ValueError(self._described(error)) from None
            else:
                if self._ended or not _REST_OF_NUMBER.match(self._text, end):
                    self._go_to(end)
                    return value
            self._read_on()

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Return whether an error may only show that the text ends within the value."""
        return error.msg.startswith(_UNTERMINATED) or error.pos >= len(self._text) - _LONGEST_LITERAL

    def _described(self, error: json.JSONDecodeError) -> str:
        if self._ended and (error.pos == len(self._text) or error.msg.startswith(_UNTERMINATED)):
            return "the file ends within it"
        line = self.line + self._text.count("\n", self._at, error.pos)
        return f"{error.msg.removesuffix(' at')} on line {line}"

    def _go_to(self, place: int) -> None:
        self.line += self._text.count("\n", self._at, place)
        self._at = place

    def _read_on(self) -> None:
        """Add to the text: at least as much as it holds, so that a long value is tried only a few times."""
        text = self._text[self._at :]
        if len(text) > MAX_BYTES_OF_RECORD:
            raise too_large(f"{self.path}:{self.line}", "the value that begins there")
        block = self._stream.content.read(max(MIB, len(text)))
        try:
            more = self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}: invalid UTF-8 ({error.reason}) after line {self.line}; save it as UTF-8"
            ) from None
        self._text = text + more
        self._at = 0
        self._num_characters += len(more)
        self._ended = not block
