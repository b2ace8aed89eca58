"""Greedy output of a served bundle against PyTorch, over a whole test set, through gRPC.

    dragoman serve bundles/g2p-en &
    python tests/bench/parity.py runs/g2p-en --target localhost:50051 --source g2p-data/test.source

Prints how many answers are equal and lists ties (two logits within 1e-4); exit status 1 on any other difference.
"""

import argparse
import asyncio
import sys
from pathlib import Path

import sentencepiece

from dragoman.client import AsyncClient
from dragoman_export.verify import TIE_GAP, reference_activations
from dragoman_training.checkpoint import LoadedCheckpoint, load_model
from dragoman_training.corpus import read_lines
from dragoman_training.data import encode_source
from dragoman_training.decode import greedy_all
from dragoman_training.tokenizer import PlainTokenizer, Tokenizer


async def served(target: str, texts: list[str]) -> list[tuple[str, ...]]:
    """The server's tokens for each text, many requests in flight."""
    window = asyncio.Semaphore(256)
    async with AsyncClient(target) as client:

        async def one(text: str) -> tuple[str, ...]:
            async with window:
                return (await client.generate(text)).segments[0].hypotheses[0].tokens

        return list(await asyncio.gather(*map(one, texts)))


def token_names(tokenizer: Tokenizer) -> list[str]:
    """What a server calls the tokens, in the order of their ids."""
    if isinstance(tokenizer, PlainTokenizer):
        return list(tokenizer.tokens)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.to_bytes())
    return [pieces.id_to_piece(index) for index in range(len(tokenizer))]


def gap(checkpoint: LoadedCheckpoint, text: str, actual: list[int], expected: list[int]) -> tuple[int, float]:
    """The first differing step and how far apart the two choices' logits are there, by PyTorch."""
    eos = checkpoint.special.eos
    a, b = [*actual, eos], [*expected, eos]
    step = next(i for i in range(len(a)) if a[i] != b[i])
    source = tuple(encode_source(checkpoint.source_tokenizer, text))
    start = checkpoint.special.decoder_start
    logits = reference_activations(checkpoint.model, source, tuple(b[:step]), start).logits[step]
    return step, abs(float(logits[a[step]] - logits[b[step]]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--source", type=Path, required=True)
    args = parser.parse_args()
    checkpoint = load_model(args.checkpoint)
    texts = read_lines(args.source)
    answers = asyncio.run(served(args.target, texts))
    sources = [encode_source(checkpoint.source_tokenizer, text) for text in texts]
    references = greedy_all(checkpoint.model, sources, checkpoint.max_target_tokens, checkpoint.special)
    ids = {token: index for index, token in enumerate(token_names(checkpoint.target_tokenizer))}
    ties = differences = 0
    for text, answer, reference in zip(texts, answers, references, strict=True):
        actual = [ids[token] for token in answer]
        if actual != reference.tokens:
            step, distance = gap(checkpoint, text, actual, reference.tokens)
            is_tie = distance <= TIE_GAP
            ties, differences = ties + is_tie, differences + (not is_tie)
            print(f"{'tie' if is_tie else 'DIFFERENCE'}: {text}, token {step}, logits {distance:.2g} apart")
    print(f"{len(texts)} sources: {len(texts) - ties - differences} equal, {ties} ties, {differences} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
