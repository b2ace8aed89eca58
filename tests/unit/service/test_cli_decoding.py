"""The decoding options on the command line."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

from dragoman.cli import generate
from dragoman.cli.decoding import decoding_options
from dragoman.errors import ConfigError, InvalidRequestError
from dragoman.types import DecodingOptions, UnknownWords


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    return parser.parse_args(arguments)


def test_nothing_given_is_the_default():
    """Every option of the dataclass has its place among the arguments."""
    args = parse("abc")
    assert decoding_options(args) == DecodingOptions()
    assert all(hasattr(args, field.name) for field in fields(DecodingOptions))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--max-new-tokens 9 --min-new-tokens 2 --max-length-ratio 1.5 --no-repeat-ngram-size 3",
            DecodingOptions(max_new_tokens=9, min_new_tokens=2, max_length_ratio=1.5, no_repeat_ngram_size=3),
        ),
        (
            "--beam-size 5 --patience 2 --length-penalty 0.6 --coverage-penalty 0.2 --num-hypotheses 3",
            DecodingOptions(beam_size=5, patience=2.0, length_penalty=0.6, coverage_penalty=0.2, num_hypotheses=3),
        ),
        (
            "--temperature 0.7 --top-k 5 --top-p 0.9 --min-p 0.1 --seed 18446744073709551615",
            DecodingOptions(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=2**64 - 1),
        ),
        (
            "--target-prefix x --stop END --stop . --suppress-token a --suppress-token b --suppress-sequence c_d",
            DecodingOptions(
                target_prefix="x",
                stop=("END", "."),
                suppress_tokens=("a", "b"),
                suppress_sequences=(("c", "d"),),
            ),
        ),
        (
            "--repetition-penalty 1.2 --allow-repetition --return-scores --num-top-tokens 4 --alignment",
            DecodingOptions(
                repetition_penalty=1.2,
                detect_repetition=False,
                return_scores=True,
                num_top_tokens=4,
                return_alignment=True,
            ),
        ),
        ("--return-alternatives --num-hypotheses 4", DecodingOptions(return_alternatives=True, num_hypotheses=4)),
        ("--unknown-words copy", DecodingOptions(unknown_words=UnknownWords.COPY)),
        (
            "--split-sentences --protect urls --protect x+",
            DecodingOptions(split_sentences=True, protect=("urls", "x+")),
        ),
        ("--no-split-sentences", DecodingOptions(split_sentences=False)),
    ],
)
def test_each_flag_sets_its_option(line, expected):
    """Those that may be given several times add up."""
    assert decoding_options(parse(*(word.replace("_", " ") for word in line.split()))) == expected


@pytest.mark.parametrize("policy", UnknownWords)
def test_every_policy_for_unknown_words_has_its_name(policy):
    """That of the service."""
    assert decoding_options(parse("--unknown-words", policy)).unknown_words is policy


def test_options_that_contradict_each_other_are_refused_before_any_model():
    """With the words of the service."""
    with pytest.raises(InvalidRequestError, match=r"beam_size is 4 and temperature is 0\.5"):
        generate.run(parse("--beam-size", "4", "--temperature", "0.5", "abc"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--return-scores"], "--return-scores was given without --json"),
        (["--num-hypotheses", "2", "--beam-size", "2"], "--num-hypotheses was given without --json"),
        (["--return-alternatives"], "--return-alternatives was given without --json"),
        (["--num-top-tokens", "2"], "--num-top-tokens was given without --json"),
        (["--priority", "1"], "--priority was given without --target"),
        (
            ["--target", "a:1", "--slots", "2", "--stuck-seconds", "3"],
            "--slots, --stuck-seconds and --target were both",
        ),
    ],
)
def test_what_a_line_has_no_place_for_is_not_dropped_in_silence(arguments, message):
    """Refused before any model is opened."""
    with pytest.raises(ConfigError, match=message):
        generate.run(parse(*arguments, "abc"))
