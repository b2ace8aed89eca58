"""The coverage penalty: by hand, and with weights that another writing of the attention hands out."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dragoman_training.attention import TorchAttention, length_mask, merge_heads, split_heads
from dragoman_training.beam import BeamOptions, beam_search
from dragoman_training.coverage import attention_weights, coverage_penalty
from dragoman_training.model import Transformer
from dragoman_training.tokenizer import SPECIAL_IDS

EOS = SPECIAL_IDS.eos


class Recording(TorchAttention):
    """Step by step, and keeps the cross-attention's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def encoder(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        return TorchAttention().encoder(q, k, v, num_heads, lengths)

    def cross(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, lengths: Tensor) -> Tensor:
        scores = torch.einsum("bhtd,bhsd->bhts", split_heads(q, num_heads), k) / math.sqrt(k.shape[-1])
        self.weights.append(scores.masked_fill(~length_mask(lengths, k.shape[2]), -math.inf).softmax(dim=-1))
        return merge_heads(self.weights[-1] @ v)


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_weights_are_those_of_the_last_decoder_layer(
    make_model: Callable[..., Transformer], norm_first: bool
) -> None:
    """The mean of its heads, for each token that is read."""
    model = make_model(norm_first=norm_first, decoder_layers=3)
    source, read = [4, 5, 6, 7, EOS], [SPECIAL_IDS.decoder_start, 8, 4, 9]
    with torch.inference_mode():
        weights = attention_weights(model, source, read)
        recording = Recording()
        model.use_attention(recording)
        model(torch.tensor([source]), torch.tensor([len(source)]).int(), torch.tensor([read]))
    assert len(recording.weights) == 3
    torch.testing.assert_close(weights, recording.weights[-1][0].mean(dim=0), atol=1e-5, rtol=0)


def test_the_penalty_by_hand() -> None:
    """The first position got more than enough, the second and third 3/8 each, the last none at all."""
    weights = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.75, 0.125, 0.125, 0.0]])
    assert coverage_penalty(weights) == pytest.approx(2 * math.log(3 / 8))
    assert coverage_penalty(torch.ones(2, 3)) == 0.0


def test_it_changes_the_scores_of_what_is_finished(make_model: Callable[..., Transformer]) -> None:
    """Ended and cut hypotheses, with a prefix: each gets what the attention of all its steps is worth, and the order
    follows."""
    model = make_model()
    model.projection.bias.data[EOS] += 1.0
    source, prefix = [4, 5, 6, 7, 8, EOS], [5]
    reasons, moved = set(), False
    for limit in (3, 6):
        plain = BeamOptions(beam_size=4, max_new_tokens=limit, num_hypotheses=4)
        found = beam_search(model, source, replace(plain, coverage_penalty=2.0), prefix=prefix)
        for hypothesis in found:
            written = hypothesis.tokens if hypothesis.finish_reason == "stop" else hypothesis.tokens[:-1]
            with torch.inference_mode():
                weights = attention_weights(model, source, [SPECIAL_IDS.decoder_start, *written])
            assert weights.shape == (len(prefix) + len(hypothesis.log_probs), len(source))
            normalised = sum(hypothesis.log_probs) / len(hypothesis.log_probs)
            assert hypothesis.score == pytest.approx(normalised + 2 * coverage_penalty(weights), abs=1e-5)
            reasons.add(hypothesis.finish_reason)
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
        without = beam_search(model, source, plain, prefix=prefix)
        moved = moved or [h.tokens for h in found] != [h.tokens for h in without]
    assert reasons == {"stop", "length"}
    assert moved
