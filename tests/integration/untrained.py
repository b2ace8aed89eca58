"""A model at toy size that nobody trained: quickly made, of strong opinions, with answers that end."""

import random

import torch

from dragoman_training.checkpoint import LoadedCheckpoint
from dragoman_training.config import ModelConfig, padded_vocab_size
from dragoman_training.data import encode_source
from dragoman_training.decode import greedy
from dragoman_training.model import Transformer
from dragoman_training.tokenizer import PlainTokenizer, SpecialIds, file_names

SHAPES = {
    "pre-norm, gelu": {"norm_first": True, "activation": "gelu", "tied_embeddings": "all"},
    "post-norm, relu": {"norm_first": False, "activation": "relu", "tied_embeddings": "none"},
}
ENCODER_LAYERS, DECODER_LAYERS = 1, 1


def texts(count, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefgh", k=rng.randint(1, 12))) for _ in range(count)]


def untrained(shape, folder):
    """A checkpoint of strong opinions that ends its answers."""
    folder.mkdir()
    tokenizer = PlainTokenizer.build("character", texts(50))
    files = file_names(tokenizer, tokenizer)
    for file in files.values():
        (folder / file).write_bytes(tokenizer.to_bytes())
    size = padded_vocab_size(len(tokenizer))
    special = SpecialIds(unused=tuple(range(len(tokenizer), size)))
    config = ModelConfig(
        d_model=64,
        num_heads=2,
        ffn_dim=96,
        encoder_layers=ENCODER_LAYERS,
        decoder_layers=DECODER_LAYERS,
        source_vocab_size=size,
        target_vocab_size=size,
        **shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Transformer(config).eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    sources = [encode_source(tokenizer, text) for text in texts(20)]
    model.projection.bias.data[list(special.never_produced)] = 50
    end_sometimes(model, special, sources, 1 / 3)
    return LoadedCheckpoint(folder, model, tokenizer, tokenizer, files, special, 64, 24, {"training": {}, "data": {}})


@torch.inference_mode()
def end_sometimes(model, special, sources, share):
    """Set the bias of the end token so that it is the best at this share of the steps."""
    bias = model.projection.bias.data
    bias[special.eos] = -1000
    gaps = []  # the end's distance to the best token, at each step
    for source, answer in zip(sources, greedy(model, sources, 24, special), strict=True):
        inputs = torch.tensor([[special.decoder_start, *answer.tokens[:-1]]])
        logits = model(torch.tensor([source]), torch.tensor([len(source)], dtype=torch.int32), inputs)[0]  # (T, V)
        gaps.append(logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0] - logits[:, special.eos])
    bias[special.eos] += torch.cat(gaps).quantile(share)
