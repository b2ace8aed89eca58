"""The folder in which a bundle is made goes with its process, however that ends."""

import subprocess
import sys

import pytest

from dragoman.work_folder import work_folder

HOLD = """
import sys
from pathlib import Path
from dragoman.work_folder import work_folder
with work_folder(Path(sys.argv[1])) as folder:
    (folder / "graph").write_text("large")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has a work folder for ``tmp_path / "bundle"``, and the folder's path."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "bundle")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


@pytest.mark.parametrize("fails", [False, True])
def test_it_is_gone_when_the_work_is_done_or_fails(tmp_path, fails):
    """It lies beside the target, whose own folder is made where it is missing, and is hidden."""
    target = tmp_path / "bundles" / "en-de"
    try:
        with work_folder(target) as folder:
            assert folder.parent == target.parent and folder.name.startswith(".")
            (folder / "graph").write_text("large")
            assert not fails
    except AssertionError:
        assert fails
    assert list(target.parent.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, holder):
    """Nobody holds it any more; another bundle's folder, or a user's, is no leftover."""
    process, left = holder
    process.kill()
    process.wait()
    others = [tmp_path / name for name in ("bundle", ".bundle-x", ".exporting-other-x", ".before-exporting-bundle-x")]
    for other in others:
        other.mkdir()
    with work_folder(tmp_path / "bundle") as folder:
        assert str(folder) != left
        assert sorted(tmp_path.iterdir()) == sorted([*others, folder])


def test_what_a_living_process_has_stays(tmp_path, holder):
    """Two exports to one place do not disturb each other."""
    _, held = holder
    with work_folder(tmp_path / "bundle") as folder:
        assert {str(path) for path in tmp_path.iterdir()} == {str(folder), held}
    assert [str(path) for path in tmp_path.iterdir()] == [held]


def test_a_name_with_wildcards_removes_nothing_else(tmp_path):
    """``[ab]*`` is a name."""
    other = tmp_path / ".exporting-a-x"
    other.mkdir()
    with work_folder(tmp_path / "[ab]*"):
        assert other.exists()
    assert list(tmp_path.iterdir()) == [other]
