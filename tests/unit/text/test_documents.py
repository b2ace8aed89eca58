"""Whole texts through the pipeline: layout, sentences, over-long ones, and what is protected."""

import re
import string
from dataclasses import replace

import numpy as np
import pytest

from dragoman.alignment import Aligner
from dragoman.answer import TextResult
from dragoman.bundle import Limits, TextRules
from dragoman.config import EngineConfig
from dragoman.engine.engine import Engine
from dragoman.errors import InvalidRequestError, ModelUnsupportedError, OverloadedError, SourceTooLongError
from dragoman.pipeline import TextLimits, TextPipeline
from dragoman.protection import vocabulary_of
from dragoman.served_model import token_rules
from dragoman.testing import ScriptedRunner, scripted_manifest
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer
from dragoman.types import DecodingOptions
from dragoman.vocabulary import EOS_ID, SPECIAL_TOKENS, PlainVocabulary

VOCABULARY = PlainVocabulary("character", (*SPECIAL_TOKENS, *string.printable, "\u00a0"))
ENGLISH = TextRules("en", "de", True, ("code", "itself"))
LIMITS = TextLimits(10_000, 50)
CODES = vocabulary_of("code").split()
FIRST = CODES[0]
CODE = re.compile("|".join(CODES))


class Model:
    """A pipeline whose model answers with what ``answer`` makes of its source, and tells what it has read."""

    def __init__(self, answer=str.swapcase, texts=ENGLISH, limits=LIMITS, max_source_tokens=1000):
        def script(source, fed):
            wanted = (*VOCABULARY.encode(answer(text_of(source))), EOS_ID)
            return np.eye(len(VOCABULARY.tokens))[wanted[min(len(fed), len(wanted)) - 1]]

        self.runner = ScriptedRunner(script)
        size = len(VOCABULARY.tokens)
        manifest = scripted_manifest(limits=Limits(max_source_tokens, 1000))
        shape = replace(manifest.model, source_vocab_size=size, target_vocab_size=size)
        entry = replace(manifest.tokenizers.source, size=size)
        tokenizers = replace(manifest.tokenizers, source=entry, target=entry)
        manifest = replace(manifest, model=shape, tokenizers=tokenizers, texts=texts)
        self.engine = Engine([self.runner], token_rules(manifest), EngineConfig())
        self.pipeline = TextPipeline(
            manifest,
            SourceTokenizer(VOCABULARY, (), (EOS_ID,)),
            TargetTokenizer(VOCABULARY),
            self.engine,
            limits,
            Aligner(lambda source, tokens: np.eye(len(tokens), len(source), dtype=np.float32), 8),
        )

    @property
    def read(self):
        return [text_of(source) for source in self.runner.encoded]

    async def __aenter__(self):
        self.engine.start()
        return self

    async def __aexit__(self, *_):
        await self.engine.close()
        self.pipeline.close()

    async def answer(self, text, **options):
        return await self.pipeline.generate(text, DecodingOptions(**options))


def text_of(source):
    return "".join(VOCABULARY.tokens[index] for index in source[:-1])


def sources(text, result):
    return [text[segment.start : segment.end] for segment in result.segments]


def lost(text, result):
    return [text[start:end] for s in result.segments for start, end in s.hypotheses[0].unprotected]


@pytest.mark.parametrize(
    "text",
    [
        "Menu\n\nSoup\t4.50\r\n  Bread\n",
        "Wait!!!!\n\n",
        "\n",
        "   ",
        "\u00a0",
        "a\rb\u2028c\x85 d\u2029\r\n\ve",
        "One. Two!\t Three?  \n Done.\u00a0 Next one\n\n",
        "- one\n- two\n1. three\n",
    ],
)
async def test_a_text_comes_back_in_its_own_layout(text):
    """Blanks, blank lines, line ends of all kinds and what is between sentences stay, byte for byte."""
    async with Model() as model:
        result = await model.answer(text)
        assert result.text == text.swapcase()
        assert (await model.answer(text, split_sentences=False)).text == text.swapcase()
    assert all(read == read.strip() != "" for read in model.read)


async def test_the_sentences_of_a_text_are_segments_of_one_batch():
    """Each with the span of its own, all decoded in the same steps."""
    text = "Dr. Roth is in. Is he?\nYes!  Go."
    async with Model() as model:
        result = await model.answer(text)
    assert sources(text, result) == model.read == ["Dr. Roth is in.", "Is he?", "Yes!", "Go."]
    assert not any(segment.continues for segment in result.segments)
    assert model.runner.num_decode_steps == len("Dr. Roth is in.") + 1


