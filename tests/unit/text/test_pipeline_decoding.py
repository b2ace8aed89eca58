"""Every way of decoding through tokenizer, engine and back, over a scripted runner."""

import asyncio
import contextlib
import itertools
import math
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.answer import TextResult, TopToken
from dragoman.bundle import Limits, Tokenizers
from dragoman.config import EngineConfig
from dragoman.engine.engine import Engine, Stream
from dragoman.errors import ImpossibleError, InvalidRequestError, ModelUnsupportedError, RowError
from dragoman.pipeline import TextLimits, TextPipeline
from dragoman.resolver import Terms
from dragoman.served_model import token_rules
from dragoman.testing import ALPHABET, VOCABULARY, ScriptedRunner, scripted_manifest, scripted_model
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer
from dragoman.types import DecodingOptions, FinishReason
from dragoman.vocabulary import BYTE_TOKENS, EOS_ID, SPECIAL_TOKENS, PlainVocabulary, SentencePieceVocabulary

SIZE = len(VOCABULARY.tokens)
BYTES = PlainVocabulary("character", (*SPECIAL_TOKENS, *BYTE_TOKENS, *"abcd"))


def hashing_script(size, eos_bonus=0.5):
    """Every token depends on the whole source and all that was fed; the end becomes more probable."""

    def script(source, fed):
        generator = random.Random(hash((source, fed)))
        logits = [generator.uniform(-2, 2) for _ in range(size)]
        logits[EOS_ID] += eos_bonus * len(fed)
        return logits

    return script


def surely(size, answer_of):
    """A model without doubts: second to the answer's next token come a, b and so on; the end, where it is due."""

    def script(source, fed):
        answer = answer_of(source)
        logits = -0.1 * np.arange(size)
        logits[EOS_ID] = -20
        logits[answer[min(len(fed), len(answer)) - 1]] = 9
        return logits

    return script


COPY = surely(SIZE, lambda source: source)


def saying(*texts):
    """A model of the byte vocabulary that answers the n-th letter of the alphabet with the n-th of these texts."""
    answers = [[4 + byte for byte in text.encode()] for text in texts]

    return surely(len(BYTES.tokens), lambda source: [*answers[source[0] - BYTES.tokens.index("a")], EOS_ID])


@contextlib.asynccontextmanager
async def running(script=None, num_slots=8, vocabulary=VOCABULARY, limits=None, runner=None):
    """A pipeline over a script; by default one that answers with its source."""
    runner = runner or (ScriptedRunner(num_slots=num_slots) if script is None else ScriptedRunner(script, num_slots))
    size = len(vocabulary.tokens)
    manifest = scripted_manifest(limits=limits)
    entries = (manifest.tokenizers.source, manifest.tokenizers.target)
    manifest = replace(
        manifest,
        model=replace(manifest.model, source_vocab_size=size, target_vocab_size=size),
        tokenizers=Tokenizers(*(replace(entry, size=size) for entry in entries)),
    )
    engine = Engine([runner], token_rules(manifest), EngineConfig())
    tokenizers = SourceTokenizer(vocabulary, (), (EOS_ID,)), TargetTokenizer(vocabulary)
    engine.start()
    try:
        yield TextPipeline(manifest, *tokenizers, engine, TextLimits(10_000, 50))
    finally:
        await engine.close()


async def best(pipeline, text, **options):
    """The best answer to a text of one line, and what it was streamed as."""
    *updates, result = [item async for item in pipeline.stream(text, DecodingOptions(**options))]
    assert isinstance(result, TextResult)
    (segment,) = result.segments
    for number, hypothesis in enumerate(segment.hypotheses):
        own = [update for update in updates if update.hypothesis == number]
        assert "".join(update.delta for update in own) == hypothesis.text
        assert [update.result for update in own if update.result is not None] == [hypothesis]
        assert number == 0 or len(own) == 1
    assert result.text == segment.hypotheses[0].text
    return segment.hypotheses[0]


async def answers(pipeline, text, **options):
    await best(pipeline, text, **options)
    return (await pipeline.generate(text, DecodingOptions(**options))).segments[0].hypotheses


