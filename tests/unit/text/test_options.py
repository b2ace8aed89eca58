"""What a caller may ask for, and what contradicts itself."""

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest

from dragoman.errors import InvalidRequestError
from dragoman.types import DecodingOptions, UnknownWords

DRAWN = {"temperature": 1.0}
BEAM = {"beam_size": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be from 1 to 1000000"),
        ({"max_new_tokens": -5}, "max_new_tokens is -5"),
        ({"max_new_tokens": 2**31 - 1}, "max_new_tokens is 2147483647"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"min_new_tokens": 4, "max_new_tokens": 3}, "min_new_tokens is 4; .* 3, which is max_new_tokens"),
        ({"max_length_ratio": 0.0}, "max_length_ratio is 0.0"),
        ({"max_length_ratio": math.nan}, "max_length_ratio is nan"),
        ({"max_length_ratio": math.inf}, "max_length_ratio is inf"),
        ({"beam_size": 0}, "beam_size is 0"),
        ({"beam_size": 10_000}, "beam_size is 10000"),
        ({"patience": 0.0, **BEAM}, "patience is 0.0"),
        ({"patience": math.nan, **BEAM}, "patience is nan"),
        ({"patience": 2.0}, "patience is 2.0 and beam_size is 1"),
        ({"length_penalty": 0.5}, "length_penalty is 0.5 and beam_size is 1"),
        ({"length_penalty": 0.5, **DRAWN}, "length_penalty is 0.5 and beam_size is 1"),
        ({"patience": 2.0, "length_penalty": 0.0, **BEAM}, "patience is 2.0 and length_penalty is 0"),
        ({"patience": 0.1, **BEAM}, "patience is 0.1 and beam_size is 4; .* must round to 1 or more"),
        ({"num_hypotheses": 0}, "num_hypotheses is 0"),
        ({"num_hypotheses": 2}, "num_hypotheses is 2; it must be from 1 to 1, which is beam_size"),
        ({"num_hypotheses": 5, **BEAM}, "num_hypotheses is 5; .* 4, which is beam_size"),
        ({"num_hypotheses": 3, "patience": 0.5, **BEAM}, "num_hypotheses is 3; .* 2, which is beam_size x patience"),
        ({"length_penalty": math.inf}, "length_penalty is inf"),
        ({"coverage_penalty": 0.1}, "coverage_penalty is 0.1 and beam_size is 1; coverage_penalty needs a beam search"),
        ({"coverage_penalty": 10.1, **BEAM}, "coverage_penalty is 10.1; it must be from -10.0 to 10.0"),
        ({"coverage_penalty": math.nan, **BEAM}, "coverage_penalty is nan"),
        ({"length_penalty": math.nan}, "length_penalty is nan"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e-300}, "temperature is 1e-300"),
        ({"temperature": 0.7, **BEAM}, "beam_size is 4 and temperature is 0.7"),
        ({"top_k": -1, **DRAWN}, "top_k is -1"),
        ({"top_p": 0.0, **DRAWN}, "top_p is 0.0"),
        ({"top_p": 1.5, **DRAWN}, "top_p is 1.5"),
        ({"top_p": math.nan, **DRAWN}, "top_p is nan"),
        ({"min_p": math.nan, **DRAWN}, "min_p is nan"),
        ({"min_p": 1.1, **DRAWN}, "min_p is 1.1"),
        ({"seed": -1, **DRAWN}, "seed is -1"),
        ({"seed": 2**64, **DRAWN}, "seed is 18446744073709551616"),
        ({"top_k": 5}, "top_k is 5 and temperature is 0"),
        ({"top_p": 0.5}, "top_p is 0.5 and temperature is 0"),
        ({"min_p": 0.5}, "min_p is 0.5 and temperature is 0"),
        ({"seed": 0}, "seed is 0 and temperature is 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": 0.009}, "repetition_penalty is 0.009; it must be from 0.01 to 100"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
        ({"num_top_tokens": 33}, "num_top_tokens is 33"),
        ({"return_alternatives": True, **BEAM}, "return_alternatives is set, beam_size is 4"),
        ({"return_alternatives": True, **DRAWN}, "return_alternatives is set, .* temperature is 1.0"),
        ({"stop": ("",)}, r"stop\[0\] has 0 characters"),
        ({"stop": ("a", "a" * 257)}, r"stop\[1\] has 257 characters"),
        ({"stop": ("a",) * 17}, "stop has 17 texts"),
        ({"stop": "END"}, "stop is 'END'; it must be a tuple"),
        ({"stop": ["END"]}, "stop is .*tuple"),
        ({"suppress_tokens": ("a",) * 1025}, "suppress_tokens has 1025 tokens"),
        ({"suppress_sequences": (("a",), ())}, r"suppress_sequences\[1\] has 0 tokens"),
        ({"suppress_sequences": ("ab",)}, r"suppress_sequences\[0\] is 'ab'; it must be a tuple"),
        ({"suppress_sequences": (("a",) * 65,)}, r"suppress_sequences\[0\] has 65 tokens"),
        ({"suppress_sequences": (("a",),) * 257}, "suppress_sequences has 257 sequences"),
    ],
)
def test_what_no_server_could_honour_is_refused_by_name_value_and_rule(options, message):
    """Out of bounds, not a number, contradictory, or without effect beside the others."""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        DecodingOptions(**options)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1, "min_new_tokens": 1},
        {"temperature": -0.0},
        {"temperature": 0.001, "num_hypotheses": 1024, "seed": 2**64 - 1, "top_k": 1, "top_p": 1e-9, "min_p": 1.0},
        {"beam_size": 1024, "num_hypotheses": 1024, "patience": 100.0, "length_penalty": -10.0},
        {"beam_size": 4, "num_hypotheses": 2, "patience": 0.5},
        {"beam_size": 4, "patience": 0.125},
        {"beam_size": 4, "length_penalty": 0.0},
        {"beam_size": 4, "length_penalty": 0.0, "patience": 2.0, "coverage_penalty": -10.0},
        {"repetition_penalty": 0.01},
        {"return_alternatives": True, "num_hypotheses": 5},
        {"beam_size": 2, "length_penalty": 0.5},
        {"stop": ("a" * 256,) * 16},
    ],
)
def test_the_bounds_themselves_are_allowed(options):
    """Contradictions begin beyond them."""
    DecodingOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": "4"}, "beam_size is '4'; it must be an integer"),
        ({"beam_size": 4.0}, "beam_size is 4.0; it must be an integer"),
        ({"beam_size": True}, "beam_size is True; it must be an integer"),
        ({"beam_size": None}, "beam_size is None; it must be an integer"),
        ({"max_new_tokens": [1]}, r"max_new_tokens is \[1\]; it must be an integer"),
        ({"temperature": "warm"}, "temperature is 'warm'; it must be a number"),
        ({"temperature": True}, "temperature is True; it must be a number"),
        ({"top_p": None}, "top_p is None; it must be a number"),
        ({"max_length_ratio": 1j}, "max_length_ratio is 1j; it must be a number"),
        ({"return_scores": 1}, "return_scores is 1; it must be True or False"),
        ({"detect_repetition": "no"}, "detect_repetition is 'no'; it must be True or False"),
        ({"target_prefix": b"ab"}, "target_prefix is b'ab'; it must be a text"),
        ({"target_prefix": "x" * 1000, "seed": "y" * 1000}, "seed is 'y"),
        ({"suppress_tokens": (1,)}, r"suppress_tokens\[0\] is 1; it must be a text"),
        ({"suppress_sequences": (("a", None),)}, r"suppress_sequences\[0\]\[1\] is None; it must be a text"),
        ({"stop": ("a", 2)}, r"stop\[1\] is 2; it must be a text"),
        ({"unknown_words": "omit"}, "unknown_words is 'omit'; it must be one of refuse, byte_fallback, copy, suppress"),
        ({"unknown_words": 3}, "unknown_words is 3"),
        ({"beem_size": 4}, "beem_size is no decoding option: did you mean beam_size"),
        ({"zzz": 4}, "zzz is no decoding option: there is max_new_tokens, .*, unknown_words"),
    ],
)
def test_values_of_another_type_and_names_of_no_option_are_refused(options, message):
    """As every other mistake is, so that one ``except`` finds them all."""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        DecodingOptions(**options)
    assert len(str(caught.value)) < 700


def test_numbers_of_other_libraries_are_numbers():
    """numpy's, and whole ones where any number will do."""
    options = DecodingOptions(beam_size=np.int64(4), length_penalty=1, max_length_ratio=np.float32(1.5))
    assert (options.beam_size, options.length_penalty, options.max_length_ratio) == (4, 1, 1.5)
    assert DecodingOptions(unknown_words="copy") == DecodingOptions(unknown_words=UnknownWords.COPY)


def test_options_can_be_changed_and_copied():
    """Like those of any frozen dataclass."""
    options = DecodingOptions(beam_size=4, stop=("a",))
    assert dataclasses.replace(options, beam_size=2) == DecodingOptions(beam_size=2, stop=("a",))
    assert copy.deepcopy(options) == pickle.loads(pickle.dumps(options)) == options