@pytest.mark.parametrize(
    ("model", "server", "request_", "num_segments"),
    [
        (ENGLISH, None, None, 2),
        (ENGLISH, None, False, 1),
        (ENGLISH, False, None, 1),
        (ENGLISH, False, True, 2),
        (replace(ENGLISH, split_sentences=False), None, None, 1),
        (replace(ENGLISH, split_sentences=False), True, None, 2),
        (None, None, None, 1),
        (None, True, None, 1),
    ],
)
async def test_who_says_whether_sentences_are_split(model, server, request_, num_segments):
    """The request, else the server, else the model; a model without a language never does unless it is asked."""
    async with Model(texts=model, limits=TextLimits(1000, 50, server)) as running:
        result = await running.answer("One. Two.", split_sentences=request_)
    assert (len(result.segments), result.text) == (num_segments, "oNE. tWO.")


async def test_a_model_without_a_language_cannot_be_told_to_split():
    """It has no rules."""
    async with Model(texts=None) as model:
        with pytest.raises(ModelUnsupportedError, match=r"split_sentences is set; .* --source-language"):
            await model.answer("One. Two.", split_sentences=True)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"target_prefix": "x"}, "target_prefix"), ({"num_hypotheses": 2, "beam_size": 2}, "num_hypotheses is 2")],
)
async def test_what_is_for_one_segment_is_refused_for_two_sentences(options, name):
    """And answered where they are not split."""
    async with Model() as model:
        with pytest.raises(InvalidRequestError, match=f"{name} .*text has 2 sentences"):
            await model.answer("One. Two.", **options)
        await model.answer("One. Two.", **options, split_sentences=False)


async def test_sentences_count_as_segments():
    """Against the same limit as lines."""
    async with Model(limits=TextLimits(1000, 3)) as model:
        with pytest.raises(SourceTooLongError, match="more than 3 lines, or sentences"):
            await model.answer("One two. Three four. Five six.\nSeven.")
        assert model.read == []


async def test_a_sentence_too_long_for_the_model_is_cut_and_says_so():
    """Behind a clause or at a blank; joined with the blanks that it had; never in silence."""
    text = "Ok. The quick fox,  which jumps over dogs and cats. End."
    async with Model(max_source_tokens=21) as model:
        result = await model.answer(text)
    assert result.text == text.swapcase()
    assert [(read, segment.continues) for read, segment in zip(model.read, result.segments, strict=True)] == [
        ("Ok.", False),
        ("The quick fox,", True),
        ("which jumps over", True),
        ("dogs and cats.", False),
        ("End.", False),
    ]


@pytest.mark.parametrize(("text", "options"), [("a b c d e f", {"split_sentences": False}), ("Ok. abcdefghijk", {})])
async def test_a_sentence_that_may_or_can_not_be_cut_is_refused(text, options):
    """As one always was; so is a single word that is too long."""
    async with Model(max_source_tokens=10) as model:
        with pytest.raises(SourceTooLongError, match="this model accepts 10"):
            await model.answer(text, **options)
        assert model.read == []


PATTERNS = ("placeholders", "urls")
ADDRESS = "https://ex.test/a?b=1&c=2"


async def test_protected_spans_are_hidden_from_the_model_and_put_back():
    """The model reads words in their place, and its answer has them as they were."""
    text = f"Hi {{user_name}}, you have %d files at {ADDRESS}. Bye {{x}}"
    async with Model(str.upper) as model:
        result = await model.answer(text, protect=PATTERNS)
    assert result.text == f"HI {{user_name}}, YOU HAVE %d FILES AT {ADDRESS}. BYE {{x}}"
    assert lost(text, result) == []
    first, second, third = CODES[:3]
    assert model.read == [f"Hi {first}, you have {second} files at {third}.", f"Bye {first}"]
    assert sources(text, result) == [text[: text.index(" Bye")], "Bye {x}"]


async def test_what_is_lost_as_a_word_is_tried_as_it_is():
    """The second answer counts where it has what the first one lost."""
    async with Model(lambda text: CODE.sub("", text)) as model:
        result = await model.answer("a {x} b", protect=PATTERNS)
    assert (result.text, lost("a {x} b", result), len(model.read)) == ("a {x} b", [], 2)
    assert result.num_source_tokens == len("a {x} b") + 1


async def test_what_is_lost_either_way_is_told():
    """The answer with the fewest losses comes back, with the spans of the text that it does not have."""
    text = "One {a}.\nSee {b} %d"

    def answer(read):
        return read.replace(FIRST, "").replace("{", "(").replace("}", ")")

    async with Model(answer) as model:
        result = await model.answer(text, protect=PATTERNS)
    assert result.text == "One (a).\nSee (b) %d"
    assert lost(text, result) == ["{a}", "{b}"]


