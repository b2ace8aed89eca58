"""Gradients from several workers against the whole batch at once."""

from collections.abc import Callable

import pytest
import torch

from dragoman_training.data import Pair, make_batch
from dragoman_training.model import Transformer
from dragoman_training.optim import smoothed_loss
from dragoman_training.workers import Workers

PAIRS = [Pair([4] * n + [2], [*[5, 6, 4][: 1 + n % 3], 2]) for n in range(1, 8)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_shares_add_up_to_the_whole_batch(make_model: Callable[..., Transformer], count: int) -> None:
    """Without dropout, loss and gradient do not depend on the number of workers."""
    model = make_model(dropout=0.0)
    batch = make_batch(PAIRS)
    loss, tokens = smoothed_loss(model(batch.source, batch.source_lengths, batch.target), batch.labels, 0, 0.1)
    (loss / tokens).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with Workers(model, count, seed=1, smoothing=0.1) as workers:
        shares = [PAIRS[n::count] for n in range(count)]
        summed, counted = workers.accumulate(shares)
        assert summed == pytest.approx(loss.item(), rel=1e-5)
        assert counted == tokens
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_fewer_shares_than_workers_are_fine(make_model: Callable[..., Transformer]) -> None:
    """A worker without a share adds nothing, also right after a full batch."""
    model = make_model(dropout=0.0)
    with Workers(model, 2, seed=1, smoothing=0.0) as workers:
        workers.accumulate([PAIRS[:3], PAIRS[3:]])
        loss, tokens = workers.accumulate([PAIRS[:1]])
        first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        workers.accumulate([PAIRS[:1]])
        assert tokens == len(PAIRS[0].target)
        assert all(torch.equal(a, p.grad) for a, p in zip(first, model.parameters(), strict=True) if p.grad is not None)
        assert loss > 0


def test_results_keep_their_order_and_errors_come_out(make_model: Callable[..., Transformer]) -> None:
    """``map`` answers in the order of its items; an error in a worker is the caller's."""
    with Workers(make_model(), 2, seed=1, smoothing=0.0) as workers:
        assert workers.map(lambda _, item: item * item, range(7)) == [n * n for n in range(7)]
        with pytest.raises(ZeroDivisionError):
            workers.map(lambda _, item: 1 / item, [1, 1, 0])


def test_weights_are_shared_and_threads_restored(make_model: Callable[..., Transformer]) -> None:
    """An update of the first model is an update of all; PyTorch's thread count is put back."""
    model = make_model()
    before = torch.get_num_threads()
    with Workers(model, 3, seed=1, smoothing=0.0) as workers:
        with torch.no_grad():
            next(model.parameters()).add_(1)
        pointers = {next(replica.parameters()).data_ptr() for replica in workers.models}
    assert len(pointers) == 1
    assert torch.get_num_threads() == before
