"""Reading parallel text: what ends a line, what is refused and how the message helps."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman_training.corpus import (
    count_lines,
    file_sha256,
    iterate_jsonl,
    iterate_lines,
    iterate_pairs,
    iterate_tsv,
    read_aligned,
    read_lines,
)
from dragoman_training.errors import DataError


def test_only_lf_and_crlf_end_a_line(tmp_path: Path) -> None:
    """Other separators of Unicode, a lone CR and form feeds are text; nothing is normalised."""
    path = tmp_path / "lines"
    path.write_bytes("a\u2028b\r\n\x0cc\rd\n\n\ufeffe\u0301\x85f \r".encode())
    assert read_lines(path) == ["a\u2028b", "\x0cc\rd", "", "\ufeffe\u0301\x85f \r"]


@pytest.mark.parametrize("content", [b"", b"\n", b"a", b"a\n", b"a\nb", b"\n\n", b"a\r\n\rb\n"])
def test_lines_are_counted_as_they_are_read(tmp_path: Path, content: bytes) -> None:
    """The last line may lack its line feed."""
    (tmp_path / "lines").write_bytes(content)
    (tmp_path / "lines.gz").write_bytes(gzip.compress(content))
    for name in ("lines", "lines.gz"):
        assert count_lines(tmp_path / name) == len(read_lines(tmp_path / name))


def test_gzip_is_unpacked_by_its_name(tmp_path: Path) -> None:
    """The same lines, and a cut file is refused by name instead of ending early."""
    packed = gzip.compress("ä\nb\n".encode() * 500)
    (tmp_path / "a.gz").write_bytes(packed)
    assert read_lines(tmp_path / "a.gz") == ["ä", "b"] * 500
    (tmp_path / "cut.gz").write_bytes(packed[:-9])
    (tmp_path / "plain.gz").write_text("text")
    for name in ("cut.gz", "plain.gz"):
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            read_lines(tmp_path / name)


def test_a_missing_file_is_refused_with_a_remedy_that_fits_any_file(tmp_path: Path) -> None:
    """Outputs and references are read here too, which nothing prepares."""
    for read in (read_lines, count_lines, file_sha256):
        with pytest.raises(DataError, match=r"absent cannot be read \(No such file or directory\): check the path$"):
            read(tmp_path / "absent")


READERS: list[Callable[[Path], object]] = [
    read_lines,
    count_lines,
    file_sha256,
    lambda path: next(iterate_pairs(path, path)),
]


@pytest.mark.parametrize("read", READERS, ids=["lines", "count", "hash", "pairs"])
def test_what_gives_its_content_once_is_refused_without_waiting_for_it(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    """A named pipe that nobody fills, one as a shell's <(…) makes it, a device, a folder."""
    os.mkfifo(tmp_path / "fifo")
    here, there = os.pipe()
    os.write(there, b"a\n")
    os.close(there)
    try:
        for path in (tmp_path / "fifo", Path(f"/dev/fd/{here}"), Path("/dev/zero")):
            with pytest.raises(DataError, match=f"{path} is no regular file: .*name a file instead of a pipe"):
                read(path)
        assert os.read(here, 2) == b"a\n"  # nothing was taken
    finally:
        os.close(here)
    with pytest.raises(DataError, match="is a folder: name a file"):
        read(tmp_path)


def test_a_name_that_no_file_can_have_is_refused() -> None:
    """A configuration may spell a NUL."""
    for read in READERS:
        with pytest.raises(DataError, match=r"'a\\x00b' is no path"):
            read(Path("a\0b"))


def test_a_byte_order_mark_begins_a_file_and_is_no_text(tmp_path: Path) -> None:
    """In plain text, TSV and JSONL, packed or not; once, and nowhere else."""
    mark = "\ufeff".encode()
    (tmp_path / "lines").write_bytes(mark + mark + b"a\r\n" + mark + b"b\n")
    (tmp_path / "lines.gz").write_bytes(gzip.compress((tmp_path / "lines").read_bytes()))
    for name in ("lines", "lines.gz"):
        assert read_lines(tmp_path / name) == ["\ufeffa", "\ufeffb"]
    (tmp_path / "t.tsv").write_bytes(mark + b"a\tb\n")
    (tmp_path / "t.jsonl").write_bytes(mark + b'{"source": "a", "target": "b"}\n')
    assert list(iterate_tsv(tmp_path / "t.tsv")) == list(iterate_jsonl(tmp_path / "t.jsonl")) == [("a", "b")]
    (tmp_path / "mark").write_bytes(mark)
    assert len(read_lines(tmp_path / "mark")) == count_lines(tmp_path / "mark") == 1