# --- prefix and length


async def test_an_answer_begins_with_its_prefix_which_is_not_scored():
    """The prefix takes the place of the first tokens; limits, scores and usage count what comes behind it."""
    async with running() as pipeline:
        whole = await best(pipeline, "abcdef", target_prefix="xy", return_scores=True)
        assert (whole.text, whole.tokens, whole.finish_reason) == ("xycdef", tuple("xycdef"), FinishReason.STOP)
        assert len(whole.token_scores) == 5
        short = await best(pipeline, "abcdef", target_prefix="xy", max_new_tokens=2)
        assert (short.text, short.finish_reason) == ("xycd", FinishReason.LENGTH)
        result = await pipeline.generate("abcdef", DecodingOptions(target_prefix="xy"))
        assert result.num_generated_tokens == 4


async def test_the_minimum_and_the_ratio_bound_an_answer():
    """No end before the minimum; no more tokens than the ratio allows."""
    async with running() as pipeline:
        assert len((await best(pipeline, "ab", min_new_tokens=3, max_new_tokens=3)).tokens) == 3
        assert (await best(pipeline, "abcdefgh", max_length_ratio=0.5)).text == "abcd"
        assert (await best(pipeline, "abcdefgh", max_length_ratio=0.5)).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a\nb", {"target_prefix": "x"}, "target_prefix is set and text has 2 lines"),
        ("a\nb", {"num_hypotheses": 2, "beam_size": 2}, "num_hypotheses is 2 and text has 2 lines"),
        ("a", {"target_prefix": "a" * 64}, "target_prefix has 64 tokens"),
        ("a", {"num_hypotheses": 9, "temperature": 1.0}, "num_hypotheses is 9; .* 8 rows"),
        ("", {"suppress_tokens": ("none",)}, "suppress_tokens names 'none'"),
    ],
)
async def test_what_this_model_cannot_do_is_refused_before_any_work(text, options, message):
    """Even for a blank text."""
    runner = ScriptedRunner()
    async with running(runner=runner) as pipeline:
        with pytest.raises(InvalidRequestError, match=message):
            await pipeline.generate(text, DecodingOptions(**options))
    assert runner.encoded == []


# --- stop strings


async def test_nothing_of_a_stop_string_is_ever_sent():
    """endx ends before the string; endless, which only begins like it, is sent in full; streamed as unary."""
    async with running() as pipeline:
        cut = await best(pipeline, "abendxyz", stop=("endx",))
        assert (cut.text, cut.tokens, cut.finish_reason) == ("ab", ("a", "b"), FinishReason.STOP_SEQUENCE)
        whole = await best(pipeline, "abendless", stop=("endx",))
        assert (whole.text, whole.finish_reason) == ("abendless", FinishReason.STOP)
        async for update in pipeline.stream("abendxyz", DecodingOptions(stop=("endx",))):
            if not isinstance(update, TextResult):
                assert "e" not in update.delta


async def test_a_blank_before_a_stop_string_is_kept(sentencepiece_model):
    """It may have been sent before the string began: the text is what stands before it, streamed or not."""
    vocabulary = SentencePieceVocabulary(sentencepiece_model("bpe"))
    script = surely(len(vocabulary.tokens), lambda source: source)
    async with running(script, vocabulary=vocabulary) as pipeline:
        for stop, text in (("dog", "the "), (" dog", "the"), ("e", "th")):
            cut = await best(pipeline, "the dog runs", stop=(stop,))
            assert (cut.text, cut.finish_reason) == (text, FinishReason.STOP_SEQUENCE)


async def test_the_end_of_an_answer_may_complete_a_stop_string_or_leave_one_begun():
    """What was held back for a string that never came is in the text."""
    async with running() as pipeline:
        assert (await best(pipeline, "abend", stop=("end",))).finish_reason is FinishReason.STOP_SEQUENCE
        begun = await best(pipeline, "aben", stop=("end",))
        assert (begun.text, begun.finish_reason) == ("aben", FinishReason.STOP)
        assert (await best(pipeline, "abend", stop=("end",), max_new_tokens=4)).text == "aben"


