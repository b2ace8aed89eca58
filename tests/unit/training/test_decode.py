"""Reference decoding against hand-worked and brute-force answers, on a model that plays back scripted probabilities."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.training.conftest import SCRIPTED_VOCABULARY as VOCABULARY
from tests.unit.training.conftest import Script, Scripted, noise
from torch import Tensor

from dragoman_training.beam import (
    BeamOptions,
    beam_search,
    beam_search_all,
    beam_search_together,
    most_probable,
)
from dragoman_training.decode import FIRST_CAPACITY, greedy, greedy_all, in_groups, score
from dragoman_training.errors import DecodingError
from dragoman_training.model import KeyValue, Transformer
from dragoman_training.steering import Steering, allowed_log_probs
from dragoman_training.tokenizer import SPECIAL_IDS, SpecialIds

MakeModel = Callable[..., Transformer]
EOS = SPECIAL_IDS.eos
A, B, C = 4, 5, 6


def brute_force(script: Script, steps: int, penalty: float) -> tuple[float, list[int]]:
    """The best score of all sequences that end within ``steps``, or are cut there."""
    best = (-math.inf, [0])
    for length in range(1, steps + 1):
        for tokens in itertools.product([A, B, C], repeat=length):
            for sequence in {tokens, (*tokens[:-1], EOS)}:
                if sequence[-1] != EOS and length < steps:
                    continue
                total = 0.0
                for position, token in enumerate(sequence):
                    read = (SPECIAL_IDS.decoder_start, *sequence[:position])
                    total += allowed_log_probs(torch.tensor([script(read)]), SPECIAL_IDS)[0, token].item()
                best = max(best, (total / length**penalty, [t for t in sequence if t != EOS]))
    return best


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_finds_the_best_of_all_sequences(
    scripted: Callable[..., Scripted], penalty: float, seed: int
) -> None:
    """Wide enough to hold everything, the search agrees with brute force for every length penalty."""

    def script(tokens: tuple[int, ...]) -> list[float]:
        return noise((seed, *tokens))

    # so wide that no prefix is dropped, and so many that the count of finished ones never stops it
    options = BeamOptions(beam_size=200, max_new_tokens=4, length_penalty=penalty, num_hypotheses=40)
    found = beam_search(scripted(script), [4, EOS], options)
    score, tokens = brute_force(script, 4, penalty)
    assert found[0].score == pytest.approx(score, abs=1e-4)
    assert found[0].tokens == tokens
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)


def table(entries: dict[str, dict[str, float]]) -> Script:
    """Probabilities written as words: what was read, then the next token ("." ends)."""
    ids = {"A": A, "B": B, "C": C, ".": EOS}

    def script(tokens: tuple[int, ...]) -> list[float]:
        read = "".join({v: k for k, v in ids.items()}[t] for t in tokens[1:])
        logits = [-math.inf] * VOCABULARY
        for token, probability in entries[read].items():
            logits[ids[token]] = math.log(probability)
        return logits

    return script


WORKED = {
    "": {"A": 0.5, "B": 0.4, ".": 0.1},
    "A": {"A": 0.35, "B": 0.35, ".": 0.3},
    "B": {".": 0.9, "A": 0.1},
    "AA": {".": 1.0},
    "AB": {".": 0.6, "A": 0.4},
    "BA": {".": 1.0},
    "ABA": {".": 1.0},
}


def test_a_worked_example(scripted: Callable[..., Scripted]) -> None:
    """Beam 2. Step 1 keeps A (0.5) and B (0.4). Step 2 ranks B. (0.36), AA and AB (0.175 each), A. (0.15): B. is
    finished, AA keeps its place, AB moves up; A. is of rank 4 and dropped. Step 3 ranks AA. (0.175), AB. (0.105): both
    end, which makes three hypotheses, one more than the beam."""
    options = BeamOptions(beam_size=2, max_new_tokens=9, num_hypotheses=2, length_penalty=1.0)
    found = beam_search(scripted(table(WORKED)), [4, EOS], options)
    assert [h.tokens for h in found] == [[B], [A, A]]
    assert found[0].score == pytest.approx(math.log(0.36) / 2)
    assert found[1].score == pytest.approx(math.log(0.175) / 3)
    assert found[0].log_probs == pytest.approx([math.log(0.4), math.log(0.9)])
    assert {h.finish_reason for h in found} == {"stop"}


def test_without_length_penalty_the_first_finished_rank_may_end_it(scripted: Callable[..., Scripted]) -> None:
    """B. is ranked first in step 2, and one hypothesis is wanted: no third step is run, unless coverage may change who
    is the best."""
    reads: list[int] = []

    def script(tokens: tuple[int, ...]) -> list[float]:
        reads.append(len(tokens))
        return table(WORKED)(tokens)

    options = BeamOptions(beam_size=2, max_new_tokens=9, length_penalty=0.0)
    assert beam_search(scripted(script), [4, EOS], options)[0].tokens == [B]
    assert max(reads) == 2
    beam_search(scripted(script), [4, EOS], replace(options, coverage_penalty=0.1))
    assert max(reads) == 3


@pytest.mark.parametrize(
    ("patience", "best"), [(0.5, [B]), (0.75, [A, A]), (1.0, [A, A]), (1.5, [A, A]), (2.0, [A, B, A])]
)
def test_patience_waits_for_more_hypotheses(
    scripted: Callable[..., Scripted], patience: float, best: list[int]
) -> None:
    """A penalty that lets the longest win. B. is finished in step 2, AA. and AB. in step 3, ABA. in step 4: beam 2
    stops with one, two (1.5, rounded), two, three or four of them."""
    options = BeamOptions(beam_size=2, max_new_tokens=9, length_penalty=5.0, patience=patience)
    assert beam_search(scripted(table(WORKED)), [4, EOS], options)[0].tokens == best


def test_the_last_step_finishes_every_beam(scripted: Callable[..., Scripted]) -> None:
    """Cut off after one step, both beams come back with finish reason length."""
    options = BeamOptions(beam_size=2, max_new_tokens=1, num_hypotheses=2)
    found = beam_search(scripted(table(WORKED)), [4, EOS], options)
    assert [(h.tokens, h.finish_reason) for h in found] == [([A], "length"), ([B], "length")]


def test_beam_one_is_greedy(make_model: MakeModel) -> None:
    """Same tokens, same log-probabilities, same finish."""
    model = make_model()
    for source in ([4, 5, 2], [9, 2], [11, 10, 9, 8, 2]):
        one = greedy(model, [source], 12)[0]
        beam = beam_search(model, source, BeamOptions(beam_size=1, max_new_tokens=12))[0]
        assert (one.tokens, one.finish_reason) == (beam.tokens, beam.finish_reason)
        assert one.log_probs == pytest.approx(beam.log_probs, abs=1e-5)
        assert beam.score == pytest.approx(one.score / len(one.log_probs), abs=1e-5)


def test_cached_greedy_equals_decoding_from_scratch(make_model: MakeModel) -> None:
    """The whole prefix through ``decode`` at each step gives the tokens of the cached steps, rows together or alone."""
    model = make_model()
    sources = [[4, 5, 6, 2], [7, 2], [8, 9, 10, 11, 4, 2], [5, 2]]
    together = greedy_all(model, sources, 10, batch_rows=3)
    for source, hypothesis in zip(sources, together, strict=True):
        read = [SPECIAL_IDS.decoder_start]
        with torch.inference_mode():
            for _ in range(10):
                logits = model.forward(torch.tensor([source]), torch.tensor([len(source)]).int(), torch.tensor([read]))
                read.append(int(allowed_log_probs(logits[:, -1], SPECIAL_IDS).argmax()))
                if read[-1] == EOS:
                    break
        expected = [token for token in read[1:] if token != EOS]
        assert hypothesis.tokens == expected
        assert greedy(model, [source], 10)[0].tokens == expected


@pytest.mark.parametrize("banned", [SPECIAL_IDS.pad, SPECIAL_IDS.bos, SPECIAL_IDS.unk])
def test_pad_bos_and_unk_are_never_produced(scripted: Callable[..., Scripted], banned: int) -> None:
    """Even with the highest logit at step 3, in greedy and in every beam; the others share the whole probability."""

    def script(tokens: tuple[int, ...]) -> list[float]:
        logits = [0.0, 0.0, -2.0, 0.0, 1.0, 0.5, 0.0]
        if len(tokens) == 3:
            logits[banned] = 50.0
        return logits

    model = scripted(script)
    outputs = greedy(model, [[4, EOS]], 5)
    outputs += beam_search(model, [4, EOS], BeamOptions(beam_size=4, max_new_tokens=5, num_hypotheses=4))
    for hypothesis in outputs:
        assert not {SPECIAL_IDS.pad, SPECIAL_IDS.bos, SPECIAL_IDS.unk} & set(hypothesis.tokens)
    mass = math.exp(-2) + math.e + math.exp(0.5) + 1
    assert outputs[0].log_probs == pytest.approx([1 - math.log(mass)] * 5, abs=1e-5)


def test_a_model_that_never_ends_is_cut_with_reason_length(scripted: Callable[..., Scripted]) -> None:
    """500 steps, far beyond anything trained."""
    output = greedy(scripted(lambda _: [0.0, 0.0, -50.0, 0.0, 1.0, 0.0, 0.0]), [[4, EOS]], 500)[0]
    assert (output.tokens, output.finish_reason) == ([A] * 500, "length")


def test_decoding_starts_from_the_one_decoder_start_id(scripted: Callable[..., Scripted]) -> None:
    """Greedy and beam read first what the special ids say, whatever it is."""
    reads: list[int] = []

    def script(tokens: tuple[int, ...]) -> list[float]:
        reads.append(tokens[0])
        return [0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0]

    special = SpecialIds(decoder_start=6)
    greedy(scripted(script), [[4, EOS]], 5, special)
    beam_search(scripted(script), [4, EOS], BeamOptions(beam_size=2, max_new_tokens=5), special)
    assert set(reads) == {6}


NAN, INFINITY = math.nan, math.inf


@pytest.mark.parametrize(
    "values",
    [
        {"num_hypotheses": 3},
        {"num_hypotheses": 0},
        {"beam_size": 0},
        {"max_new_tokens": 0},
        {"num_hypotheses": 2, "patience": 0.5},
        {"patience": 0.2},
        {"patience": NAN},
        {"patience": INFINITY},
        {"length_penalty": NAN},
        {"coverage_penalty": INFINITY},
        {"steering": Steering(min_new_tokens=6)},
    ],
    ids=str,
)
def test_impossible_options_are_refused(values: dict[str, Any]) -> None:
    """More hypotheses than beams or than are waited for, no step, numbers that are none, a minimum over the maximum."""
    with pytest.raises(ValueError, match=f"{next(iter(values))}|min_new_tokens.*must be"):
        BeamOptions(**{"beam_size": 2, "max_new_tokens": 5, **values})


class BySource(Scripted):
    """A script that also depends on the source, by its length."""

    def step(
        self, tokens: Tensor, cached: Tensor, past: list[KeyValue], memory: list[KeyValue], lengths: Tensor
    ) -> tuple[Tensor, list[KeyValue]]:
        written, past = super().step(tokens, cached, past, memory, lengths)
        return written + torch.tensor([noise((length,)) for length in lengths.tolist()]), past


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("kind", ["scripted", "model"])
def test_sources_searched_together_find_what_they_find_alone(
    make_model: MakeModel, kind: str, beam: int, penalty: float
) -> None:
    """Sources of unlike lengths; with the script, they end at unlike steps, some beyond the caches' first capacity."""

    def script(tokens: tuple[int, ...]) -> list[float]:
        logits = noise(tokens)
        logits[EOS] -= 1.0
        return logits

    model: Transformer = make_model()
    if kind == "scripted":
        model = BySource(make_model(target_vocab_size=VOCABULARY, num_heads=1).config).eval()
        model.script = script
    sources = [[4, 5, 6, EOS], [7, EOS], [8, 9, 10, 11, 4, EOS], [5, EOS], [11, 4, EOS], [10] * 9 + [EOS]]
    limit = 2 * FIRST_CAPACITY + 1 if kind == "scripted" else 6
    options = BeamOptions(beam_size=beam, max_new_tokens=limit, num_hypotheses=min(beam, 2), length_penalty=penalty)
    alone = [beam_search(model, source, options) for source in sources]
    for batch_rows in (2 * beam, 100):
        together = beam_search_all(model, sources, options, batch_rows=batch_rows)
        assert [[h.tokens for h in found] for found in together] == [[h.tokens for h in found] for found in alone]
        for one, other in zip(together, alone, strict=True):
            assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-5)
    if kind == "scripted":
        lengths = {len(found[0].tokens) for found in alone}
        assert len(lengths) > 2
        assert penalty == 0 or max(lengths) > FIRST_CAPACITY, lengths