def test_files_of_unequal_length_are_refused_with_both_counts(tmp_path: Path) -> None:
    """Line n must belong to line n, whether the files are streamed or not."""
    (tmp_path / "a").write_text("x\n" * 100)
    (tmp_path / "b").write_text("y\n" * 99)
    for pair in (("a", "b"), ("b", "a")):
        source, target = (tmp_path / name for name in pair)
        message = rf"{pair[0]} has \d+ lines but .*{pair[1]} has \d+: line n"
        with pytest.raises(DataError, match=message) as refusal:
            read_aligned(source, target)
        assert "100" in str(refusal.value) and "99" in str(refusal.value)
        with pytest.raises(DataError, match=message):
            list(iterate_pairs(source, target))


def test_missing_empty_and_undecodable_files_are_refused(tmp_path: Path) -> None:
    """Each with the file's name and what is wrong."""
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes(b"ok\n\n\xe9\n")
    with pytest.raises(DataError, match=r"missing cannot be read \(No such file.*check the path"):
        read_lines(tmp_path / "missing")
    with pytest.raises(DataError, match=r"latin is not UTF-8 in line 3"):
        list(iterate_lines(tmp_path / "latin"))
    with pytest.raises(DataError, match=r"empty"):
        read_aligned(tmp_path / "empty", tmp_path / "empty")


def test_unusual_separators_do_not_shift_pairs(tmp_path: Path) -> None:
    """A side with U+2028, U+0085 or a lone CR inside a line still has one line there."""
    (tmp_path / "a").write_bytes("1\u2028\n2\x85\n3\rx\n4\n".encode())
    (tmp_path / "b").write_bytes(b"1\n2\r\n3\n4")
    assert [source[0] + target for source, target in iterate_pairs(tmp_path / "a", tmp_path / "b")] == [
        "11",
        "22",
        "33",
        "44",
    ]


def test_tsv_columns_are_chosen_and_quotes_are_text(tmp_path: Path) -> None:
    """Columns count from 1; a short line is refused with its number."""
    (tmp_path / "t.tsv").write_text('1\t"a\t2\tb"\n3\tc\t4\td\n')
    assert list(iterate_tsv(tmp_path / "t.tsv", 2, 4)) == [('"a', 'b"'), ("c", "d")]
    assert list(iterate_tsv(tmp_path / "t.tsv")) == [("1", '"a'), ("3", "c")]
    (tmp_path / "t.tsv").write_text("a\tb\nc\n")
    with pytest.raises(DataError, match=r"t\.tsv has 1 columns in line 2: columns 1 and 2 are needed"):
        list(iterate_tsv(tmp_path / "t.tsv"))


def test_jsonl_keys_are_chosen(tmp_path: Path) -> None:
    """Texts are taken as JSON means them."""
    (tmp_path / "t.jsonl").write_text('{"en": "a\\u00e9\\n", "de": "b", "id": 1}\n')
    assert list(iterate_jsonl(tmp_path / "t.jsonl", "en", "de")) == [("aé\n", "b")]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        '"source"',
        '{"source": "a"}',
        '{"source": "a", "target": 3}',
        '{"source": "\\ud800", "target": "b"}',
        pytest.param("[" * 200_000, id="nested"),
        pytest.param("9" * 5_000, id="number"),
    ],
)
def test_a_line_without_a_pair_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    """No JSON, no object, a missing key, another type than text, half a surrogate pair, absurd depth and numbers."""
    (tmp_path / "t.jsonl").write_text('{"source": "a", "target": "b"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"t\.jsonl has no pair in line 2"):
        list(iterate_jsonl(tmp_path / "t.jsonl"))
