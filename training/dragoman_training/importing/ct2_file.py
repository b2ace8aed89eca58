"""CTranslate2's model.bin: named arrays in one file.

All numbers are little-endian. A string is its number of bytes with a closing zero (u16), the bytes (UTF-8), the zero.

    u32 binary version; string specification; u32 its revision; u32 number of variables; for each of them
        string name; u8 number of dimensions; u32 each dimension
        versions 2 and 3: u8 bytes of a value (4: float32, 2: int16, 1: int8); u32 number of values
        versions 4 to 6:  u8 place of the type in TYPES; u32 number of bytes
        the values
    versions 3 to 6: u32 number of aliases; for each of them: string alias; string name of a variable

A description, in the form of the code that writes it: python/ctranslate2/specs/model_spec.py of CTranslate2. Version 1
had other names for everything and is not read.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman_training.errors import ModelImportError

VERSIONS = range(2, 7)
TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
OLD_TYPES = {4: "float32", 2: "int16", 1: "int8"}  # by the bytes of a value
GLOBAL_INT16_SCALE = 1000.0  # of int16 weights without a scale of their own, as the oldest have

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Variable:
    """An array as it is stored. bfloat16 values are the upper halves of float32 values, as uint16."""

    values: NDArray[Any]
    kind: str  # one of TYPES


@dataclass(frozen=True)
class ModelFile:
    """What model.bin holds. An alias is a further name of a variable, and of its scale."""

    version: int
    specification: str
    revision: int
    variables: dict[str, Variable]

    def floats(self, name: str) -> Floats:
        """A variable as float32, divided by its scale if it is quantized: one a row, or one for all."""
        variable = self.variables[name]
        if variable.kind == "bfloat16":
            return (variable.values.astype(np.uint32) << 16).view(np.float32)
        values = variable.values.astype(np.float32)
        if variable.kind not in ("int8", "int16"):
            return values
        scale = self.variables.get(f"{name}_scale")
        if scale is None:
            if variable.kind == "int8":
                raise ModelImportError(f"{name} has int8 values but no scale: convert the model anew")
            return values / np.float32(GLOBAL_INT16_SCALE)
        scales = scale.values.astype(np.float32).reshape(-1)
        if len(scales) not in (1, len(values)):
            raise ModelImportError(f"{name} has {len(values)} rows and {len(scales)} scales: convert the model anew")
        return values / scales.reshape(-1, *[1] * (values.ndim - 1))


def read_model_file(path: Path) -> ModelFile:
    """Read model.bin. Raises ``ModelImportError`` naming the file where it is damaged, cut off or of another version.

    Nothing is allocated for a declared size that the file does not hold.
    """
    try:
        return _read(_Reader(path.read_bytes()))
    except OSError as error:
        raise ModelImportError(f"{path} cannot be read: {error.strerror}") from error
    except ModelImportError as error:
        raise ModelImportError(f"{path} is no model of CTranslate2 that can be read: {error}") from error


def _read(reader: _Reader) -> ModelFile:
    version = reader.number("I")
    if version not in VERSIONS:
        raise ModelImportError(f"its binary version is {version}: versions 2 to 6 are known")
    specification, revision = reader.text(), reader.number("I")
    variables: dict[str, Variable] = {}
    for _ in range(reader.number("I")):
        name = reader.text()
        if name in variables:
            raise ModelImportError(f"it has {name} twice")
        variables[name] = _read_variable(reader, name, version)
    if version >= 3:
        for _ in range(reader.number("I")):
            alias, name = reader.text(), reader.text()
            if name not in variables:
                raise ModelImportError(f"{alias} stands for {name}, which it lacks")
            for end in ("", "_scale"):
                if f"{name}{end}" in variables:
                    variables[f"{alias}{end}"] = variables[f"{name}{end}"]
    if reader.left:
        raise ModelImportError(f"{reader.left} bytes follow behind its end")
    return ModelFile(version, specification, revision, variables)


def _read_variable(reader: _Reader, name: str, version: int) -> Variable:
    shape = tuple(reader.number("I") for _ in range(reader.number("B")))
    code, size = reader.number("B"), reader.number("I")
    if version < 4:
        kind = OLD_TYPES.get(code)
        size *= code
    else:
        kind = TYPES[code] if code < len(TYPES) else None
    if kind is None:
        raise ModelImportError(f"{name} has values of the unknown type {code}")
    stored = np.dtype("uint16" if kind == "bfloat16" else kind).newbyteorder("<")
    if size != math.prod(shape) * stored.itemsize:
        raise ModelImportError(f"{name} has {size} bytes, which are not {shape} values of type {kind}")
    return Variable(np.frombuffer(reader.take(size), stored).reshape(shape), kind)


class _Reader:
    """A place in bytes, which cannot leave them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    @property
    def left(self) -> int:
        """How many bytes have not been read."""
        return len(self._data) - self._place

    def take(self, size: int) -> memoryview:
        """The next bytes, not copied."""
        if size > self.left:
            raise ModelImportError(f"it ends at byte {len(self._data)}, where {size - self.left} more should follow")
        self._place += size
        return memoryview(self._data)[self._place - size : self._place]

    def number(self, format: str) -> int:
        """The next number: "B" of 1 byte, "H" of 2, "I" of 4."""
        return int(struct.unpack(f"<{format}", self.take(struct.calcsize(f"<{format}")))[0])

    def text(self) -> str:
        """The next string."""
        stored = bytes(self.take(self.number("H")))
        try:
            if stored.endswith(b"\0"):
                return stored[:-1].decode("utf-8")
        except UnicodeDecodeError:
            pass
        raise ModelImportError(f"it has no name before byte {self._place}")