def test_equal_continuations_go_to_the_earlier_beam_and_the_lower_id(scripted: Callable[..., Scripted]) -> None:
    """All tokens equally probable: each step keeps the first beam's lowest ids."""
    model = scripted(lambda _: [0.0] * VOCABULARY)
    options = BeamOptions(beam_size=2, max_new_tokens=2, num_hypotheses=2, length_penalty=0.0)
    # Step 1 ranks </s>, A, B, C: </s> is finished and B takes its place before A. Step 2 ranks B</s>, BA, BB, BC.
    found = beam_search(model, [4, EOS], options)
    assert [h.tokens for h in found] == [[], [B]]


def test_the_most_probable_are_those_of_a_stable_sort() -> None:
    """Rows full of equal values: always the lowest ids."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 3, (50, 40), generator=generator).float()
    rows[rows == 0] = -math.inf
    values, ids = most_probable(rows, 7)
    expected, order = torch.sort(rows, descending=True, stable=True)
    assert [sorted(row, reverse=True) for row in values] == expected[:, :7].tolist()
    assert [set(row) for row in ids] == [set(row) for row in order[:, :7].tolist()]


def test_groups_are_of_near_equal_length_and_results_in_the_sources_order() -> None:
    """However the search goes through the groups."""
    sources = [[7] * length for length in (5, 1, 4, 2, 3)]
    asked: list[list[int]] = []

    def lengths(groups: list[list[Sequence[int]]]) -> list[list[int]]:
        asked.extend([len(source) for source in group] for group in groups)
        return [[len(source) for source in group] for group in groups]

    assert in_groups(sources, 2, lengths) == [5, 1, 4, 2, 3]
    assert asked == [[1, 2], [3, 4], [5]]
    assert in_groups([], 2, lengths) == []


def test_a_prefix_is_fed_and_costs_nothing(scripted: Callable[..., Scripted]) -> None:
    """Behind A come AA. and AB.: their scores, lengths and limits are those of what comes behind it."""
    model = scripted(table(WORKED))
    options = BeamOptions(beam_size=2, max_new_tokens=2, num_hypotheses=2)
    found = beam_search(model, [4, EOS], options, prefix=[A])
    assert [(h.tokens, h.finish_reason) for h in found] == [([A, A], "stop"), ([A, B], "stop")]
    assert [h.score for h in found] == pytest.approx([math.log(0.35) / 2, math.log(0.35 * 0.6) / 2])
    assert found[1].log_probs == pytest.approx([math.log(0.35), math.log(0.6)])
    output = greedy(model, [[4, EOS]], 1, prefixes=[[A, B]])[0]
    assert (output.tokens, output.finish_reason) == ([A, B], "stop")
    assert output.log_probs == pytest.approx([math.log(0.6)])
    output = greedy(model, [[4, EOS]], 1, prefixes=[[A]])[0]
    assert (output.tokens, output.finish_reason) == ([A, A], "length")


def test_any_tokens_may_be_a_prefix(scripted: Callable[..., Scripted]) -> None:
    """Ids that are never produced or suppressed, and repeated ones: they are forced, not chosen."""
    model = scripted(lambda tokens: [0.0, 0.0, -1.0, 0.0, 0.0, 0.5, 0.0])
    prefix = [SPECIAL_IDS.unk, B, B]
    steering = Steering(suppressed=(B,), no_repeat_ngram_size=1)
    output = greedy(model, [[4, EOS]], 1, prefixes=[prefix], steering=steering)[0]
    assert output.tokens == [*prefix, A]
    options = BeamOptions(beam_size=2, max_new_tokens=1, num_hypotheses=2, steering=steering)
    assert [h.tokens for h in beam_search(model, [4, EOS], options, prefix=prefix)] == [[*prefix, A], [*prefix, C]]


def test_greedy_search_goes_on_from_a_prefix_as_it_would_have(make_model: MakeModel) -> None:
    """The beginning of each answer as a prefix gives the answer, also beyond the caches' first capacity."""
    model = make_model()
    model.projection.bias.data[EOS] -= 3.0
    sources = [[4, 5, 6, EOS], [7, EOS], [8, 9, 10, 11, 4, EOS]]
    limit = FIRST_CAPACITY + 8
    for source, whole in zip(sources, greedy(model, sources, limit), strict=True):
        for count in (1, FIRST_CAPACITY, len(whole.tokens) - 1):
            rest = greedy(model, [source], limit - count, prefixes=[whole.tokens[:count]])[0]
            assert (rest.tokens, rest.finish_reason) == (whole.tokens, whole.finish_reason)
            assert rest.log_probs == pytest.approx(whole.log_probs[count:], abs=1e-5)