@pytest.mark.parametrize(("text", "patterns", "doubled"), [("7 x", "numbers", "7"), ("x {a}", "placeholders", "{a}")])
@pytest.mark.parametrize("kind", ["code", "itself"])
async def test_a_doubled_span_is_told(text, patterns, doubled, kind):
    """And is there twice: nothing is taken out of an answer."""
    async with Model(lambda read: f"{read}, {read}", texts=replace(ENGLISH, protect_with=(kind,))) as model:
        result = await model.answer(text, protect=(patterns,))
    assert (result.text, lost(text, result)) == (f"{text}, {text}", [doubled])


async def test_a_model_without_any_substitute_reads_the_text_as_it_is():
    """It is answered all the same, and tells what it lost."""
    async with Model(lambda read: "nothing of it", texts=replace(ENGLISH, protect_with=())) as model:
        result = await model.answer("a {x} b", protect=PATTERNS)
    assert result.text == "nothing of it" and lost("a {x} b", result) == ["{x}"]


async def test_another_attempt_that_finds_no_room_refuses_the_text(monkeypatch):
    """What the first one came to would be an answer that depends on who else asks."""
    submit, submitted = Engine.submit, []

    def full(engine, request):
        submitted.append(request)
        if len(submitted) > 1:
            raise OverloadedError("the queue is full", 1.0)
        return submit(engine, request)

    monkeypatch.setattr(Engine, "submit", full)
    async with Model(lambda read: "nothing of it") as model:
        with pytest.raises(OverloadedError):
            await model.answer("a {x} b", protect=PATTERNS)
    assert len(submitted) == 2


async def test_lines_that_are_nothing_but_protected_never_reach_the_model():
    """A calendar of numbers comes back as it is."""
    text = "\n".join(str(day) for day in range(1, 32))
    async with Model(lambda text: f"{text} {text}") as model:
        result = await model.answer(text, protect=("numbers",))
    assert (result.text, model.read, lost(text, result)) == (text, [], [])


async def test_a_stream_never_shows_a_substitute():
    """A segment with protected spans comes in one piece with its end; others grow as they are decoded."""
    text = "Hi {name}.\nabc def"
    async with Model() as model:
        *updates, result = [i async for i in model.pipeline.stream(text, DecodingOptions(protect=PATTERNS))]
    assert isinstance(result, TextResult) and result.text == "hI {name}.\nABC DEF"
    deltas = [[u.delta for u in updates if u.segment == index] for index in (0, 1)]
    assert deltas[0] == ["hI {name}."]
    assert "".join(deltas[1]) == "ABC DEF"
    assert {(u.segment, u.source) for u in updates} == {(0, (0, 10)), (1, (11, 18))}


async def test_alignment_points_at_what_was_protected():
    """The spans of a substitute's tokens are those of what it stands for."""
    async with Model(str) as model:
        result = await model.answer("a {name} b", protect=PATTERNS, return_alignment=True)
    points = result.segments[0].hypotheses[0].alignment
    spans = [point.source_span for point in points]
    assert spans == [(0, 1), (1, 2), *[(2, 8)] * len(FIRST), (8, 9), (9, 10)]


async def test_each_of_several_answers_tells_its_own_losses():
    """And has what was protected put back."""
    async with Model(str) as model:
        result = await model.answer("a {x}", protect=PATTERNS, num_hypotheses=3, return_alternatives=True)
    best, *others = result.segments[0].hypotheses
    assert (best.text, best.unprotected) == ("a {x}", ())
    for other in others:
        assert (other.text.count("{x}") == 1) == (other.unprotected == ())


async def test_a_vocabulary_that_cannot_spell_the_substitutes_reads_the_text_as_it_is():
    """What it loses is told all the same."""
    from dragoman.testing import scripted_model

    model = scripted_model()
    model.start()
    try:
        result = await model.pipeline.generate("ab", DecodingOptions(protect=("a",)))
    finally:
        await model.close()
    assert (result.text, result.segments[0].hypotheses[0].unprotected) == ("ab", ((0, 1),))


async def test_too_many_spans_of_one_segment_are_refused():
    """There are 64 substitutes; the message says what to do."""
    async with Model() as model:
        assert (await model.answer("1 " * 64 + "x", protect=("numbers",))).text == "1 " * 64 + "X"
        with pytest.raises(InvalidRequestError, match="protect matches 65 spans of one segment"):
            await model.answer("1 " * 65 + "x", protect=("numbers",))


async def test_a_cut_never_goes_through_what_is_protected():
    """Neither between sentences nor where one is too long."""
    text = "aaaa bbbb <b c. D> cccc dddd"
    async with Model(max_source_tokens=12) as model:
        result = await model.answer(text, protect=("tags",))
    assert result.text == "AAAA BBBB <b c. D> CCCC DDDD"
    assert model.read == ["aaaa bbbb", f"{FIRST} cccc", "dddd"]
