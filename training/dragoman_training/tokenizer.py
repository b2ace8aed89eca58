"""Text to ids and back: plain vocabularies and SentencePiece models.

The files are shared with the service, which has readers of its own. A plain vocabulary is JSON,

    {"kind": "plain", "unit": "character", "tokens": ["<pad>", "<s>", "</s>", "<unk>", "a", ...]}

a SentencePiece model its own format (``*.model``). The four specials come first; those of a vocabulary that comes from
elsewhere may be others, and anywhere: its file tells which (``"special": [0, 1, 2, 46], "unknown": 46``, and see
listed.py). Text that looks like a special is text: it never becomes that special's id. Sequence templates: a source is
its tokens and ``</s>``, or what ``SpecialIds`` has around it; the decoder reads ``SpecialIds.decoder_start`` and then
the target's tokens; the labels are the target's tokens and ``</s>``.
"""

from __future__ import annotations

import heapq
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import sentencepiece

from dragoman_training.config import TokenizerConfig
from dragoman_training.errors import CheckpointError, DataError
from dragoman_training.listed import ListedSentencePieceTokenizer, check_listed
from dragoman_training.protobuf import message_fields
from dragoman_training.sampling import Sampler

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
# A vocabulary is learned from at most so much text. The library needs up to about 7 (BPE) and 20 (unigram) bytes a
# character besides; unigram also takes several times as long.
TRAINING_LINES = 1_000_000
TRAINING_CHARACTERS = {"bpe": 50_000_000, "unigram": 20_000_000}
LONGEST_LINE = 4192  # bytes: the library's default; it does not look at longer ones
RESERVED = "\u2585"  # the library leaves out every line that holds it, without a word
SUFFIXES = {"plain": "json", "sentencepiece": "model", "sentencepiece+vocab": "json"}
TOO_FEW = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")  # the library's words


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """The ids with a meaning of their own. ``decoder_start`` is what the decoder reads first, everywhere.

    ``unused`` are those that no search may choose, such as those that only round up the target embedding's size;
    ``producible`` those of pad, bos, unk and decoder_start that it may. ``source_start`` and ``source_end`` stand
    around a source's tokens; ``pad``, behind a shorter source too, is an id of both sides.
    """

    pad: int = 0
    bos: int = 1
    eos: int = 2
    unk: int = 3
    decoder_start: int = 1
    unused: tuple[int, ...] = ()
    producible: tuple[int, ...] = ()
    source_start: tuple[int, ...] = ()
    source_end: tuple[int, ...] = (2,)

    @property
    def never_produced(self) -> tuple[int, ...]:
        """Ids that no search may choose."""
        named = {self.pad, self.bos, self.unk, self.decoder_start} - {*self.producible}
        return tuple(sorted({*named, *self.unused} - {self.eos}))

    def source(self, tokens: Iterable[int]) -> list[int]:
        """A source's tokens with what stands around them."""
        return [*self.source_start, *tokens, *self.source_end]

    def as_dict(self) -> dict[str, object]:
        """As stored in a checkpoint's config.json."""
        return {name: list(ids) if isinstance(ids, tuple) else ids for name, ids in asdict(self).items()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> SpecialIds:
        """Those of a checkpoint's config.json; what came later has its default. Raises TypeError for one without."""
        if missing := {"pad", "bos", "eos", "unk", "decoder_start", "unused"} - record.keys():
            raise TypeError(f"it lacks special_ids.{min(missing)}")
        fields: dict[str, Any] = {n: tuple(ids) if isinstance(ids, list) else ids for n, ids in record.items()}
        return cls(**fields)


SPECIAL_IDS = SpecialIds()


class Tokenizer(Protocol):
    """One vocabulary. ``encode`` adds no specials; ``decode`` leaves no trace of ``<pad>``, ``<s>`` and ``</s>``."""

    kind: str  # "plain", "sentencepiece" or "sentencepiece+vocab": how the file is read
    normalization: str  # the rule by which text is changed before it is split; "identity" for none

    def __len__(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def to_bytes(self) -> bytes: ...


class PlainTokenizer:
    """A token is one character, or one blank-separated piece. It does not normalise, strip or lower-case."""

    kind = "plain"
    normalization = "identity"

    def __init__(
        self, unit: str, tokens: Sequence[str], special: Sequence[int] = (), unknown: int = SPECIAL_IDS.unk
    ) -> None:
        """``special`` are ids, ``unknown`` among them; without any, the four specials come first."""
        if unit not in ("character", "piece"):
            raise CheckpointError(f"tokenizer unit is {unit!r}: choose character or piece")
        if not special and tuple(tokens[: len(SPECIAL_TOKENS)]) != SPECIAL_TOKENS:
            raise CheckpointError(f"tokens start with {list(tokens[:4])}: they must start with {list(SPECIAL_TOKENS)}")
        self.special = frozenset(special or range(len(SPECIAL_TOKENS)))
        check_listed(tokens, self.special, unknown)
        self.unit = unit
        self.tokens = tuple(tokens)
        self.unknown = unknown
        self._has_four = not special
        self._ids = {token: index for index, token in enumerate(tokens) if index not in self.special}
        for token in self._ids:
            if (unit == "character" and len(token) != 1) or (unit == "piece" and " " in token):
                raise CheckpointError(f"token {token!r} is no {unit}: build the vocabulary from text again")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def build(cls, unit: str, lines: Iterable[str]) -> PlainTokenizer:
        """The vocabulary of all tokens in ``lines``, in code point order."""
        seen: set[str] = set()
        for line in lines:
            seen.update(split_text(unit, line))
        return cls(unit, [*SPECIAL_TOKENS, *sorted(seen - set(SPECIAL_TOKENS))])

    def encode(self, text: str) -> list[int]:
        """Ids of a text's tokens; a token outside the vocabulary becomes ``<unk>``."""
        return [self._ids.get(token, self.unknown) for token in split_text(self.unit, text)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special tokens leave no trace, but for ``<unk>``, which shows as U+FFFD."""
        shown = (i for i in ids if i == self.unknown or i not in self.special)
        parts = ["\ufffd" if i == self.unknown else self.tokens[i] for i in shown]
        return ("" if self.unit == "character" else " ").join(parts)

    def to_bytes(self) -> bytes:
        """The file described above."""
        content: dict[str, object] = {"kind": "plain", "unit": self.unit, "tokens": list(self.tokens)}
        if not self._has_four:
            content |= {"special": sorted(self.special), "unknown": self.unknown}
        return (json.dumps(content, ensure_ascii=False) + "\n").encode("utf-8")

    @classmethod
    def from_bytes(cls, data: bytes) -> PlainTokenizer:
        """Read the file described above; anything else is a ``CheckpointError``."""
        try:
            content = json.loads(data)
            if content["kind"] != "plain":
                raise CheckpointError(f"kind is {content['kind']!r}: this reader knows plain")
            others = {name: content[name] for name in ("special", "unknown") if name in content}
            return cls(content["unit"], content["tokens"], **others)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"not a plain vocabulary: {error}") from error


class SentencePieceTokenizer:
    """A SentencePiece model (Kudo and Richardson 2018), unigram or BPE.

    Superfluous blanks are lost (at the ends, and all but one between words), and U+2581, the library's own mark of a
    blank, becomes one. Any other text comes back unchanged where the normalisation is ``identity`` and the model has
    byte pieces. Several threads may encode and decode with one object.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes) -> None:
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            normalizer = message_fields(message_fields(model)[3])
            self.normalization = normalizer[1].decode("utf-8")
        except (RuntimeError, ValueError, LookupError) as error:  # ValueError: an empty file
            raise CheckpointError(f"not a SentencePiece model: {error}") from error
        self._model = model
        processor = self._processor
        ids = (processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id())
        expected = (SPECIAL_IDS.pad, SPECIAL_IDS.bos, SPECIAL_IDS.eos, SPECIAL_IDS.unk)
        if ids != expected:
            raise CheckpointError(f"<pad>, <s>, </s>, <unk> have the ids {ids}: they must be {expected}")
        self._sampler = Sampler(processor)

    def __len__(self) -> int:
        return int(self._processor.get_piece_size())

    @classmethod
    def train(cls, config: TokenizerConfig, lines: Iterable[str], seed: int) -> SentencePieceTokenizer:
        """Learn a vocabulary of ``config.vocab_size`` tokens from lines of text.

        Of more than a million lines, or more characters than ``TRAINING_CHARACTERS``, a random sample of that size is
        looked at and held in memory; blank lines and those over ``LONGEST_LINE`` bytes are not looked at, and U+2585
        is read as a blank. The same lines and ``seed`` give the same vocabulary, in any process. Raises ``DataError``
        when the lines do not hold that many tokens, when their characters alone are more, and when none is looked at.
        """
        assert config.vocab_size is not None  # TokenizerConfig checks
        readable = (line.replace(RESERVED, " ") for line in lines)
        usable = (line for line in readable if line.strip() and len(line.encode("utf-8")) <= LONGEST_LINE)
        drawn = drawn_lines(usable, TRAINING_LINES, TRAINING_CHARACTERS[config.kind], Random(seed))
        if not drawn:
            raise DataError(
                f"the training text has no line to learn a vocabulary from: all are blank or over {LONGEST_LINE} bytes:"
                " add text, or divide long lines"
            )
        drawn.reverse()
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(drawn.pop() for _ in range(len(drawn))),  # held once: the library copies them
                model_writer=model,
                model_type=config.kind,
                vocab_size=config.vocab_size,
                character_coverage=config.character_coverage,
                byte_fallback=config.byte_fallback,
                split_digits=config.split_digits,
                user_defined_symbols=list(config.user_defined_symbols),
                normalization_rule_name=config.normalization,
                pad_id=SPECIAL_IDS.pad,
                bos_id=SPECIAL_IDS.bos,
                eos_id=SPECIAL_IDS.eos,
                unk_id=SPECIAL_IDS.unk,
                unk_surface="\ufffd",
                input_sentence_size=0,  # all: its own sample is another one in each process
                max_sentence_length=LONGEST_LINE,
                num_threads=1,  # the result depends on it
                minloglevel=2,
            )
        except RuntimeError as error:
            words = str(error).rpartition("] ")[2].strip()
            if needed := TOO_FEW.search(words):
                raise DataError(
                    f"tokenizer.vocab_size is {config.vocab_size}: the characters of the training text, with the"
                    f" special tokens and bytes, are {needed[1]}: raise it, or lower tokenizer.character_coverage"
                ) from error
            raise DataError(
                f"the training text gives no vocabulary of tokenizer.vocab_size = {config.vocab_size} tokens: lower it,"
                f" or add text ({words})"
            ) from error
        return cls(model.getvalue())

    def encode(self, text: str) -> list[int]:
        """The one best segmentation; superfluous blanks are gone."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def sample(self, texts: Sequence[str], sampling: float, seed: int) -> list[list[int]]:
        """A random segmentation of each text: see sampling.py. The same seed gives the same ids."""
        random = Random(seed)
        return [self._sampler.sample(text, sampling, random) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; ``<unk>`` and bytes that are no UTF-8 show as U+FFFD."""
        text: str = self._processor.decode(list(ids))
        return text

    def to_bytes(self) -> bytes:
        """The SentencePiece model file."""
        return self._model


def drawn_lines(lines: Iterable[str], most_lines: int, most_characters: int, random: Random) -> list[str]:
    """A random sample of the lines, in their order, as large as both limits allow; all of them if they fit.

    Each line draws a number, and those with the lowest stay: one reading, and only the sample in memory.
    """
    kept: list[tuple[float, int, str]] = []  # a heap, the highest number first
    characters, bound = 0, 1.0
    for place, line in enumerate(lines):
        if (number := random.random()) >= bound:
            continue
        heapq.heappush(kept, (-number, place, line))
        characters += len(line)
        while len(kept) > most_lines or characters > most_characters:
            number, _, out = heapq.heappop(kept)
            characters -= len(out)
            bound = -number
    kept.sort(key=lambda item: item[1])
    return [line for _, _, line in kept]


def train_tokenizers(
    config: TokenizerConfig, pairs: Callable[[], Iterable[tuple[str, str]]], seed: int
) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers of the source and the target side; one object for both when they are joint.

    ``pairs`` starts to read the training text anew: each vocabulary takes one reading, and none is kept in memory.
    """
    if config.kind == "plain":
        assert config.source_unit is not None and config.target_unit is not None  # TokenizerConfig checks
        source_tokenizer = PlainTokenizer.build(config.source_unit, (source for source, _ in pairs()))
        return source_tokenizer, PlainTokenizer.build(config.target_unit, (target for _, target in pairs()))
    if config.joint:
        both = SentencePieceTokenizer.train(config, (text for pair in pairs() for text in pair), seed)
        return both, both
    return (
        SentencePieceTokenizer.train(config, (source for source, _ in pairs()), seed),
        SentencePieceTokenizer.train(config, (target for _, target in pairs()), seed),
    )


def file_names(source: Tokenizer, target: Tokenizer) -> dict[str, str]:
    """What the files of each side are called in a checkpoint: one file when the sides share a tokenizer."""
    if source is target:
        name = f"tokenizer.{SUFFIXES[source.kind]}"
        return {"source": name, "target": name}
    sides = (("source", source), ("target", target))
    return {side: f"{side}.tokenizer.{SUFFIXES[tokenizer.kind]}" for side, tokenizer in sides}


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer file, by its ending and, of JSON, its kind; ``CheckpointError`` naming the file otherwise."""
    try:
        data = path.read_bytes()
        if path.suffix == ".model":
            return SentencePieceTokenizer(data)
        return (ListedSentencePieceTokenizer if _is_listed(data) else PlainTokenizer).from_bytes(data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path} is no tokenizer file: {error}") from error


def _is_listed(data: bytes) -> bool:
    try:
        return bool(json.loads(data)["kind"] == ListedSentencePieceTokenizer.kind)
    except (ValueError, KeyError, TypeError):  # whatever it is, the other reader tells
        return False


def split_text(unit: str, text: str) -> list[str]:
    """The tokens of a text as strings: its characters, or what stands between blanks (U+0020)."""
    return list(text) if unit == "character" else [piece for piece in text.split(" ") if piece]
