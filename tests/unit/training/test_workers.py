"""Gradients from several workers against the whole batch at once."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from dragoman_training.data import Pair, make_batch
from dragoman_training.model import Transformer
from dragoman_training.workers import Workers

PAIRS = [Pair([4] * n + [2], [*[5, 6, 4][: 1 + n % 3], 2]) for n in range(1, 8)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_shares_add_up_to_the_whole_batch(make_model: Callable[..., Transformer], count: int) -> None:
    """Without dropout, loss and gradient do not depend on the number of workers."""
    model = make_model(dropout=0.0)
    batch = make_batch(PAIRS)
    logits, labels = model(batch.source, batch.source_lengths, batch.target).flatten(0, 1), batch.labels.flatten()
    loss = F.cross_entropy(logits, labels, ignore_index=0, label_smoothing=0.1, reduction="sum")
    tokens = int((labels != 0).sum())
    (loss / tokens).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with Workers(model, count, smoothing=0.1) as workers:
        shares = [PAIRS[n::count] for n in range(count)]
        summed, counted = workers.accumulate(shares)
        assert summed == pytest.approx(loss.item(), rel=1e-5)
        assert counted == tokens
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_fewer_shares_than_workers_are_fine(make_model: Callable[..., Transformer]) -> None:
    """A worker without a share adds nothing, also right after a full batch."""
    model = make_model(dropout=0.0)
    with Workers(model, 2, smoothing=0.0) as workers:
        workers.accumulate([PAIRS[:3], PAIRS[3:]])
        loss, tokens = workers.accumulate([PAIRS[:1]])
        first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        workers.accumulate([PAIRS[:1]])
        assert tokens == len(PAIRS[0].target)
        assert all(torch.equal(a, p.grad) for a, p in zip(first, model.parameters(), strict=True) if p.grad is not None)
        assert loss > 0


def test_results_keep_their_order_and_errors_come_out(make_model: Callable[..., Transformer]) -> None:
    """``map`` answers in the order of its items; an error in a worker is the caller's."""
    with Workers(make_model(), 2, smoothing=0.0) as workers:
        assert workers.map(lambda _, item: item * item, range(7)) == [n * n for n in range(7)]
        with pytest.raises(ZeroDivisionError):
            workers.map(lambda _, item: 1 / item, [1, 1, 0])


def test_weights_are_shared_and_threads_restored(make_model: Callable[..., Transformer]) -> None:
    """An update of the first model is an update of all; PyTorch's thread count is put back."""
    model = make_model()
    before = torch.get_num_threads()
    with Workers(model, 3, smoothing=0.0) as workers:
        with torch.no_grad():
            next(model.parameters()).add_(1)
        pointers = {next(replica.parameters()).data_ptr() for replica in workers.models}
    assert len(pointers) == 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("count", [1, 2])
def test_however_a_step_is_cut_into_shares_its_gradient_is_the_same(
    make_model: Callable[..., Transformer], count: int
) -> None:
    """Eight pairs of 2 to 40 tokens as one share, as eight, or as three and five: a token weighs the same in all."""
    model = make_model(dropout=0.0)
    lengths = (2, 3, 5, 8, 13, 21, 34, 40)
    pairs = [Pair([4 + n % 8] * n + [2], [4 + (3 * k + n) % 6 for k in range(n - 1)] + [2]) for n in lengths]
    results = []
    with Workers(model, count, smoothing=0.1) as workers:
        for shares in ([pairs], [[pair] for pair in pairs], [pairs[:3], pairs[3:]]):
            loss, tokens = workers.accumulate(shares)
            assert tokens == sum(lengths)
            results.append((loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        for ours, whole in zip(gradient, results[0][1], strict=True):
            torch.testing.assert_close(ours, whole, rtol=0, atol=1e-5)


def test_a_step_without_shares_has_no_gradient(make_model: Callable[..., Transformer]) -> None:
    """Nothing of the step before is left."""
    model = make_model()
    with Workers(model, 2, smoothing=0.0) as workers:
        workers.accumulate([PAIRS])
        assert workers.accumulate([[], []]) == (0.0, 0)
    assert all(p.grad is None for p in model.parameters())


def test_gradients_with_dropout_are_repeated_bit_by_bit(make_model: Callable[..., Transformer]) -> None:
    """From equal seeds, whichever thread is faster, with every kind of dropout; from others they differ."""
    model = make_model(dropout=0.3, attention_dropout=0.3, activation_dropout=0.3)
    shares = [PAIRS[n:] + PAIRS[:n] for n in range(4)]

    def gradient(seed: int) -> list[torch.Tensor]:
        torch.rand(seed)  # PyTorch's own generator has no part in it
        for index, generator in enumerate(workers.generators):
            generator.manual_seed(seed + index)
        workers.accumulate(shares)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with Workers(model, 2, smoothing=0.1) as workers:
        workers.training(True)
        first, other = gradient(3), gradient(4)
        for _ in range(3):
            assert all(map(torch.equal, gradient(3), first))
        assert not any(map(torch.equal, first, other))


def test_switched_off_dropout_is_no_dropout(make_model: Callable[..., Transformer]) -> None:
    """Every kind of it, while the model stays in training mode."""
    gradients = []
    for rate in (0.0, 0.5):
        model = make_model(dropout=rate, attention_dropout=rate, activation_dropout=rate)
        with Workers(model, 1, smoothing=0.1) as workers:
            workers.training(True)
            workers.dropout(enabled=False)
            workers.accumulate([PAIRS])
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *gradients))