async def test_scores_and_alternatives_of_positions_are_cut_with_the_text():
    """The sum is that of what is left; usage counts it."""
    async with running() as pipeline:
        options = DecodingOptions(stop=("cd",), return_scores=True, num_top_tokens=2)
        result = await pipeline.generate("abcdef", options)
        cut = result.segments[0].hypotheses[0]
        whole = await best(pipeline, "abcdef", return_scores=True, num_top_tokens=2)
    assert (cut.tokens, cut.token_scores, cut.top_tokens) == (("a", "b"), whole.token_scores[:2], whole.top_tokens[:2])
    assert cut.score == cut.log_probability == sum(whole.token_scores[:2])
    assert result.num_generated_tokens == 2


@pytest.mark.parametrize("stops_at_once", [True, False])
async def test_an_answer_is_the_same_however_late_the_engine_hears_of_its_end(monkeypatch, stops_at_once):
    """Told to stop, the engine ends at its next step; not told, it runs to the limit: nobody sees the difference."""
    told = threading.Event()
    if stops_at_once:
        stop = Stream.stop

        def tell(stream):
            stop(stream)
            told.set()

        monkeypatch.setattr(Stream, "stop", tell)
    else:
        monkeypatch.setattr(Stream, "stop", lambda stream: None)
    runner = ScriptedRunner(lambda source, fed: np.eye(SIZE)[4 + len(fed) % 26] * 9)  # b c d ... for ever

    def hold():
        if stops_at_once and runner.num_decode_steps == 5:
            assert told.wait(60)

    runner.before_decode = hold
    async with running(runner=runner) as pipeline:
        answer = await best(pipeline, "a", stop=("ef",), return_scores=True)
    assert (answer.text, answer.finish_reason) == ("bcd", FinishReason.STOP_SEQUENCE)
    assert answer.token_scores == pytest.approx([-math.log1p(26 * math.exp(-9))] * 3, abs=1e-6)
    # The fifth step completes the string; the next one may have begun before the engine heard of it.
    assert runner.num_decode_steps in ((5, 6) if stops_at_once else (64,))


@pytest.mark.parametrize("is_late", [True, False])
async def test_an_answer_that_has_its_end_does_not_fail_by_what_comes_behind(monkeypatch, is_late):
    """Behind the stop text nothing may come: whether or not the engine heard of the end by then, the answer is good."""
    told = threading.Event()
    stop = Stream.stop

    def tell(stream):
        if not is_late:
            stop(stream)
        told.set()

    monkeypatch.setattr(Stream, "stop", tell)
    runner = ScriptedRunner(lambda source, fed: np.eye(SIZE)[4 + len(fed) % 26] * 9)  # b c d ... for ever

    def hold():
        if runner.num_decode_steps == 5 and not is_late:
            assert told.wait(60)

    runner.before_decode = hold
    nothing_behind_f = tuple(("f", token) for token in ("</s>", *ALPHABET))
    async with running(runner=runner) as pipeline:
        answer = await best(pipeline, "a", stop=("ef",), suppress_sequences=nothing_behind_f, return_scores=True)
        assert (answer.text, answer.finish_reason) == ("bcd", FinishReason.STOP_SEQUENCE)
        assert len(answer.token_scores) == 3
        with pytest.raises(ImpossibleError):
            await best(pipeline, "a", stop=("gh",), suppress_sequences=nothing_behind_f)


