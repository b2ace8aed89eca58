"""Token shards: what they hold, when they are made, reused and made again."""

import signal
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.processes import start

from dragoman_training import data
from dragoman_training.config import TrainConfig
from dragoman_training.configfile import load_config
from dragoman_training.data import Dataset, Pair, load_datasets
from dragoman_training.errors import DataError
from dragoman_training.shards import (
    CHUNK,
    GrowingRows,
    Limits,
    Shard,
    encoded_shards,
    nameless,
    open_shards,
    write_shards,
)

Encoded = tuple[list[list[int]], list[list[int]]]


def encode_lengths(_: int, pairs: Sequence[tuple[str, str]]) -> Encoded:
    """A text of n characters becomes the ids n-1, ..., 0."""
    return [[*range(len(a))][::-1] for a, _ in pairs], [[*range(len(b))][::-1] for _, b in pairs]


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), max_size=40),
    num_tokens=st.sampled_from([(10, 10), (10, 70_000), (65_536, 65_537)]),
    per_shard=st.integers(1, 40),
)
def test_shards_hold_what_fits_in_order_and_count_the_rest(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[tuple[int, int]],
    num_tokens: tuple[int, int],
    per_shard: int,
) -> None:
    """In memory, in nameless files and written and opened again; ids take two bytes where they can.

    A shard ends with the pair that brings it to so many tokens.
    """
    folder = tmp_path_factory.mktemp("shards")
    texts = [("x" * a, "y" * b) for a, b in sizes]
    expected = [Pair([*range(a)][::-1], [*range(b)][::-1]) for a, b in sizes if 1 < a <= 5 and 1 < b <= 6]
    reasons = Counter(
        "no source tokens" if a == 1 else
        "no target tokens" if b == 1 else
        "source over 5 tokens" if a > 5 else
        "target over 6 tokens"
        for a, b in sizes if not (1 < a <= 5 and 1 < b <= 6)
    )  # fmt: skip
    dropped: Counter[str] = Counter()
    shards = list(encoded_shards(texts, encode_lengths, num_tokens, Limits(5, 6), dropped, per_shard))
    tokens = [[len(pair.source) + len(pair.target) for pair in Dataset([shard], {})] for shard in shards]
    assert all(sum(some) >= per_shard for some in tokens[:-1])
    assert all(0 < sum(some) < per_shard + some[-1] for some in tokens)
    write_shards(folder, shards, dropped)
    opened = open_shards(folder)
    assert opened is not None
    for found in (Dataset(shards, dropped), Dataset(nameless(shards, folder), dropped), Dataset(*opened)):
        assert list(found) == expected
        assert [found[i] for i in np.arange(len(found), dtype=np.int32)] == expected
        assert found.source_lengths.tolist() == [len(pair.source) for pair in expected]
        assert found.target_lengths.tolist() == [len(pair.target) for pair in expected]
        assert found.dropped == reasons
    for shard in opened[0]:
        widths = [2 if size <= 65_536 else 4 for size in num_tokens]
        assert [rows.ids.itemsize for rows in shard] == widths


def test_a_pair_outside_the_dataset_is_an_error() -> None:
    """Below 0 as well: it would be some other pair."""
    shards = encoded_shards([("ab", "cd")], encode_lengths, (9, 9), Limits(5, 5), Counter())
    dataset = Dataset(shards, {})
    for index in (-1, 1):
        with pytest.raises(IndexError, match=f"pair {index} of 1"):
            dataset[index]


def test_text_is_tokenized_chunk_by_chunk() -> None:
    """Each chunk knows its number, and the text is read no further than the chunk in hand."""
    read = 0
    seen: list[tuple[int, int, int]] = []

    def texts() -> Iterator[tuple[str, str]]:
        nonlocal read
        for _ in range(CHUNK + 5):
            read += 1
            yield "ab", "cd"

    def encode(number: int, pairs: Sequence[tuple[str, str]]) -> Encoded:
        seen.append((number, len(pairs), read))
        return encode_lengths(number, pairs)

    list(encoded_shards(texts(), encode, (9, 9), Limits(5, 5), Counter()))
    assert seen == [(0, CHUNK, CHUNK), (1, 5, CHUNK + 5)]


def test_a_finished_shard_is_not_copied() -> None:
    """It would be in memory twice."""
    rows = GrowingRows(10)
    tracemalloc.start()
    try:
        for _ in range(200):
            rows.append([5] * 1000)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        finished = rows.finished()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert finished.ids.nbytes == 400_000
    assert peak - held < 10_000


@pytest.fixture
def config(toy: Path) -> TrainConfig:
    """The toy task's configuration."""
    return load_config(str(toy / "toy.toml"))


def shard_folders(toy: Path) -> list[Path]:
    return sorted(path for path in (toy / ".dragoman-shards").iterdir() if path.is_dir())


