"""The least of protobuf's wire format: what a SentencePiece model file says of itself."""

from __future__ import annotations


def message_fields(message: bytes) -> dict[int, bytes]:
    """The bytes fields of a protobuf message by number, the last of each; ``IndexError`` where it is cut off.

    The library's own reader of its files needs one certain version of protobuf, which is not for this package to
    choose. The format: https://protobuf.dev/programming-guides/encoding/
    """
    fields: dict[int, bytes] = {}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        tag = varint()
        if tag & 7 == 0:
            varint()
            continue
        length = {1: 8, 5: 4}.get(tag & 7) or varint()
        if tag & 7 == 2:
            fields[tag >> 3] = message[position : position + length]
        position += length
    return fields
