"""Folders that appear at once."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman_training.errors import DataError
from dragoman_training.folders import explained, locked, written_aside


def test_the_name_is_there_only_when_all_is_written(tmp_path: Path) -> None:
    """An error leaves nothing."""
    with pytest.raises(RuntimeError), written_aside(tmp_path / "new"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with written_aside(tmp_path / "new") as aside:
        (aside / "file").write_text("x")
        assert not (tmp_path / "new").exists()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["new", "new/file"]


def test_two_writers_of_one_folder_never_share_files(tmp_path: Path) -> None:
    """The first to end has its own files there, all of them; the other is refused and leaves nothing."""
    with pytest.raises(OSError, match="not empty"), written_aside(tmp_path / "new") as slow:
        (slow / "slow").write_text("")
        with written_aside(tmp_path / "new") as fast:
            (fast / "fast").write_text("")
            assert [path.name for path in slow.iterdir()] == ["slow"]
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["fast"]
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["new", "new/fast"]


def test_what_a_killed_writer_left_goes_with_the_next_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    """Of that folder only. The usual permissions hold, not those of a private temporary folder."""
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from dragoman_training.folders import written_aside\n"
        "with written_aside(Path(sys.argv[1])) as aside:\n"
        "    (aside / 'half').write_text('')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for name in ("new", "other"):
        killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / name)], check=False)
        assert killed.returncode == -signal.SIGKILL
    assert [path.name.rpartition("-")[0] for path in sorted(tmp_path.iterdir())] == [".writing-new", ".writing-other"]
    (tmp_path / "plain").mkdir()
    with written_aside(tmp_path / "living") as living, written_aside(tmp_path / "new") as aside:
        (living / "file").write_text("")
        assert len(list(tmp_path.glob(".writing-new-*"))) == 1
        with pytest.raises(RuntimeError), written_aside(tmp_path / "new"):
            raise RuntimeError
        assert aside.exists()
    assert [path.name for path in (tmp_path / "living").iterdir()] == ["file"]
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert [path.name.rpartition("-")[0] for path in tmp_path.glob(".*")] == [".writing-other"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(errno.ENOSPC, "No space left"), "No space left"), (OSError("I/O error: full"), "I/O error: full")],
    ids=["system", "library"],
)
def test_a_failed_writing_is_explained(tmp_path: Path, error: OSError, reason: str) -> None:
    """The folder, the reason, the free space and the remedy."""
    words = rf"new could not be written \({reason}\), [\d,]+ MiB free: make room, or choose another --out"
    with pytest.raises(DataError, match=words), explained(tmp_path / "new", DataError):
        raise error


def test_a_folder_that_another_process_filled_meanwhile_is_explained(tmp_path: Path) -> None:
    """A file in the place of its parent is something else."""
    new, under_a_file = tmp_path / "new", tmp_path / "file" / "new"
    words = "new was filled by another process meanwhile: choose another --out"
    with pytest.raises(DataError, match=words), explained(new, DataError), written_aside(new):
        new.mkdir()
        (new / "mine").write_text("")
    (tmp_path / "file").write_text("")
    words = r"file/new could not be written \(File exists\)"
    with pytest.raises(DataError, match=words), explained(under_a_file, DataError), written_aside(under_a_file):
        pass


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
