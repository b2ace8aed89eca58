"""What a SentencePiece model file says of itself, and where in a text the library found its pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sentencepiece import SentencePieceProcessor

from dragoman.errors import BundleError


def open_model(model: bytes) -> SentencePieceProcessor:
    """The library's reader of a model file's content. Raises BundleError."""
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise BundleError(f"no SentencePiece model: {error}") from error
    return processor


def found_spans(found: dict[str, Any], is_byte: Iterable[bool], text: str) -> list[tuple[int, int]]:
    """Of each piece that the library found in a text, its characters: see ``Vocabulary.spans``."""
    spans: list[tuple[int, int]] = []
    following = (0, 0)
    # Backwards: the library gives a character's place to the last of its bytes, and an empty one to the others.
    for byte, (start, end) in zip(reversed(list(is_byte)), reversed(found["offsets"]), strict=True):
        if start == end == following[0] and byte:
            end = following[1]
        following = end - len(text[start:end].lstrip()), end
        spans.append(following)
    return spans[::-1]


def read_normalization(model: bytes) -> str:
    """The name of a SentencePiece model's rule. Raises BundleError for options that this version does not decode by.

    The fields are those of sentencepiece_model.proto. The library's Python module for it wants the protobuf release of
    its own day, newer than what other packages stand, so that the few fields are read here.
    """
    fields = _message_fields(model)
    trainer, normalizer, denormalizer = (_message_fields(_as_bytes(fields.get(number))) for number in (2, 3, 5))
    options = {
        "add_dummy_prefix": normalizer.get(3, 1) == 1,
        "remove_extra_whitespaces": normalizer.get(4, 1) == 1,
        "escape_whitespaces": normalizer.get(5, 1) == 1,
        "treat_whitespace_as_suffix": trainer.get(24, 0) == 0,
        "denormalization_rule_tsv": not denormalizer.get(2),
    }
    if unusual := [name for name, usual in options.items() if not usual]:
        raise BundleError(f"was trained with another {', '.join(unusual)} than the default: train it without")
    return _as_bytes(normalizer.get(1)).decode("utf-8") or "identity"


def _as_bytes(value: int | bytes | None) -> bytes:
    return value if isinstance(value, bytes) else b""


def _message_fields(message: bytes) -> dict[int, int | bytes]:
    """The last value of each field of a valid protobuf message (https://protobuf.dev/programming-guides/encoding).

    Fixed-size numbers are left out.
    """
    fields: dict[int, int | bytes] = {}
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type in (0, 2):
            value, position = _varint(message, position)
            fields[number] = value
            if wire_type == 2:
                fields[number] = message[position : position + value]
                position += value
        else:
            position += 8 if wire_type == 1 else 4
    return fields


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """The number that starts at ``position``, and where it ends."""
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
