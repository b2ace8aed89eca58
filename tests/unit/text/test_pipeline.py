"""One text through tokenizer, engine and back, over a scripted runner."""

import asyncio
import contextlib
import math
import threading

import numpy as np
import pytest

from dragoman.answer import TextResult
from dragoman.bundle import Limits
from dragoman.config import EngineConfig
from dragoman.engine.engine import Engine
from dragoman.errors import DragomanError, InvalidRequestError, OverloadedError, SourceTooLongError
from dragoman.pipeline import TextLimits, TextPipeline
from dragoman.served_model import token_rules
from dragoman.testing import ScriptedRunner, copy_script, scripted_manifest, scripted_model
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer
from dragoman.types import DecodingOptions, FinishReason
from dragoman.vocabulary import EOS_ID, SentencePieceVocabulary


@contextlib.asynccontextmanager
async def running(runner=None, **options):
    runner = runner or ScriptedRunner()
    model = scripted_model([runner], **options)
    model.start()
    try:
        yield model.pipeline
    finally:
        await model.close()


async def test_a_text_of_lines_keeps_its_layout():
    """Every line is answered at its place, blanks and line ends stay, usage counts all lines."""
    async with running() as pipeline:
        result = await pipeline.generate("  abc\r\n\nde \n", DecodingOptions(return_scores=True))
    assert result.text == "  abc\r\n\nde \n"
    assert [(s.start, s.end, s.hypotheses[0].tokens) for s in result.segments] == [
        (2, 5, ("a", "b", "c")),
        (8, 10, ("d", "e")),
    ]
    assert (result.num_source_tokens, result.num_generated_tokens) == (7, 5)
    scores = result.segments[0].hypotheses[0]
    assert scores.score == pytest.approx(math.fsum(scores.token_scores)) and len(scores.token_scores) == 4


@pytest.mark.parametrize("text", ["", " ", "\n", "\t\r\n \u00a0"])
async def test_blank_text_comes_back_without_a_run(text):
    """Empty and blank texts are returned as they are and the model is never asked."""
    runner = ScriptedRunner()
    async with running(runner) as pipeline:
        result = await pipeline.generate(text, DecodingOptions())
    assert (result.text, result.segments) == (text, ())
    assert runner.encoded == []


class Echo:
    """A pipeline whose model answers with its source, over SentencePiece tokenizers."""

    def __init__(self, model):
        vocabulary = SentencePieceVocabulary(model)
        size = len(vocabulary.tokens)

        def script(source, fed):
            return np.eye(size)[source[len(fed) - 1]]

        self.runner = ScriptedRunner(script)
        self.manifest = scripted_manifest()
        self.engine = Engine([self.runner], token_rules(self.manifest), EngineConfig())
        tokenizers = SourceTokenizer(vocabulary, (), (EOS_ID,)), TargetTokenizer(vocabulary)
        self.pipeline = TextPipeline(self.manifest, *tokenizers, self.engine, TextLimits(1000, 10))

    async def __aenter__(self):
        self.engine.start()
        return self

    async def __aexit__(self, *_):
        await self.engine.close()


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
async def test_subwords_and_bytes_stream_to_whole_words(sentencepiece_model, kind):
    """The deltas hold no half character and no mark, and join to the answer, blanks and all."""
    text = "the green dog\n über 🦩 straße \n日本"
    async with Echo(sentencepiece_model(kind)) as echo:
        *updates, result = [item async for item in echo.pipeline.stream(text, DecodingOptions())]
    assert result.text == text
    assert [segment.hypotheses[0].text for segment in result.segments] == ["the green dog", "über 🦩 straße", "日本"]
    for index, segment in enumerate(result.segments):
        deltas = [update.delta for update in updates if update.segment == index]
        assert "".join(deltas) == segment.hypotheses[0].text
        assert not any("\ufffd" in delta or "\u2581" in delta for delta in deltas)


async def test_spans_count_the_text_as_it_was_sent(sentencepiece_model):
    """A rule that makes other characters of some moves no segment's place."""
    async with Echo(sentencepiece_model("bpe", True, "nfkc")) as echo:
        result = await echo.pipeline.generate("Ⅳ … ﬁne\n the ½", DecodingOptions())
    assert [(s.start, s.end, s.hypotheses[0].text) for s in result.segments] == [
        (0, 7, "IV ... fine"),
        (9, 14, "the 1⁄2"),
    ]


async def test_a_line_of_which_the_tokenizer_keeps_nothing_comes_back_without_a_run(sentencepiece_model):
    """A zero-width blank, which the rule removes, is a blank line: unchanged at its place, streamed or not."""
    text = "the dog\n\u200b\nthe tree"
    async with Echo(sentencepiece_model("bpe", True, "nmt_nfkc")) as echo:
        *updates, result = [item async for item in echo.pipeline.stream(text, DecodingOptions(return_scores=True))]
        alone = await echo.pipeline.generate("\u200b", DecodingOptions())
    assert (result.text, alone.text) == (text, "\u200b")
    assert len(echo.runner.encoded) == 2
    blank = result.segments[1].hypotheses[0]
    assert (blank.tokens, blank.finish_reason, blank.score, blank.token_scores) == ((), FinishReason.STOP, 0.0, ())
    assert [u.delta for u in updates if u.segment == 1] == ["\u200b"]
    assert alone.segments[0].hypotheses[0].score is None


