"""Protobuf's text format, read without a schema: fields with their lines, typed when taken.

    message := { name [":"] "{" message "}"  |  name ":" value  |  name ":" "[" value, … "]" }

Whoever reads a message takes the fields that it understands; ``finish`` refuses the rest, so that a
setting is never ignored by accident.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from tessella.core.errors import UsageError

T = TypeVar("T")

MAX_DEPTH = 32  # Caffe nets nest four deep; deeper is an attack on the recursion
MAX_CHARACTERS = 1 << 20  # Caffe's largest nets have 200,000
MAX_NUMBER = 1 << 31
MAX_DIGITS = 100

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n\f\v]+|\#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?[fF]?))
      | (?P<word>-?[A-Za-z_]\w*)
      | (?P<mark>[{}<>:\[\],;])""",
    re.VERBOSE,
)
_CLOSING = {"{": "}", "<": ">"}


class Word(str):
    """A bare word: an enumeration's value, true or false."""


_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    Word: "a bare word",
}


@dataclass(frozen=True, kw_only=True)
class Token:
    kind: str
    text: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str
    value: Any  # Message, Word, str, int or float
    line: int


@dataclass(kw_only=True)
class Message:
    """A message's fields in order; ``owner`` is the name of the layer or network for errors."""

    line: int
    entries: list[Entry] = field(default_factory=list)
    owner: str = "the network"
    taken: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        return any(e.name == name for e in self.entries)

    def take_all(self, name: str, kind: type[T]) -> list[T]:
        """Every value of a repeated field, as ``int``, ``float``, ``str`` or ``bool``."""
        self.taken.add(name)
        return [self._typed(e, kind) for e in self.entries if e.name == name]

    @overload
    def take(self, name: str, kind: type[T], default: T) -> T: ...

    @overload
    def take(self, name: str, kind: type[T]) -> T | None: ...

    def take(self, name: str, kind: type[T], default: T | None = None) -> T | None:
        """The value of a field, the last one where it is given twice, or ``default``."""
        values = self.take_all(name, kind)
        return values[-1] if values else default

    def choose(self, name: str, default: str, known: tuple[str, ...]) -> str:
        """The value of an enumeration; a number counts into ``known``."""
        self.taken.add(name)
        found = [e for e in self.entries if e.name == name]
        value = found[-1].value if found else default
        if isinstance(value, int) and 0 <= value < len(known):
            value = known[value]
        if value not in known:
            raise self.error(f"{name} is not known", seen=value, fix=f"use {' or '.join(known)}")
        return str(value)

    def messages(self, name: str) -> list[Message]:
        """All messages of a repeated field."""
        self.taken.add(name)
        found = [e for e in self.entries if e.name == name]
        for entry in found:
            if not isinstance(entry.value, Message):
                raise self.error(f"{name} is not a message in braces", seen=entry.value)
            entry.value.owner = self.owner
        return [e.value for e in found]

    def message(self, name: str) -> Message:
        """The message of a field, empty where it is missing; several are one, as in protobuf."""
        found = self.messages(name)
        entries = [e for m in found for e in m.entries]
        line = found[0].line if found else self.line
        return Message(line=line, entries=entries, owner=self.owner)

    def finish(self, *ignored: str) -> None:
        """Raise ``UsageError`` if a field was neither taken nor is among the ``ignored``."""
        for entry in self.entries:
            if entry.name not in self.taken and entry.name not in ignored:
                raise UsageError(
                    f"{self.owner} has a setting that is not supported",
                    seen=f"{entry.name} in line {entry.line}",
                    fix="take it out, or write this layer in Python (file.py:Class)",
                )

    def error(self, wrong: str, *, seen: object = None, fix: str | None = None) -> UsageError:
        return UsageError(f"{self.owner} (line {self.line}): {wrong}", seen=seen, fix=fix)

    def _typed(self, entry: Entry, kind: type[T]) -> T:
        value = entry.value
        if kind is bool and value in ("true", "false") and isinstance(value, Word):
            value = value == "true"
        elif kind is bool and value in (0, 1) and isinstance(value, int):
            value = bool(value)
        elif kind is float and isinstance(value, int):
            value = float(value)
        if kind is int and isinstance(value, int) and abs(value) >= MAX_NUMBER:
            raise UsageError(
                f"{self.owner}: {entry.name} is out of range",
                seen=f"{value} in line {entry.line}",
                fix="correct the text",
            )
        if isinstance(value, kind) and type(value) is kind:
            return value
        raise UsageError(
            f"{self.owner}: {entry.name} is not {_NAMES[kind]}",
            seen=f"{value!r} in line {entry.line}",
            fix="correct the text",
        )


