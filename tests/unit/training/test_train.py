"""Training end to end at toy size: files, figures, early stopping, the moving average, numbers that are not finite."""

import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dragoman_training import beam, checkpoint, data, decode
from dragoman_training import trainer as training
from dragoman_training.config import ModelShape
from dragoman_training.configfile import load_config
from dragoman_training.data import Pair
from dragoman_training.errors import CheckpointError, DataError, TrainingError
from dragoman_training.model import Transformer
from dragoman_training.progress import Progress
from dragoman_training.train import train
from dragoman_training.trainer import Trainer
from dragoman_training.validate import validate
from dragoman_training.workers import Workers

Shares = Sequence[Sequence[Pair]]


def weights(run: Path) -> bytes:
    return (run / "last" / "model.safetensors").read_bytes()


def metrics_of(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def scripted(values: list[float]) -> Callable[..., SimpleNamespace]:
    """A validation that finds these losses one after another."""
    remaining = iter(values)

    def validate(*_: object) -> SimpleNamespace:
        figures = {"loss": next(remaining), "exact_match": 0.0, "word_error_rate": 1.0}
        return SimpleNamespace(metrics=lambda: figures, signatures={})

    return validate


def test_a_run_leaves_the_documented_files(toy: Path) -> None:
    """Config, metrics, the newest checkpoints and relative links; no absolute path anywhere in the records."""
    assert train(load_config("toy.toml"), toy / "run") is None
    run = toy / "run"
    metrics = metrics_of(run)
    assert [line["step"] for line in metrics] == [4, 8, 12]
    assert all(line["dev_exact_match"] == 1 - line["dev_word_error_rate"] for line in metrics)  # type: ignore[operator]  # a number
    assert set(metrics[-1]) >= {
        *("epoch", "learning_rate", "train_loss", "dev_loss", "target_tokens", "tokens_per_second", "signatures"),
        *("skipped_steps", "best_step", "validations_without_better", "seconds", "cpu_seconds"),
    }
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert {"step-00000008", "step-00000012"} <= set(names)
    assert len(names) <= 3  # the two newest and the best
    assert str((run / "last").readlink()) == "checkpoints/step-00000012"
    best = min(metrics, key=lambda line: line["dev_loss"])["step"]  # type: ignore[arg-type, return-value]  # a number
    assert str((run / "best").readlink()) == f"checkpoints/step-{best:08d}"
    assert sorted(path.name for path in (run / "last").iterdir()) == [
        "config.json",
        "metrics.json",
        "model.safetensors",
        "source.tokenizer.json",
        "target.tokenizer.json",
        "training_state.pt",
    ]
    record = (run / "last" / "config.json").read_text()
    assert record == (run / "config.json").read_text()
    assert str(toy) not in record
    assert json.loads(record)["special_ids"]["decoder_start"] == 1


def test_a_run_is_repeatable_bit_for_bit(toy_with_everything: Path) -> None:
    """Same configuration and data, same weights, whatever random numbers were drawn before."""
    config = load_config("toy.toml")
    train(config, toy_with_everything / "a")
    torch.rand(3)
    train(config, toy_with_everything / "b")
    assert weights(toy_with_everything / "a") == weights(toy_with_everything / "b")


def test_the_decoder_reads_one_start_id_in_training_and_decoding(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the decoder is given first in training batches, in greedy and in beam search is config.json's constant."""
    trainer = Trainer(load_config("toy.toml"), toy / "run")
    first: dict[str, set[int]] = {"training": set(), "decoding": set()}
    embed = Transformer.embed_target

    def watched(kind: str) -> Callable[..., torch.Tensor]:
        def wrapper(model: Transformer, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            if int(positions.reshape(-1)[0]) == 0:
                first[kind] |= set(tokens[:, 0].tolist())
            return embed(model, tokens, positions)

        return wrapper

    with trainer.workers:
        monkeypatch.setattr(Transformer, "embed_target", watched("training"))
        trainer.step([[trainer.datasets.train[n] for n in range(3)]])
    monkeypatch.setattr(Transformer, "embed_target", watched("decoding"))
    model = trainer.model.eval()
    decode.greedy(model, [[4, 2], [5, 2]], 3, trainer.special)
    beam.beam_search(model, [4, 2], beam.BeamOptions(beam_size=2, max_new_tokens=3), trainer.special)
    constant = trainer.record["special_ids"]["decoder_start"]
    assert first == {"training": {constant}, "decoding": {constant}}


# -- what is seen ------------------------------------------------------------------------------------------------------


def test_the_start_tells_what_is_trained_on(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs kept and dropped by reason, parameters, vocabularies, device, precision, the place of the token shards."""
    with (toy / "train.source").open("a") as source, (toy / "train.target").open("a") as target:
        source.write("\nabcdabcdabcd\n")
        target.write("A\nB\n")
    train(load_config("toy.toml", ["loop.device=cpu"]), toy / "run")
    lines = capsys.readouterr().err
    for words in ("60 pairs", "1 blank source", "1 source over 8 tokens", "10 for validation", "cpu", "fp32"):
        assert words in lines
    assert "vocabularies of 8 and 8 tokens" in lines
    parameters = sum(weight.numel() for weight in load_file(toy / "run" / "last" / "model.safetensors").values())
    assert f"{parameters:,} parameters" in lines
    assert ".dragoman-shards" in lines
    assert "finished; best at step" in lines


def test_without_a_terminal_each_validation_is_one_line(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No progress bar in a log file, and the time of a step is told."""
    train(load_config("toy.toml"), toy / "run")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["4", "8", "12"]
    assert all("s a step" in line for line in lines)


def test_without_a_terminal_the_time_to_the_next_validation_is_told_now_and_then(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With step, loss and speed, a line a time, under a clock on which every step takes 25 seconds."""
    now = 0.0
    step = Trainer.step

    def slow(trainer: Trainer, shares: Shares) -> tuple[float, int]:
        nonlocal now
        now += 25.0
        return step(trainer, shares)

    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: now, process_time=lambda: now))
    monkeypatch.setattr(Trainer, "step", slow)
    train(load_config("toy.toml", ["loop.validate_every=5"]), Path("run"))
    lines = [line for line in capsys.readouterr().err.splitlines() if " of 12: " in line]
    shape = r"run: step (\d+) of 12: loss \d\.\d{3}, [\d,]+ target tokens/s; validation at step (\d+) in ([\d:]+)"
    told = [re.fullmatch(shape, line) for line in lines]
    # Every second step, but where a validation has just told.
    assert [match and match.groups() for match in told] == [
        ("2", "5", "0:01:15"),
        ("4", "5", "0:00:25"),
        ("7", "10", "0:01:15"),
        ("9", "10", "0:00:25"),
    ]


def test_on_a_terminal_a_bar_tells_loss_speed_rate_and_time_left(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bar over all steps."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    train(load_config("toy.toml"), toy / "run")
    bar = [part for part in terminal.getvalue().split("\r") if "12/12" in part][-1]
    for words in ("loss ", "target tokens/s", "rate ", "<00:00"):
        assert words in bar


def test_tensorboard_gets_training_and_validation_curves(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training at each log interval, the dev figures at each validation; closed at the end."""
    seen: list[tuple[int, set[str]]] = []
    closed = []

    class Writer:
        def __init__(self, run: Path, after: int) -> None:
            assert (run, after) == (toy / "run", 0)

        def scalars(self, step: int, values: dict[str, float]) -> None:
            assert all(isinstance(value, float) for value in values.values())
            seen.append((step, set(values)))

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(training, "RunWriter", Writer)
    monkeypatch.setattr(training, "LOG_EVERY", 6)
    train(load_config("toy.toml"), toy / "run")
    curves = {"train/loss", "train/learning_rate", "train/tokens_per_second"}
    assert [step for step, names in seen if names == curves] == [6, 12]
    assert [step for step, names in seen if "dev/loss" in names] == [4, 8, 12]
    assert closed == [True]

    def fails(*_: object) -> None:
        raise DataError("broken")

    monkeypatch.setattr(training, "validate", fails)
    (toy / "run").rename(toy / "first")
    with pytest.raises(DataError, match="broken"):
        train(load_config("toy.toml"), toy / "run")
    assert closed == [True, True]


def test_the_signatures_are_told_once_a_session(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In whole, at the first validation, as they stand in metrics.jsonl."""
    config = load_config("toy.toml", ["loop.metric=bleu"])
    train(config, toy / "run")
    signatures = metrics_of(toy / "run")[0]["signatures"]
    assert isinstance(signatures, dict) and set(signatures) == {"bleu", "chrf"}
    lines = capsys.readouterr().err.splitlines()
    for figure, name in (("bleu", "BLEU"), ("chrf", "chrF")):
        assert [line for line in lines if signatures[figure] in line] == [
            f"dev {name} is sacreBLEU's {signatures[figure]}"
        ]
    first = next(n for n, line in enumerate(lines) if line.startswith("step 4 "))
    assert "sacreBLEU" in lines[first + 1]


def test_curves_that_cannot_be_written_do_not_end_a_run(
    toy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning, and training goes on."""

    class Broken:
        def __init__(self, run: Path, after: int) -> None:
            pass

        def scalars(self, step: int, values: dict[str, float]) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "RunWriter", Broken)
    assert train(load_config("toy.toml"), toy / "run") is None
    assert len([line for line in caplog.messages if "No space left" in line]) == 3


# -- the best, and enough of it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [("loss", [3.0, 1.0, 1.0, 2.0], 2), ("bleu", [3.0, 9.0, 9.0, 2.0], 2), ("exact_match", [0.0, 0.0], 1)],
)
def test_the_best_is_the_first_of_the_best_values(metric: str, values: list[float], best: int) -> None:
    """The loss is better when lower, the other metrics when higher; an equal value is not better."""
    progress = Progress()
    for step, value in enumerate(values, 1):
        progress.step = step
        progress.judge(metric, value)
    assert (progress.best_step, progress.validations_without_better) == (best, len(values) - best)


def test_a_figure_that_is_no_number_is_never_better() -> None:
    """A loss of NaN does not become the best one that nothing can beat."""
    progress = Progress(step=1)
    progress.judge("loss", 2.0)
    progress.step = 2
    progress.judge("loss", float("nan"))
    assert (progress.best_step, progress.best_value) == (1, 2.0)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_first_figure_that_is_no_number_is_not_the_best(value: float) -> None:
    """It counts as a validation that brought nothing; the first finite one is the best."""
    progress = Progress(step=1)
    progress.judge("loss", value)
    assert (progress.best_step, progress.best_value, progress.validations_without_better) == (None, None, 1)
    progress.step = 2
    progress.judge("loss", 1.0)
    assert (progress.best_step, progress.best_value, progress.validations_without_better) == (2, 1.0, 0)


def test_a_run_without_a_finite_figure_has_no_best(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends all the same, says so, keeps its last checkpoint, and writes null, as JSON knows no NaN."""
    monkeypatch.setattr(training, "validate", scripted([float("nan")] * 3))
    assert train(load_config("toy.toml"), toy / "run") is None
    assert "no best: no validation's loss was a finite number" in capsys.readouterr().err
    assert not (toy / "run" / "best").exists()
    assert [line["dev_loss"] for line in metrics_of(toy / "run")] == [None, None, None]
    assert '"dev_loss": null' in (toy / "run" / "last" / "metrics.json").read_text()
    assert (toy / "run" / "last").readlink().name == "step-00000012"


def test_enough_validations_without_a_better_one_end_the_run(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends as finished, says why, records it, keeps the best, and has nothing left to resume."""
    monkeypatch.setattr(training, "validate", scripted([3.0, 2.0, 2.5, 2.0, 1.0]))
    config = load_config("toy.toml", ["loop.patience=2", "schedule.steps=40"])
    assert train(config, toy / "run") is None
    assert "stopped early at step 16: 2 validations without a better loss; best at step 8" in capsys.readouterr().err
    assert metrics_of(toy / "run")[-1]["validations_without_better"] == 2
    assert (toy / "run" / "best").readlink().name == "step-00000008"
    before = weights(toy / "run")
    assert train(config, toy / "run", resume=True) is None
    assert weights(toy / "run") == before
    assert len(metrics_of(toy / "run")) == 4


# -- the moving average ------------------------------------------------------------------------------------------------


def test_the_moving_average_is_validated_and_saved(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a plain sum in double precision: validated and saved is the average, training goes on beside it."""
    raw: list[dict[str, torch.Tensor]] = []
    validated: list[dict[str, torch.Tensor]] = []

    def copied(model: Transformer) -> dict[str, torch.Tensor]:
        return {name: weight.detach().double() for name, weight in model.named_parameters()}

    step = Trainer.step

    def watched_step(self: Trainer, shares: Shares) -> tuple[float, int]:
        if not raw:
            raw.append(copied(self.model))
        result = step(self, shares)
        raw.append(copied(self.model))
        return result

    def watched_validate(workers: Workers, *rest: object) -> object:
        validated.append(copied(workers.models[-1]))
        return validate(workers, *rest)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(Trainer, "step", watched_step)
    monkeypatch.setattr(training, "validate", watched_validate)
    train(load_config("toy.toml", ["optimizer.ema_decay=0.7"]), toy / "run")
    saved = load_file(toy / "run" / "last" / "model.safetensors")
    own = checkpoint.load_state(toy / "run" / "last")["weights"]
    for name in saved:
        average = raw[0][name]
        for n, values in enumerate(raw[1:], 1):
            decay = min(0.7, (1 + n) / (10 + n))
            average = decay * average + (1 - decay) * values[name]
        torch.testing.assert_close(saved[name].double(), average, rtol=1e-5, atol=1e-6)
        assert torch.equal(saved[name].double(), validated[-1][name])
        assert torch.equal(own[name].double(), raw[-1][name])
    assert not torch.equal(saved["target_embedding.weight"], own["target_embedding.weight"])
    loaded = checkpoint.load_model(toy / "run" / "last")
    assert torch.equal(loaded.model.target_embedding.weight, saved["target_embedding.weight"])


# -- numbers that are not finite ---------------------------------------------------------------------------------------


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Steps whose gradient gets one number that is not finite."""
    steps: set[int] = set()
    step, accumulate = Trainer.step, Workers.accumulate
    now = [0]

    def counted(self: Trainer, shares: Shares) -> tuple[float, int]:
        now[0] = self.progress.step + 1
        return step(self, shares)

    def poisoned(self: Workers, shares: Shares) -> tuple[float, int]:
        result = accumulate(self, shares)
        if now[0] in steps:
            gradient = next(iter(self.models[0].parameters())).grad
            assert gradient is not None
            gradient.view(-1)[0] = float("inf")
        return result

    monkeypatch.setattr(Trainer, "step", counted)
    monkeypatch.setattr(Workers, "accumulate", poisoned)
    yield steps


def test_a_gradient_that_is_not_finite_skips_the_step(toy: Path, poison: set[int]) -> None:
    """The step is counted, the weights stay as they were, and training goes on."""
    poison.add(3)
    trainer = Trainer(load_config("toy.toml", ["optimizer.ema_decay=0.5"]), toy / "run")
    trainer.start()
    assert trainer.train() is None
    assert (trainer.progress.skipped_steps, trainer.progress.bad_in_a_row) == (1, 0)
    assert trainer.average is not None and trainer.average.updates == 11
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert metrics_of(toy / "run")[-1]["skipped_steps"] == 1


def test_ten_bad_gradients_in_a_row_end_the_run(toy: Path, poison: set[int]) -> None:
    """With a message that says what to change; the last checkpoint is whole and has the weights of before."""
    poison |= set(range(6, 40))
    with pytest.raises(TrainingError, match=r"10 times in a row, at step 15: lower optimizer\.learning_rate"):
        train(load_config("toy.toml", ["schedule.steps=40"]), toy / "run")
    assert [line["skipped_steps"] for line in metrics_of(toy / "run")] == [0, 3, 7]
    for folder in checkpoint.checkpoint_folders(toy / "run"):
        assert all(torch.isfinite(p).all() for p in checkpoint.load_model(folder).model.parameters())


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_weights_that_are_not_finite_are_never_written(toy: Path, decay: float) -> None:
    """Saving refuses and leaves no folder; behind a moving average that is still finite, too."""
    trainer = Trainer(load_config("toy.toml", [f"optimizer.ema_decay={decay}"]), toy / "run")
    trainer.start()
    trainer.model.source_embedding.weight.data[0, 0] = float("inf")
    with pytest.raises(TrainingError, match=r"source_embedding\.weight is not finite"):
        trainer.save({})
    assert checkpoint.checkpoint_folders(toy / "run") == []


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_data_that_never_fits_is_refused(toy: Path) -> None:
    """Limits that drop every pair are named."""
    with pytest.raises(DataError, match="no training pair fits the limits"):
        train(load_config("toy.toml", ["data.max_source_tokens=1"]), toy / "run")


def test_a_folder_with_something_else_in_it_is_refused(toy: Path) -> None:
    """Nothing of it is touched, and no data is read first."""
    (toy / "run").mkdir()
    (toy / "run" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"run exists: continue it with --resume, or choose another --out"):
        train(load_config("toy.toml"), toy / "run")
    assert [path.name for path in (toy / "run").iterdir()] == ["notes.txt"]


def test_an_interrupted_start_is_started_over(toy: Path) -> None:
    """Its tokenizers may be those of another configuration."""
    data.load_datasets(load_config("toy.toml", ["tokenizer.source_unit=piece"]), toy / "run")
    (toy / "run" / ".writing-tokenizers-1a2b3c4d").mkdir()
    train(load_config("toy.toml"), toy / "run")
    assert len(checkpoint.load_model(toy / "run").source_tokenizer) == 8


def test_model_shape_and_settings_of_the_record_are_those_of_the_configuration(toy: Path) -> None:
    """config.json tells every setting, under the name that it has in the file."""
    config = load_config("toy.toml")
    train(config, toy / "run")
    record = json.loads((toy / "run" / "config.json").read_text())
    assert ModelShape(**{name: record["model"][name] for name in ModelShape.__dataclass_fields__}) == config.model
    assert record["training"]["schedule"]["steps"] == 12
    assert record["data"]["dev_source"]["lines"] == 10
