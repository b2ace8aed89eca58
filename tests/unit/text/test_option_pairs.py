"""Every option beside every other: honoured in the answer, or refused by name. Nothing is ignored."""

from __future__ import annotations

import itertools
import random
import re
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from dragoman.alignment import Aligner
from dragoman.answer import TextHypothesis, TextResult
from dragoman.bundle import TextRules
from dragoman.config import EngineConfig
from dragoman.engine.engine import Engine, Stream
from dragoman.errors import DragomanError, InvalidRequestError
from dragoman.pipeline import TextLimits, TextPipeline
from dragoman.served_model import token_rules
from dragoman.testing import VOCABULARY, ScriptedRunner, scripted_manifest
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer
from dragoman.types import DecodingOptions, FinishReason, GenerationRequest, UnknownWords
from dragoman.vocabulary import EOS_ID, UNK_ID

TEXT = "abcdeÄ"
KNOWN = "abcdef"
BASES: list[dict[str, Any]] = [{}, {"beam_size": 3}, {"temperature": 1.0}, {"num_hypotheses": 2, "temperature": 2.0}]


class Outcome(NamedTuple):
    """What one request came to."""

    asked: dict[str, Any]
    request: GenerationRequest
    result: TextResult

    @property
    def answers(self) -> tuple[TextHypothesis, ...]:
        return self.result.segments[0].hypotheses

    def new(self, answer: TextHypothesis) -> tuple[str, ...]:
        """The tokens behind the prefix."""
        return answer.tokens[len(self.request.prefix) :]


def every(check: Callable[[Outcome, TextHypothesis], bool]) -> Callable[[Outcome], bool]:
    return lambda outcome: all(check(outcome, answer) for answer in outcome.answers)


def searched(name: str) -> Callable[[Outcome], bool]:
    """What shows in no single answer is asked of the engine."""
    return lambda outcome: bool(getattr(outcome.request.search, name) == outcome.asked[name])


def positions(outcome: Outcome, answer: TextHypothesis) -> int:
    """How many there are behind the prefix, that of an end token that the model produced included."""
    return len(outcome.new(answer)) + (answer.finish_reason is FinishReason.STOP)


told_coverage: list[int] = []
"""The answers whose coverage was asked for by the request that runs."""

OPTIONS: dict[str, tuple[Any, Callable[[Outcome], bool]]] = {
    "max_new_tokens": (4, every(lambda o, a: positions(o, a) <= 4)),
    "min_new_tokens": (3, every(lambda o, a: a.finish_reason is not FinishReason.STOP or len(o.new(a)) >= 3)),
    "max_length_ratio": (0.5, every(lambda o, a: positions(o, a) <= 3)),
    "beam_size": (4, searched("beam_size")),
    "patience": (2.0, searched("patience")),
    "num_hypotheses": (3, lambda o: len(o.answers) == 3),
    "length_penalty": (0.5, searched("length_penalty")),
    "coverage_penalty": (0.3, lambda o: bool(told_coverage)),
    "temperature": (0.7, lambda o: searched("temperature")(o) and o.result.seed is not None),
    "top_k": (5, searched("top_k")),
    "top_p": (0.8, searched("top_p")),
    "min_p": (0.1, searched("min_p")),
    "seed": (7, lambda o: o.result.seed == 7),
    "repetition_penalty": (
        1.5,
        lambda o: o.request.steering is not None and o.request.steering.repetition_penalty == 1.5,
    ),
    "no_repeat_ngram_size": (1, every(lambda o, a: len(set(a.tokens)) == len(a.tokens))),
    "target_prefix": ("xy", every(lambda o, a: a.text.startswith("xy") and a.tokens[:2] == ("x", "y"))),
    "suppress_tokens": (("a", "e"), every(lambda o, a: not {"a", "e"} & set(o.new(a)))),
    "suppress_sequences": (
        (("b",), ("c", "d")),
        every(lambda o, a: "b" not in o.new(a) and "cd" not in "".join(a.tokens)),
    ),
    "stop": (("d", "gh"), every(lambda o, a: "d" not in a.text and "gh" not in a.text)),
    "detect_repetition": (False, lambda o: not o.request.stop_at_loops),
    "return_scores": (True, every(lambda o, a: a.score is not None and len(a.token_scores or ()) >= len(o.new(a)))),
    "num_top_tokens": (
        2,
        every(
            lambda o, a: (
                len(a.top_tokens) >= len(o.new(a))
                and (bool(a.top_tokens) or a.finish_reason is FinishReason.STOP_SEQUENCE)  # cut to nothing
                and all(0 < len(place) <= 2 for place in a.top_tokens)
            )
        ),
    ),
    "return_alternatives": (True, lambda o: len({o.new(answer)[:1] for answer in o.answers}) == len(o.answers)),
    "return_alignment": (True, every(lambda o, a: len(a.alignment) == len(a.tokens))),
    "unknown_words": (
        UnknownWords.COPY,
        lambda o: (
            o.request.source.count(UNK_ID) == 1
            and all("<unk>" not in answer.text and len(answer.text) == len(answer.tokens) for answer in o.answers)
        ),
    ),
    "split_sentences": (True, lambda o: [(s.start, s.end) for s in o.result.segments] == [(0, len(KNOWN))]),
    "protect": (
        ("cd",),
        every(lambda o, a: a.unprotected == (() if re.findall(r"(?<![a-z])cd(?![a-z])", a.text) else ((2, 4),))),
    ),
}
"""For each option a value that is not its default, and what it promises."""


