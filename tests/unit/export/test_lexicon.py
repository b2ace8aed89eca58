"""Which target tokens a source token becomes, against the textbook's loops, and as a shortlist's table."""

import random
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the runtime alone has no tools of the export")

from dragoman.engine.candidates import read_arrays
from dragoman.engine.projection import Projection
from dragoman.vocabulary import BYTE_TOKENS, SPECIAL_TOKENS, PlainVocabulary
from dragoman_export import lexicon, shortlist
from dragoman_export.errors import ExportError
from dragoman_export.lexicon import learn_lexicon
from dragoman_export.shortlist import ShortlistOptions, find_candidates, to_bytes
from dragoman_training.errors import DataError
from dragoman_training.tokenizer import PlainTokenizer, SpecialIds


def textbook(pairs, target_size, iterations):
    """IBM's model 1 as Brown et al. have it, pair by pair; None is the empty word."""
    t = defaultdict(lambda: 1 / target_size)
    for _ in range(iterations):
        counts, totals = defaultdict(float), defaultdict(float)
        for source, target in pairs:
            for f in target:
                whole = t[None, f] + sum(t[e, f] for e in source)
                for e in (None, *source):
                    counts[e, f] += t[e, f] / whole
                    totals[e] += t[e, f] / whole
        t = defaultdict(float, {(e, f): count / totals[e] for (e, f), count in counts.items()})
    return t


