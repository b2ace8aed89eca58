"""Words that the source vocabulary lacks: refused, spelled in bytes, copied into the answer, or left to the model."""

import asyncio
import contextlib
import dataclasses
import threading
from functools import partial

import numpy as np
import pytest

from dragoman.alignment import Aligner
from dragoman.answer import TextResult
from dragoman.bundle import SpecialIds
from dragoman.config import EngineConfig
from dragoman.engine.engine import Engine
from dragoman.errors import InvalidRequestError, ModelUnsupportedError
from dragoman.pipeline import TextLimits, TextPipeline
from dragoman.resolver import Resolver, Terms
from dragoman.served_model import token_rules
from dragoman.testing import VOCABULARY, ScriptedRunner, scripted_manifest
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer
from dragoman.types import DecodingOptions, FinishReason, UnknownWords
from dragoman.vocabulary import BYTE_TOKENS, EOS_ID, SPECIAL_TOKENS, UNK_ID, PlainVocabulary, SentencePieceVocabulary

WORDS = PlainVocabulary("piece", (*SPECIAL_TOKENS, "the", "dog", "runs"))
BYTES = PlainVocabulary("character", (*SPECIAL_TOKENS, *BYTE_TOKENS, *"abc"))
LETTERS = VOCABULARY

REFUSE, BYTE_FALLBACK, COPY, SUPPRESS = UnknownWords


def straight(source, tokens):
    """Target token t comes from source token t."""
    return np.eye(len(tokens), len(source), dtype=np.float32)


def echo(source, fed, size=30):
    """The source, <unk> included; second to it the others in their order; the end, where it is due."""
    logits = -0.1 * np.arange(size)
    logits[EOS_ID] = -20
    logits[source[min(len(fed), len(source)) - 1]] = 9
    return logits


@contextlib.asynccontextmanager
async def running(vocabulary=LETTERS, forced_pass=straight, runner=None, special_ids=None):
    """A model that answers with its source."""
    manifest = scripted_manifest()
    if special_ids is not None:
        manifest = dataclasses.replace(manifest, special_ids=special_ids)
    runner = runner or ScriptedRunner(partial(echo, size=len(vocabulary.tokens)))
    engine = Engine([runner], token_rules(manifest), EngineConfig())
    aligner = None if forced_pass is None else Aligner(forced_pass, 8)
    tokenizers = SourceTokenizer(vocabulary, (), (EOS_ID,)), TargetTokenizer(vocabulary)
    engine.start()
    pipeline = TextPipeline(manifest, *tokenizers, engine, TextLimits(10_000, 50), aligner)
    try:
        yield pipeline
    finally:
        await engine.close()
        pipeline.close()


async def answers(pipeline, text, **options):
    """The answers to a text of one line, each streamed as it is returned."""
    *updates, result = [item async for item in pipeline.stream(text, DecodingOptions(**options))]
    assert isinstance(result, TextResult)
    (segment,) = result.segments
    for number, hypothesis in enumerate(segment.hypotheses):
        assert "".join(update.delta for update in updates if update.hypothesis == number) == hypothesis.text
    return segment.hypotheses


# --- what the model reads


@pytest.mark.parametrize("policy", [COPY, SUPPRESS])
def test_unknown_words_are_read_as_the_token_for_them(policy):
    """One for each character, or for each piece, as the vocabulary has it."""
    assert SourceTokenizer(LETTERS, (), (EOS_ID,)).encode("aÄ1", policy) == (4, UNK_ID, UNK_ID, EOS_ID)
    assert SourceTokenizer(WORDS, (), (EOS_ID,)).encode("the Zug runs", policy) == (4, UNK_ID, 6, EOS_ID)


@pytest.mark.parametrize("policy", [None, REFUSE])
def test_they_are_refused_by_name_otherwise(policy):
    """As ever."""
    with pytest.raises(InvalidRequestError, match=r"text holds 'Ä' \(U\+00C4\), which this model's source"):
        SourceTokenizer(LETTERS, (), (EOS_ID,)).encode("aÄ", policy)


@pytest.mark.parametrize("kind", ["plain", "sentencepiece"])
def test_what_could_be_spelled_in_bytes_is_refused_on_request(sentencepiece_model, kind):
    """Each character once, by name; without the request, or asked to, it is spelled."""
    vocabulary = BYTES if kind == "plain" else SentencePieceVocabulary(sentencepiece_model("bpe"))
    source = SourceTokenizer(vocabulary, (), (EOS_ID,))
    known = "ab" if kind == "plain" else "the dog"
    text = f"{known}日日🦩"
    with pytest.raises(InvalidRequestError, match=r"text holds '日' \(U\+65E5\), '🦩' \(U\+1F9A9\), which"):
        source.encode(text, REFUSE)
    assert source.encode(known, REFUSE) == source.encode(known)
    assert source.encode(text, BYTE_FALLBACK) == source.encode(text)
    assert UNK_ID not in source.encode(text)


