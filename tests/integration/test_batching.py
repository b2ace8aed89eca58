"""The promise of the engine on the real embedded model: an answer does not depend on who shares the batch.

The model is int8: answers are equal to the last bit of every score. (fp32: see test_export.py.)
"""

import asyncio
import random

import pytest

from dragoman.bundle import ModelBundle
from dragoman.config import EngineConfig, embedded_bundle
from dragoman.engine.engine import Engine
from dragoman.engine.replica import generate_all
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman.errors import RequestCancelledError
from dragoman.served_model import load_tokenizers, token_rules
from dragoman.types import GenerationRequest, SearchOptions, Steering

KV_BYTES = 1 << 28


SEARCHES = [
    SearchOptions(beam_size=4, num_hypotheses=3),
    SearchOptions(beam_size=2, length_penalty=0.0),
    SearchOptions(temperature=0.7, top_p=0.9, seed=3, num_hypotheses=2),
    SearchOptions(num_hypotheses=4, alternatives=True),
]


class G2p:
    """The embedded model's parts, opened once."""

    def __init__(self):
        self.bundle = ModelBundle.load(embedded_bundle("g2p-en"))
        self.model = OrtModel(self.bundle.manifest.model, self.bundle.manifest.graphs[0], self.bundle.read)
        self.rules = token_rules(self.bundle.manifest)
        self.tokenizer, _ = load_tokenizers(self.bundle)

    def request(self, word):
        """Greedy for every other word; for the others something else, always the same."""
        rng = random.Random(word)
        search = rng.choice([SearchOptions()] * len(SEARCHES) + SEARCHES)
        steering = rng.choice([None, None, Steering(min_new_tokens=3, repetition_penalty=1.2, no_repeat_ngram_size=2)])
        prefix = tuple(rng.choices(range(4, 43), k=rng.choice([0, 0, 0, 2])))
        return GenerationRequest(
            self.tokenizer.encode(word), 60, return_scores=True, search=search, steering=steering, prefix=prefix
        )

    def runner(self, num_slots):
        return OrtRunner(self.model, num_slots, KV_BYTES)

    def alone(self, words):
        """Each word by itself, one at a time."""
        runner = self.runner(4)
        return [generate_all(runner, self.rules, [self.request(w)], EngineConfig())[0].hypotheses for w in words]


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
                    return update.result.hypotheses
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
        assert outcomes[i] == expected[i], words[i]


def test_batch_size_order_and_neighbours_change_nothing(g2p):
    """64 words of 1 to 60 letters: alone, 8 and 64 at a time, reversed, and each beside the longest word."""
    words = [*made_up_words(63, longest=60, seed=3), "a" * 63]
    expected = g2p.alone(words)
    for num_slots in (8, 64):
        for order in (range(64), range(63, -1, -1)):
            requests = [g2p.request(words[i]) for i in order]
            outcomes = generate_all(g2p.runner(num_slots), g2p.rules, requests, EngineConfig())
            for i, outcome in zip(order, outcomes, strict=True):
                assert outcome.hypotheses == expected[i], f"{words[i]}, {num_slots} slots"
    runner = g2p.runner(8)
    for word, alone in zip(words, expected, strict=True):
        outcome, _ = generate_all(runner, g2p.rules, [g2p.request(word), g2p.request("a" * 63)], EngineConfig())
        assert outcome.hypotheses == alone, f"{word} beside the longest"


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
                return update.result.hypotheses
        raise AssertionError("a stream ends with its result")

    outcomes = await asyncio.gather(*map(one, words))
    await engine.close()
    for word, outcome, alone in zip(words, outcomes, expected, strict=True):
        assert outcome == alone, word


def test_equal_runs_are_bit_equal(g2p):
    """The same requests in the same slots twice: equal to the last bit of every score."""
    requests = [g2p.request(word) for word in made_up_words(50, longest=30, seed=9)]
    first, second = (generate_all(g2p.runner(16), g2p.rules, requests, EngineConfig()) for _ in range(2))
    assert [o.hypotheses for o in first] == [o.hypotheses for o in second]
