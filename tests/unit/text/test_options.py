"""What a caller may ask for, and what contradicts itself."""

import math

import pytest

from dragoman.errors import InvalidRequestError
from dragoman.types import DecodingOptions

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
        ({"patience": 2.0, "length_penalty": 0.0, **BEAM}, "patience is 2.0 and length_penalty is 0"),
        ({"patience": 0.1, **BEAM}, "patience is 0.1 and beam_size is 4; .* must round to 1 or more"),
        ({"num_hypotheses": 0}, "num_hypotheses is 0"),
        ({"num_hypotheses": 2}, "num_hypotheses is 2; it must be from 1 to 1, which is beam_size"),
        ({"num_hypotheses": 5, **BEAM}, "num_hypotheses is 5; .* 4, which is beam_size"),
        ({"num_hypotheses": 3, "patience": 0.5, **BEAM}, "num_hypotheses is 3; .* 2, which is beam_size x patience"),
        ({"length_penalty": math.inf}, "length_penalty is inf"),
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
        {"repetition_penalty": 0.01},
        {"return_alternatives": True, "num_hypotheses": 5},
        {"length_penalty": 0.5},
        {"stop": ("a" * 256,) * 16},
    ],
)
def test_the_bounds_themselves_are_allowed(options):
    """And a length penalty where there is nothing to rank, as ever."""
    DecodingOptions(**options)