@pytest.mark.parametrize(
    ("policy", "model", "message"),
    [
        (BYTE_FALLBACK, "refuse", "unknown_words is byte_fallback; .* no tokens for bytes: leave it unset"),
        (COPY, "byte_fallback", "unknown_words is copy; to this model no word is unknown"),
        (SUPPRESS, "byte_fallback", "unknown_words is suppress; to this model no word is unknown"),
    ],
)
def test_a_policy_that_the_vocabulary_cannot_serve_says_why(policy, model, message):
    """It is the model's fault, not the request's."""
    vocabulary = LETTERS if model == "refuse" else BYTES
    manifest = scripted_manifest()
    object.__setattr__(manifest, "unknown_policy", model)
    resolver = Resolver(manifest, SourceTokenizer(vocabulary, (), (EOS_ID,)), TargetTokenizer(vocabulary), 8)
    with pytest.raises(ModelUnsupportedError, match=message):
        resolver.resolve(DecodingOptions(unknown_words=policy))
    resolver.resolve(DecodingOptions(unknown_words=REFUSE))


async def test_nothing_can_be_copied_without_an_alignment_graph():
    """Told before any work, and for a blank text too."""
    async with running(forced_pass=None) as pipeline:
        for text in ("abc", ""):
            with pytest.raises(ModelUnsupportedError, match=r"unknown_words is copy; .* without an alignment graph"):
                await pipeline.generate(text, DecodingOptions(unknown_words=COPY))
        assert (await answers(pipeline, "abc", unknown_words=SUPPRESS))[0].text == "abc"


# --- what it answers


async def test_an_unknown_word_of_the_answer_is_the_source_s():
    """The text has the word, the tokens say which were copied; alignments come for those who ask."""
    async with running() as pipeline:
        (copied,) = await answers(pipeline, "abÄ9c", unknown_words=COPY, return_scores=True)
        assert (copied.text, copied.tokens) == ("abÄ9c", ("a", "b", "<unk>", "<unk>", "c"))
        assert len(copied.token_scores) == 6 and copied.alignment == ()
        (aligned,) = await answers(pipeline, "  abÄ", unknown_words=COPY, return_alignment=True)
        assert aligned.text == "abÄ"
        assert [point.source_span for point in aligned.alignment] == [(2, 3), (3, 4), (4, 5)]


async def test_the_unknown_word_that_the_model_looked_at_is_copied():
    """Back to front here; a known word that it looked at more does not count."""

    def crossed(source, tokens):
        return straight(source[:-1], tokens)[::-1] + 5 * (np.arange(len(source) - 1) == source.index(5))

    async with running(WORDS, crossed) as pipeline:
        (answer,) = await answers(pipeline, "Bo dog Zug", unknown_words=COPY)
    assert (answer.text, answer.tokens) == ("Zug dog Bo", ("<unk>", "dog", "<unk>"))


async def test_of_a_source_that_is_all_known_the_token_is_copied():
    """Where the model makes up an unknown word, as for a rare translation."""

    def script(source, fed):
        logits = np.array(echo(source, fed))
        logits[UNK_ID] = 20 if len(fed) == 2 else -20
        return logits

    async with running(runner=ScriptedRunner(script)) as pipeline:
        (answer,) = await answers(pipeline, "abc", unknown_words=COPY)
    assert (answer.text, answer.tokens) == ("abc", ("a", "<unk>", "c"))


async def test_words_are_copied_with_the_blanks_of_the_vocabulary(sentencepiece_model):
    """Pieces bring their own; an unknown stretch of characters is one word."""
    async with running(WORDS) as pipeline:
        assert (await answers(pipeline, "Bo the  Zug runs", unknown_words=COPY))[0].text == "Bo the Zug runs"
    vocabulary = SentencePieceVocabulary(sentencepiece_model("unigram", False))
    async with running(vocabulary) as pipeline:
        for text in ("the 日本 dog", "日本 the"):
            (answer,) = await answers(pipeline, text, unknown_words=COPY)
            assert answer.text == text and answer.tokens.count("<unk>") == 1


async def test_policies_hold_where_the_unknown_has_another_id():
    """The last one here, which the model may produce by itself: copied, or never said where that is asked for."""
    vocabulary = PlainVocabulary("piece", ("<blank>", "<s>", "</s>", "the", "dog", "<unk>"), (0, 1, 2, 5), 5)
    async with running(vocabulary, special_ids=SpecialIds(EOS_ID, 1, ())) as pipeline:
        (copied,) = await answers(pipeline, "the Zug dog", unknown_words=COPY)
        (suppressed,) = await answers(pipeline, "the Zug dog", unknown_words=SUPPRESS)
        with pytest.raises(InvalidRequestError, match="text holds 'Zug'"):
            await answers(pipeline, "the Zug dog")
    assert (copied.text, copied.tokens) == ("the Zug dog", ("the", "<unk>", "dog"))
    assert "<unk>" not in suppressed.tokens and suppressed.text.startswith("the ")


