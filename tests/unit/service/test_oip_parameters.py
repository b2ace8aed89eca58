"""Request parameters of the Open Inference Protocol."""

from __future__ import annotations

import time
from dataclasses import fields

import pytest

from dragoman.errors import InvalidRequestError
from dragoman.oip import inference_pb2 as pb
from dragoman.servicers.parameters import Parameters, read_parameters
from dragoman.servicers.rpc import Call
from dragoman.types import DecodingOptions

Value = bool | int | float | str


def read(call: Call | None = None, *, scored: bool = False, **values: Value) -> Parameters:
    """Parameters as a client would send them: each in the field of its type."""
    request = pb.ModelInferRequest()
    for name, value in values.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return read_parameters(request, call or Call("ModelInfer"), scored=scored)


def test_options_have_our_names_or_those_of_other_software():
    """Every alias means the option; numbers without a fraction do for options that may have one."""
    ours = DecodingOptions(max_new_tokens=9, min_new_tokens=2, beam_size=4, num_hypotheses=2, length_penalty=1.0)
    assert read(max_new_tokens=9, min_new_tokens=2, beam_size=4, num_hypotheses=2, length_penalty=1).options == ours
    assert read(max_tokens=9, min_tokens=2, num_beams=4, num_return_sequences=2).options == ours
    assert read(max_decoding_length=9, min_decoding_length=2, beam_width=4, num_return_sequences=2).options == ours
    drawn = DecodingOptions(temperature=0.5, top_k=3, top_p=0.9, seed=7)
    assert read(temperature=0.5, top_k=3, top_p=0.9, seed=7).options == drawn
    assert read(sampling_temperature=0.5, sampling_topk=3, sampling_topp=0.9, random_seed=7).options == drawn
    assert read().options == DecodingOptions()


def test_a_seed_may_have_64_bits():
    """It comes in the field for unsigned numbers then."""
    request = pb.ModelInferRequest()
    request.parameters["seed"].uint64_param = 2**64 - 1
    request.parameters["temperature"].double_param = 1.0
    assert read_parameters(request, Call("ModelInfer"), scored=False).options.seed == 2**64 - 1


def test_every_option_is_a_parameter_or_refused_with_a_way_out():
    """Options that are added later cannot be forgotten here."""
    for option in fields(DecodingOptions):
        with pytest.raises(InvalidRequestError) as caught:
            read(**{option.name: 1e300})
        assert option.name in str(caught.value) and "is no parameter: did you" not in str(caught.value)


def test_lists_are_one_text_or_a_json_array():
    """A text that begins with a bracket is given in an array."""
    assert read(stop=".").options.stop == (".",)
    assert read(stop='["[", "ab"]').options.stop == ("[", "ab")
    assert read(suppress_tokens='["a"]').options.suppress_tokens == ("a",)
    assert read(suppress_sequences='[["a", "b"], ["c"]]').options.suppress_sequences == (("a", "b"), ("c",))
    for value, words in (
        ("[x", "no JSON array"),
        ("[" * 100_000, "no JSON array"),
        ("[1]", r"stop\[0\] is 1"),
        (1, "is 1"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            read(stop=value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"beam_sizes": 2}, "'beam_sizes' is no parameter: did you mean beam_size"),
        ({"sequence_id": 3}, "'sequence_id' is no parameter"),
        ({"num_beams": 2, "beam_size": 2}, "beam_size is given twice"),
        ({"max_tokens": "5"}, "max_new_tokens is '5'; it must be an integer"),
        ({"max_tokens": 5.0}, "max_new_tokens is 5.0; it must be an integer"),
        ({"max_tokens": True}, "max_new_tokens is True; it must be an integer"),
        ({"max_tokens": 0}, "max_new_tokens is 0; it must be from 1"),
        ({"num_beams": 2, "temperature": 1.0}, "beam search draws nothing"),
        ({"unknown_words": "keep"}, "unknown_words is 'keep'; it must be one of refuse"),
        ({"return_scores": True}, "ask for the output 'score'"),
        ({"return_alignment": True}, "dragoman.v1.GenerationService"),
        ({"priority": -1}, "priority is -1; it must be from 1, the most urgent, to 21"),
        ({"priority": 22}, "priority is 22"),
        ({"priority": 1.0}, "priority is 1.0; it must be an integer"),
        ({"timeout": -1}, "timeout is -1"),
        ({"triton_enable_empty_final_response": 1}, "must be true or false"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(values, words):
    """Unknown names, other types, contradictions, and what no output shows."""
    with pytest.raises(InvalidRequestError, match=words):
        read(**values)


def test_a_parameter_without_a_value_is_refused():
    """The protocol allows it; it says nothing."""
    request = pb.ModelInferRequest()
    request.parameters["beam_size"].SetInParent()
    with pytest.raises(InvalidRequestError, match="beam_size has no value"):
        read_parameters(request, Call("ModelInfer"), scored=False)


def test_priorities_are_those_of_triton():
    """1 is the most urgent, and 0 stands for the one in the middle."""
    assert [read(priority=p).terms.priority for p in (0, 1, 2, 10, 11, 12, 21)] == [0, 10, 9, 1, 0, -1, -10]


def test_a_timeout_is_a_deadline_in_microseconds():
    """The sooner of it and the call's own counts; 0 is none."""
    now = time.monotonic()
    assert read().terms.deadline is read(timeout=0).terms.deadline is None
    alone = read(timeout=2_000_000).terms.deadline
    assert alone is not None and now + 2 <= alone <= time.monotonic() + 2
    call = Call("ModelInfer", deadline=now + 1)
    assert read(call).terms.deadline == read(call, timeout=60_000_000).terms.deadline == now + 1
    sooner = read(Call("ModelInfer", deadline=now + 60), timeout=1_000_000).terms.deadline
    assert sooner is not None and sooner < now + 60


def test_the_rest_of_a_request_is_for_whom_it_is():
    """Language, caller, empty final response, and scores where an output needs them."""
    parameters = read(Call("ModelInfer", caller="me"), scored=True, target_language="de")
    assert (parameters.target_language, parameters.terms.caller, parameters.empty_final) == ("de", "me", False)
    assert parameters.options == DecodingOptions(return_scores=True)
    assert read(triton_enable_empty_final_response=True).empty_final is True