def parting(value):
    """b and then d x y, behind which no numbers are left; or, a little less probable, c and then e till the end."""

    def script(source, fed):
        letters = {"b": "bdxy", "c": "ceeeeee"}
        logits, said = np.full(SIZE, -20.0), fed[1:]
        logits[EOS_ID] = -40.0
        if not said:
            logits[[VOCABULARY.tokens.index("b"), VOCABULARY.tokens.index("c")]] = 1.0, 0.9
            return logits
        answer = letters.get(VOCABULARY.tokens[said[0]], "ceeeeee")
        if answer == "bdxy" and len(said) == 4:
            return np.full(SIZE, value)
        logits[EOS_ID if len(said) >= len(answer) else VOCABULARY.tokens.index(answer[len(said)])] = 5.0
        return logits

    return script


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("options", [{"return_alternatives": True}, {"beam_size": 2}])
async def test_one_of_several_answers_that_has_its_end_does_not_fail_by_what_comes_behind(options, value):
    """The one that stopped is good, and the other goes on to its own end; with another stop text, both are lost."""
    async with running(parting(value)) as pipeline:
        found = await answers(pipeline, "a", stop=("xy",), num_hypotheses=2, return_scores=True, **options)
        ends = {one.text: (one.finish_reason, len(one.token_scores)) for one in found}
        assert ends == {"bd": (FinishReason.STOP_SEQUENCE, 2), "ceeeeee": (FinishReason.STOP, 8)}
        for stop in ((), ("z",)):
            if "beam_size" in options and value == -math.inf:  # dropped, as ever
                assert (await best(pipeline, "a", stop=stop, **options)).text == "ceeeeee"
            else:
                with pytest.raises(RowError if math.isnan(value) else ImpossibleError):
                    await answers(pipeline, "a", stop=stop, num_hypotheses=2, **options)


@pytest.mark.parametrize("behind", [math.nan, -math.inf])
async def test_samples_that_have_their_ends_do_not_fail_by_what_comes_behind(behind):
    """All of them reach the text, and then nothing is left for any."""

    def script(source, fed):
        return np.full(SIZE, behind) if len(fed) > 5 else np.eye(SIZE)[4 + len(fed) % 26] * 60  # b c d e f

    options = {"temperature": 1.0, "seed": 1, "num_hypotheses": 3}
    async with running(script) as pipeline:
        found = await answers(pipeline, "a", stop=("ef",), **options)
        assert [(one.text, one.finish_reason) for one in found] == [("bcd", FinishReason.STOP_SEQUENCE)] * 3
        with pytest.raises(RowError if math.isnan(behind) else ImpossibleError):
            await answers(pipeline, "a", stop=("gh",), **options)


async def test_stop_strings_of_beams_and_of_several_answers_cut_each():
    """Where the search goes on behind them; the answers are ranked by what is left of them."""
    script = hashing_script(SIZE, eos_bonus=0.2)
    async with running(script) as pipeline:
        for options in ({"beam_size": 4, "num_hypotheses": 4}, {"temperature": 1.0, "seed": 5, "num_hypotheses": 4}):
            options["min_new_tokens"] = 5
            whole = await answers(pipeline, "abc", return_scores=True, **options)
            stop = whole[0].text[2:4]
            cut = await answers(pipeline, "abc", return_scores=True, stop=(stop,), **options)
            assert any(one.finish_reason is FinishReason.STOP_SEQUENCE for one in cut)
            assert not any(stop in one.text for one in cut)
            assert sorted(one.text for one in cut) == sorted(one.text.split(stop)[0] for one in whole)
            assert [one.score for one in cut] == sorted((one.score for one in cut), reverse=True)
            for one in cut:
                length = len(one.token_scores) if "beam_size" in options else 1
                assert one.score == pytest.approx(sum(one.token_scores) / max(1, length))
            unscored = await answers(pipeline, "abc", stop=(stop,), **options)
            assert [one.text for one in unscored] == [one.text for one in cut]
            assert all((one.score, one.token_scores, one.log_probability) == (None,) * 3 for one in unscored)


# --- the ways to search


async def test_beam_search_returns_its_best_and_both_scores():
    """The normalised one ranks; the plain sum and each token's are there too."""
    async with running(hashing_script(SIZE)) as pipeline:
        found = await answers(
            pipeline, "abcd", beam_size=4, num_hypotheses=3, length_penalty=0.6, return_scores=True, patience=2.0
        )
    assert len(found) == 3 and len({one.text for one in found}) == 3
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    for one in found:
        assert one.log_probability == pytest.approx(math.fsum(one.token_scores))
        assert one.score == pytest.approx(one.log_probability / len(one.token_scores) ** 0.6)


