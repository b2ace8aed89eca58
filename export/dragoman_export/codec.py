"""Text to tokens and back as the service does it, proven to be as training does it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dragoman.errors import InvalidRequestError
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer
from dragoman.vocabulary import SPECIAL_TOKENS, Vocabulary, load_vocabulary
from dragoman_export.errors import ExportError
from dragoman_training.checkpoint import LoadedCheckpoint
from dragoman_training.data import encode_source
from dragoman_training.tokenizer import SpecialIds

Encoded = list[tuple[str, tuple[int, ...]]]
"""Texts with their source tokens."""


class Codec:
    """The service's tokenizers for a checkpoint. Raises ExportError wherever training's give something else."""

    def __init__(self, checkpoint: LoadedCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.vocabularies = {
            side: load_vocabulary(tokenizer.kind, checkpoint.folder / checkpoint.tokenizer_files[side])
            for side, tokenizer in (("source", checkpoint.source_tokenizer), ("target", checkpoint.target_tokenizer))
        }
        special = checkpoint.special
        check_special_ids(special, self.vocabularies["source"], self.vocabularies["target"])
        self._source = SourceTokenizer(self.vocabularies["source"], special.source_start, special.source_end)
        self._target = TargetTokenizer(self.vocabularies["target"])
        self._check_pieces()

    def encode(self, text: str) -> tuple[int, ...] | None:
        """A text's source tokens; None where the service would refuse it, or return it as it is."""
        try:
            source = self._source.encode(text)
        except InvalidRequestError:  # counted by the caller as one of those that are left out
            return None
        if list(source) != encode_source(self._checkpoint.source_tokenizer, text, self._checkpoint.special):
            raise ExportError(
                f"the service encodes {text!r} as {list(source)}, training does not: the tokenizers differ"
            )
        own = self.own(source)
        is_text = text.strip() and own.start < own.stop
        return source if is_text and len(source) <= self._checkpoint.max_source_tokens else None

    def own(self, source: tuple[int, ...]) -> slice:
        """Where in a text's source tokens its own are, without the template's."""
        return self._source.own(source)

    def encode_all(self, texts: Sequence[str]) -> Encoded:
        """Those of the texts that the service accepts."""
        return [(text, source) for text in texts if (source := self.encode(text)) is not None]

    def decode(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """The texts of some answers."""
        texts = []
        for tokens in answers:
            served = self._target.decode(tuple(tokens))
            # Training shows <unk> as U+FFFD; to a caller it stands for nothing, or for a word of the source.
            known = [token for token in tokens if token != self._target.unknown_id]
            trained = self._checkpoint.target_tokenizer.decode(known)
            if served != trained:
                raise ExportError(f"the service decodes {list(tokens)} to {served!r}, training to {trained!r}")
            texts.append(served)
        return texts

    def generated(self, count: int) -> Encoded:
        """Texts of random tokens, for a model that comes without any: short and long, the same each time."""
        tokenizer, rng = self._checkpoint.source_tokenizer, random.Random(0)
        most = self._checkpoint.max_source_tokens - len(self._checkpoint.special.source([]))
        encoded: Encoded = []
        for index in range(4 * count):
            length = 1 + index * min(most, 60) // (4 * count)
            text = tokenizer.decode(rng.choices(range(len(tokenizer)), k=length))
            encoded += self.encode_all([text])
        return encoded[:: max(1, len(encoded) // count)]

    def _check_pieces(self) -> None:
        """Raises ExportError unless the service decodes every token that may be produced as training does.

        Each is decoded as a whole answer, and behind another token: at the start of an answer, blanks go away. The
        model's own answers to a few sources hold but a part of the vocabulary.
        """
        special = self._checkpoint.special
        left_out = {special.eos, *special.never_produced}
        ids = [index for index in range(len(self._checkpoint.target_tokenizer)) if index not in left_out]
        alone = self.decode([(index,) for index in ids])
        _, first = max(zip(map(len, alone), ids, strict=True))  # the longest text: it surely starts the answer
        self.decode([(first, index) for index in ids])


def check_special_ids(special: SpecialIds, source: Vocabulary, target: Vocabulary) -> None:
    """Raises ExportError unless each id is that of the token that it is named after: training knows no others.

    Where a vocabulary has other special tokens than training's, those with a meaning have to be some of these. A
    comparison with PyTorch cannot tell, because both sides would start and end by the same wrong id.
    """
    if target.tokens[: len(SPECIAL_TOKENS)] == SPECIAL_TOKENS:
        names = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>", "decoder_start": "<s>"}
        for name, token in names.items():
            index, right = getattr(special, name), target.tokens.index(token)
            if index != right:
                raise ExportError(
                    f"special_ids.{name} of the checkpoint is {index}; models are trained with {right}, the id of "
                    f"{token}"
                )
    for name, ids, vocabulary in (
        ("eos", (special.eos,), target),
        ("decoder_start", (special.decoder_start,), target),
        ("source_start", special.source_start, source),
        ("source_end", special.source_end, source),
    ):
        for index in ids:
            if not 0 <= index < len(vocabulary.tokens) or vocabulary.pieces[index] is not None:
                raise ExportError(
                    f"special_ids.{name} of the checkpoint has {index}, which is no special token of its vocabulary"
                )
    if special.unk != target.unknown_id:
        raise ExportError(
            f"special_ids.unk of the checkpoint is {special.unk}; its target vocabulary's is {target.unknown_id}"
        )
