"""Several processes that train one model: the same run as with as many workers, written by one of them."""

import json
from pathlib import Path

import pytest
from tests.processes import torchrun

from dragoman_training import checkpoint
from dragoman_training.configfile import load_config
from dragoman_training.train import train

PROGRAM = "import argparse, sys; from dragoman_training.cli import train as t; p = argparse.ArgumentParser();"
PROGRAM += "t.add_arguments(p); sys.exit(t.run(p.parse_args()))"


def losses(run: Path) -> list[float]:
    return [json.loads(line)["dev_loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_train_like_two_workers(toy: Path) -> None:
    """Of one token budget, with dropout and moving average: the same dev losses but for rounding, one set of files."""
    settings = ["optimizer.ema_decay=0.5", "loop.accumulate=2", "optimizer.kind=sgd", "optimizer.learning_rate=0.1"]
    train(load_config("toy.toml", settings), toy / "workers")
    (toy / "program.py").write_text(PROGRAM)
    arguments = ["toy.toml", "--out", "processes", "--set", "loop.workers=1"]
    for setting in settings:
        arguments += ["--set", setting]
    done = torchrun(2, "program.py", *arguments, cwd=toy)
    assert done.status == 0, done.err
    assert done.err.count("step 12 epoch") == 1
    assert "2 processes of cpu" in done.err
    assert losses(toy / "processes") == pytest.approx(losses(toy / "workers"), abs=1e-4)
    assert checkpoint.load_model(toy / "processes").max_source_tokens == 8
    longer = ["--resume", "--set", "schedule.steps=16", "--allow-change", "schedule.steps"]
    done = torchrun(2, "program.py", *arguments, *longer, cwd=toy)
    assert done.status == 0, done.err
    assert (toy / "processes" / "last").readlink().name == "step-00000016"


# The main process alone fails in its first validation.
FAILING = """
from dragoman_training import trainer
from dragoman_training.errors import DataError

def fails(*_):
    raise DataError("the dev data is gone")

trainer.validate = fails
"""


@pytest.mark.parametrize(
    ("before", "settings", "message"),
    [
        (
            "import pathlib; pathlib.Path('run/mine').mkdir(parents=True, exist_ok=True)\n",
            [],
            "run exists: continue it",
        ),
        (FAILING, [], "the dev data is gone"),
        ("", ["--set", "data.batch_tokens=15"], "for each of 2 processes: at least 16"),
    ],
    ids=["start", "validation", "budget"],
)
def test_a_failure_of_the_main_process_ends_all(toy: Path, before: str, settings: list[str], message: str) -> None:
    """With its message and status, and none waits for one that does not come."""
    (toy / "program.py").write_text(before + PROGRAM)
    arguments = ["toy.toml", "--out", "run", "--set", "loop.workers=1", *settings]
    done = torchrun(2, "program.py", *arguments, cwd=toy)
    assert done.status != 0
    assert "dragoman train: error: " in done.err
    assert message in done.err
    assert "exitcode  : 2" in done.err