@pytest.mark.parametrize("beam", [1, 3])
def test_prefixes_of_unlike_lengths_together_give_what_each_gives_alone(make_model: MakeModel, beam: int) -> None:
    """Sources of unlike lengths too, one of them without a prefix."""
    model = make_model()
    sources = [[4, 5, 6, EOS], [7, EOS], [8, 9, 10, 11, 4, EOS], [5, EOS]]
    prefixes = [[4, 5], [], [7] * (FIRST_CAPACITY + 1), [9, 8, 7]]
    options = BeamOptions(beam_size=beam, max_new_tokens=6, num_hypotheses=beam, length_penalty=0.6)
    searched = beam_search_together(model, sources, options, prefixes=prefixes)
    outputs = greedy(model, sources, 6, prefixes=prefixes)
    for found, output, source, prefix in zip(searched, outputs, sources, prefixes, strict=True):
        alone = beam_search(model, source, options, prefix=prefix)
        assert [h.tokens for h in found] == [h.tokens for h in alone]
        assert [h.score for h in found] == pytest.approx([h.score for h in alone], abs=1e-5)
        assert all(h.tokens[: len(prefix)] == prefix for h in found)
        assert output.tokens == greedy(model, [source], 6, prefixes=[prefix])[0].tokens
        if beam == 1:
            assert found[0].tokens == output.tokens