def random_pairs(seed, count=40, size=12):
    rng = random.Random(seed)
    return [
        (rng.choices(range(size), k=rng.randint(1, 6)), rng.choices(range(size), k=rng.randint(1, 6)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("block", [1, 50, 1 << 20])
def test_the_probabilities_are_the_textbooks(monkeypatch, block):
    """In one block of links or many, tokens that come twice in a pair included."""
    monkeypatch.setattr(lexicon, "BLOCK_LINKS", block)
    pairs = random_pairs(1)
    found = learn_lexicon(iter(pairs), 12, 12)
    expected = textbook(pairs, 12, lexicon.ITERATIONS)
    actual = {(int(e), int(f)): p for e, f, p in zip(found.source, found.target, found.probability, strict=True)}
    assert actual == pytest.approx({key: p for key, p in expected.items() if key[0] is not None})


def test_the_best_come_first_and_chance_is_left_out():
    """At most so many a source token, by falling probability, none below the least."""
    found = learn_lexicon(random_pairs(2), 12, 12)
    by_source = defaultdict(list)
    for e, f, p in zip(found.source.tolist(), found.target.tolist(), found.probability.tolist(), strict=True):
        by_source[e].append((-p, f))
    sources, targets = found.best(3, 0.05)
    for e in range(12):
        assert by_source[e] == sorted(by_source[e])
        best = [f for p, f in by_source[e][:3] if -p >= 0.05]
        assert targets[sources == e].tolist() == best


def test_only_so_much_text_is_held(monkeypatch):
    """Pairs behind the limit are left out; empty sides teach nothing."""
    monkeypatch.setattr(lexicon, "MAX_LINKS", 5)
    found = learn_lexicon([([], [1]), ([1], []), ([2], [3, 4]), ([5], [6])], 9, 9)
    assert found.source.tolist() == [2, 2]


def test_text_without_a_pair_is_refused():
    """There is nothing to learn from."""
    with pytest.raises(ExportError, match="no pair of lines"):
        learn_lexicon([([], [1])], 9, 9)


# The table of a model's text

GERMAN = ["das Haus", "das Buch", "ein Buch", "das kleine Haus", "ein Haus", "", "<lang> " * 40]
ENGLISH = ["the house", "the book", "a book", "the small house", "a house", "x", "y"]


def vocabulary(lines, *more):
    return (*SPECIAL_TOKENS, *sorted({word for line in lines for word in line.split()} | set(more)))


def write(folder, sources=GERMAN, targets=ENGLISH):
    for name, lines in (("source", sources), ("target", targets)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return folder / "source", folder / "target"


def model_of(source, target, padding=0):
    """As much of a checkpoint as the table needs."""
    return SimpleNamespace(
        source_tokenizer=PlainTokenizer("piece", source),
        target_tokenizer=PlainTokenizer("piece", target),
        special=SpecialIds(),
        max_source_tokens=32,
        max_target_tokens=32,
        model=SimpleNamespace(
            config=SimpleNamespace(source_vocab_size=len(source) + padding, target_vocab_size=len(target) + padding)
        ),
    )


def table(files, source, target, padding=0, **options):
    candidates = find_candidates(
        ShortlistOptions(*files, **options),
        model_of(source, target, padding),
        PlainVocabulary("piece", source),
        PlainVocabulary("piece", target),
    )
    names = [target[i] for i in candidates.always]
    return candidates, names, lambda word: {target[i] for i in candidates.of((source.index(word),))} - set(names)


def test_a_source_token_has_what_it_is_translated_by(tmp_path):
    """Learned from four words in five lines; the most frequent target token is everyone's, and so is the end."""
    source, target = vocabulary(GERMAN), vocabulary(ENGLISH)
    candidates, always, own = table(write(tmp_path), source, target, num_per_token=1, num_always=1)
    assert always == ["</s>", "house"]  # "the" comes three times, too, and has the larger id
    assert own("Buch") == {"book"}
    assert own("ein") == {"a"}
    assert own("kleine") == {"small"}
    assert own("<lang>") == set()  # of a line that training would leave out
    assert candidates.num_tokens == len(target)


def test_what_is_copied_may_come(tmp_path):
    """A token of the same name, though no line shows it; special tokens never, but for the end. Padding has none."""
    source, target = vocabulary(GERMAN, "Anna"), vocabulary(ENGLISH, "Anna")
    candidates, always, own = table(write(tmp_path), source, target, padding=3, num_per_token=2, num_always=1)
    assert own("Anna") == {"Anna"}
    everything = {target[i] for i in [*candidates.tokens, *candidates.always]}
    assert everything.isdisjoint({"<pad>", "<s>", "<unk>"}) and "</s>" in always
    assert len(candidates.offsets) == len(source) + 4
    assert candidates.of((len(source),)).tolist() == candidates.always.tolist()


def test_bytes_are_everyones_where_the_target_has_them(tmp_path):
    """Those of a character vocabulary with all 256, as of SentencePiece's with byte fallback."""
    source = vocabulary(GERMAN)
    characters = PlainVocabulary("character", (*SPECIAL_TOKENS, *BYTE_TOKENS, *"abehkmostulx"))
    model = model_of(source, (*SPECIAL_TOKENS, *map(str, range(len(characters.tokens) - 4))))
    options = ShortlistOptions(*write(tmp_path), num_per_token=2, num_always=1)
    found = find_candidates(options, model, PlainVocabulary("piece", source), characters)
    assert found.always.tolist() == [2, *range(4, 260)]


def test_long_text_is_sampled_evenly(tmp_path, monkeypatch):
    """Every third line of seven, where three are the most."""
    monkeypatch.setattr(shortlist, "MAX_PAIRS", 3)
    source, target = vocabulary(GERMAN), vocabulary(ENGLISH)
    _, always, _ = table(write(tmp_path), source, target, num_per_token=9, num_always=9)
    assert set(always) == {"</s>", "the", "house", "small"}  # of lines 0, 3 and 6, which is too long


def test_files_that_are_not_aligned_are_refused(tmp_path):
    """Both counts are named."""
    files = write(tmp_path, targets=ENGLISH[:-1])
    with pytest.raises(ExportError, match=r"source has 7 lines and .*target 6: .* aligned"):
        table(files, vocabulary(GERMAN), vocabulary(ENGLISH))


def test_a_file_that_is_not_there_is_named(tmp_path):
    """As everywhere in training."""
    source, _ = write(tmp_path)
    with pytest.raises(DataError, match="nowhere"):
        table((source, tmp_path / "nowhere"), vocabulary(GERMAN), vocabulary(ENGLISH))


@pytest.mark.parametrize("name", ["num_per_token", "num_always"])
def test_no_candidates_at_all_are_refused(tmp_path, name):
    """By name."""
    with pytest.raises(ExportError, match=f"{name} of the shortlist is 0"):
        ShortlistOptions(tmp_path, tmp_path, **{name: 0})


def test_the_same_text_gives_the_same_bytes(tmp_path):
    """And they hold what was put in."""
    source, target = vocabulary(GERMAN), vocabulary(ENGLISH)
    size = len(target)
    projection = Projection(np.full((size, 4), 7, np.uint8), np.ones(size, np.float32), None)
    files = write(tmp_path)
    one, two = (to_bytes(table(files, source, target)[0], projection) for _ in range(2))
    assert one == two
    assert set(read_arrays(one)) == {"offsets", "tokens", "always", "weights", "scales"}