def parse(text: str) -> Message:
    """The message in a text; raises ``UsageError`` with the line of the first mistake."""
    if len(text) > MAX_CHARACTERS:
        raise UsageError(
            "the network's text is too long",
            seen=f"{len(text):,} characters, at most {MAX_CHARACTERS:,}",
            fix="write the network in Python (file.py:Class)",
        )
    return _Parser(_tokens(text)).message(Token(kind="mark", text="", line=1), depth=0)


def _tokens(text: str) -> list[Token]:
    tokens, position, line = [], 0, 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _syntax("a character that cannot be here", text[position : position + 10], line)
        if match.lastgroup != "skip":
            tokens.append(Token(kind=str(match.lastgroup), text=match.group(), line=line))
        line += match.group().count("\n")
        position = match.end()
    return [*tokens, Token(kind="end", text="the end of the text", line=line)]


def _syntax(wrong: str, seen: str, line: int) -> UsageError:
    return UsageError(
        f"the network's text is not valid in line {line}: {wrong}",
        seen=seen,
        fix="correct that line",
    )


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens, self._position = tokens, 0

    def _peek(self) -> Token:
        return self._tokens[self._position]

    def _next(self) -> Token:
        token = self._peek()
        self._position += token.kind != "end"
        return token

    def _skip(self, *marks: str) -> bool:
        token = self._peek()
        found = token.kind == "mark" and token.text in marks
        self._position += found
        return found

    def message(self, opening: Token, *, depth: int) -> Message:
        """The fields up to the mark that closes ``opening``, or to the end of the text."""
        if depth > MAX_DEPTH:
            raise _syntax(f"more than {MAX_DEPTH} nested messages", opening.text, opening.line)
        message = Message(line=opening.line)
        closing = _CLOSING.get(opening.text)
        while True:
            token = self._next()
            if token.kind == "end" and closing is not None:
                raise _syntax(f"{closing} is missing", f"{opening.text} never closed", opening.line)
            if token.kind == "end" or (token.kind == "mark" and token.text == closing):
                return message
            if token.kind != "word":
                raise _syntax("a field's name is missing", token.text, token.line)
            message.entries += self._field(token, depth)
            self._skip(",", ";")

    def _field(self, name: Token, depth: int) -> list[Entry]:
        colon = self._skip(":")
        if colon and self._skip("["):
            values = []
            while not self._skip("]"):
                values.append(self._value(depth))
                self._skip(",")
        else:
            opens = self._peek().kind == "mark" and self._peek().text in _CLOSING
            if not colon and not opens:
                raise _syntax(f"no value after {name.text}", self._peek().text, name.line)
            values = [self._value(depth)]
        return [Entry(name=name.text, value=v, line=name.line) for v in values]

    def _value(self, depth: int) -> Any:
        token = self._next()
        if token.kind == "mark" and token.text in _CLOSING:
            return self.message(token, depth=depth + 1)
        if token.kind == "string":
            text = _unquote(token)
            while self._peek().kind == "string":  # adjacent strings are one
                text += _unquote(self._next())
            return text
        if token.kind == "number":
            if len(token.text) > MAX_DIGITS:
                raise _syntax("a number is too long", token.text[:40], token.line)
            return _number(token.text)
        if token.kind == "word":
            special = token.text.lstrip("-").lower() in ("inf", "infinity", "nan")
            return float(token.text) if special else Word(token.text)
        raise _syntax("a value is missing", token.text, token.line)


def _number(text: str) -> int | float:
    if "x" in text.lower():
        return int(text, 16)
    digits = text.rstrip("fF")
    return int(digits) if digits.lstrip("+-").isdigit() and digits == text else float(digits)


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'"}


def _unquote(token: Token) -> str:
    def escaped(match: re.Match[str]) -> str:
        if match[1] not in _ESCAPES:
            raise _syntax("an escape that is not supported", match[0], token.line)
        return _ESCAPES[match[1]]

    return re.sub(r"\\(.)", escaped, token.text[1:-1])
