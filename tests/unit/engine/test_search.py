"""What searches find, through the real scheduler over a scripted model, against searches that keep no state."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.config import EngineConfig
from dragoman.engine.replica import TokenRules, generate_all
from dragoman.engine.sampling import Sampler
from dragoman.errors import ImpossibleError, RowError
from dragoman.testing import VOCABULARY, ScriptedRunner
from dragoman.types import FinishReason, GenerationRequest, SearchOptions, Steering
from dragoman.vocabulary import BOS_ID, EOS_ID, PAD_ID, UNK_ID

RULES = TokenRules(decoder_start=BOS_ID, eos=EOS_ID, never_generated=(PAD_ID, BOS_ID, UNK_ID))
SIZE = len(VOCABULARY.tokens)


def hashing_script(source, fed):
    """Every token depends on the whole source and the whole prefix, in the order in which it was fed."""
    generator = random.Random(hash((source, fed)))
    logits = [generator.uniform(-2, 2) for _ in range(SIZE)]
    logits[EOS_ID] += 0.6 * len(fed) / (1 + len(source))
    return logits


def run(*requests, script=hashing_script, num_slots=64):
    return generate_all(ScriptedRunner(script, num_slots), RULES, list(requests), EngineConfig())


def log_probs(source, produced, script=hashing_script):
    """By the script alone: the log-probability of each token after some others."""
    logits = list(script(source, (BOS_ID, *produced)))
    for index in RULES.never_generated:
        logits[index] = -math.inf
    total = math.log(sum(math.exp(value) for value in logits))
    return [value - total for value in logits]


def plain_beam_search(source, size, steps, penalty, hypotheses, patience=1.0, prefix=(), *, may_end_early=True):
    """CTranslate2's rules, with every prefix read anew. Tokens and scores, best first."""
    beams, finished, first_finished = [(0.0, ())], [], False
    for step in range(steps):
        candidates = sorted(
            (-(total + value), rank, token)
            for rank, (total, tokens) in enumerate(beams)
            for token, value in enumerate(log_probs(source, (*prefix, *tokens)))
            if value > -math.inf
        )[: 2 * size]
        spare = [c for c in candidates[size:] if c[2] != EOS_ID]
        going = []
        for place, (cost, rank, token) in enumerate(candidates[:size]):
            tokens = (*beams[rank][1], token)
            if token == EOS_ID or step == steps - 1:
                finished.append((-cost / len(tokens) ** penalty, tokens))
                first_finished = first_finished or place == 0
                if spare:
                    cost, rank, token = spare.pop(0)
                    going.append((-cost, (*beams[rank][1], token)))
            else:
                going.append((-cost, tokens))
        beams = going
        enough = len(finished) >= math.floor(size * patience + 0.5)
        if penalty == 0 and may_end_early:
            enough = first_finished and len(finished) >= hypotheses
        if enough:
            break
    finished.sort(key=lambda item: -item[0])
    return [(tokens[:-1] if tokens[-1] == EOS_ID else tokens, score) for score, tokens in finished[:hypotheses]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(4, 20), min_size=1, max_size=5),
    st.integers(2, 8),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.6, 1.0, 2.0, -1.0]),
    st.sampled_from([1.0, 0.5, 2.0]),
    st.lists(st.integers(4, 20), max_size=3),
)
def test_beam_search_finds_what_a_search_without_state_finds(source, size, steps, penalty, patience, prefix):
    """Width, limit, length penalty, patience and prefix: every hypothesis, its tokens and its score."""
    search = SearchOptions(beam_size=size, num_hypotheses=size, length_penalty=penalty, patience=patience)
    request = GenerationRequest((*source, EOS_ID), steps, True, prefix=tuple(prefix), search=search)
    (outcome,) = run(request)
    expected = plain_beam_search((*source, EOS_ID), size, steps, penalty, size, patience, tuple(prefix))
    assert [h.tokens for h in outcome.hypotheses] == [(*prefix, *tokens) for tokens, _ in expected]
    assert [h.score for h in outcome.hypotheses] == pytest.approx([score for _, score in expected], rel=1e-4, abs=1e-4)
    for hypothesis in outcome.hypotheses:
        length = len(hypothesis.token_scores)
        assert hypothesis.score == pytest.approx(sum(hypothesis.token_scores) / length**penalty)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(4, 20), min_size=1, max_size=5),
    st.integers(2, 6),
    st.integers(1, 9),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([1.0, 2.0]),
)
def test_with_a_coverage_penalty_all_that_was_finished_is_handed_over(source, size, steps, penalty, patience):
    """Also without a length penalty, the search goes on to its full number: whoever asked for one answer ranks anew."""
    search = SearchOptions(beam_size=size, length_penalty=penalty, patience=patience, coverage_penalty=0.5)
    (outcome,) = run(GenerationRequest((*source, EOS_ID), steps, True, search=search))
    expected = plain_beam_search((*source, EOS_ID), size, steps, penalty, None, patience, may_end_early=False)
    assert [h.tokens for h in outcome.hypotheses] == [tokens for tokens, _ in expected]
    assert [h.score for h in outcome.hypotheses] == pytest.approx([score for _, score in expected], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("penalty", [0, 0.6, 1, 2, -1])
def test_a_beam_as_wide_as_all_sequences_finds_the_best_of_all(penalty):
    """Four letters, at most four steps, a beam of 4^4: brute force finds nothing better."""
    letters = [EOS_ID, 4, 5, 6]

    def script(source, fed):
        logits = hashing_script(source, fed)
        return [value if index in letters else -math.inf for index, value in enumerate(logits)]

    source = (7, EOS_ID)
    search = SearchOptions(beam_size=256, length_penalty=penalty, patience=100.0)
    (outcome,) = run(GenerationRequest(source, 4, True, search=search), script=script, num_slots=256)
    best = -math.inf
    for count in range(1, 5):
        for tokens in itertools.product(letters, repeat=count):
            if EOS_ID in tokens[:-1] or (tokens[-1] != EOS_ID and count < 4):
                continue
            total = sum(log_probs(source, tokens[:i], script)[token] for i, token in enumerate(tokens))
            best = max(best, total / count**penalty)
    assert outcome.hypotheses[0].score == pytest.approx(best, rel=1e-5)


def test_the_reorder_cannot_be_skipped():
    """With rows that keep what they held, a beam reads another's past, and the answers are others."""

    class WithoutForks(ScriptedRunner):
        def fork(self, source_slot, target_slot):
            forks.append((source_slot, target_slot))

    forks = []
    requests = [GenerationRequest((4 + i, 5, EOS_ID), 8, search=SearchOptions(beam_size=4)) for i in range(8)]
    right = [o.hypotheses for o in run(*requests)]
    wrong = [o.hypotheses for o in generate_all(WithoutForks(hashing_script, 64), RULES, requests, EngineConfig())]
    assert forks
    assert right != wrong


def test_only_rows_that_change_their_past_are_copied():
    """A beam that goes on in its own row costs nothing: fewer forks than beams, and none when nothing is swapped."""
    copied = []

    class Counting(ScriptedRunner):
        def fork(self, source_slot, target_slot):
            copied.append((source_slot, target_slot))
            super().fork(source_slot, target_slot)

    def apart(source, fed):
        """Each beam goes on with one token that is all but certain: no beam takes another's place."""
        logits = [-20.0] * SIZE
        if len(fed) == 1:
            for rank in range(4):
                logits[4 + rank] = 3.0 - rank
        else:
            logits[fed[1] if len(fed) < 8 else EOS_ID] = 20.0
        return logits

    request = GenerationRequest((9, EOS_ID), 12, search=SearchOptions(beam_size=4, num_hypotheses=4))
    (outcome,) = generate_all(Counting(apart, 8), RULES, [request], EngineConfig())
    assert copied == []
    assert [h.tokens for h in outcome.hypotheses] == [(4 + rank,) * 7 for rank in range(4)]


def test_greedy_is_a_beam_of_one_without_its_normalisation():
    """The best token at each step; the score is the plain sum."""
    (outcome,) = run(GenerationRequest((4, 5, EOS_ID), 30, True))
    (best,) = outcome.hypotheses
    produced = []
    while len(produced) < 30:
        values = log_probs((4, 5, EOS_ID), tuple(produced))
        token = max(range(SIZE), key=lambda index: values[index])
        if token == EOS_ID:
            break
        produced.append(token)
    assert best.tokens == tuple(produced)
    assert best.score == pytest.approx(sum(best.token_scores))


def test_a_prefix_is_what_the_answer_begins_with():
    """It is fed, not scored, and does not count towards the limit."""
    source = (4, 5, EOS_ID)
    (outcome,) = run(GenerationRequest(source, 3, True, prefix=(7, 8, 9)))
    (best,) = outcome.hypotheses
    assert best.tokens[:3] == (7, 8, 9)
    assert len(best.tokens) <= 6
    expected, produced = [], [7, 8, 9]
    for token in [*best.tokens[3:], *([EOS_ID] if best.finish_reason == FinishReason.STOP else [])]:
        expected.append(log_probs(source, tuple(produced))[token])
        produced.append(token)
    assert best.token_scores == pytest.approx(expected, abs=1e-5)


def test_a_given_target_is_scored_with_its_end():
    """Each token's log-probability after those before it, and the end token's; nothing is searched."""
    source, target = (4, 5, EOS_ID), (6, 9, 6)
    (outcome,) = run(GenerationRequest(source, 1, True, prefix=target, score_prefix=True))
    (best,) = outcome.hypotheses
    assert (best.tokens, best.finish_reason) == (target, FinishReason.STOP)
    full = (*target, EOS_ID)
    expected = [log_probs(source, full[:place])[token] for place, token in enumerate(full)]
    assert best.token_scores == pytest.approx(expected, abs=1e-5)


def test_alternatives_part_at_the_first_token_behind_the_prefix():
    """The n best there but the end, each continued greedily, in the order of their first tokens."""
    source, prefix = (4, 5, EOS_ID), (7, 8)
    search = SearchOptions(num_hypotheses=4, alternatives=True)
    (outcome,) = run(GenerationRequest(source, 10, True, prefix=prefix, search=search))
    values = log_probs(source, prefix)
    best = sorted((i for i in range(SIZE) if i != EOS_ID), key=lambda index: (-values[index], index))[:4]
    assert [h.tokens[2] for h in outcome.hypotheses] == best
    for hypothesis, first in zip(outcome.hypotheses, best, strict=True):
        (alone,) = run(GenerationRequest(source, 9, prefix=(*prefix, first)))
        assert alone.hypotheses[0].tokens == hypothesis.tokens


def test_the_first_probability_of_an_alternative_is_over_all_but_the_end():
    """To end is none of the alternatives, and takes no share of them."""
    source = (4, 5, EOS_ID)
    search = SearchOptions(num_hypotheses=2, alternatives=True)
    (outcome,) = run(GenerationRequest(source, 1, True, search=search))
    values = log_probs(source, ())
    share = math.log(1 - math.exp(values[EOS_ID]))
    for hypothesis in outcome.hypotheses:
        assert hypothesis.token_scores == pytest.approx([values[hypothesis.tokens[0]] - share], abs=1e-5)


def test_top_tokens_of_every_position():
    """The most probable ones with their log-probabilities, in greedy and in beam search: more than it looks at, too."""
    source = (4, 5, EOS_ID)
    for search, count in ((SearchOptions(), 2), (SearchOptions(beam_size=3), 2), (SearchOptions(beam_size=2), 6)):
        (outcome,) = run(GenerationRequest(source, 8, True, search=search, num_top=count))
        best = outcome.hypotheses[0]
        assert len(best.top) == len(best.token_scores)
        for place, step in enumerate(best.top):
            values = log_probs(source, best.tokens[:place])
            expected = sorted(range(SIZE), key=lambda index: (-values[index], index))[:count]
            assert [token for token, _ in step] == expected
            assert [value for _, value in step] == pytest.approx([values[token] for token in expected], abs=1e-5)


def test_samples_of_one_request_differ_and_are_ranked():
    """Three hypotheses by chance, the most probable first; the same seed gives them again, another does not."""

    def drawn(seed):
        search = SearchOptions(temperature=1.0, num_hypotheses=3, seed=seed)
        (outcome,) = run(GenerationRequest((4, 5, EOS_ID), 12, True, search=search))
        return outcome.hypotheses

    first = drawn(1)
    assert len({h.tokens for h in first}) == 3
    assert [h.score for h in first] == sorted((h.score for h in first), reverse=True)
    assert drawn(1) == first
    assert {h.tokens for h in drawn(2)} != {h.tokens for h in first}


def mixed(seed):
    """A request with any of the options."""
    rng = random.Random(seed)
    search = rng.choice(
        [
            SearchOptions(),
            SearchOptions(beam_size=rng.randint(2, 4), num_hypotheses=2, length_penalty=rng.choice([0.0, 1.0])),
            SearchOptions(temperature=0.8, num_hypotheses=rng.randint(1, 3), seed=seed, top_k=rng.choice([0, 5])),
            SearchOptions(num_hypotheses=rng.randint(1, 5), alternatives=True),
        ]
    )
    steering = rng.choice([None, Steering(min_new_tokens=3), Steering(repetition_penalty=1.3, suppressed=(6, 7))])
    source = (*rng.choices(range(4, 20), k=rng.randint(1, 6)), EOS_ID)
    prefix = tuple(rng.choices(range(8, 12), k=rng.choice([0, 0, 2])))
    return GenerationRequest(
        source,
        rng.randint(1, 12),
        rng.random() < 0.5,
        prefix=prefix,
        search=search,
        steering=steering,
        num_top=rng.choice([0, 2]),
        stop_at_loops=rng.random() < 0.5,
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(5, 40))
def test_any_mixture_of_options_gives_each_what_it_gets_alone(seed, count, num_slots):
    """Greedy, beams, samples, alternatives, steering, prefixes side by side: tokens and scores as without company."""
    requests = [mixed(seed * 100 + index) for index in range(count)]
    together = run(*requests, num_slots=num_slots)
    for request, outcome in zip(requests, together, strict=True):
        (alone,) = run(request, num_slots=5)
        assert outcome.hypotheses == alone.hypotheses


def test_constraints_that_leave_no_token_fail_that_request_alone():
    """Everything suppressed: an error of its own, and the neighbour's answer is untouched."""
    impossible = GenerationRequest((4, EOS_ID), 5, steering=Steering(suppressed=tuple(range(SIZE))))
    other = GenerationRequest((5, EOS_ID), 5, search=SearchOptions(beam_size=3))
    outcome, good = run(impossible, other)
    assert isinstance(outcome, ImpossibleError)
    assert "loosen suppress_tokens" in str(outcome)
    assert good.hypotheses == run(other)[0].hypotheses


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_finite_scores_fails_alone_in_every_search(value):
    """Also when it is one beam of several that goes wrong."""

    def script(source, fed):
        logits = hashing_script(source, fed)
        if source[0] == 9 and len(fed) > 2:
            logits[5] = value
        return logits

    searches = [SearchOptions(), SearchOptions(beam_size=3), SearchOptions(temperature=1.0, num_hypotheses=2)]
    for search in searches:
        bad = GenerationRequest((9, EOS_ID), 9, search=search, steering=Steering(min_new_tokens=9))
        good = GenerationRequest((5, EOS_ID), 9, search=search)
        outcome, other = run(bad, good, script=script)
        assert isinstance(outcome, RowError)
        assert other.hypotheses == run(good, script=script)[0].hypotheses


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("kind", ["greedy", "samples", "alternatives"])
def test_where_answers_are_cut_a_row_that_cannot_go_on_ends_alone(value, kind):
    """It is returned as far as it came, with its error; the others are what they would have been."""
    search = {
        "greedy": SearchOptions(),
        "samples": SearchOptions(temperature=1.5, num_hypotheses=4, seed=3),
        "alternatives": SearchOptions(num_hypotheses=4, alternatives=True),
    }[kind]

    def script(source, fed):
        logits = hashing_script(source, fed)
        logits[EOS_ID] = -20.0
        return [value] * SIZE if len(fed) > 3 and sum(fed) % (1 if kind == "greedy" else 7) == 0 else logits

    request = GenerationRequest((9, EOS_ID), 9, True, search=search)
    (whole,) = run(request)
    (outcome,) = run(replace(request, stop=("x",)), script=script)
    (refused,) = run(request, script=script)
    failed = [h for h in outcome.hypotheses if h.error is not None]
    assert failed and len(outcome.hypotheses) == len(whole.hypotheses)
    assert type(refused) is type(failed[0].error) is (RowError if math.isnan(value) else ImpossibleError)
    assert (kind == "greedy") == (len(failed) == len(outcome.hypotheses))
    for hypothesis in failed:
        assert 3 <= len(hypothesis.tokens) < 9 and len(hypothesis.token_scores) == len(hypothesis.tokens)
    for hypothesis in outcome.hypotheses:
        assert hypothesis.error is not None or len(hypothesis.tokens) == 9


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_where_answers_are_cut_a_beam_that_cannot_go_on_is_handed_over(value):
    """With its score and its error, behind those that were finished; the search goes on with the others."""

    def script(source, fed):
        """5 goes on to its end; 4, which is better, comes to nothing."""
        allowed = {(): (4, 5), (5,): (5,), (5, 5): (EOS_ID,)}.get(fed[1:])
        if allowed is None:
            return [value] * SIZE
        return [1.0 - 0.1 * index if index in allowed else -math.inf for index in range(SIZE)]

    request = GenerationRequest((9, EOS_ID), 9, True, search=SearchOptions(beam_size=2), stop=("x",))
    (outcome,) = run(request, script=script)
    good, bad = outcome.hypotheses
    assert (good.tokens, good.error) == ((5, 5), None)
    assert (bad.tokens, type(bad.error)) == ((4,), RowError if math.isnan(value) else ImpossibleError)
    assert bad.score == sum(bad.token_scores) == pytest.approx(-math.log1p(math.exp(-0.1)))


def test_no_more_failed_beams_are_kept_than_the_search_is_wide():
    """The best of them, however many dead ends there are; one without numbers before all that merely ended."""

    def script(source, fed):
        """Tokens above 9 are dead ends; 10 is one because of NaN."""
        if fed[-1] > 9:
            return [math.nan if fed[-1] == 10 else -math.inf] * SIZE
        logits = hashing_script(source, fed)
        logits[EOS_ID] = -20.0 if len(fed) < 12 else 20.0
        return [*logits[:10], 3.0, *(2.5 + 0.01 * index for index in range(11, SIZE))]

    request = GenerationRequest((9, EOS_ID), 20, True, search=SearchOptions(beam_size=4), stop=("x",))
    (outcome,) = run(request, script=script)
    failed = [h for h in outcome.hypotheses if h.error is not None]
    assert len(failed) == 4 and isinstance(failed[0].error, RowError)


def test_a_beam_that_may_choose_nothing_is_dropped():
    """The other goes on; when none may go on, the request fails, but for what it has finished."""

    def script(source, fed):
        """After 4 nothing may come; after 5, 5 again and then the end."""
        allowed = {(): (4, 5), (4,): (), (5,): (5,), (5, 5): (EOS_ID,)}.get(fed[1:], ())
        return [1.0 if index in allowed else -math.inf for index in range(SIZE)]

    search = SearchOptions(beam_size=2)
    (outcome,) = run(GenerationRequest((9, EOS_ID), 9, search=search), script=script)
    assert outcome.hypotheses[0].tokens == (5, 5)
    (outcome,) = run(GenerationRequest((9, EOS_ID), 9, search=search, prefix=(4,)), script=script)
    assert isinstance(outcome, ImpossibleError)


def test_a_beam_search_over_fewer_tokens_than_beams_ends():
    """Two tokens may come, eight beams were asked for: idle rows do no harm."""

    def script(source, fed):
        return [0.5 * (index == 4) if index in (4, EOS_ID) else -math.inf for index in range(SIZE)]

    search = SearchOptions(beam_size=8, num_hypotheses=8)
    (outcome,) = run(GenerationRequest((9, EOS_ID), 3, True, search=search), script=script)
    assert {h.tokens for h in outcome.hypotheses} == {(), (4,), (4, 4), (4, 4, 4)}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("scored", [False, True])
def test_alternatives_to_an_end_that_is_certain(count, scored):
    """However sure the model is of the end: the best of the others, and their share of what the end leaves."""

    def script(source, fed):
        return [60.0 if index == EOS_ID else float(index == 7) for index in range(SIZE)]

    search = SearchOptions(num_hypotheses=count, alternatives=True)
    (outcome,) = run(GenerationRequest((9, EOS_ID), 9, scored, search=search), script=script)
    assert [h.tokens for h in outcome.hypotheses] == [(7,), (4,)][:count]
    if scored:
        assert outcome.hypotheses[0].token_scores[0] == pytest.approx(1 - math.log(math.e + SIZE - 5))


def test_alternatives_where_nothing_but_the_end_may_come():
    """There is none: the request fails, alone."""
    steering = Steering(suppressed=tuple(i for i in range(SIZE) if i != EOS_ID))
    search = SearchOptions(num_hypotheses=2, alternatives=True)
    bad, good = GenerationRequest((9, EOS_ID), 9, search=search, steering=steering), GenerationRequest((5, EOS_ID), 9)
    outcome, other = run(bad, good)
    assert isinstance(outcome, ImpossibleError)
    assert other.hypotheses == run(good)[0].hypotheses


def test_an_error_in_one_requests_search_ends_that_request_alone(monkeypatch):
    """Whatever it is: its rows are free again, the neighbour's answer is untouched, and the log has the cause."""
    good = GenerationRequest((5, EOS_ID), 9, search=SearchOptions(beam_size=3))
    expected = run(good)[0].hypotheses
    draw = Sampler.draw

    def fail(self, logits):
        if self._options.seed == 13:
            raise ZeroDivisionError
        return draw(self, logits)

    monkeypatch.setattr(Sampler, "draw", fail)
    bad = GenerationRequest((9, EOS_ID), 9, search=SearchOptions(temperature=1.0, seed=13, num_hypotheses=2))
    outcomes = run(bad, good, bad, bad, good, num_slots=5)
    assert [isinstance(outcome, RowError) for outcome in outcomes] == [True, False, True, True, False]
    assert outcomes[1].hypotheses == outcomes[4].hypotheses == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([math.nan, math.inf, -math.inf, 60.0]))
def test_no_numbers_of_a_model_end_the_engine(seed, value):
    """NaN, infinities and certainty anywhere, under any options: every request has an answer or an error of its own."""

    def script(source, fed):
        logits = hashing_script(source, fed)
        rng = random.Random(hash((seed, source, fed)))
        for index in range(SIZE):
            if rng.random() < 0.1:
                logits[index] = value
        return logits

    outcomes = run(*(mixed(seed * 50 + index) for index in range(8)), script=script, num_slots=6)
    assert all(isinstance(o, RowError | ImpossibleError) or o.hypotheses for o in outcomes)
