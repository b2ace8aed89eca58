"""Brings what a repository holds into the table, and takes out what it holds no more. On the event loop.

A version takes requests once every byte of it was checked and its golden set was replayed; until then, and for good if
that fails, the versions before it go on. Loading runs in a thread of its own, one version at a time.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from dragoman.config import RepositoryConfig
from dragoman.errors import (
    BundleError,
    ConfigError,
    DragomanError,
    LoadError,
    ModelNotFoundError,
    OverloadedError,
)
from dragoman.model_repository import Fingerprint, FoundBundle, ModelRepository
from dragoman.model_status import ModelState
from dragoman.model_table import ModelTable, version_order
from dragoman.served_model import ServedModel

T = TypeVar("T")
Key = tuple[str, str]

logger = logging.getLogger(__name__)


class ModelLoader:
    """Keeps a table like its repository. What is asked of it is done one after the other."""

    def __init__(
        self,
        table: ModelTable,
        repository: ModelRepository,
        load: Callable[[Path], ServedModel],
        config: RepositoryConfig,
        drain_seconds: float,
    ) -> None:
        """``load`` verifies and opens a bundle; it blocks. ``drain_seconds``: how long a model may finish requests."""
        self._table = table
        self._repository = repository
        self._load = load
        self._config = config
        self._drain_seconds = drain_seconds
        self._loaded: dict[Key, FoundBundle] = {}
        self._models: dict[Key, ServedModel] = {}
        self._failed: dict[Key, Fingerprint] = {}  # not tried again before its files change
        self._unloaded: set[str] = set()  # by a caller, who has to load them again
        self._tasks: set[asyncio.Task[None]] = set()  # that load or drain a model
        self._turn = asyncio.Lock()

    @property
    def callers_may_load(self) -> bool:
        """Whether ``load`` and ``unload`` are for callers of the server."""
        return self._config.allow_control

    async def announce(self) -> None:
        """Tell the table what ``load_all`` is going to load. Raises ConfigError as ``ModelRepository.scan``."""
        for name, bundles in (await self._scan()).items():
            for bundle in bundles[: self._config.versions]:
                self._table.announce(name, bundle.version, ModelState.LOADING)

    async def load_all(self) -> None:
        """Load what is to be served from the start.

        Raises what the newest version of a model raised of which none can be loaded, and ConfigError as
        ``ModelRepository.scan`` and for a default model that there is not.
        """
        async with self._turn:
            found = await self._scan()
            if self._table.default not in ("", *found):
                raise ConfigError(f"the default model is {self._table.default!r}; there is {', '.join(found)}")
            for name, bundles in found.items():
                error = await self._update(name, bundles)
                if error is not None and not any(key[0] == name for key in self._loaded):
                    raise error

    async def reload(self) -> None:
        """Look at the repository again: take in what is new or changed, take out what is gone or too old.

        What cannot be loaded changes nothing, and is told in the log and in the table.
        """
        async with self._turn:
            try:
                found = await self._scan()
            except ConfigError as error:
                logger.error("the models stay as they are: %s", error)
                return
            for name, bundles in found.items():
                if name not in self._unloaded:
                    await self._update(name, bundles)
            for name in {name for name, _ in self._loaded} - set(found):
                logger.info("%s is gone from the repository", name)
                self._retire_versions(name, keep=())
            for status in self._table.statuses():
                key = status.name, status.version
                if not any(bundle.version == key[1] for bundle in found.get(key[0], ())):
                    self._table.forget(*key)
                    self._failed.pop(key, None)

    def start_polling(self) -> asyncio.Task[None] | None:
        """``reload`` for ever, each time ``poll_seconds`` after the last one; None where that is 0."""
        return asyncio.create_task(self._poll()) if self._config.poll_seconds else None

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._config.poll_seconds)
            try:
                await self.reload()
            except Exception:
                logger.exception("could not look for models; the next look is in %s s", self._config.poll_seconds)

    async def load(self, name: str) -> None:
        """Take in the newest versions of one model, also those that failed before.

        Raises ModelNotFoundError where the repository has no such model, and LoadError where its newest version cannot
        be served; what was served before still is. A caller who does not wait for the end changes nothing about it.
        """
        work = asyncio.create_task(self._load_newest(name))
        self._tasks.add(work)
        work.add_done_callback(self._ended)
        await asyncio.shield(work)

    async def _load_newest(self, name: str) -> None:
        async with self._turn:
            try:
                found = await self._scan()
            except ConfigError as error:
                raise LoadError(str(error)) from error
            if name not in found:
                raise ModelNotFoundError(f"no model {name[:100]!r} in the repository; there is {', '.join(found)}")
            self._unloaded.discard(name)
            for key in [key for key in self._failed if key[0] == name]:
                del self._failed[key]
            problem = await self._update(name, found[name])
            newest = found[name][0]
            if self._loaded.get((name, newest.version)) != newest:
                raise LoadError(str(problem)) from problem

    async def unload(self, name: str) -> None:
        """Take a model out until it is loaded by name; returns when its requests are done and its memory is free.

        Raises ModelNotFoundError where no such model is loaded.
        """
        async with self._turn:
            if not any(key[0] == name for key in self._loaded):
                names = ", ".join(sorted({key[0] for key in self._loaded})) or "none"
                raise ModelNotFoundError(f"no model {name[:100]!r} is loaded; there is {names}")
            self._unloaded.add(name)
            retiring = self._retire_versions(name, keep=())
        await asyncio.wait(retiring)  # a caller who does not wait for the end changes nothing about it

    async def close(self) -> None:
        """Load nothing more, and close the models that still drain."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever still waits

    async def _scan(self) -> dict[str, list[FoundBundle]]:
        """By name, the newest version first."""
        known = {bundle.path: bundle for bundle in self._loaded.values()}
        by_name: dict[str, list[FoundBundle]] = {}
        for bundle in await _in_thread(self._repository.scan):
            if bundle.problem and bundle.path in known:  # its manifest cannot be read any more
                loaded = known[bundle.path]
                bundle = replace(bundle, name=loaded.name, version=loaded.version)
            by_name.setdefault(bundle.name, []).append(bundle)
        for bundles in by_name.values():
            bundles.sort(key=lambda bundle: version_order(bundle.version), reverse=True)
        return by_name

    async def _update(self, name: str, bundles: Sequence[FoundBundle]) -> Exception | None:
        """Serve the newest versions that can be served; returns what is wrong with the newest one that cannot."""
        keep: list[str] = []
        error: Exception | None = None
        for bundle in bundles:
            key = name, bundle.version
            if self._loaded.get(key) != bundle and self._failed.get(key) != bundle.fingerprint:
                failure = await self._take(bundle)
                error = error or failure
            if key in self._loaded:
                keep.append(bundle.version)
            if len(keep) == self._config.versions:
                break
        if keep:
            self._retire_versions(name, keep)
        return error

    async def _take(self, bundle: FoundBundle) -> Exception | None:
        """Load one version and let it take requests; returns what is wrong with it, if anything is."""
        key = bundle.name, bundle.version
        self._table.announce(*key, ModelState.LOADING)
        try:
            self._check(bundle)
            model = await _in_thread(lambda: self._load(bundle.path))
            if (model.name, model.version) != key:
                raise LoadError(f"{bundle.path} was exchanged for another model while it was loaded: load it again")
        except Exception as error:  # ONNX Runtime and the file system raise many unrelated types
            logger.error(
                "%s version %s cannot be served: %s", *key, error, exc_info=not isinstance(error, DragomanError)
            )
            if isinstance(error, BundleError | ConfigError):  # the bundle's own fault; others may pass
                self._failed[key] = bundle.fingerprint
            self._table.announce(*key, ModelState.FAILED, str(error))
            return error
        replaced = self._table.add(model)
        self._failed.pop(key, None)
        self._loaded[key], self._models[key] = bundle, model
        logger.info("%s version %s takes requests", *key)
        if replaced is not None:
            self._retire(replaced)
        return None

    def _check(self, bundle: FoundBundle) -> None:
        if bundle.problem:
            raise BundleError(bundle.problem)
        if (num_loaded := self._table.num_loaded) >= self._config.max_loaded:
            raise OverloadedError(
                f"{num_loaded} versions are in memory, those that finish their requests included; max_loaded is "
                f"{self._config.max_loaded}: unload one, or raise it; to swap a version takes room for one more"
            )

    def _retire_versions(self, name: str, keep: Sequence[str]) -> list[asyncio.Task[None]]:
        """Retire the loaded versions of a model but for some."""
        keys = [key for key in self._loaded if key[0] == name and key[1] not in keep]
        for key in keys:
            del self._loaded[key]
        return [self._retire(self._models.pop(key)) for key in keys]

    def _retire(self, model: ServedModel) -> asyncio.Task[None]:
        self._table.retire(model)
        task = asyncio.create_task(self._finish(model))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _finish(self, model: ServedModel) -> None:
        name, version = model.name, model.version
        logger.info("%s version %s takes no more requests", name, version)
        if not await self._table.finish(model, self._drain_seconds):
            logger.warning("%s version %s took too long to drain: requests that still ran are lost", name, version)
        last = [model]
        del model
        await _in_thread(lambda: _release(last))  # gigabytes take a while
        logger.info("%s version %s is unloaded", name, version)


def _release(last: list[ServedModel]) -> None:
    """Drop the last reference to a model, and give its memory back to the system."""
    last.clear()
    with suppress(OSError, AttributeError):  # glibc alone has this function, and the need for it
        ctypes.CDLL(None).malloc_trim(0)


async def _in_thread(work: Callable[[], T]) -> T:
    """Run in a thread that a process which ends does not wait for: loading may take minutes."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised where it is awaited
            tell(error, None)
        else:
            tell(None, result)

    def tell(error: BaseException | None, result: T | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(finish, error, result)

    def finish(error: BaseException | None, result: Any) -> None:
        if done.done():  # given up
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await done
