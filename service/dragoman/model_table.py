"""The models that are served, by name and version: who answers a request, and until when. On the event loop.

A call holds what it works with: a model that is retired gets no new call, and is closed when the last one has ended.
So a version can be swapped for another while requests come in: each is answered by one model, from start to end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from dragoman.errors import ConfigError, DragomanError, ModelNotFoundError, NotReadyError
from dragoman.model_status import ModelState, ModelStatus
from dragoman.served_model import ServedModel


class TableListener(Protocol):
    """Who wants to know of changes; called on the event loop."""

    def on_ready(self, model: ServedModel) -> None:
        """This model's engine runs, and it answers requests from now on."""

    def on_gone(self, model: ServedModel) -> None:
        """This model is about to be closed."""

    def on_change(self) -> None:
        """Some status is another than before, or an engine is dead."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A model that is in memory and ours to close."""

    model: ServedModel
    num_leases: int = 0
    retired: bool = False
    unused: asyncio.Event = field(default_factory=asyncio.Event)  # retired, and the last lease is gone
    watch: asyncio.Task[None] | None = None


class ModelTable:
    """The served models. Starts and closes their engines; loads nothing (see ``model_loader.py``)."""

    def __init__(self, models: Sequence[ServedModel] = (), default: str | None = None) -> None:
        """``models``: loaded, not started; others come with ``add``.

        ``default``: the name of the model for requests that name none; None means the first model's. Empty means that
        such requests go to the only name there is; where there are several, they are refused.

        Raises ConfigError for two models alike.
        """
        names = [f"{model.name} version {model.version}" for model in models]
        if len(set(names)) != len(names):
            raise ConfigError(f"two models have the same name and version: {', '.join(names)}")
        self.default = default if default is not None else models[0].name if models else ""
        self._entries = [_Entry(model) for model in models]
        self._pending: dict[tuple[str, str], ModelStatus] = {}  # what is not in memory: it loads, or it failed
        self._listener: TableListener | None = None
        self._failures: asyncio.Queue[DragomanError] = asyncio.Queue()
        self._is_live = True

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """Those that answer requests: the default first, then by name, of each name the newest first."""
        ready = [entry.model for entry in self._entries if not entry.retired]
        ready.sort(key=lambda model: version_order(model.version), reverse=True)
        ready.sort(key=lambda model: (model.name != self.default, model.name))
        return tuple(ready)

    @property
    def num_loaded(self) -> int:
        """How many versions are in memory, those that drain included."""
        return len(self._entries)

    @property
    def is_live(self) -> bool:
        """False once an engine is dead: the process should end."""
        return self._is_live

    def statuses(self) -> list[ModelStatus]:
        """All versions that there are, by name, the newest first."""
        first = self.models[:1] if self._default_name() else ()
        found = [
            ModelStatus(
                entry.model.name,
                entry.model.version,
                ModelState.DRAINING if entry.retired else ModelState.READY,
                is_default=entry.model in first,
            )
            for entry in self._entries
        ]
        found += self._pending.values()
        found.sort(key=lambda status: version_order(status.version), reverse=True)
        found.sort(key=lambda status: status.name)
        return found

    def find(self, name: str, version: str) -> ServedModel:
        """The model for a request; it is only sure to be there until the caller's next ``await``.

        No version means the newest: the highest, where numbers within it count as such. Raises ModelNotFoundError
        listing what there is, and NotReadyError for what is still being loaded.
        """
        return self._find(name, version).model

    @contextmanager
    def leases(self) -> Generator[Leases]:
        """For one call: the models that it asks for stay until it ends."""
        leases = Leases(self)
        try:
            yield leases
        finally:
            leases.release()

    def start(self, listener: TableListener) -> None:
        """Start the engines; those of models that are added later start as they come."""
        self._listener = listener
        for entry in self._entries:
            self._start(entry)
        listener.on_change()

    def announce(self, name: str, version: str, state: ModelState, reason: str = "") -> None:
        """Tell of a version that is not in memory, and loads or failed to."""
        self._pending[name, version] = ModelStatus(name, version, state, reason)
        self._changed()

    def forget(self, name: str, version: str) -> None:
        """Nothing more is to be told of a version that is not in memory."""
        if self._pending.pop((name, version), None) is not None:
            self._changed()

    def add(self, model: ServedModel) -> ServedModel | None:
        """Start a model's engine and let it take requests, the next one already.

        Returns the one of the same name and version that it stands in for, retired: ``finish`` is to follow.
        """
        entry = _Entry(model)
        if self._listener is not None:
            self._start(entry)
        replaced = next((e for e in self._entries if not e.retired and _names(e.model) == _names(model)), None)
        if replaced is not None:
            self._retire(replaced)
        self._entries.append(entry)
        self._pending.pop(_names(model), None)
        self._changed()
        return None if replaced is None else replaced.model

    def retire(self, model: ServedModel) -> None:
        """Give the model no more requests: ``finish`` is to follow. To a model that is not here nothing happens."""
        entry = self._entry(model)
        if entry is not None:
            self._retire(entry)
            self._changed()

    async def finish(self, model: ServedModel, seconds: float) -> bool:
        """Close a retired model when the requests that it has are done, or after so many seconds.

        Returns False where requests were lost that way. To a model that is not here nothing happens.
        """
        entry = self._entry(model)
        if entry is None:
            return True
        try:
            await asyncio.wait_for(entry.unused.wait(), seconds)
            return True
        except TimeoutError:
            return False
        finally:
            await self._close(entry)

    async def failed(self) -> DragomanError:
        """Return when an engine is dead. All is NOT_SERVING by then, and the process should exit."""
        return await self._failures.get()

    async def close(self) -> None:
        """Close all models. What still runs ends with NotReadyError."""
        for entry in list(self._entries):
            await self._close(entry)

    def _entry(self, model: ServedModel) -> _Entry | None:
        return next((entry for entry in self._entries if entry.model is model), None)

    def _find(self, name: str, version: str) -> _Entry:
        wanted = name or self._default_name()
        candidates = [
            entry
            for entry in self._entries
            if not entry.retired and entry.model.name == wanted and version in ("", entry.model.version)
        ]
        if candidates:
            return max(candidates, key=lambda entry: version_order(entry.model.version))
        if any(
            status.state is ModelState.LOADING and wanted in ("", status.name) and version in ("", status.version)
            for status in self._pending.values()
        ):
            which = f"the model {wanted[:100]!r}" if wanted else "the server's model"
            raise NotReadyError(f"{which} is being loaded: retry later")
        there = ", ".join(f"{model.name} version {model.version}" for model in self.models) or "none"
        if not wanted:
            raise ModelNotFoundError(f"no model is named, and this server has no default: name one; there is {there}")
        asked = " ".join(f"{what} {text[:100]!r}" for what, text in (("model", name), ("version", version)) if text)
        raise ModelNotFoundError(f"no {asked or 'default model'} is served; there is {there}")

    def _default_name(self) -> str:
        """The model for requests that name none; empty where there is no such model."""
        names = {entry.model.name for entry in self._entries if not entry.retired}
        return self.default or (names.pop() if len(names) == 1 else "")

    def _start(self, entry: _Entry) -> None:
        assert self._listener is not None
        entry.model.start()
        entry.watch = asyncio.create_task(self._watch(entry.model))
        self._listener.on_ready(entry.model)

    async def _watch(self, model: ServedModel) -> None:
        failure = await model.engine.failed()
        self._is_live = False
        self._changed()
        self._failures.put_nowait(failure)

    def _retire(self, entry: _Entry) -> None:
        entry.retired = True
        if not entry.num_leases:
            entry.unused.set()

    def _release(self, entry: _Entry) -> None:
        entry.num_leases -= 1
        if entry.retired and not entry.num_leases:
            entry.unused.set()

    async def _close(self, entry: _Entry) -> None:
        if self._listener is not None:
            self._listener.on_gone(entry.model)
        if entry.watch is not None:
            entry.watch.cancel()
        try:
            await entry.model.close()
        finally:
            if entry in self._entries:
                self._entries.remove(entry)
            self._changed()

    def _changed(self) -> None:
        if self._listener is not None:
            self._listener.on_change()


class Leases:
    """What one call holds. Whoever asks twice for the same names gets the same model, swapped or not."""

    def __init__(self, table: ModelTable) -> None:
        self._table = table
        self._held: dict[tuple[str, str], _Entry] = {}

    def model(self, name: str, version: str) -> ServedModel:
        """As ``ModelTable.find``; the model is there until the call ends."""
        entry = self._held.get((name, version))
        if entry is None:
            entry = self._held[name, version] = self._table._find(name, version)
            entry.num_leases += 1
        return entry.model

    def release(self) -> None:
        """Give all of them back."""
        while self._held:
            self._table._release(self._held.popitem()[1])


def version_order(version: str) -> tuple[list[tuple[bool, int, str]], str]:
    """What to sort versions by: "10" comes after "9", and "1.10" after "1.9"."""
    parts = [part for part in re.split(r"(\d+)", version) if part]
    return [(True, int(part), "") if part.isdecimal() else (False, 0, part) for part in parts], version


def _names(model: ServedModel) -> tuple[str, str]:
    return model.name, model.version