async def test_a_stream_joins_to_the_unary_answer():
    """The deltas of each segment, joined, are its text; the last item is the whole result."""
    async with running() as pipeline:
        items = [item async for item in pipeline.stream("abcdef\nxyz", DecodingOptions())]
        unary = await pipeline.generate("abcdef\nxyz", DecodingOptions())
    *updates, result = items
    assert isinstance(result, TextResult) and result.text == unary.text == "abcdef\nxyz"
    for index, segment in enumerate(result.segments):
        assert "".join(u.delta for u in updates if u.segment == index) == segment.hypotheses[0].text
    assert sum(u.result is not None for u in updates) == 2


async def test_the_length_limit_is_told():
    """max_new_tokens cuts with finish reason length; a larger one than the model's means the model's."""
    endless = ScriptedRunner(lambda source, fed: [0.0] * 4 + [1.0] * 26)
    async with running(endless) as pipeline:
        short = (await pipeline.generate("ab", DecodingOptions(max_new_tokens=3))).segments[0].hypotheses[0]
        capped = (await pipeline.generate("ab", DecodingOptions(max_new_tokens=500))).segments[0].hypotheses[0]
    assert (short.text, short.finish_reason) == ("aaa", FinishReason.LENGTH)
    assert (len(capped.tokens), capped.finish_reason) == (64, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("a" * 64, SourceTooLongError, "65 tokens, end token included; this model accepts 64"),
        ("a" * 101, SourceTooLongError, "101 bytes; this server accepts 100"),
        ("a\n" * 6, SourceTooLongError, "more than 5 lines"),
        ("ab\ncD", InvalidRequestError, r"'D' \(U\+0044\)"),
        ("ok\ud800end", InvalidRequestError, r"lone surrogate U\+D800 at character 2"),
        ("a\x00b", InvalidRequestError, r"U\+0000"),
    ],
)
async def test_bad_text_is_refused_before_the_model(text, error, message):
    """Each refusal names value and limit, and nothing of the text reaches the model."""
    runner = ScriptedRunner()
    async with running(runner, limits=TextLimits(max_text_bytes=100, max_segments=5)) as pipeline:
        with pytest.raises(error, match=message):
            await pipeline.generate(text, DecodingOptions())
        assert (await pipeline.generate("a" * 63, DecodingOptions())).text == "a" * 63
    assert len(runner.encoded) == 1


async def test_a_text_is_refused_whole_when_the_queue_is_full_half_way():
    """Where two lines find no place together, neither is decoded, and the text fails."""
    reached, opened = threading.Event(), threading.Event()

    def gate():
        reached.set()
        assert opened.wait(60)

    runner = ScriptedRunner(num_slots=1)
    runner.before_decode = gate
    model = scripted_model([runner], EngineConfig(max_waiting=2))
    model.start()
    running = asyncio.create_task(model.pipeline.generate("z", DecodingOptions()))
    assert await asyncio.to_thread(reached.wait, 60)
    waiting = asyncio.create_task(model.pipeline.generate("y", DecodingOptions()))
    while model.engine.snapshot().num_waiting == 0:
        await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await model.pipeline.generate("a\nb", DecodingOptions())
    opened.set()
    assert ((await running).text, (await waiting).text) == ("z", "y")
    assert len(runner.encoded) == 2
    assert (await model.pipeline.generate("abc", DecodingOptions())).text == "abc"
    await model.close()


async def test_one_failing_line_fails_the_text():
    """A NaN in one line's scores is that text's error; another text is served."""

    def script(source, fed):
        return [math.nan] * 30 if source[0] == 25 else copy_script(source, fed)

    async with running(ScriptedRunner(script)) as pipeline:
        bad, good = await asyncio.gather(
            pipeline.generate("ab\nvw", DecodingOptions()),
            pipeline.generate("cd\nef", DecodingOptions()),
            return_exceptions=True,
        )
    assert isinstance(bad, DragomanError) and good.text == "cd\nef"


async def test_closing_the_stream_cancels_the_work():
    """Whoever stops reading frees the slots."""
    endless = ScriptedRunner(lambda source, fed: [0.0] * 4 + [1.0] * 26)
    manifest = scripted_manifest(limits=Limits(64, 10_000_000))
    model = scripted_model([endless], manifest=manifest)
    model.start()
    stream = model.pipeline.stream("ab\ncd", DecodingOptions())
    await anext(stream)
    await stream.aclose()
    await model.engine.drained()
    assert model.engine.snapshot().slots_used == 0
    await model.close()