async def test_the_text_of_a_stream_waits_at_the_first_copied_word():
    """What comes before it is sent at once, the rest with the end."""
    runner = ScriptedRunner(echo)
    came = threading.Event()

    def hold():
        if runner.num_decode_steps == 4:
            assert came.wait(60)

    runner.before_decode = hold
    async with running(runner=runner) as pipeline:
        deltas = []
        async for item in pipeline.stream("abcÄdef", DecodingOptions(unknown_words=COPY)):
            if not isinstance(item, TextResult):
                deltas.append(item.delta)
                if "".join(deltas) == "abc":
                    came.set()
    assert "".join(deltas[:-1]) == "abc" and deltas[-1] == "Ädef"


@pytest.mark.parametrize(
    "options",
    [
        {"beam_size": 3, "num_hypotheses": 3},
        {"temperature": 0.01, "seed": 1, "num_hypotheses": 2},
        {"return_alternatives": True, "num_hypotheses": 3},
        {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "suppress_tokens": ("z",)},
    ],
)
async def test_words_are_copied_in_every_way_of_decoding(options):
    """Into every answer that has an unknown word."""
    async with running() as pipeline:
        found = await answers(pipeline, "aÄb", unknown_words=COPY, **options)
        for one in found:
            letters = ["Ä" if token == "<unk>" else token for token in one.tokens]
            assert one.text == "".join(letters)
        assert "aÄb" in [one.text for one in found]


async def test_a_stop_text_is_found_in_and_across_copied_words():
    """In streams too; what began before the copied word was held back."""
    async with running() as pipeline:
        for stop, text in (("Ä", "ab"), ("bÄ9", "a"), ("9c", "abÄ"), ("Äc", "abÄ9c")):
            (answer,) = await answers(pipeline, "abÄ9c", unknown_words=COPY, stop=(stop,))
            assert answer.text == text and len(answer.tokens) == len(text)
            assert (answer.finish_reason is FinishReason.STOP_SEQUENCE) == (text != "abÄ9c")


async def test_no_other_answer_ever_has_an_unknown_word():
    """Suppressed or not asked for, whatever the model thinks, and beside one that has it in every step."""

    def script(source, fed):
        logits = np.zeros(30)
        logits[UNK_ID] = 9 if len(fed) < 4 else -9
        logits[EOS_ID] = -3 if len(fed) < 4 else 5
        return logits

    runner = ScriptedRunner(script)
    async with running(runner=runner) as pipeline:
        found = await asyncio.gather(
            answers(pipeline, "Äbc", unknown_words=COPY),
            answers(pipeline, "Äbc", unknown_words=SUPPRESS),
            answers(pipeline, "abc"),
            answers(pipeline, "abc", beam_size=3, num_hypotheses=3),
            answers(pipeline, "abc", temperature=1.0, num_hypotheses=2),
        )
    assert found[0][0].tokens == ("<unk>",) * 3
    for others in found[1:]:
        assert not any("<unk>" in one.tokens for one in others)
    assert found[1] == found[2]


async def test_a_shortlist_is_told_that_unknown_words_may_come():
    """Whatever it thinks of them; of other requests it hears the prefix alone."""
    told = []

    class Told(ScriptedRunner):
        def admit(self, sources, slots, prefixes=()):
            told.extend(prefixes)
            super().admit(sources, slots, prefixes)

    async with running(runner=Told(echo)) as pipeline:
        await answers(pipeline, "abc", unknown_words=COPY, target_prefix="x")
        await answers(pipeline, "abc", unknown_words=SUPPRESS, target_prefix="x")
    x = LETTERS.tokens.index("x")
    assert told == [(x, UNK_ID), (x,)]


async def test_copies_have_room_like_alignments():
    """More answers than are aligned at a time are refused before any work."""
    async with running() as pipeline:
        with pytest.raises(InvalidRequestError, match="8 at a time"):
            await pipeline.generate("\n".join("a" * 9), DecodingOptions(unknown_words=COPY))


def test_to_suppress_what_is_to_be_copied_is_a_contradiction():
    """Named as one."""
    resolver = Resolver(scripted_manifest(), SourceTokenizer(LETTERS, (), (EOS_ID,)), TargetTokenizer(LETTERS), 8)
    with pytest.raises(InvalidRequestError, match="suppress_tokens names '<unk>' and unknown_words is copy"):
        resolver.resolve(DecodingOptions(unknown_words=COPY, suppress_tokens=("<unk>",)))
    resolved = resolver.resolve(DecodingOptions(unknown_words=COPY, suppress_sequences=(("<unk>", "<unk>"),)))
    assert resolver.request(resolved, (4, EOS_ID), Terms()).steering.allowed == (UNK_ID,)
