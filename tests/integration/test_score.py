"""Scores of given answers, against plain PyTorch."""

import pytest
import torch

from dragoman.config import EngineConfig
from dragoman.pipeline import TextLimits
from dragoman.served_model import ServedModel
from dragoman.types import DecodingOptions
from dragoman_training.checkpoint import load_model
from dragoman_training.data import encode_source
from dragoman_training.decode import score


async def test_scores_are_those_of_the_reference(reverse_bundle, reverse_run, reverse_data):
    """Of right, wrong and empty answers: each token's within 1e-4. Of what a search wrote, they are the search's."""
    torch.set_num_threads(1)
    checkpoint = load_model(reverse_run)
    lines = (reverse_data / "dev.source").read_text().split()[:40]
    targets = [" ".join(reversed(line.upper())) for line in lines]
    pairs = [*zip(lines, targets, strict=True), *zip(lines, [*targets[1:], ""], strict=True)]
    served = ServedModel.load(reverse_bundle, EngineConfig(), TextLimits(1000, 10))
    served.start()
    try:
        for text, target in pairs:
            found = await served.pipeline.score(text, target)
            expected = score(
                checkpoint.model,
                encode_source(checkpoint.source_tokenizer, text),
                checkpoint.target_tokenizer.encode(target),
                checkpoint.special,
            )
            assert found.token_scores == pytest.approx(expected, abs=1e-4)
            assert found.log_probability == pytest.approx(sum(expected), abs=1e-3)
        searched = (await served.pipeline.generate(lines[0], DecodingOptions(return_scores=True))).segments[0]
        answer = searched.hypotheses[0]
        assert (await served.pipeline.score(lines[0], answer.text)).token_scores == answer.token_scores
    finally:
        await served.close()
