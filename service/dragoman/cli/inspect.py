"""Show all that a bundle says of itself, and check it.

Prints name, shape, tokenizers, limits, special ids, the nodes of every graph (as the model's shape requires them, as
exported, and as ONNX Runtime optimised them), the comparison with PyTorch, quality, provenance, and the files.
Exit status: 0 all holds, 1 something does not, 2 it is no bundle of this version.

  dragoman inspect bundles/g2p-en --verify
  dragoman inspect g2p-en --json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman import inspection
from dragoman.bundle import load_manifest
from dragoman.cli import runtime
from dragoman.config import EngineConfig, ServerConfig, embedded_bundle, embedded_models
from dragoman.errors import BundleError

if TYPE_CHECKING:
    from dragoman.bundle import Manifest

SUMMARY = "show what a bundle says of itself, and check it"
EXTRA: str | None = "cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "bundle",
        metavar="BUNDLE",
        help=f"a folder made by dragoman export, or an embedded model: {', '.join(embedded_models()) or 'none'}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: the manifest, and what was checked")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="also hash every file, replay the golden sets of the CPU and run the alignment graph (without it, names "
        "and sizes are compared)",
    )
    parser.add_argument("--graph", action="store_true", help="also draw how many nodes of each operator a graph has")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a file or an answer is not what the manifest says."""
    path = Path(args.bundle)
    if not path.exists() and args.bundle in embedded_models():
        path = embedded_bundle(args.bundle)
    manifest = load_manifest(path)
    wrong_files = inspection.file_problems(path, manifest, hashes=args.verify)
    problems, replay = list(wrong_files.values()), Replay([], {}, [])
    if args.verify and not problems:
        replay = _replay(path, manifest)
        problems = replay.problems
    if args.json:
        checks = {
            "problems": problems,
            "hashed": args.verify,
            "replayed": replay.replayed,
            "not_replayed": replay.left_out,
        }
        print(json.dumps({**json.loads(manifest.to_json()), **checks}, indent=2, ensure_ascii=False))
    else:
        print("\n".join(inspection.describe(manifest, wrong_files, histogram=args.graph)))
        if args.verify and not problems:
            print(f"\nverified: every file's SHA-256; reproduced here: {', '.join(replay.replayed) or 'nothing'}")
            for name, reason in replay.left_out.items():
                print(f"not replayed: {name}: {reason}")
    for problem in problems:
        print(f"dragoman inspect: {problem}", file=sys.stderr)
    return 1 if problems else 0


@dataclass(frozen=True)
class Replay:
    """What of a bundle was run here as a server would run it, what was not and why, and what failed."""

    replayed: list[str]
    left_out: dict[str, str]
    problems: list[str]


def _replay(path: Path, manifest: Manifest) -> Replay:
    """Load the model as a server would, for each graph set of the CPU and the shortlist.

    Each load replays a golden set, and runs the alignment graph once.
    """
    runtime.check_runtime()
    from dragoman.pipeline import TextLimits
    from dragoman.served_model import ServedModel

    server = ServerConfig()
    limits = TextLimits(server.max_text_bytes, server.max_segments)
    result = Replay([], {}, [])
    served = [(graphs.precision, False) for graphs in manifest.graphs if graphs.provider == "cpu"]
    if manifest.shortlist is not None:
        served.append((manifest.shortlist.precision, True))
    for precision, shortlist in served:
        try:
            ServedModel.load(path, EngineConfig(num_slots=8), limits, precision=precision, shortlist=shortlist)
        except BundleError as error:
            result.problems.append(str(error))
        else:
            result.replayed.append(f"cpu/{precision}{' with the shortlist' if shortlist else ''}")
    for graphs in manifest.graphs:
        if graphs.provider != "cpu":
            result.left_out[f"{graphs.provider}/{graphs.precision}"] = (
                "its graphs are for a GPU, and this ran on the CPU"
            )
    if manifest.alignment is not None:
        if served:
            result.replayed.append("the alignment graph")
        else:
            result.left_out["the alignment graph"] = "there are no graphs for the CPU to run it with"
    return result
