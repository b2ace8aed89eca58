"""Two processes against one."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import torchrun

from dragoman_training.config import LoopConfig
from dragoman_training.distributed import Group, join
from dragoman_training.errors import ConfigError

SCRIPT = Path(__file__).with_name("torchrun_script.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The results of the script by number of processes: two started by torchrun; this one, with two workers."""
    file = tmp_path_factory.mktemp("torchrun") / "two.pt"
    done = torchrun(2, SCRIPT, file, cwd=file.parent)
    assert done.status == 0, done.err
    spec = importlib.util.spec_from_file_location("torchrun_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with torch.random.fork_rng(devices=[]):
        return {1: script.run(Group(), 2), 2: torch.load(file, weights_only=True)}


def test_the_gradient_of_a_step_is_that_of_one_process(runs: dict[int, dict[str, Any]]) -> None:
    """Each process has other pairs and another number of tokens; the gradient is that of all of them."""
    for one, two in zip(runs[1]["sgd"]["gradients"], runs[2]["sgd"]["gradients"], strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-5)
    assert max(gradient.abs().max() for gradient in runs[1]["sgd"]["gradients"]) > 1e-2


def test_twenty_steps_of_sgd_end_with_the_weights_of_one_process(runs: dict[int, dict[str, Any]]) -> None:
    """Also through steps in which a process has no share, or one less than the other."""
    for one, two in zip(runs[1]["sgd"]["weights"], runs[2]["sgd"]["weights"], strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_losses_are_those_of_one_process(runs: dict[int, dict[str, Any]], optimizer: str) -> None:
    """Every process reports the mean over the tokens of all; and the model learns."""
    losses = runs[1][optimizer]["losses"]
    assert runs[2][optimizer]["losses"] == pytest.approx(losses, abs=1e-3)
    assert losses[-1] < losses[0] - 0.2


def test_a_flag_in_one_process_is_seen_by_all(runs: dict[int, dict[str, Any]]) -> None:
    """A stop asked of any one ends all at the same step; of none, nothing."""
    assert runs[2]["stops"] == [True, True, False]


def test_a_process_alone_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends nothing, and it writes."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    group = join(LoopConfig(validate_every=1, device="cpu"))
    assert group == Group(torch.device("cpu"), 0, 1)
    assert group.is_main
    assert group.all_reduce_sum([1.5, 2.0]) == [1.5, 2.0]
    assert not group.any(False)
    group.barrier()
    group.close()


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        ({"workers": 2, "device": "cpu"}, "2", r"loop\.workers is 2: .*set it to 1"),
        ({"device": "cuda"}, "1", r"loop\.device is 'cuda': .*choose auto or cpu"),
        ({"precision": "fp16"}, "1", r"loop\.precision is 'fp16': .*choose fp32 or bf16"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], world_size: str, message: str
) -> None:
    """Before anything is started, with the key and what to choose."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(ConfigError, match=message):
        join(LoopConfig(validate_every=1, **changes))