def script(source: tuple[int, ...], fed: tuple[int, ...]) -> list[float]:
    """Everything may come, repeated often; the end becomes more probable."""
    generator = random.Random(hash((source, fed)))
    logits = [generator.uniform(-2, 2) for _ in range(30)]
    logits[4:9] = [logit + 2 for logit in logits[4:9]]
    logits[UNK_ID] += 2
    logits[EOS_ID] += 0.4 * len(fed) - 2
    return logits


def forced_pass(source: tuple[int, ...], tokens: tuple[int, ...]) -> Any:
    return np.eye(len(tokens), len(source), dtype=np.float32)


def coverage(source: tuple[int, ...], tokens: tuple[int, ...]) -> Any:
    told_coverage.append(len(tokens))
    return np.full((len(tokens) + 1, len(source)), 1 / len(source), np.float32)


def test_every_option_has_its_promise() -> None:
    """And a value of its own."""
    assert set(OPTIONS) == set(DecodingOptions.__dataclass_fields__)
    for name, (value, _) in OPTIONS.items():
        assert value != DecodingOptions.__dataclass_fields__[name].default


async def test_every_pair_of_options_is_honoured_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and on top of a beam search, of sampling, and of several answers."""
    submit = Engine.submit
    requests: list[GenerationRequest] = []

    def remember(engine: Engine, request: GenerationRequest) -> Stream:
        requests.append(request)
        return submit(engine, request)

    monkeypatch.setattr(Engine, "submit", remember)
    monkeypatch.setattr(secrets, "randbits", random.Random(0).getrandbits)  # the same draws in every run
    manifest = replace(scripted_manifest(), texts=TextRules("en", None, False, ("itself",)))
    tokenizers = SourceTokenizer(VOCABULARY, (), (EOS_ID,)), TargetTokenizer(VOCABULARY)
    engine = Engine([ScriptedRunner(script)], token_rules(manifest), EngineConfig())
    aligner = Aligner(forced_pass, 64, coverage)
    pipeline = TextPipeline(manifest, *tokenizers, engine, TextLimits(10_000, 50), aligner)
    engine.start()
    num_honoured = num_refused = 0
    try:
        for base, pair in itertools.product(BASES, itertools.combinations(OPTIONS, 2)):
            asked = {**base, **{name: OPTIONS[name][0] for name in pair}}
            try:
                options = DecodingOptions(**asked)
                text = TEXT if "unknown_words" in pair else KNOWN
                told_coverage.clear()
                result = await pipeline.generate(text, options)
            except DragomanError as error:
                assert isinstance(error, InvalidRequestError), (asked, error)
                assert any(name in str(error) for name in asked), (asked, error)
                num_refused += 1
                continue
            outcome = Outcome(asked, requests[-1], result)
            for name in pair:
                assert OPTIONS[name][1](outcome), (name, asked, result)
            num_honoured += 1
    finally:
        await engine.close()
        pipeline.close()
    assert num_honoured > 400 and num_refused > 100