def attention(source, tokens):
    """How much each token that is read looks at each of the source: (T + 1, S)."""
    rng = np.random.default_rng(abs(hash((source, tokens))))
    weights = rng.random((len(tokens) + 1, len(source))) ** 4
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def no_alignment(source, tokens):
    raise AssertionError("nothing is to be aligned")


@pytest.mark.parametrize("stop", [(), ("b", "n")])
@pytest.mark.parametrize("options", [{}, {"num_hypotheses": 3, "length_penalty": 0.0}, {"target_prefix": "xy"}])
async def test_the_coverage_penalty_ranks_all_that_the_search_finished(options, stop):
    """By hand from what the engine hands over: the steps that produced each answer, as far as it is left."""
    model = scripted_model(
        [ScriptedRunner(hashing_script(SIZE))], forced_pass=no_alignment, coverage=attention, limits=None
    )
    model.start()
    try:
        options = {"beam_size": 4, "coverage_penalty": 0.7, "return_scores": True, "stop": stop, **options}
        moved = 0
        for text in ("abc", "defg", "hi", "jklmnop", "q"):
            found = await answers(model.pipeline, text, **options)
            plain = await answers(model.pipeline, text, **{**options, "coverage_penalty": 0.0})
            source = (*(VOCABULARY.tokens.index(letter) for letter in text), EOS_ID)
            decoding = DecodingOptions(**options)
            stream = model.engine.submit(
                model.pipeline._resolver.request(model.pipeline._resolve(decoding), source, Terms())
            )
            async for update in stream:
                result = update.result
            expected = []
            for hypothesis in result.hypotheses:
                tokens = [VOCABULARY.tokens[token] for token in hypothesis.tokens]
                num_prefix = len(decoding.target_prefix)
                cut = next((i for i, t in enumerate(tokens) if i >= num_prefix and t in stop), None)
                kept, scores = hypothesis.tokens[:cut], hypothesis.token_scores
                if cut is not None:
                    scores = scores[: cut - num_prefix]
                steps = attention(source, kept)[: num_prefix + len(scores)].astype(float)
                penalty = sum(math.log(min(total, 1.0)) for total in steps.sum(axis=0) if total > 0)
                score = sum(scores) / max(1, len(scores)) ** decoding.length_penalty + 0.7 * penalty
                expected.append((score, "".join(tokens[:cut])))
            expected.sort(key=lambda one: -one[0])
            assert [one.text for one in found] == [text for _, text in expected[: decoding.num_hypotheses]]
            assert [one.score for one in found] == pytest.approx([s for s, _ in expected[: decoding.num_hypotheses]])
            moved += found[0].text != plain[0].text
        assert moved
    finally:
        await model.close()


async def test_coverage_without_an_alignment_graph_is_refused_before_any_work():
    """The model lacks what it takes: the message says what to do."""
    runner = ScriptedRunner()
    async with running(runner=runner) as pipeline:
        with pytest.raises(ModelUnsupportedError, match=r"coverage_penalty is 0\.2; .* dragoman export --alignment"):
            await pipeline.generate("abc", DecodingOptions(beam_size=2, coverage_penalty=0.2))
    assert runner.encoded == []


async def test_alternatives_are_answers_that_part_behind_the_prefix():
    """The most probable token first, whatever became of the others."""
    async with running(hashing_script(SIZE, eos_bonus=0.0), num_slots=8) as pipeline:
        options = {"target_prefix": "xy", "return_alternatives": True, "num_hypotheses": 4, "max_new_tokens": 6}
        found = await answers(pipeline, "abc", num_top_tokens=4, **options)
        greedy = await best(pipeline, "abc", target_prefix="xy", max_new_tokens=6)
    assert [one.tokens[:2] for one in found] == [("x", "y")] * 4
    firsts = [one.tokens[2] for one in found]
    assert firsts == [top.token for top in found[0].top_tokens[0]] and len(set(firsts)) == 4
    assert found[0].tokens == greedy.tokens


