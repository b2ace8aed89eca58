"""Times CTranslate2 on a transformer with random weights, for check.py: one JSON object in, one out.

    python tests/gpu/ctranslate.py '{"d_model": 512, ..., "rows": [1, 8], "source_tokens": 25, "steps": 30}'

Each row is decoded greedily for the same number of steps, whatever it says.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ctranslate2: Any = importlib.import_module("ctranslate2")  # not among what the project installs


def random_model(sizes: dict[str, Any], folder: Path) -> None:
    """Write a pre-norm model with ReLU of these sizes in CTranslate2's format."""
    width, inner, generator = sizes["d_model"], sizes["ffn_dim"], np.random.default_rng(0)

    def weight(rows: int, columns: int) -> Any:
        return (generator.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def fill_linear(spec: Any, rows: int, columns: int) -> None:
        spec.weight, spec.bias = weight(rows, columns), np.zeros(rows, np.float32)

    def fill_norm(spec: Any) -> None:
        spec.gamma, spec.beta = np.ones(width, np.float32), np.zeros(width, np.float32)

    def fill_attention(spec: Any, parts: Sequence[int]) -> None:
        fill_norm(spec.layer_norm)
        for linear, number in zip(spec.linear, parts, strict=True):
            fill_linear(linear, number * width, width)

    spec = ctranslate2.specs.TransformerSpec.from_config(
        (sizes["encoder_layers"], sizes["decoder_layers"]),
        sizes["num_heads"],
        pre_norm=True,
        activation=ctranslate2.specs.Activation.RELU,
    )
    positions = weight(512, width)
    spec.encoder.position_encodings.encodings = spec.decoder.position_encodings.encodings = positions
    spec.encoder.embeddings[0].weight = weight(sizes["source_vocab_size"], width)
    spec.decoder.embeddings.weight = weight(sizes["target_vocab_size"], width)
    fill_linear(spec.decoder.projection, sizes["target_vocab_size"], width)
    for side in (spec.encoder, spec.decoder):
        fill_norm(side.layer_norm)
        for layer in side.layer:
            fill_attention(layer.self_attention, (3, 1))
            if side is spec.decoder:
                fill_attention(layer.attention, (1, 2, 1))
            fill_norm(layer.ffn.layer_norm)
            fill_linear(layer.ffn.linear_0, inner, width)
            fill_linear(layer.ffn.linear_1, width, inner)
    specials = ["<blank>", "<s>", "</s>", "<unk>"]
    spec.register_source_vocabulary([*specials, *(f"s{i}" for i in range(4, sizes["source_vocab_size"]))])
    spec.register_target_vocabulary([*specials, *(f"t{i}" for i in range(4, sizes["target_vocab_size"]))])
    spec.validate()
    spec.save(str(folder))


def time_rows(translator: Any, rows: int, sizes: dict[str, Any]) -> float:
    """Target tokens a second of one batch of so many rows, encoder included: the best of five runs but the first."""
    generator = np.random.default_rng(rows)
    batch = [
        [f"s{i}" for i in generator.integers(4, sizes["source_vocab_size"], sizes["source_tokens"])]
        for _ in range(rows)
    ]
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        found = translator.translate_batch(
            batch,
            beam_size=1,
            max_batch_size=rows,
            min_decoding_length=sizes["steps"],
            max_decoding_length=sizes["steps"],
        )
        seconds.append(time.perf_counter() - begin)
    assert all(len(result.hypotheses[0]) == sizes["steps"] for result in found)
    return float(rows * sizes["steps"] / min(seconds[1:]))


def main() -> int:
    sizes = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        random_model(sizes, Path(folder))
        translator = ctranslate2.Translator(
            folder,
            device=sizes["device"],
            device_index=sizes["device_id"],
            compute_type=sizes["compute_type"],
            inter_threads=1,
            intra_threads=1,
        )
        speeds = {rows: time_rows(translator, rows, sizes) for rows in sizes["rows"]}
    print(json.dumps({"version": ctranslate2.__version__, "tokens_per_second": speeds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
