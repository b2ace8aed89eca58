"""The transformer: caching, padding and positions."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from dragoman_training.attention import TorchAttention
from dragoman_training.data import pad
from dragoman_training.decode import empty_caches
from dragoman_training.dropout import Dropout
from dragoman_training.model import Transformer, sinusoidal_positions

MakeModel = Callable[..., Transformer]
SOURCES = [[4, 5, 6, 7, 8, 9, 10, 2], [5, 2], [11, 4, 4, 2]]
TARGETS = [[1, 4, 5, 6, 7, 8], [1, 9, 9, 4, 4, 5], [1, 5, 4, 5, 4, 5]]


def lengths_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor([len(row) for row in rows], dtype=torch.int32)


def logits_of(model: Transformer, sources: list[list[int]], targets: list[list[int]]) -> torch.Tensor:
    with torch.inference_mode():
        return model.forward(pad(sources, 0), lengths_of(sources), torch.tensor(targets))


@pytest.mark.parametrize("changes", [{}, {"norm_first": False, "activation": "gelu"}, {"activation": "silu"}])
def test_cached_steps_equal_teacher_forcing_on_ragged_rows(make_model: MakeModel, changes: dict[str, object]) -> None:
    """One token at a time with cached keys and values gives the logits of the whole target at once."""
    model = make_model(**changes)
    expected = logits_of(model, SOURCES, TARGETS)
    with torch.inference_mode():
        lengths = lengths_of(SOURCES)
        memory = model.keys_values(model.encode(pad(SOURCES, 0), lengths))
        past = empty_caches(model, 3, 9, memory)
        for position in range(6):
            tokens = torch.tensor([target[position] for target in TARGETS])
            cached = torch.full((3,), position, dtype=torch.int32)
            logits, past = model.step(tokens, cached, past, memory, lengths)
            torch.testing.assert_close(logits, expected[:, position], rtol=1e-4, atol=1e-5)


def test_rows_of_one_step_may_stand_at_different_positions(make_model: MakeModel) -> None:
    """A row that is two tokens behind its neighbour gets its own logits: the cache holds each row's own length."""
    model = make_model()
    expected = logits_of(model, SOURCES[:2], TARGETS[:2])
    with torch.inference_mode():
        lengths = lengths_of(SOURCES[:2])
        memory = model.keys_values(model.encode(pad(SOURCES[:2], 0), lengths))
        past = empty_caches(model, 2, 9, memory)
        for position in range(4):
            behind = max(position - 2, 0)
            tokens = torch.tensor([TARGETS[0][position], TARGETS[1][behind]])
            logits, past = model.step(tokens, torch.tensor([position, behind]).int(), past, memory, lengths)
        torch.testing.assert_close(logits[0], expected[0, 3], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits[1], expected[1, 1], rtol=1e-4, atol=1e-5)


def test_neighbours_and_padding_do_not_change_a_row(make_model: MakeModel) -> None:
    """Alone, beside rows of any length, or padded far beyond its length: a row's logits stay, and none is NaN."""
    model = make_model()
    alone = [logits_of(model, [s], [t])[0] for s, t in zip(SOURCES, TARGETS, strict=True)]
    for order in itertools.permutations(range(3)):
        together = logits_of(model, [SOURCES[i] for i in order], [TARGETS[i] for i in order])
        assert torch.isfinite(together).all()
        for row, index in enumerate(order):
            torch.testing.assert_close(together[row], alone[index], rtol=1e-4, atol=1e-5)
    for width in (16, 64, 256):
        padded = torch.full((1, width), 7)  # padding of any content
        padded[0, :2] = torch.tensor(SOURCES[1])
        with torch.inference_mode():
            logits = model.forward(padded, torch.tensor([2]).int(), torch.tensor([TARGETS[1]]))
        torch.testing.assert_close(logits[0], alone[1], rtol=1e-4, atol=1e-5)


