"""Small models with random weights in CTranslate2's format, written by its own Python package."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from dragoman_training.importing.ct2_file import TYPES, ModelFile

SPECIALS = ["<unk>", "<s>", "</s>"]


def random_spec(
    specs: Any, *, width: int = 8, heads: int = 2, inner: int = 12, rows: tuple[int, int] = (11, 9), **options: Any
) -> Any:
    """A specification filled at random. ``options`` are those of TransformerSpec.from_config.

    All that an option asks for is there; what is optional for all is not: no positions, hence sinusoids.
    """
    rng = np.random.default_rng(1)

    def array(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.5).astype(np.float32)

    def fill(spec: Any, name: str, linear_rows: dict[str, tuple[int, int]]) -> None:
        for key, value in vars(spec).items():
            if key.startswith("_") or isinstance(value, str):
                continue
            if isinstance(value, list):
                for number, item in enumerate(value):
                    fill(item, f"{key}_{number}", linear_rows)
            elif isinstance(value, specs.model_spec.LayerSpec):
                inside = linear_rows
                if key in ("self_attention", "attention"):
                    groups = (3, 1) if key == "self_attention" else (1, 2, 1)
                    inside = {f"linear_{number}": (count * width, width) for number, count in enumerate(groups)}
                elif key == "ffn":
                    inside = {"linear_0": (inner, width), "linear_0_noact": (inner, width), "linear_1": (width, inner)}
                fill(value, key, inside)
            elif key in ("gamma", "beta"):
                setattr(spec, key, array(width) + (key == "gamma"))
            elif value is None and key == "weight":
                shape = linear_rows.get(name, (rows[1], width))
                if isinstance(spec, specs.common_spec.LinearSpec):
                    spec.bias = array(shape[0])
                spec.weight = array(*shape)
            elif value is None:
                setattr(spec, key, array(3, 4))

    layers = options.pop("layers", (1, 2))
    spec = specs.TransformerSpec.from_config(layers, heads, **options)
    fill(spec, "", {"embeddings_0": (rows[0], width)})
    return spec


def save(spec: Any, folder: Path, quantization: str | None = None, **settings: Any) -> Path:
    """Write a folder; ``settings`` replace those of config.json."""
    rows = spec.get_source_vocabulary_size()[0], spec.get_target_vocabulary_size()
    source, target = ([*SPECIALS, *(f"{side}{i}" for i in range(3, n))] for side, n in zip("st", rows, strict=True))
    spec.register_source_vocabulary(source)
    spec.register_target_vocabulary(target)
    spec.validate()
    spec.optimize(quantization)
    folder.mkdir(parents=True)
    spec.save(str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


def packed(file: ModelFile, version: int) -> bytes:
    """model.bin of another binary version. Without aliases: each variable is there by its own name."""

    def text(value: str) -> bytes:
        stored = value.encode()
        return struct.pack("<H", len(stored) + 1) + stored + b"\0"

    parts = [
        struct.pack("<I", version),
        text(file.specification),
        struct.pack("<II", file.revision, len(file.variables)),
    ]
    for name, variable in file.variables.items():
        values = variable.values
        parts.append(text(name) + struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape))
        if version < 4:
            parts.append(struct.pack("<BI", values.itemsize, values.size))
        else:
            parts.append(struct.pack("<BI", TYPES.index(variable.kind), values.nbytes))
        parts.append(values.tobytes())
    return b"".join([*parts, *([struct.pack("<I", 0)] if version >= 3 else [])])