def test_each_source_needs_its_prefix(make_model: MakeModel) -> None:
    """Two sources and one prefix are a mistake."""
    with pytest.raises(ValueError, match="1 prefixes for 2 sources"):
        greedy(make_model(), [[4, EOS], [5, EOS]], 5, prefixes=[[A]])


def test_the_score_of_an_output_is_the_one_it_was_found_with(make_model: MakeModel) -> None:
    """Teacher-forced at once or token by token, the end token included."""
    model = make_model()
    model.projection.bias.data[EOS] += 3.0
    sources = [[4, 5, 6, EOS], [7, EOS], [8, 9, 10, 11, 4, EOS]]
    for source in sources:
        output = greedy(model, [source], 30)[0]
        assert output.finish_reason == "stop"
        assert score(model, source, output.tokens) == pytest.approx(output.log_probs, abs=1e-5)
    assert len(score(model, sources[0], [])) == 1
    unlikely = score(model, sources[0], [A, SPECIAL_IDS.unk, B])
    assert unlikely[1] == -math.inf
    assert all(math.isfinite(x) for x in (unlikely[0], unlikely[2], unlikely[3]))


def test_a_search_that_may_choose_nothing_says_so(scripted: Callable[..., Scripted]) -> None:
    """All suppressed, or all used up; a beam that runs dry while another lives is only dropped."""
    model = scripted(lambda tokens: [0.0] * VOCABULARY)
    everything = Steering(suppressed=(A, B, C, EOS))
    with pytest.raises(DecodingError, match="source 0: no token may come at position 0"):
        greedy(model, [[4, EOS]], 5, steering=everything)
    with pytest.raises(DecodingError, match="source 0: no token may come at position 1"):
        beam_search(model, [4, EOS], BeamOptions(beam_size=2, max_new_tokens=5, steering=everything), prefix=[A])
    used_up = Steering(min_new_tokens=4, no_repeat_ngram_size=1)
    with pytest.raises(DecodingError, match="position 3"):
        greedy(model, [[4, EOS]], 5, steering=used_up)
    dry = Steering(suppressed=(EOS,), suppressed_sequences=((A, A), (A, B), (A, C)))
    options = BeamOptions(beam_size=3, max_new_tokens=3, num_hypotheses=3, steering=dry)
    found = beam_search(model, [4, EOS], options)
    assert [h.tokens[0] for h in found] == [B] * 3
    assert all(math.isfinite(x) for h in found for x in h.log_probs)
