"""From names and wishes to ids and numbers, within one model's limits."""

import pytest

from dragoman.bundle import Limits
from dragoman.errors import InvalidRequestError
from dragoman.resolver import Resolver, Terms
from dragoman.testing import VOCABULARY, scripted_manifest
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer
from dragoman.types import DecodingOptions, SearchOptions, Steering
from dragoman.vocabulary import EOS_ID

A, B, C = (VOCABULARY.tokens.index(letter) for letter in "abc")
SOURCE = (A, B, EOS_ID)


def resolver(num_slots=8, max_new_tokens=20):
    manifest = scripted_manifest(limits=Limits(10, max_new_tokens))
    return Resolver(manifest, SourceTokenizer(VOCABULARY, (), (EOS_ID,)), TargetTokenizer(VOCABULARY), num_slots)


def request(options, source=SOURCE, terms=None, **settings):
    resolving = resolver(**settings)
    return resolving.request(resolving.resolve(options), source, terms or Terms())


def test_nothing_asked_for_is_greedy_search_up_to_the_models_limit():
    """Without steering, which costs nothing then; with the loop guard."""
    plain = request(DecodingOptions())
    assert (plain.max_new_tokens, plain.search, plain.steering) == (20, SearchOptions(), None)
    assert (plain.prefix, plain.return_scores, plain.num_top, plain.stop_at_loops) == ((), False, 0, True)


def test_names_become_ids():
    """Tokens, sequences of them, and the text of a prefix."""
    steered = request(
        DecodingOptions(
            min_new_tokens=2,
            suppress_tokens=("c", "</s>"),
            suppress_sequences=(("a", "b"), ("c",)),
            repetition_penalty=1.5,
            no_repeat_ngram_size=3,
            target_prefix="ba",
        )
    )
    assert steered.steering == Steering(2, (C, EOS_ID), ((A, B), (C,)), 1.5, 3)
    assert steered.prefix == (B, A)


def test_the_prefix_takes_its_part_of_the_models_limit():
    """What comes behind it has the rest, whatever was asked for; a prefix that leaves nothing is refused."""
    assert request(DecodingOptions(target_prefix="abc")).max_new_tokens == 17
    assert request(DecodingOptions(target_prefix="abc", max_new_tokens=99)).max_new_tokens == 17
    assert request(DecodingOptions(target_prefix="abc", max_new_tokens=5)).max_new_tokens == 5
    assert request(DecodingOptions(target_prefix="a" * 19)).max_new_tokens == 1
    with pytest.raises(InvalidRequestError, match=r"target_prefix has 20 tokens; .* up to 20"):
        request(DecodingOptions(target_prefix="a" * 20))


@pytest.mark.parametrize(("ratio", "expected"), [(0.1, 1), (1.0, 3), (1.5, 4), (6.6, 19), (100.0, 20)])
def test_the_length_ratio_counts_the_sources_tokens(ratio, expected):
    """Rounded down, 1 at least, never above the model's limit."""
    assert request(DecodingOptions(max_length_ratio=ratio)).max_new_tokens == expected


def test_a_minimum_that_there_is_no_room_for_is_refused():
    """By the model's limit behind the prefix, and by the ratio to the source."""
    assert request(DecodingOptions(min_new_tokens=17, target_prefix="abc")).max_new_tokens == 17
    with pytest.raises(InvalidRequestError, match="min_new_tokens is 18; this model has room for 17"):
        request(DecodingOptions(min_new_tokens=18, target_prefix="abc"))
    with pytest.raises(
        InvalidRequestError, match=r"min_new_tokens is 5; max_length_ratio 1.5 allows 4 for a source of 3"
    ):
        request(DecodingOptions(min_new_tokens=5, max_length_ratio=1.5))


def test_more_rows_than_the_engine_has_are_refused():
    """Beams and hypotheses, drawn or searched; as many as there are is allowed."""
    for options in ({"beam_size": 9}, {"num_hypotheses": 9, "temperature": 1.0}):
        with pytest.raises(InvalidRequestError, match="is 9; this server decodes 8 rows together"):
            request(DecodingOptions(**options))
        request(DecodingOptions(**options), num_slots=9)


