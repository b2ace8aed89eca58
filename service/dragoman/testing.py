"""Stand-ins for tests, shipped so that a user's tests can have them too: a runner that follows a script, no ONNX.

``ScriptedRunner`` keeps per row what a real one keeps, the source and the fed tokens, so that a wrong slot, move or
length shows in the answers. ``scripted_model`` puts it behind the real engine and pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dragoman.alignment import Aligner, ForcedPass
from dragoman.bundle import (
    FORMAT_VERSION,
    Graph,
    GraphSet,
    Limits,
    Manifest,
    ModelBundle,
    ModelShape,
    SpecialIds,
    TokenizerEntry,
    Tokenizers,
)
from dragoman.config import EngineConfig
from dragoman.engine.engine import Engine
from dragoman.pipeline import TextLimits, TextPipeline
from dragoman.served_model import ServedModel, token_rules
from dragoman.tokenizer import SourceTokenizer, TargetTokenizer
from dragoman.types import FloatArray, IntArray, StatsListener, TokenIds
from dragoman.vocabulary import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, UNK_ID, PlainVocabulary

Script = Callable[[TokenIds, TokenIds], Sequence[float]]
"""Logits (V,) after a source and the target tokens fed so far, the decoder start included."""

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = PlainVocabulary("character", (*SPECIAL_TOKENS, *ALPHABET))


def copy_script(source: TokenIds, fed: TokenIds) -> Sequence[float]:
    """Answer with the source itself, and end where it ends, or later where that is not taken."""
    logits = [0.0] * len(VOCABULARY.tokens)
    logits[source[min(len(fed), len(source)) - 1]] = 5.0
    return logits


class ScriptedRunner:
    """A ``Runner`` whose logits come from a script."""

    def __init__(self, script: Script = copy_script, num_slots: int = 8) -> None:
        self._script = script
        self._num_slots = num_slots
        self._sources: list[TokenIds] = [()] * num_slots
        self._fed: list[TokenIds] = [()] * num_slots
        self.num_decode_steps = 0
        self.encoded: list[TokenIds] = []
        self.before_decode: Callable[[], None] = lambda: None

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def kv_cache_bytes(self) -> int:
        return 0

    def reserve(self, num_source_tokens: int, max_new_tokens: int) -> None:
        """There is always room."""

    def admit(
        self, sources: Sequence[TokenIds], slots: Sequence[Sequence[int]], prefixes: Sequence[TokenIds] = ()
    ) -> None:
        self.encoded += sources
        for source, own in zip(sources, slots, strict=True):
            for slot in own:
                self._sources[slot], self._fed[slot] = source, ()

    def decode(self, tokens: IntArray) -> FloatArray:
        self.before_decode()
        self.num_decode_steps += 1
        rows = range(len(tokens))
        for row in rows:
            self._fed[row] = (*self._fed[row], int(tokens[row]))
        return np.array([self._script(self._sources[row], self._fed[row]) for row in rows], np.float32)

    def move(self, source_slot: int, target_slot: int) -> None:
        self._sources[target_slot], self._fed[target_slot] = self._sources[source_slot], self._fed[source_slot]

    def fork(self, source_slot: int, target_slot: int) -> None:
        assert self._sources[target_slot] == self._sources[source_slot]
        self._fed[target_slot] = self._fed[source_slot]


def scripted_manifest(name: str = "scripted", limits: Limits | None = None) -> Manifest:
    """A manifest for ``VOCABULARY`` on both sides; its files do not exist."""
    size = len(VOCABULARY.tokens)
    graph = Graph("none.onnx", (), (), {}, {}, {})
    return Manifest(
        format_version=FORMAT_VERSION,
        name=name,
        version="1",
        created="2000-01-01T00:00:00Z",
        model=ModelShape(32, 1, 32, 1, 1, size, size),
        special_ids=SpecialIds(EOS_ID, BOS_ID, (PAD_ID, BOS_ID, UNK_ID)),
        limits=limits or Limits(max_source_tokens=64, max_new_tokens=64),
        unknown_policy="refuse",
        tokenizers=Tokenizers(
            TokenizerEntry("plain", "source.json", size, (), (EOS_ID,), "identity"),
            TokenizerEntry("plain", "target.json", size, (BOS_ID,), (EOS_ID,), "identity"),
        ),
        graphs=(GraphSet("cpu", "fp32", 17, "float", True, graph, graph, "golden.jsonl", 1e-3, {}, {}),),
        quality={},
        provenance={},
    )


def scripted_model(
    runners: Sequence[ScriptedRunner] | None = None,
    config: EngineConfig | None = None,
    limits: TextLimits | None = None,
    listener: StatsListener | None = None,
    manifest: Manifest | None = None,
    forced_pass: ForcedPass | None = None,
    coverage: ForcedPass | None = None,
) -> ServedModel:
    """A served model that follows a script; by default it answers a word of a-z with itself. Not started yet."""
    manifest = manifest or scripted_manifest()
    engine = Engine(runners or [ScriptedRunner()], token_rules(manifest), config or EngineConfig(), listener)
    pipeline = TextPipeline(
        manifest,
        SourceTokenizer(VOCABULARY, (), (EOS_ID,)),
        TargetTokenizer(VOCABULARY),
        engine,
        limits or TextLimits(max_text_bytes=65536, max_segments=256),
        None if forced_pass is None else Aligner(forced_pass, engine.max_waiting, coverage),
    )
    return ServedModel(ModelBundle(Path(), manifest), manifest.graphs[0], engine, pipeline)