async def test_what_is_drawn_without_a_seed_can_be_drawn_again():
    """The answer tells the seed; other searches have none to tell."""
    async with running(hashing_script(SIZE)) as pipeline:
        first = await pipeline.generate("abcd", DecodingOptions(temperature=1.5))
        again = await pipeline.generate("abcd", DecodingOptions(temperature=1.5, seed=first.seed))
        others = {(await pipeline.generate("abcd", DecodingOptions(temperature=1.5))).text for _ in range(8)}
        assert (again.text, again.seed) == (first.text, first.seed)
        assert len(others) > 1
        assert (await pipeline.generate("abcd", DecodingOptions(beam_size=2))).seed is None


async def test_the_same_seed_draws_the_same_text_in_any_order():
    """Six requests with one seed, in three orders, arriving at different steps: each text's answer is its own."""
    texts = ["abc", "d", "efgh", "ij", "klmnop", "q"]
    options = DecodingOptions(temperature=1.0, top_p=0.9, seed=1234, return_scores=True)

    async def later(pipeline, text, delay):
        for _ in range(delay):
            await asyncio.sleep(0)
        return (await pipeline.generate(text, options)).segments[0].hypotheses

    async with running(hashing_script(SIZE), num_slots=4) as pipeline:
        alone = {text: await later(pipeline, text, 0) for text in texts}
        for order in (texts, texts[::-1], texts[3:] + texts[:3]):
            together = await asyncio.gather(*(later(pipeline, text, 7 * i) for i, text in enumerate(order)))
            assert dict(zip(order, together, strict=True)) == alone
    assert len({found[0].text for found in alone.values()}) == 6


KINDS = {
    "greedy": {},
    "beam": {"beam_size": 4},
    "sampling": {"temperature": 1.0, "seed": 3, "top_k": 10},
    "penalty": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "stop strings": {"stop": ("a", "b", "c")},
    "n best": {"beam_size": 3, "num_hypotheses": 3, "return_scores": True},
    "prefix": {"target_prefix": "xyz", "num_top_tokens": 2},
    "alternatives": {"return_alternatives": True, "num_hypotheses": 2},
    "suppressed": {"suppress_tokens": ("a", "e"), "suppress_sequences": (("b", "c"),), "min_new_tokens": 4},
}


async def test_every_pair_of_kinds_of_request_shares_a_batch_unharmed():
    """Overlapping at any step, streamed or not: each answer equals the same request alone."""
    rng = random.Random(4)
    async with running(hashing_script(SIZE, eos_bonus=0.3), num_slots=8) as pipeline:

        async def one(kind, text, delay, *, streamed):
            for _ in range(delay):
                await asyncio.sleep(0)
            if streamed:
                await best(pipeline, text, **KINDS[kind])
            return (await pipeline.generate(text, DecodingOptions(**KINDS[kind]))).segments

        alone = {(kind, text): await one(kind, text, 0, streamed=False) for kind in KINDS for text in ("abcde", "fgh")}
        for first, second in itertools.combinations_with_replacement(KINDS, 2):
            found = await asyncio.gather(
                one(first, "abcde", rng.randint(0, 30), streamed=rng.random() < 0.5),
                one(second, "fgh", rng.randint(0, 30), streamed=rng.random() < 0.5),
            )
            assert found == [alone[first, "abcde"], alone[second, "fgh"]], (first, second)


async def test_a_request_whose_constraints_leave_nothing_fails_alone():
    """Its neighbour, in the same batch, is answered."""
    async with running() as pipeline:
        impossible = DecodingOptions(suppress_tokens=("</s>", *ALPHABET))
        bad, good = await asyncio.gather(
            pipeline.generate("abc", impossible), pipeline.generate("xyz", DecodingOptions()), return_exceptions=True
        )
    assert isinstance(bad, ImpossibleError) and "loosen suppress_tokens" in str(bad)
    assert good.text == "xyz"


# --- steering


async def test_suppressed_tokens_and_sequences_never_come():
    """By name; the model's next choice takes their place."""
    async with running(COPY) as pipeline:
        assert (await best(pipeline, "xaxb", suppress_tokens=("x",))).text == "aaab"
        assert (await best(pipeline, "xyzxy", suppress_sequences=(("x", "y"), ("z",)))).text == "xaaxa"


