"""Which tokens an answer may be made of, by its source: the table of a shortlist. Pure numpy.

The file is NumPy's ``.npz`` of arrays, all of fixed types: ``offsets`` (S + 1,) and ``tokens`` int32, where the
candidates of source token s are ``tokens[offsets[s]:offsets[s + 1]]``; ``always`` int32, the candidates of every
source; and the output projection, of which ``projection.py`` tells.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dragoman.bundle import ModelShape
from dragoman.errors import BundleError
from dragoman.types import IntArray, TokenIds

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of S source tokens among V target tokens, and those of every source."""

    num_tokens: int  # V
    offsets: NDArray[np.int32]  # (S + 1,)
    tokens: NDArray[np.int32]
    always: NDArray[np.int32]

    @classmethod
    def checked(cls, arrays: Arrays, shape: ModelShape) -> Self:
        """Those in a file's arrays. Raises BundleError where they are not of such a model."""
        offsets = array_of(arrays, "offsets", (shape.source_vocab_size + 1,), np.int32)
        tokens = array_of(arrays, "tokens", (int(offsets[-1]),), np.int32)
        always = array_of(arrays, "always", (None,), np.int32)
        if offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise BundleError("its offsets do not ascend from 0: copy the bundle again, or export it anew")
        for name, ids in (("tokens", tokens), ("always", always)):
            wrong = ids[(ids < 0) | (ids >= shape.target_vocab_size)]
            if len(wrong):
                raise BundleError(
                    f"its {name} hold {wrong[0]}, but the target vocabulary has {shape.target_vocab_size} tokens: it "
                    "belongs to another model"
                )
        return cls(shape.target_vocab_size, offsets, tokens, always)

    def of(self, source: TokenIds, prefix: TokenIds = ()) -> IntArray:
        """The tokens that may come, ascending, each once: the source's, everyone's, and those of ``prefix``."""
        own = [self.tokens[self.offsets[token] : self.offsets[token + 1]] for token in set(source)]
        may_come = np.zeros(self.num_tokens, np.bool_)  # much quicker than sorting
        may_come[np.concatenate([self.always, *own, np.array(prefix, np.int32)])] = True
        return np.flatnonzero(may_come)


def read_arrays(content: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of a shortlist's file. Raises BundleError when it holds anything else."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays)
    except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise BundleError(f"it is no archive of arrays ({error}): copy the bundle again, or export it anew") from error


def array_of(arrays: Arrays, name: str, shape: tuple[int | None, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """A file's array of that name, of such a shape (None: any size) and type. Raises BundleError."""
    if name not in arrays:
        raise BundleError(f"it has no array {name!r}: export the bundle anew")
    array = arrays[name]
    fits = array.ndim == len(shape) and all(n in (None, size) for n, size in zip(shape, array.shape, strict=True))
    if not fits or array.dtype != dtype:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise BundleError(
            f"its array {name!r} is {array.dtype} of shape {array.shape}; it must be {np.dtype(dtype)} of shape "
            f"({sizes}): it belongs to another model"
        )
    return array
