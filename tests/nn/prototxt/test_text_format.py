"""Protobuf's text format: what may be written, and where a mistake is reported."""

import math

import pytest

from tessella.core.errors import UsageError
from tessella.nn.prototxt.text_format import Word, parse


def test_every_way_to_write_a_value():
    message = parse(
        """
        whole: 12  negative: -3 hex: 0x1F, real: 0.5; short: .25 exponent: 1e-3 suffixed: 2f
        text: "a # b" other: 'it''s' long: "one "   # adjacent strings are one
                                           "two" escaped: "a\\"b\\n"
        yes: true  no: false  enum: MAX
        list: [1, 2, 3]  list: 4
        far: -inf
        nested { inner: 1 } nested: { inner: 2 } nested < inner: 3 >
        """
    )
    assert message.take("whole", int) == 12
    assert message.take("negative", int) == -3
    assert message.take("hex", int) == 31
    assert [message.take(n, float) for n in ("real", "short", "exponent", "suffixed")] == [
        0.5, 0.25, 0.001, 2.0,
    ]  # fmt: skip
    assert message.take("whole", float) == 12.0
    assert message.take("text", str) == "a # b"
    assert message.take("other", str) == "its"
    assert message.take("long", str) == "one two"
    assert message.take("escaped", str) == 'a"b\n'
    assert (message.take("yes", bool), message.take("no", bool)) == (True, False)
    assert message.take("enum", Word) == "MAX"
    assert message.take_all("list", int) == [1, 2, 3, 4]
    assert message.take("far", float) == -math.inf
    assert [m.take("inner", int) for m in message.messages("nested")] == [1, 2, 3]
    assert message.message("nested").take_all("inner", int) == [1, 2, 3]
    assert message.take("absent", int, default=7) == 7
    message.finish()


def test_what_nobody_took_is_refused_with_its_line():
    message = parse("known: 1\n\nunknown: 2")
    message.take("known", int)
    with pytest.raises(UsageError, match="unknown in line 3"):
        message.finish()
    message.finish("unknown")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb {\n c: 2\n", "line 2: } is missing"),
        ("a: 1\n}", "line 2: a field's name is missing"),
        ("a\nb: 2", "line 1: no value after a"),
        ("a:", "line 1: a value is missing"),
        ("a: [1, 2", "a value is missing"),
        ('\na: "open', "line 2: a character that cannot be here"),
        ("a: 1 $", "a character that cannot be here"),
        ('a: "\\q"', "an escape that is not supported"),
        ("a {" * 100, "more than 32 nested messages"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(UsageError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("a: 1.5", int), ('a: "1"', int), ("a: true", float), ("a: 2", bool), ("a: 1", str)],
)
def test_values_of_another_type_are_refused(text, kind):
    with pytest.raises(UsageError, match=r"a is not .* in line 1"):
        parse(text).take("a", kind)
