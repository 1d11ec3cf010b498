"""How much a message of protobuf holds, looked at before it is parsed.

A field without content takes two bytes of a message and a hundred of its parser: 64 MB of them took
3 GB. So fields are counted first, and numbers, as far as the memory and the time allow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tessella.core.errors import InputError

SMALL_BYTES = 1 << 16  # so much is parsed as it is: it has 32,768 fields at most
MOST_FIELDS = 1 << 14  # 2 MB of the parser, and 10 ms to count them
# In packed fields. As many take 0.3 s to become a tensor, about as JSON's largest text.
MOST_NUMBERS = 1 << 22
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def require_few(content: bytes, message: Any) -> None:
    """Raise ``InputError`` if a message has more fields or numbers than one may have, or cannot be
    read as far as they are counted.

    Args:
        message: the class of it.
    """
    if len(content) > SMALL_BYTES:
        _Count().add(content, 0, len(content), message.DESCRIPTOR)


class _Count:
    def __init__(self) -> None:
        self._fields = self._numbers = 0

    def add(self, content: bytes, position: int, end: int, descriptor: Any) -> None:
        """Count what stands between two places, as a message of this kind."""
        known = descriptor.fields_by_number
        while position < end:
            self._fields += 1
            if self._fields > MOST_FIELDS:
                raise _too_many(f"more than {MOST_FIELDS:,} fields")
            tag, position = _varint(content, position, end)
            wire = tag & 7
            if wire == _VARINT:
                _, position = _varint(content, position, end)
            elif wire == _BYTES:
                length, start = _varint(content, position, end)
                position = start + length
                field = known.get(tag >> 3)
                if position > end:
                    raise _unreadable()
                if field is not None and field.message_type is not None:
                    self.add(content, start, position, field.message_type)
                elif field is not None and field.type not in (field.TYPE_BYTES, field.TYPE_STRING):
                    width = _width(field)
                    if width > 1:
                        self._numbers += length // width
                    else:  # a number ends with its only byte below 128
                        ends = np.frombuffer(content, np.uint8, length, start) < 128
                        self._numbers += int(np.count_nonzero(ends))
                    if self._numbers > MOST_NUMBERS:
                        raise _too_many(f"more than {MOST_NUMBERS:,} numbers in contents")
            elif wire in (_FIXED64, _FIXED32):
                position += 8 if wire == _FIXED64 else 4
            else:  # a group, which none of our messages has
                raise _unreadable()


def _width(field: Any) -> int:
    """The least bytes of a number in a packed field."""
    if field.type in (field.TYPE_DOUBLE, field.TYPE_FIXED64, field.TYPE_SFIXED64):
        return 8
    return 4 if field.type in (field.TYPE_FLOAT, field.TYPE_FIXED32, field.TYPE_SFIXED32) else 1


def _varint(content: bytes, position: int, end: int) -> tuple[int, int]:
    """The number at a place, and where the next thing begins."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            break
        byte = content[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise _unreadable()


def _too_many(seen: str) -> InputError:
    return InputError(
        "the request has too many parts", seen=seen, fix="send tensors in raw_input_contents"
    )


def _unreadable() -> InputError:
    return InputError("the request is no message of protobuf")
