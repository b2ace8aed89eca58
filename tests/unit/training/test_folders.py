"""Folders that appear at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from dragoman_training.folders import locked, written_aside


def test_the_name_is_there_only_when_all_is_written(tmp_path: Path) -> None:
    """An error leaves nothing; what a killed process left does not get in."""
    (tmp_path / ".writing-new").mkdir()
    (tmp_path / ".writing-new" / "stale").write_text("")
    with pytest.raises(RuntimeError), written_aside(tmp_path / "new"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with written_aside(tmp_path / "new") as aside:
        (aside / "file").write_text("x")
        assert not (tmp_path / "new").exists()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["new", "new/file"]


def test_a_folder_that_holds_something_is_not_replaced(tmp_path: Path) -> None:
    """Whoever came first wins."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").write_text("")
    with pytest.raises(OSError, match="not empty"), written_aside(tmp_path / "new") as aside:
        (aside / "file").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_lock_shuts_out_other_processes_until_its_holder_is_gone(tmp_path: Path) -> None:
    """Another process does not get it meanwhile, and gets it after."""
    program = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'w')\n"
        "try:\n    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError:\n    sys.exit(3)\n"
    )
    attempt = [sys.executable, "-c", program, str(tmp_path / "lock")]
    with locked(tmp_path / "lock"):
        with pytest.raises(BlockingIOError), locked(tmp_path / "lock", wait=False):
            pass
        assert subprocess.run(attempt, check=False).returncode == 3
    assert subprocess.run(attempt, check=False).returncode == 0
