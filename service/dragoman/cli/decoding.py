"""The decoding options as options of a command."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # heavy
    from dragoman.types import DecodingOptions

_FLAGS: Final[dict[str, tuple[tuple[str, dict[str, Any]], ...]]] = {
    "length": (
        ("--max-new-tokens", {"type": int, "metavar": "N", "help": "decoding steps (default: the model's limit)"}),
        ("--min-new-tokens", {"type": int, "metavar": "N", "help": "no answer ends before"}),
        (
            "--max-length-ratio",
            {"type": float, "metavar": "R", "help": "at most so many new tokens for each source token"},
        ),
    ),
    "search": (
        ("--beam-size", {"type": int, "metavar": "N", "help": "width of beam search (default: 1, greedy search)"}),
        (
            "--patience",
            {"type": float, "metavar": "P", "help": "wait for beam size x P finished hypotheses (default: 1)"},
        ),
        (
            "--length-penalty",
            {"type": float, "metavar": "P", "help": "of beam search: divide scores by length ** P (default: 1)"},
        ),
        (
            "--coverage-penalty",
            {
                "type": float,
                "metavar": "P",
                "help": "of beam search: weight of a penalty for source tokens that got little attention (default: 0); "
                "the model must have been exported with --alignment",
            },
        ),
        (
            "--num-hypotheses",
            {"type": int, "metavar": "N", "help": "answers to each text, which is of one line then; needs --json"},
        ),
        (
            "--return-alternatives",
            {
                "action": "store_true",
                "help": "answers that differ in their first token behind the prefix, the most probable first; needs "
                "--json",
            },
        ),
    ),
    "sampling": (
        ("--temperature", {"type": float, "metavar": "T", "help": "draw tokens by chance (default: 0, do not)"}),
        ("--top-k", {"type": int, "metavar": "K", "help": "... among the K most probable ones"}),
        ("--top-p", {"type": float, "metavar": "P", "help": "... among the fewest whose mass reaches P"}),
        ("--min-p", {"type": float, "metavar": "P", "help": "... among those P times as probable as the best one"}),
        ("--seed", {"type": int, "metavar": "N", "help": "the same seed draws the same answers (default: by chance)"}),
    ),
    "steering": (
        (
            "--target-prefix",
            {"metavar": "TEXT", "help": "what the answer to each text begins with; texts are of one line then"},
        ),
        (
            "--stop",
            {"action": "append", "metavar": "TEXT", "help": "end answers before this text; may be given several times"},
        ),
        (
            "--suppress-token",
            {
                "dest": "suppress_tokens",
                "action": "append",
                "metavar": "NAME",
                "help": "a token that never comes; may be given several times",
            },
        ),
        (
            "--suppress-sequence",
            {
                "dest": "suppress_sequences",
                "action": "append",
                "metavar": "NAMES",
                "help": "tokens, separated by blanks, that never follow each other; may be given several times",
            },
        ),
        (
            "--repetition-penalty",
            {"type": float, "metavar": "P", "help": "above 1, what came before is less probable (default: 1)"},
        ),
        ("--no-repeat-ngram-size", {"type": int, "metavar": "N", "help": "no N tokens follow each other twice"}),
        (
            "--allow-repetition",
            {
                "dest": "detect_repetition",
                "action": "store_false",
                "default": None,
                "help": "let answers go round in circles",
            },
        ),
    ),
    "text": (
        (
            "--unknown-words",
            {
                "choices": ["refuse", "byte_fallback", "copy", "suppress"],
                "help": "what becomes of words that the source vocabulary lacks: refuse the text, spell them in bytes, "
                "put them into the answer where it has an unknown word (for models exported with --alignment), or let "
                "the model make of them what it can (default: refuse or byte_fallback, as the model can)",
            },
        ),
        (
            "--split-sentences",
            {
                "action": argparse.BooleanOptionalAction,
                "default": None,
                "help": "answer each sentence of a line by itself, and cut those that are too long for the model, "
                "behind a comma or at a blank (default: as the model has it)",
            },
        ),
        (
            "--protect",
            {
                "action": "append",
                "metavar": "PATTERN",
                "help": "what must arrive unchanged: urls, emails, numbers, codes, placeholders, tags, or a regular "
                "expression of RE2; may be given several times. What does not is told on stderr",
            },
        ),
    ),
    "what comes with an answer": (
        ("--return-scores", {"action": "store_true", "help": "log-probabilities of tokens and answers; needs --json"}),
        (
            "--num-top-tokens",
            {"type": int, "metavar": "N", "help": "the N most probable tokens at each position; needs --json"},
        ),
        (
            "--alignment",
            {
                "dest": "return_alignment",
                "action": "store_true",
                "help": "append to each answer which source token each target token comes from (with --json: a field "
                "of it); the model must have been exported with --alignment",
            },
        ),
    ),
}

JSON_ONLY: Final = ("num_hypotheses", "return_alternatives", "return_scores", "num_top_tokens")
"""Options of which a line of text has no place for what they give."""


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """An option for each of ``DecodingOptions``'s."""
    for title, flags in _FLAGS.items():
        group = parser.add_argument_group(title)
        for flag, settings in flags:
            group.add_argument(flag, **settings)


def decoding_options(args: argparse.Namespace) -> DecodingOptions:
    """What was given. Raises InvalidRequestError."""
    from dragoman.types import DecodingOptions, UnknownWords

    given = {name: getattr(args, name) for name in DecodingOptions.__dataclass_fields__}
    values = {name: value for name, value in given.items() if value is not None}
    for name in ("stop", "suppress_tokens", "protect"):
        if name in values:
            values[name] = tuple(values[name])
    if "unknown_words" in values:
        values["unknown_words"] = UnknownWords(values["unknown_words"])
    if "suppress_sequences" in values:
        values["suppress_sequences"] = tuple(tuple(names.split()) for names in values["suppress_sequences"])
    return DecodingOptions(**values)


def json_only(options: DecodingOptions) -> list[str]:
    """The flags that were given of options of which a line of text has no place for what they give."""
    return [
        "--" + name.replace("_", "-")
        for name in JSON_ONLY
        if getattr(options, name) != options.__dataclass_fields__[name].default
    ]