async def test_an_answer_that_goes_round_in_circles_is_ended():
    """Three tokens for ever: ended early, with its own reason; at the limit without the guard, or for such a source."""
    circling = ScriptedRunner(lambda source, fed: np.eye(SIZE)[4 + len(fed) % 3])
    async with running(runner=circling, limits=Limits(64, 500)) as pipeline:
        ended = await best(pipeline, "what", max_new_tokens=400)
        assert ended.finish_reason is FinishReason.REPETITION and len(ended.tokens) < 100
        for text, options in (("what", {"detect_repetition": False}), ("hahahahaha", {})):
            unguarded = await best(pipeline, text, max_new_tokens=400, **options)
            assert (unguarded.finish_reason, len(unguarded.tokens)) == (FinishReason.LENGTH, 400)


async def test_the_most_probable_tokens_of_each_position_have_names_and_numbers():
    """As many as asked for, the end token's position included, the chosen one first in greedy search."""
    async with running() as pipeline:
        answer = await best(pipeline, "ab", num_top_tokens=3, return_scores=True)
    assert [[top.token for top in place] for place in answer.top_tokens] == [
        ["a", "</s>", "b"],
        ["b", "</s>", "a"],
        ["</s>", "a", "b"],
    ]
    assert [place[0].log_probability for place in answer.top_tokens] == list(answer.token_scores)
    assert answer.top_tokens[0][1] == TopToken("</s>", pytest.approx(-math.log(26 + math.exp(5))))


# --- scoring


async def test_a_given_answer_is_scored_token_by_token():
    """Log-softmax of the script's logits, computed here: of each token, and of the end; as a search would find it."""
    script = hashing_script(SIZE)
    async with running(script) as pipeline:
        scored = await pipeline.score(" abc ", "xyx")
        searched = await best(pipeline, "abc", return_scores=True)
        found = await pipeline.score("abc", searched.text, Terms(priority=3))
    source = (*map(VOCABULARY.tokens.index, "abc"), EOS_ID)
    target = [VOCABULARY.tokens.index(letter) for letter in "xyx"]
    expected = []
    for place, token in enumerate([*target, EOS_ID]):
        logits = np.array(script(source, (1, *target[:place])))
        logits[[0, 1, 3]] = -np.inf  # never generated
        expected.append(logits[token] - np.log(np.exp(logits).sum()))
    assert (scored.tokens, scored.num_source_tokens) == (("x", "y", "x"), 4)
    assert scored.token_scores == pytest.approx(expected, abs=1e-5)
    assert scored.log_probability == pytest.approx(sum(expected), abs=1e-5)
    if searched.finish_reason is FinishReason.STOP:
        assert found.token_scores == searched.token_scores


async def test_the_empty_answer_has_a_score_and_blank_texts_need_no_model():
    """That of the end token; of nothing to nothing it is 0; something to nothing is refused."""
    runner = ScriptedRunner()
    async with running(runner=runner) as pipeline:
        for text, target in (("", ""), (" ", "\n")):
            blank = await pipeline.score(text, target)
            assert (blank.tokens, blank.token_scores, blank.log_probability) == ((), (), 0.0)
        with pytest.raises(InvalidRequestError, match="text is blank and target is not"):
            await pipeline.score(" ", "a")
        for text, target, name in (("a\nb", "a", "text"), ("a", "a\nb", "target")):
            with pytest.raises(InvalidRequestError, match=f"{name} has more than one line"):
                await pipeline.score(text, target)
        assert runner.encoded == []
        assert len((await pipeline.score("a", "")).token_scores) == 1


# --- streams


async def test_characters_of_several_bytes_stream_whole():
    """One byte a step, several answers at once: no half character, and deltas that join to the unary answer."""
    texts = ["naïve 👩‍👩‍👧 日本 ď", "ďábel", "日本語", "🦩🦩"]
    async with running(saying(*texts), vocabulary=BYTES, limits=Limits(64, 200)) as pipeline:
        found = await asyncio.gather(*(best(pipeline, "abcd"[i]) for i in range(4)))
        assert [one.text for one in found] == texts
        async for update in pipeline.stream("a", DecodingOptions()):
            assert isinstance(update, TextResult) or "\ufffd" not in update.delta


