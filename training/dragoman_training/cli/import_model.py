"""Make a checkpoint of another toolkit's translation model, to be exported and served like one of ours.

SOURCE is a folder in CTranslate2's format, an Argos package (.argosmodel), or a Marian folder of Hugging Face, such as
OPUS-MT's.
Its licence goes on to hold for everything that is made of it: look it up where the model comes from.

  dragoman import opus-mt-en-de --out imported/en-de
  dragoman import translate-en_es-1_0.argosmodel --out imported/en-es
  dragoman export imported/en-es --sources lines.en --out bundles/en-es
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dragoman_training.errors import TrainingError

SUMMARY = "make a checkpoint of a CTranslate2, Argos or Marian model"
EXTRA: str | None = "train"
KINDS = ("ctranslate2", "argos", "marian")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the model's folder or package")
    parser.add_argument("--out", type=Path, required=True, metavar="CKPT", help="the new checkpoint folder")
    parser.add_argument("--from", dest="kind", choices=KINDS, help="what SOURCE is (default: found out)")


def run(args: argparse.Namespace) -> int:
    """Print what was imported; 2 for a refusal."""
    from dragoman_training.importing.kinds import import_model

    try:
        imported = import_model(args.source, args.out, args.kind)
    except TrainingError as error:
        print(f"dragoman import: error: {error}", file=sys.stderr)
        return 2
    for note in imported.notes:
        print(f"dragoman import: {note}", file=sys.stderr)
    config, (source, target) = imported.config, imported.tokenizers
    print(
        f"{args.out}: {config.encoder_layers}+{config.decoder_layers} layers of width {config.d_model},"
        f" {len(source)} source and {len(target)} target tokens, texts of up to {imported.max_tokens} tokens"
    )
    print("The licence of the model goes on to hold: pass it on with what you make of it.")
    return 0
