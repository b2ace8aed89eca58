"""Where each version of each model is in its life, as the server tells it and its clients read it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ModelState(StrEnum):
    """Of one version."""

    LOADING = "loading"  # found, being verified, or waiting for that
    READY = "ready"  # answers requests
    DRAINING = "draining"  # finishes the requests that it has, and takes no more
    FAILED = "failed"  # could not be loaded; what was served before it goes on


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One version of one model."""

    name: str
    version: str
    state: ModelState
    reason: str = ""  # why it failed
    is_default: bool = False  # whether it answers requests that name neither model nor version
