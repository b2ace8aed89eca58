"""Show where the model looks in TEXT for each word of its answer.

TEXT is one line. It is answered here, without a server; then a second pass through the model's alignment graph tells
how much of its attention each word of the answer gave to each word of the text. Printed are the text, the answer, and a
line for each word of it with the words of the text that weigh most; it[2] is the second "it". What is left of 100 %
went to the rest of the text, and to the start and end tokens around it.

The model must have been exported with --alignment, as the embedded ones were.

  dragoman explain giraffe
  dragoman explain --text giraffe
  dragoman explain --answer "JH ER AE F" --png giraffe.png giraffe
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman.cli import runtime
from dragoman.config import EngineConfig, ServerConfig
from dragoman.errors import ConfigError

if TYPE_CHECKING:
    from dragoman.bundle import Manifest
    from dragoman.explanation import Heatmap, TokenAttention

SUMMARY = "show where the model looks for each word of its answer"
EXTRA: str | None = "cpu,explain"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("text", metavar="TEXT", help="one line to answer and explain")
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="the model to run: a folder of dragoman export")
    parser.add_argument("--model", metavar="NAME", help=runtime.model_help())
    parser.add_argument("--precision", metavar="NAME", help="the graphs to run (default: the bundle's first)")
    parser.add_argument("--answer", metavar="TEXT", help="explain this answer instead of the model's own")
    parser.add_argument("--tokens", action="store_true", help="show tokens instead of words")
    parser.add_argument("--text", dest="draw", action="store_true", help="also draw all weights, as shades of text")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw them as a picture (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, of tokens and of words, instead")


def run(args: argparse.Namespace) -> int:
    """Always 0: what cannot be explained is an error of the whole command."""
    if args.json and (args.draw or args.tokens):
        raise ConfigError("--json was given with --text or --tokens: it has the weights of both, and no drawing")
    runtime.check_runtime()
    if args.png:
        import_module("matplotlib")  # where it is missing, that is said before any work is done
        if args.png.is_dir() or not args.png.parent.is_dir():
            raise ConfigError(f"--png {args.png} is a folder, or in none: name a file in a folder that is there")
    from dragoman.explanation import heatmap
    from dragoman.heatmap import write_png

    manifest, attention = asyncio.run(_attention(args))
    found = heatmap(attention, tokens=args.tokens)
    if args.json:
        lines = [json.dumps(_as_json(manifest, attention), ensure_ascii=False)]
    else:
        lines = _lines(attention, found, draws=args.draw)
    # UTF-8 whatever the locale, as all answers: some have no shades, nor the letters of the text.
    sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode("utf-8"))
    if args.png and not write_png(found, f"{manifest.name} version {manifest.version}", args.png):
        print(f"dragoman explain: the font has no glyph for some characters: {args.png} has boxes", file=sys.stderr)
    return 0


async def _attention(args: argparse.Namespace) -> tuple[Manifest, TokenAttention]:
    from dragoman.pipeline import TextLimits
    from dragoman.served_model import ServedModel

    server = ServerConfig()
    limits = TextLimits(server.max_text_bytes, server.max_segments)
    path = runtime.bundle_path(args.bundle, args.model)
    model = ServedModel.load(path, EngineConfig(num_slots=8), limits, precision=args.precision)
    model.start()
    try:
        return model.bundle.manifest, await model.pipeline.attend(args.text, args.answer)
    finally:
        await model.close()


def _lines(attention: TokenAttention, found: Heatmap, *, draws: bool) -> list[str]:
    from dragoman.explanation import draw, name_sources, shown

    lines = [shown(attention.source.text), shown(attention.target.text), "", *name_sources(found)]
    return [*lines, "", *draw(found, shutil.get_terminal_size().columns)] if draws else lines


def _as_json(manifest: Manifest, attention: TokenAttention) -> dict[str, object]:
    """Rows of weights are of the target; ``own`` is where among the source's the text's own begin and end."""
    from dragoman.explanation import heatmap

    result: dict[str, object] = {"model": manifest.name, "version": manifest.version}
    result |= {"text": attention.source.text, "answer": attention.target.text}
    for name in ("tokens", "words"):
        found = heatmap(attention, tokens=name == "tokens")
        result[name] = {
            "source": found.source,
            "target": found.target,
            "own": [found.own.start, found.own.stop],
            "weights": [[round(weight, 4) for weight in row] for row in found.weights.tolist()],
        }
    return result
