"""Request parameters of the Open Inference Protocol: decoding options under our names and others', and terms.

Nothing is ignored: a parameter that is unknown, of another type, or could not show in an answer is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Final

from dragoman.errors import InvalidRequestError
from dragoman.oip import inference_pb2 as pb
from dragoman.resolver import Terms
from dragoman.servicers.rpc import Call
from dragoman.servicers.wire import check_known
from dragoman.types import MAX_PRIORITY, DecodingOptions

ALIASES: Final[Mapping[str, str]] = {
    "max_tokens": "max_new_tokens",
    "max_decoding_length": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "min_decoding_length": "min_new_tokens",
    "num_beams": "beam_size",
    "beam_width": "beam_size",
    "num_return_sequences": "num_hypotheses",
    "sampling_temperature": "temperature",
    "sampling_topk": "top_k",
    "sampling_topp": "top_p",
    "random_seed": "seed",
}
"""What Hugging Face, vLLM, CTranslate2 and TensorRT-LLM call the same option."""

_ELSEWHERE: Final[Mapping[str, str]] = {
    "return_scores": "ask for the output 'score' instead",
    "return_alignment": "no output shows it: call dragoman.v1.GenerationService instead",
    "num_top_tokens": "no output shows them: call dragoman.v1.GenerationService instead",
}
"""Options that are no parameters, and what to do instead."""

_OPTIONS: Final = frozenset(field.name for field in fields(DecodingOptions)) - _ELSEWHERE.keys()
_LISTS: Final = frozenset(field.name for field in fields(DecodingOptions) if str(field.type).startswith("tuple"))

_TARGET_LANGUAGE: Final = "target_language"
_PRIORITY: Final = "priority"
_TIMEOUT: Final = "timeout"
_EMPTY_FINAL: Final = "triton_enable_empty_final_response"
_OTHERS: Final[Mapping[str, tuple[type, str]]] = {
    _TARGET_LANGUAGE: (str, "a text"),
    _PRIORITY: (int, "an integer"),
    _TIMEOUT: (int, "an integer"),
    _EMPTY_FINAL: (bool, "true or false"),
}
"""Parameters that are no options, their types and what to call these."""

_LOWEST: Final = 2 * MAX_PRIORITY + 1
"""Triton's priorities begin with 1, the most urgent; so many stand for all of ours."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """How a request wants its texts answered."""

    options: DecodingOptions
    terms: Terms
    target_language: str
    empty_final: bool  # a stream ends with a response that has no outputs


def read_parameters(request: pb.ModelInferRequest, call: Call, *, scored: bool) -> Parameters:
    """All parameters of a request. ``scored``: whether scores are asked for. Raises InvalidRequestError."""
    options: dict[str, Any] = {"return_scores": True} if scored else {}
    others: dict[str, Any] = {}
    for given, parameter in request.parameters.items():
        name = ALIASES.get(given, given)
        if name in _ELSEWHERE:
            raise InvalidRequestError(f"{name} is no parameter: {_ELSEWHERE[name]}")
        if name not in _OPTIONS and name not in _OTHERS:
            raise InvalidRequestError(_unknown(given))
        if name in options:
            raise InvalidRequestError(f"{name} is given twice, once as {given} or another of its names: leave one out")
        value = _value(given, parameter)
        if name in _OTHERS:
            kind, words = _OTHERS[name]
            if type(value) is not kind:
                raise InvalidRequestError(f"{name} is {value!r:.100}; it must be {words}")
            others[name] = value
        else:
            options[name] = _items(given, value) if name in _LISTS else value
    return Parameters(
        DecodingOptions(**options),
        Terms(_deadline(others.get(_TIMEOUT, 0), call), _priority(others.get(_PRIORITY, 0)), call.caller),
        others.get(_TARGET_LANGUAGE, ""),
        others.get(_EMPTY_FINAL, False),
    )


def _unknown(name: str) -> str:
    known = sorted({*_OPTIONS, *ALIASES, *_OTHERS})
    alike = get_close_matches(name[:100], known, 1)
    hint = f"did you mean {alike[0]}?" if alike else f"there is {', '.join(known)}"
    return f"{name[:100]!r} is no parameter: {hint}"


def _value(name: str, parameter: pb.InferParameter) -> object:
    check_known(parameter, f"parameter {name[:100]!r}")
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise InvalidRequestError(f"parameter {name} has no value: give it one, or leave it out")
    value: object = getattr(parameter, choice)
    return value


def _items(name: str, value: object) -> tuple[Any, ...]:
    """The items of a list: a parameter has but one value, so that a text stands for them."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} is {value!r:.100}; it must be a text, or a JSON array in one")
    if not value.startswith("["):
        return (value,)
    try:
        items = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{name} begins with '[' and is no JSON array: {error}; a text that begins with '[' is given in one"
        ) from error
    return tuple(tuple(item) if isinstance(item, list) else item for item in items)


def _priority(value: int) -> int:
    if not 0 <= value <= _LOWEST:
        raise InvalidRequestError(
            f"priority is {value}; it must be from 1, the most urgent, to {_LOWEST}, or 0 for the default"
        )
    return 0 if value == 0 else MAX_PRIORITY + 1 - value


def _deadline(timeout: int, call: Call) -> float | None:
    """When the request must be answered, on ``time.monotonic``'s clock: the sooner of its timeout and the call's."""
    if timeout < 0:
        raise InvalidRequestError(f"timeout is {timeout}; it must be 0, for none, or more microseconds")
    if timeout == 0:
        return call.deadline
    own = time.monotonic() + timeout / 1e6
    return own if call.deadline is None else min(own, call.deadline)
