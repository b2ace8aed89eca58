"""Commands in processes of their own, forked from one that has imported what they need.

Importing torch and what exports takes seconds, which tests would spend again for each command. What a command does is
the same otherwise, but that functions of ``atexit`` are not called. The first command starts the process that is forked
from; it ends with the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    # What is not installed is left out, without a word.
    ["dragoman.cli.main", "dragoman_export.exporter", "dragoman_training.evaluate", "dragoman_training.train"]
)
_BEGIN = """
import os, sys
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
for descriptor, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, os.open(out, flags)), (2, os.open(err, flags))):
    os.dup2(file, descriptor)
sys.argv = ["dragoman", *arguments]
exec(compile(code, "<test>", "exec"), {"__name__": "__main__"})
"""
_COMMAND = "import sys; from dragoman.cli.main import main; sys.exit(main())"


@dataclass(frozen=True)
class Done:
    """What a process left: its exit status, negative for a signal, and what it printed."""

    status: int
    out: str
    err: str


class Started:
    """A process that runs."""

    def __init__(self, code: str, arguments: tuple[object, ...], cwd: Path, environment: Mapping[str, str]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="dragoman-test-"))
        self._out, self._err = folder / "out", folder / "err"
        names = {
            "code": code,
            "arguments": [str(argument) for argument in arguments],
            "folder": str(cwd),
            "environment": {**os.environ, **environment},
            "out": str(self._out),
            "err": str(self._err),
        }
        self._process = _CONTEXT.Process(target=exec, args=(_BEGIN, names))
        self._process.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    @property
    def err(self) -> str:
        """What it has printed to stderr so far."""
        return self._err.read_text() if self._err.exists() else ""

    def send_signal(self, number: int) -> None:
        """As ``kill`` does."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, timeout: float = 600) -> Done:
        """Its end; one that does not come is a failure."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"the process has not ended after {timeout} s; it printed {self.err}")
        done = Done(self._process.exitcode, self._out.read_text(), self._err.read_text())
        for path in (self._out, self._err):
            path.unlink()
        self._out.parent.rmdir()
        self._process.close()
        return done


def start(code: str, *arguments: object, cwd: Path, **environment: str) -> Started:
    """Begin a program with arguments, in a folder."""
    return Started(code, arguments, cwd, environment)


def start_command(*arguments: object, cwd: Path) -> Started:
    """Begin ``dragoman`` with arguments, in a folder."""
    return start(_COMMAND, *arguments, cwd=cwd)


def dragoman(*arguments: object, cwd: Path) -> str:
    """Run ``dragoman`` with arguments, in a folder, until it has done what it was told; returns what it printed."""
    done = start_command(*arguments, cwd=cwd).wait()
    assert done.status == 0, done.err
    return done.out


def torchrun(processes: int, *arguments: object, cwd: Path) -> Done:
    """Run a script in several processes of PyTorch's, on this machine."""
    code = "from torch.distributed.run import main; main()"
    options = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", processes)
    return start(code, *options, *arguments, cwd=cwd, OMP_NUM_THREADS="1").wait()
