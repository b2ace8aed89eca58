"""The promise of the engine on the real embedded model: an answer does not depend on who shares the batch."""

import asyncio
import random

import pytest

from dragoman.bundle import ModelBundle
from dragoman.config import DEFAULT_MODEL, EngineConfig, embedded_bundle
from dragoman.engine.engine import Engine
from dragoman.engine.replica import generate_all
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman.errors import RequestCancelledError
from dragoman.served_model import load_tokenizers, token_rules
from dragoman.types import GenerationRequest

TIE = 1e-4
KV_BYTES = 1 << 28


class G2p:
    """The embedded model's parts, opened once."""

    def __init__(self):
        self.bundle = ModelBundle.load(embedded_bundle(DEFAULT_MODEL))
        self.model = OrtModel(self.bundle.manifest.model, self.bundle.manifest.graphs[0], self.bundle.read)
        self.rules = token_rules(self.bundle.manifest)
        self.tokenizer, _ = load_tokenizers(self.bundle)

    def request(self, word):
        return GenerationRequest(self.tokenizer.encode(word), 64, return_scores=True)

    def runner(self, num_slots):
        return OrtRunner(self.model, num_slots, KV_BYTES)

    def alone(self, words):
        """Each word by itself: one slot, one word at a time."""
        runner = self.runner(1)
        return [generate_all(runner, self.rules, [self.request(w)], EngineConfig())[0].hypotheses[0] for w in words]


@pytest.fixture(scope="module")
def g2p():
    return G2p()


def made_up_words(count, longest, seed):
    """Pronounceable and unpronounceable ones, of 1 to ``longest`` letters."""
    rng = random.Random(seed)
    syllables = ["sta", "ro", "min", "the", "qu", "x", "ough", "eau", "'s", "pl", "ing", "z", "tion", "a", "e"]
    words = []
    while len(words) < count:
        words.append("".join(rng.choices(syllables, k=rng.randint(1, 12)))[: rng.randint(1, longest)])
    return words


def assert_same(actual, expected, where):
    """Equal tokens and scores; a difference is allowed only where the two choices are as likely as each other."""
    for step, (a, b) in enumerate(zip(actual.token_scores, expected.token_scores, strict=False)):
        assert a == pytest.approx(b, abs=TIE), f"{where}: step {step}"
        if actual.tokens[: step + 1] != expected.tokens[: step + 1]:
            return  # a tie: the scores up to here, this one included, are equal
    assert actual.tokens == expected.tokens, where


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_200_requests_with_random_cancels_equal_each_alone(g2p, num_replicas):
    """Sent together, about a third cancelled at random moments: every other one has the tokens it has alone."""
    words = made_up_words(200, longest=40, seed=num_replicas)
    expected = g2p.alone(words)
    rng = random.Random(7)
    engine = Engine([g2p.runner(16) for _ in range(num_replicas)], g2p.rules, EngineConfig())
    engine.start()

    async def one(word):
        cancel_after = rng.choice([None, None, rng.randint(0, 6)])
        stream = engine.submit(g2p.request(word))
        seen = 0
        try:
            async for update in stream:
                seen += len(update.tokens)
                if update.result is not None:
                    return update.result.hypotheses[0]
                if cancel_after is not None and seen >= cancel_after:
                    stream.cancel()
        except RequestCancelledError:
            return None
        raise AssertionError("a stream ends with a result or an error")

    outcomes = await asyncio.gather(*map(one, words))
    await engine.drained()
    snapshot = engine.snapshot()
    await engine.close()
    assert (snapshot.slots_used, snapshot.num_running, snapshot.num_waiting) == (0, 0, 0)
    survivors = [i for i, outcome in enumerate(outcomes) if outcome is not None]
    assert 100 < len(survivors) < 200
    for i in survivors:
        assert_same(outcomes[i], expected[i], words[i])


def test_batch_size_order_and_neighbours_change_nothing(g2p):
    """64 words of 1 to 60 letters: alone, 8 and 64 at a time, reversed, and each beside the longest word."""
    words = [*made_up_words(63, longest=60, seed=3), "a" * 63]
    expected = g2p.alone(words)
    for num_slots in (8, 64):
        for order in (range(64), range(63, -1, -1)):
            requests = [g2p.request(words[i]) for i in order]
            outcomes = generate_all(g2p.runner(num_slots), g2p.rules, requests, EngineConfig())
            for i, outcome in zip(order, outcomes, strict=True):
                assert_same(outcome.hypotheses[0], expected[i], f"{words[i]}, {num_slots} slots")
    runner = g2p.runner(2)
    for word, alone in zip(words, expected, strict=True):
        outcome, _ = generate_all(runner, g2p.rules, [g2p.request(word), g2p.request("a" * 63)], EngineConfig())
        assert_same(outcome.hypotheses[0], alone, f"{word} beside the longest")


async def test_sources_of_unlike_length_that_arrive_at_any_step(g2p):
    """40 sources trickle into 8 slots while others run: each attends its own source, with its own length."""
    words = made_up_words(40, longest=60, seed=5)
    expected = g2p.alone(words)
    rng = random.Random(1)
    engine = Engine([g2p.runner(8)], g2p.rules, EngineConfig())
    engine.start()

    async def one(word):
        for _ in range(rng.randint(0, 200)):
            await asyncio.sleep(0)
        async for update in engine.submit(g2p.request(word)):
            if update.result is not None:
                return update.result.hypotheses[0]
        raise AssertionError("a stream ends with its result")

    outcomes = await asyncio.gather(*map(one, words))
    await engine.close()
    for word, outcome, alone in zip(words, outcomes, expected, strict=True):
        assert_same(outcome, alone, word)


def test_equal_runs_are_bit_equal(g2p):
    """The same requests in the same slots twice: equal to the last bit of every score."""
    requests = [g2p.request(word) for word in made_up_words(50, longest=30, seed=9)]
    first, second = (generate_all(g2p.runner(16), g2p.rules, requests, EngineConfig()) for _ in range(2))
    assert [o.hypotheses for o in first] == [o.hypotheses for o in second]