def test_shards_are_reused_by_any_run_with_the_same_content(
    toy: Path, config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not made again for another run, batch size or file name; made anew for other limits, text or tokenizers."""
    first = list(load_datasets(config, toy / "run").train)
    (folder,) = shard_folders(toy)
    assert "tokenizing 60 pairs" in capsys.readouterr().err
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    (toy / "copy.source").write_bytes((toy / "train.source").read_bytes())
    same = replace(config.data, batch_tokens=99, train_source="copy.source")
    assert list(load_datasets(replace(config, data=same), toy / "other").train) == first
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps
    assert "tokenizing" not in capsys.readouterr().err

    load_datasets(replace(config, data=replace(config.data, max_source_tokens=7)), toy / "run")
    assert len(shard_folders(toy)) == 2
    (toy / "train.target").write_text("A\n" + (toy / "train.target").read_text().partition("\n")[2])
    load_datasets(config, toy / "run")
    assert len(shard_folders(toy)) == 3
    units = replace(config.tokenizer, target_unit="character")
    load_datasets(replace(config, tokenizer=units), toy / "characters")
    assert len(shard_folders(toy)) == 4


@pytest.mark.parametrize("damage", ["cut", "missing", "record", "unreadable"])
def test_damaged_shards_are_made_again(toy: Path, config: TrainConfig, damage: str) -> None:
    """A file of another size than written, or none; a record that is missing or no record."""
    first = list(load_datasets(config, toy / "run").train)
    (folder,) = shard_folders(toy)
    ids = folder / "00000.source.ids.npy"
    match damage:
        case "cut":
            ids.write_bytes(ids.read_bytes()[:-2])
        case "missing":
            ids.unlink()
        case "record":
            (folder / "shards.json").unlink()
        case "unreadable":
            (folder / "shards.json").write_text('{"files": 3}')
    assert open_shards(folder) is None
    assert list(load_datasets(config, toy / "run").train) == first
    assert open_shards(folder) is not None


def test_a_killed_build_leaves_nothing_that_looks_whole(toy: Path, config: TrainConfig) -> None:
    """Killed while it writes: only a folder under another name is there, and the next build removes it."""
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from dragoman_training import data\n"
        "from dragoman_training.configfile import load_config\n"
        "write = data.write_shards\n"
        "def kill(*arguments):\n"
        "    write(*arguments)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "data.write_shards = kill\n"
        "data.load_datasets(load_config('toy.toml'), Path('run'))\n"
    )
    killed = start(program, cwd=toy).wait()
    assert killed.status == -signal.SIGKILL, killed.err
    (left,) = shard_folders(toy)
    assert left.name.startswith(".writing-")
    load_datasets(config, toy / "run")
    (folder,) = shard_folders(toy)
    assert open_shards(folder) is not None


def test_shards_go_into_the_run_where_the_text_s_folder_takes_none(
    toy: Path, config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The place is told."""
    (toy / ".dragoman-shards").write_text("a file of that name cannot be a folder")
    datasets = load_datasets(config, toy / "run")
    assert datasets.shards_folder == toy / "run" / "shards"
    assert str(toy / "run" / "shards") in capsys.readouterr().err
    assert len(datasets.train) > 0


def test_no_place_for_shards_is_refused(toy: Path, config: TrainConfig) -> None:
    """With both places."""
    (toy / ".dragoman-shards").write_text("")
    (toy / "run").mkdir()
    (toy / "run" / "shards").write_text("")
    with pytest.raises(DataError, match=r"neither beside .* nor in .*run"):
        load_datasets(config, toy / "run")


def test_a_build_does_not_wait_for_that_of_other_shards(
    toy: Path, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another run, in the same folder, are made from beginning to end meanwhile."""
    other = replace(config, data=replace(config.data, max_source_tokens=7))
    found: list[int] = []

    def write_while_another_builds(folder: Path, shards: Iterable[Shard], dropped: Mapping[str, int]) -> None:
        monkeypatch.setattr(data, "write_shards", write_shards)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(load_datasets, other, toy / "other")
            try:
                found.append(len(future.result(timeout=30).train))
            except TimeoutError:
                future.add_done_callback(lambda _: found.append(-1))
                raise
        write_shards(folder, shards, dropped)

    monkeypatch.setattr(data, "write_shards", write_while_another_builds)
    assert len(load_datasets(config, toy / "run").train) == 60
    assert found == [60]
    assert len(shard_folders(toy)) == 2


def test_processes_that_start_together_build_once(toy: Path) -> None:
    """One trains the tokenizers and tokenizes, the others wait and find the result."""
    program = (
        "from pathlib import Path\n"
        "from dragoman_training.configfile import load_config\n"
        "from dragoman_training.data import load_datasets\n"
        "print(sum(map(sum, load_datasets(load_config('toy.toml'), Path('run')).train[0])))\n"
    )
    processes = [start(program, cwd=toy) for _ in range(2)]
    results = [process.wait() for process in processes]
    assert [result.status for result in results] == [0, 0], results
    assert results[0].out == results[1].out
    assert sum(result.err.count("tokenizing") for result in results) == 1