async def test_a_character_cut_short_is_replaced_streamed_or_not():
    """The limit comes after two of four bytes: two U+FFFD at the very end, in both modes alike."""
    async with running(saying("a🦩"), vocabulary=BYTES) as pipeline:
        cut = await best(pipeline, "a", max_new_tokens=3)
        assert (cut.text, cut.finish_reason) == ("a\ufffd\ufffd", FinishReason.LENGTH)


async def test_fifty_sentences_stream_with_every_blank(sentencepiece_model):
    """Greedy and by beams, with a bare mark for a blank as the first token, too: the deltas join to the text."""
    vocabulary = SentencePieceVocabulary(sentencepiece_model("bpe"))
    size, mark = len(vocabulary.tokens), vocabulary.tokens.index("\u2581")
    rng = random.Random(1)
    words = ["the", "garden", "dog", "runs", "over", "small", "big", "tree", "children", "football", "über", "straße"]
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 7))) for _ in range(50)]

    script = surely(size, lambda source: (mark, *source) if len(source) % 2 else source)
    async with running(script, vocabulary=vocabulary) as pipeline:
        for text in texts:
            for options in ({}, {"beam_size": 2, "max_new_tokens": 40}):
                answer = await best(pipeline, text, **options)
                assert answer.text.lstrip(" ") == text


async def test_beams_stream_what_they_agree_on_before_the_end():
    """All beams share the first tokens, so that these come while the search still runs."""
    text, sent, came = "abcdefghijklmnop", "", threading.Event()
    runner = ScriptedRunner(COPY)

    def hold():
        if runner.num_decode_steps == 12:  # until the reader has most of what was decoded by now
            assert came.wait(60)

    runner.before_decode = hold
    async with running(runner=runner) as pipeline:
        async for item in pipeline.stream(text, DecodingOptions(beam_size=2)):
            if isinstance(item, TextResult):
                break
            sent += item.delta
            if len(sent) > 6:
                came.set()
    assert sent == item.text == text


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        [
            {},
            {"beam_size": 3},
            {"beam_size": 3, "num_hypotheses": 3, "return_scores": True},
            {"temperature": 2.0, "seed": 1},
            {"temperature": 2.0, "seed": 1, "num_hypotheses": 3},
            {"return_alternatives": True, "num_hypotheses": 3},
        ]
    ),
    st.sampled_from([(), ("a",), ("\ufffd",), ("b", "\ufffda")]),
    st.sampled_from(["", "ab", "日"]),
    st.integers(1, 30),
)
def test_nothing_that_was_streamed_is_taken_back(options, stop, prefix, max_new_tokens):
    """Any bytes, half characters among them, in every mode: the deltas of each hypothesis join to its text."""

    def script(source, fed):
        logits = np.array(hashing_script(len(BYTES.tokens))(source, fed))
        logits[260:] += 3  # letters are as probable as all bytes
        return logits

    async def check():
        async with running(script, vocabulary=BYTES) as pipeline:
            found = await answers(
                pipeline, "ab", stop=stop, target_prefix=prefix, max_new_tokens=max_new_tokens, **options
            )
        for one in found:
            assert one.text.startswith(prefix)
            assert not any(text in one.text[len(prefix) :] for text in stop)

    asyncio.run(check())


async def test_alignment_comes_with_every_answer_of_several():
    """Each of its own tokens, as far as a stop string left them."""

    def forced_pass(source, tokens):
        return np.eye(len(tokens), len(source), dtype=np.float32)

    model = scripted_model([ScriptedRunner(COPY)], forced_pass=forced_pass)
    model.start()
    options = DecodingOptions(beam_size=2, num_hypotheses=2, stop=("d",), return_alignment=True)
    result = await model.pipeline.generate("abcdef", options)
    await model.close()
    for hypothesis in result.segments[0].hypotheses:
        assert len(hypothesis.alignment) == len(hypothesis.tokens)
    assert result.text == "abc"
