"""Model and loss together."""

import functools
import logging
from collections.abc import Callable

import pytest
import torch

from dragoman_training.data import Batch, Pair, make_batch
from dragoman_training.model import Transformer
from dragoman_training.objective import Objective
from dragoman_training.workers import Workers

MakeModel = Callable[..., Transformer]
PAIRS = [Pair([4] * n + [2], [*[5, 6, 4][: 1 + n % 3], 2]) for n in range(1, 8)]


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_batch_of_padding_has_exactly_no_loss_and_no_gradient(make_model: MakeModel, norm_first: bool) -> None:
    """All labels padding: zero and zeros, not NaN, for every parameter."""
    model = make_model(norm_first=norm_first)
    batch = make_batch(PAIRS)
    blank = Batch(batch.source, batch.source_lengths, batch.target, torch.zeros_like(batch.labels))
    loss = Objective(model, 0.1, "fp32", compiled=False)(blank)
    loss.backward()
    assert loss.item() == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_the_compiled_model_has_the_same_gradients(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """For batches of three shapes, with dropout from the same random bytes; the third is no reason to compile again."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # thousands of lines, if pytest listens
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    results, compilations = [], []
    for compiled in (False, True):
        model = make_model(dropout=0.0, activation_dropout=0.2, encoder_layers=1, decoder_layers=1)
        with Workers(model, 1, smoothing=0.1, compiled=compiled) as workers:
            workers.training(True)
            for share in (PAIRS[4:], PAIRS[:4], PAIRS[1:6]):
                loss, _ = workers.accumulate([share])
                results.append((loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
                compilations.append(len(graphs))
    assert compilations[:3] == [0, 0, 0]
    assert 0 < compilations[4] == compilations[5]
    for (plain_loss, plain), (loss, gradients) in zip(results[:3], results[3:], strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-6)
        for ours, theirs in zip(gradients, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
