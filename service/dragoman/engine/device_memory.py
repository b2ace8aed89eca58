"""What a runner will take of a device's memory, planned before any of it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dragoman.bundle import ModelShape
from dragoman.errors import ConfigError


@dataclass(frozen=True)
class MemoryPlan:
    """What a runner will take of the device's memory, in bytes."""

    weights: int
    kv_cache: int
    workspace: int  # an estimate, of the largest run of each graph
    limit: int  # 0: none was set

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.workspace

    @property
    def for_sessions(self) -> int:
        """What any one session's arena may grow to: all but what is allocated beside them. 0: what is free."""
        return self.limit and self.limit - self.kv_cache

    def check(self) -> None:
        """Raises ConfigError where that is more than the limit."""
        if self.limit and self.total > self.limit:
            raise ConfigError(
                f"a replica needs {self.total} bytes of the device ({'; '.join(self.lines())}): lower --slots or "
                "--max-encode-tokens, or raise --gpu-mem-limit"
            )

    def lines(self) -> tuple[str, ...]:
        """For people to read."""
        parts = {"weights": self.weights, "KV cache": self.kv_cache, "workspace, estimated": self.workspace}
        limit = f"{self.limit / 2**20:,.1f} MiB" if self.limit else "none"
        return (*(f"{name} {size / 2**20:,.1f} MiB" for name, size in parts.items()), f"limit {limit}")


def plan_memory(
    shape: ModelShape,
    graphs: Sequence[bytes | Path],
    num_slots: int,
    tokens_of_a_row: int,
    most_encoded: int,
    limit: int,
) -> MemoryPlan:
    """For these graph files, rows with room for so many tokens of either side, and that many encoded together."""
    width = shape.num_heads * shape.head_dim
    token = 2 * 2 * shape.decoder_layers * width  # keys and values of float16, of every layer
    kv_cache = num_slots * token * tokens_of_a_row
    # The encoder: its outputs, and about a dozen values of the model's width a token, that live at once. After a step:
    # the logits; masked copies of four bytes; keys and weights of eight. Rows are copied by way of one layer's.
    workspace = most_encoded * (token + 12 * 2 * width) + num_slots * shape.target_vocab_size * (4 + 4 * 4 + 4 * 8)
    return MemoryPlan(
        weights=sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in graphs),
        kv_cache=kv_cache,
        workspace=workspace + kv_cache // shape.decoder_layers,
        limit=limit,
    )