def test_later_target_tokens_do_not_change_earlier_logits(make_model: MakeModel) -> None:
    """Decoder self-attention looks back only."""
    model = make_model()
    changed = [[*target[:3], 9, 9, 9] for target in TARGETS]
    before, after = logits_of(model, SOURCES, TARGETS), logits_of(model, SOURCES, changed)
    torch.testing.assert_close(before[:, :3], after[:, :3], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(before[:, 4], after[:, 4])


def test_positions_have_no_table_to_run_out_of(make_model: MakeModel) -> None:
    """Positions far beyond anything trained are computed, and a decoder steps there without error."""
    wave = sinusoidal_positions(torch.tensor([100_000]), 8)[0]
    assert wave[0].item() == pytest.approx(math.sin(100_000), abs=1e-2)
    assert wave[7].item() == pytest.approx(math.cos(100_000 / 10_000), abs=1e-4)
    model = make_model()
    source = torch.randint(4, 12, (1, 3000))
    logits = logits_of(model, source.tolist(), torch.randint(4, 10, (1, 2000)).tolist())
    assert logits.shape == (1, 2000, 10)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(("tied", "embeddings"), [("none", 3), ("target", 2), ("all", 1)])
def test_tied_embeddings_share_their_weights(make_model: MakeModel, tied: str, embeddings: int) -> None:
    """Each degree of tying saves one matrix of vocabulary size."""
    model = make_model(tied_embeddings=tied, source_vocab_size=10)
    assert sum(p.shape == (10, 16) for p in model.parameters()) == embeddings


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_training_and_evaluation_agree_on_padded_batches(
    make_model: MakeModel, norm_first: bool, activation: str
) -> None:
    """Without dropout, in shape and values, also where the batch is wider than its longest row."""
    model = make_model(norm_first=norm_first, activation=activation, dropout=0.0)
    lengths = torch.tensor([17, 9, 2], dtype=torch.int32)
    source = torch.zeros(3, 24, dtype=torch.long)
    for row, length in enumerate(lengths.tolist()):
        source[row, :length] = torch.arange(length) % 8 + 4
    target = torch.tensor(TARGETS)
    results = []
    for mode in (True, False):
        model.train(mode)
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                memory = model.encode(source, lengths)
                results.append((memory, model.decode(target, memory, lengths)))
    for memory, logits in results:
        assert memory.shape == (3, 24, 16)
        assert logits.shape == (3, 6, 10)
        torch.testing.assert_close(memory, results[0][0])
        torch.testing.assert_close(logits, results[0][1])
    tight = model.encode(source[:, :17], lengths)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(results[0][0][row, :length], tight[row, :length])


def seeded_dropout(rate: float) -> Dropout:
    dropout = Dropout(rate)
    dropout.generator = torch.Generator().manual_seed(4)
    return dropout


def test_attention_dropout_acts_on_the_weights() -> None:
    """Equal scores and unit vectors as values show the weights: each is 0 or doubled; what is masked stays 0."""
    ops = TorchAttention(seeded_dropout(0.5))
    size = 4
    q, values = torch.zeros(300, size, size), torch.eye(size).expand(300, size, size)
    lengths = torch.full((300,), 3, dtype=torch.int32)
    weights = ops.encoder(q, q, values, 1, lengths)  # (B, T, S)
    assert weights[:, :, :3].unique().tolist() == pytest.approx([0, 2 / 3])
    assert (weights[:, :, :3] == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert (weights[:, :, 3] == 0).all()
    weights = ops.causal(q, q, values, 1)
    for position in range(size):
        seen = weights[:, position, : position + 1]
        assert seen.unique().tolist() == pytest.approx([0, 2 / (position + 1)])
        assert (weights[:, position, position + 1 :] == 0).all()


def test_attention_with_dropout_is_else_that_without(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With factors of 1 the logits are those of PyTorch's function, masks and scale included."""
    plain = logits_of(make_model(dropout=0.0), SOURCES, TARGETS)
    model = make_model(dropout=0.0, attention_dropout=0.5)
    assert torch.equal(logits_of(model, SOURCES, TARGETS), plain)  # evaluation: no dropout
    model.train()
    assert not torch.allclose(logits_of(model, SOURCES, TARGETS), plain, atol=1e-2)
    monkeypatch.setattr(Dropout, "factors", lambda _, x: torch.ones_like(x))
    torch.testing.assert_close(logits_of(model, SOURCES, TARGETS), plain, rtol=1e-4, atol=1e-5)


def test_activation_dropout_acts_behind_the_activation(make_model: MakeModel) -> None:
    """With identities for both products, each positive element is 0 or doubled."""
    feed_forward = next(make_model(activation_dropout=0.5, ffn_dim=16).decoder_layers()).feed_forward
    for linear in (feed_forward.inner, feed_forward.outer):
        linear.weight.data, linear.bias.data = torch.eye(16), torch.zeros(16)
    x = torch.rand(5, 7, 16) + 1
    assert torch.equal(feed_forward(x), x)
    feed_forward.train()
    ratio = feed_forward(x) / x
    assert ratio.unique().tolist() == pytest.approx([0, 2])


LEARNED: dict[str, object] = {"num_positions": 20}
OTHER_SHAPES: list[dict[str, object]] = [
    LEARNED,
    {"first_position": 1, "scaled_embeddings": False, "activation": "gelu_tanh"},
    {"embedding_norm": True, "norm_first": False, "layer_norm_epsilon": 1e-2},
]


@pytest.mark.parametrize("changes", OTHER_SHAPES, ids=str)
def test_models_of_other_shapes_step_as_they_read(make_model: MakeModel, changes: dict[str, object]) -> None:
    """One token at a time gives the logits of the whole target at once, whatever the padding."""
    model = make_model(**changes)
    expected = logits_of(model, SOURCES, TARGETS)
    with torch.inference_mode():
        padded = torch.nn.functional.pad(pad(SOURCES, 0), (0, 30))  # behind the last learned position, too
        memory = model.keys_values(model.encode(padded, lengths_of(SOURCES)))
        past = empty_caches(model, 3, 9, memory)
        for position in range(6):
            tokens = torch.tensor([target[position] for target in TARGETS])
            cached = torch.full((3,), position, dtype=torch.int32)
            logits, past = model.step(tokens, cached, past, memory, lengths_of(SOURCES))
            torch.testing.assert_close(logits, expected[:, position], rtol=1e-4, atol=1e-5)


def test_what_the_layers_read_is_the_sum_that_the_options_name(make_model: MakeModel) -> None:
    """Embedding, scaled or not, plus learned vectors, or waves that count from the first position; then the norm."""
    tokens = torch.tensor([[4, 5, 6]])
    model = make_model(**LEARNED)
    assert model.source_positions is not None
    expected = model.source_embedding.weight[4:7] * 4 + model.source_positions.weight[:3]  # 4: the root of the width
    torch.testing.assert_close(model.embed_source(tokens, torch.arange(3))[0], expected)
    model = make_model(first_position=1, scaled_embeddings=False, embedding_norm=True)
    summed = model.target_embedding.weight[4:7] + sinusoidal_positions(torch.arange(1, 4), 16)
    torch.testing.assert_close(model.embed_target(tokens, torch.arange(3))[0], model.target_norm(summed))