def test_a_beam_wider_than_the_vocabulary_is_refused():
    """26 letters are all that may come; what is drawn may come twice."""
    for options in ({"beam_size": 27}, {"num_hypotheses": 27, "return_alternatives": True}):
        with pytest.raises(InvalidRequestError, match="is 27; this model has 26 tokens to choose from"):
            request(DecodingOptions(**options), num_slots=64)
    request(DecodingOptions(beam_size=26), num_slots=64)
    request(DecodingOptions(num_hypotheses=64, temperature=1.0), num_slots=64)


def test_names_that_are_no_tokens_are_listed():
    """Each once, the first ten of them, cut short."""
    with pytest.raises(InvalidRequestError, match=r"suppress_tokens names 'ab', 'é', which are no tokens"):
        request(DecodingOptions(suppress_tokens=("a", "ab", "é", "ab")))
    with pytest.raises(InvalidRequestError, match=r"suppress_sequences\[1\] names 'X'"):
        request(DecodingOptions(suppress_sequences=(("a",), ("a", "X"))))
    with pytest.raises(InvalidRequestError, match="and 90 more") as caught:
        request(DecodingOptions(suppress_tokens=tuple(f"{i}" * 100 for i in range(100))))
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suppress_tokens": ("a", "<pad>")}, "suppress_tokens names '<pad>', which no answer of this model ever has"),
        ({"suppress_tokens": ("<unk>",)}, "suppress_tokens names '<unk>'"),
        ({"suppress_sequences": (("a",), ("a", "<s>"))}, r"suppress_sequences\[1\] names '<s>', which no answer"),
        ({"suppress_sequences": (("a", "</s>", "b"),)}, r"suppress_sequences\[0\] has '</s>' before its end"),
    ],
)
def test_what_no_answer_has_cannot_be_suppressed(options, message):
    """The end token can, and sequences that end with it."""
    with pytest.raises(InvalidRequestError, match=message):
        request(DecodingOptions(**options))
    request(DecodingOptions(suppress_tokens=("</s>",), suppress_sequences=(("a", "</s>"),)))


@pytest.mark.parametrize(
    ("prefix", "message"),
    [("aX", r"target_prefix holds 'X' \(U\+0058\), which this model's target"), ("a\ud800", "target_prefix holds")],
)
def test_a_prefix_that_cannot_be_spelled_is_refused(prefix, message):
    """With the characters at fault."""
    with pytest.raises(InvalidRequestError, match=message):
        request(DecodingOptions(target_prefix=prefix))


def test_a_source_that_repeats_itself_may_have_such_an_answer():
    """The loop guard is on, but for a source like a line of dots, or where it is switched off."""
    assert request(DecodingOptions(), (A, B, C, EOS_ID)).stop_at_loops
    assert not request(DecodingOptions(), (A,) * 9).stop_at_loops
    assert not request(DecodingOptions(detect_repetition=False)).stop_at_loops


def test_a_seed_is_drawn_for_sampling_alone():
    """Another one each time; one that was given stays."""
    drawn = [request(DecodingOptions(temperature=1.0)).search.seed for _ in range(2)]
    assert drawn[0] != drawn[1] and all(0 < seed < 2**53 for seed in drawn)
    assert request(DecodingOptions(temperature=1.0, seed=7)).search.seed == 7
    assert request(DecodingOptions()).search.seed == 0


def test_the_terms_reach_the_engine():
    """Deadline, priority and caller of answers and of scores."""
    terms = Terms(12.5, -3, "somebody")
    for one in (request(DecodingOptions(), terms=terms), resolver().scoring(SOURCE, "ab", terms)):
        assert (one.deadline, one.priority, one.caller) == (12.5, -3, "somebody")
    for priority in (-11, 11):
        with pytest.raises(InvalidRequestError, match=f"priority is {priority}; it must be from -10 to 10"):
            Terms(priority=priority)


def test_a_given_answer_is_forced_and_scored_to_its_end():
    """Nothing steers it; one that is longer than any answer is refused."""
    scored = resolver().scoring(SOURCE, "ab", Terms())
    assert (scored.prefix, scored.score_prefix, scored.return_scores, scored.steering) == ((A, B), True, True, None)
    assert len(resolver().scoring(SOURCE, "a" * 19, Terms()).prefix) == 19
    with pytest.raises(InvalidRequestError, match=r"target has 21 tokens, end token included; .* up to 20"):
        resolver().scoring(SOURCE, "a" * 20, Terms())
