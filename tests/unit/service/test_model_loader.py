"""What a folder of models becomes: what is found, what is served of it, and what happens when it changes."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import threading

import pytest

from dragoman.bundle import MANIFEST_NAME, ModelBundle, save_bundle
from dragoman.config import RepositoryConfig
from dragoman.errors import BundleError, ConfigError, LoadError, ModelNotFoundError
from dragoman.model_loader import ModelLoader
from dragoman.model_repository import ModelRepository
from dragoman.model_status import ModelState
from dragoman.model_table import ModelTable
from dragoman.testing import scripted_manifest, scripted_model
from dragoman.types import DecodingOptions

FILES = dict.fromkeys(("source.json", "target.json", "none.onnx", "golden.jsonl"), b"{}")


class Served:
    """A folder of models, and a table that is kept like it."""

    def __init__(self, folder, **settings):
        self.folder = folder
        self.table = ModelTable(default=settings.get("default_model", ""))
        self.loads: list[str] = []
        self.before_load = lambda: None
        config = RepositoryConfig(**settings)
        self.loader = ModelLoader(self.table, ModelRepository(folder=folder), self.load, config, drain_seconds=60)

    def load(self, path):
        self.loads.append(str(path.relative_to(self.folder)))
        self.before_load()
        bundle = ModelBundle.load(path)
        if bundle.read("golden.jsonl") == b"bad":
            raise BundleError("this machine does not reproduce the golden answer")
        return scripted_model(manifest=bundle.manifest)

    def on_ready(self, model): ...

    def on_gone(self, model): ...

    def on_change(self): ...

    async def start(self):
        self.table.start(self)
        await self.loader.load_all()
        return self

    async def unloaded(self):
        """Until nothing drains."""
        while any(status.state is ModelState.DRAINING for status in self.table.statuses()):
            await asyncio.sleep(0)

    @property
    def ready(self):
        return [(model.name, model.version) for model in self.table.models]

    @property
    def failed(self):
        return {(s.name, s.version): s.reason for s in self.table.statuses() if s.state is ModelState.FAILED}

    async def close(self):
        await self.loader.close()
        await self.table.close()


def put(folder, name, version, where=None, **files):
    """A bundle in its place, or another one; replaced if it is there."""
    path = folder / (where or f"{name}/{version}")
    manifest = dataclasses.replace(scripted_manifest(name), version=version)
    return save_bundle(manifest, {**FILES, **files}, path, overwrite=True).path


BAD = {"golden.jsonl": b"bad"}


def test_bundles_are_found_by_themselves_and_as_versions(tmp_path):
    """Names and versions are the manifests'; hidden folders and files do not count."""
    put(tmp_path, "a", "1")
    put(tmp_path, "a", "10")
    put(tmp_path, "b", "2024-09", where="anything")
    put(tmp_path, "c", "1", where=".incoming")
    put(tmp_path, "a", "11", where="a/.11")
    (tmp_path / "README").write_text("not a model")
    found = ModelRepository(folder=tmp_path).scan()
    assert [(f.name, f.version, f.problem) for f in found] == [("a", "1", ""), ("a", "10", ""), ("b", "2024-09", "")]


def test_a_folder_that_names_another_model_or_version_is_a_problem(tmp_path):
    """It says which, and what to do; so does one without a readable manifest."""
    put(tmp_path, "a", "1", where="a/2")
    put(tmp_path, "a", "3", where="b/3")
    (put(tmp_path, "c", "1") / MANIFEST_NAME).write_text("{")
    (tmp_path / "d" / "1").mkdir(parents=True)
    found = {(f.name, f.version): f.problem for f in ModelRepository(folder=tmp_path).scan()}
    assert "'1', says its manifest" in found["a", "2"] and "export it as '2'" in found["a", "2"]
    assert "of the name 'a'" in found["b", "3"]
    assert MANIFEST_NAME in found["c", "1"]
    assert "is no bundle" in found["d", "1"]


def test_twins_and_empty_or_unreadable_folders_are_refused(tmp_path):
    """Two bundles alike; a mount that is missing is not the wish to serve nothing."""
    with pytest.raises(ConfigError, match="there is no bundle"):
        ModelRepository(folder=tmp_path).scan()
    with pytest.raises(ConfigError, match="cannot read the folder of models"):
        ModelRepository(folder=tmp_path / "none").scan()
    put(tmp_path, "a", "1")
    put(tmp_path, "a", "1", where="copy")
    with pytest.raises(ConfigError, match=r"a/1 and .*copy are both a version 1"):
        ModelRepository(folder=tmp_path).scan()
    with pytest.raises(ConfigError, match="are both a version 1"):
        ModelRepository([tmp_path / "a" / "1", tmp_path / "copy"]).scan()


async def test_the_newest_versions_are_served_as_many_as_are_wanted(tmp_path):
    """Of each model; older ones are not even opened."""
    for name, version in (("a", "9"), ("a", "10"), ("a", "8"), ("b", "1")):
        put(tmp_path, name, version)
    served = await Served(tmp_path, versions=2).start()
    assert served.ready == [("a", "10"), ("a", "9"), ("b", "1")]
    assert served.loads == ["a/10", "a/9", "b/1"]
    await served.close()


async def test_at_the_start_a_version_that_fails_is_passed_over_and_a_model_without_any_is_refused(tmp_path):
    """So that a restart serves what was served before; a default that there is not is refused, too."""
    put(tmp_path, "a", "1")
    put(tmp_path, "a", "2", **BAD)
    served = await Served(tmp_path).start()
    assert served.ready == [("a", "1")]
    assert "golden answer" in served.failed["a", "2"]
    await served.close()
    put(tmp_path, "b", "1", **BAD)
    broken = Served(tmp_path)
    with pytest.raises(BundleError, match="golden answer"):
        await broken.start()
    await broken.close()
    with pytest.raises(ConfigError, match="the default model is 'c'; there is a, b"):
        await Served(tmp_path, default_model="c").start()


async def test_a_new_version_takes_over_and_an_old_one_comes_back(tmp_path):
    """With a reload; nothing is loaded that has not changed."""
    put(tmp_path, "a", "1")
    put(tmp_path, "b", "1")
    served = await Served(tmp_path).start()
    put(tmp_path, "a", "2")
    await served.loader.reload()
    await served.unloaded()
    assert served.ready == [("a", "2"), ("b", "1")]
    shutil.rmtree(tmp_path / "a" / "2")
    await served.loader.reload()
    await served.unloaded()
    assert served.ready == [("a", "1"), ("b", "1")]
    assert served.loads == ["a/1", "b/1", "a/2", "a/1"]
    await served.close()


async def test_a_version_that_fails_changes_nothing_and_is_tried_again_when_it_changes(tmp_path):
    """The reason can be read; a look at the same files again costs nothing; mended, it takes over."""
    put(tmp_path, "a", "1")
    served = await Served(tmp_path).start()
    old = served.table.find("a", "")
    put(tmp_path, "a", "2", **BAD)
    await served.loader.reload()
    await served.loader.reload()
    assert served.table.find("a", "") is old
    assert served.loads == ["a/1", "a/2"]
    assert served.failed == {("a", "2"): "this machine does not reproduce the golden answer"}
    put(tmp_path, "a", "2")
    await served.loader.reload()
    await served.unloaded()
    assert (served.ready, served.failed) == ([("a", "2")], {})
    await served.close()


async def test_a_fault_that_may_pass_is_tried_again(tmp_path):
    """A disk that could not be read, say: not the bundle's own fault."""
    put(tmp_path, "a", "1")
    served = await Served(tmp_path).start()
    put(tmp_path, "a", "2")

    def fail():
        raise OSError("input/output error")

    served.before_load = fail
    await served.loader.reload()
    assert served.failed == {("a", "2"): "input/output error"}
    served.before_load = lambda: None
    await served.loader.reload()
    assert (served.ready, served.failed) == ([("a", "2")], {})
    await served.close()


async def test_a_failed_version_that_is_taken_away_is_forgotten(tmp_path):
    """Its status with it."""
    put(tmp_path, "a", "1")
    put(tmp_path, "a", "2", **BAD)
    served = await Served(tmp_path).start()
    shutil.rmtree(tmp_path / "a" / "2")
    await served.loader.reload()
    assert (served.ready, served.failed) == ([("a", "1")], {})
    await served.close()


async def test_a_served_bundle_that_is_exchanged_or_damaged_in_its_place(tmp_path):
    """An exchange under the same name and version is a swap; a damage leaves what is in memory."""
    path = put(tmp_path, "a", "1", where="plain")
    served = await Served(tmp_path).start()
    first = served.table.find("a", "")
    put(tmp_path, "a", "1", where="plain", **{"source.json": b"{ }"})
    await served.loader.reload()
    await served.unloaded()
    second = served.table.find("a", "")
    assert second is not first and served.ready == [("a", "1")]
    (path / MANIFEST_NAME).write_text("{")
    await served.loader.reload()
    assert served.table.find("a", "") is second
    assert list(served.failed) == [("a", "1")]
    await served.close()


async def test_a_model_that_is_taken_away_is_unloaded_but_not_all_of_them_at_once(tmp_path):
    """An empty or missing folder looks like a mount that failed."""
    put(tmp_path, "a", "1")
    put(tmp_path, "b", "1")
    served = await Served(tmp_path).start()
    shutil.rmtree(tmp_path / "a")
    await served.loader.reload()
    await served.unloaded()
    assert served.ready == [("b", "1")]
    shutil.rmtree(tmp_path / "b")
    await served.loader.reload()
    assert served.ready == [("b", "1")]
    await served.close()


async def test_what_is_in_memory_is_bounded(tmp_path):
    """A version too many is not loaded, which is told, and it comes when there is room."""
    put(tmp_path, "a", "1")
    served = await Served(tmp_path, max_loaded=2).start()
    put(tmp_path, "b", "1")
    put(tmp_path, "c", "1")
    await served.loader.reload()
    assert served.ready == [("a", "1"), ("b", "1")]
    assert "max_loaded is 2" in served.failed["c", "1"]
    with pytest.raises(LoadError, match="max_loaded is 2"):
        await served.loader.load("c")
    await served.loader.unload("b")
    await served.loader.reload()
    assert (served.ready, served.failed) == ([("a", "1"), ("c", "1")], {})
    await served.close()


async def test_callers_unload_and_load_by_name(tmp_path):
    """Unloaded, it stays so through a reload; loading again brings the newest, or says why it cannot."""
    put(tmp_path, "a", "1")
    put(tmp_path, "b", "1")
    served = await Served(tmp_path).start()
    await served.loader.unload("a")
    assert served.table.num_loaded == 1
    await served.loader.reload()
    assert served.ready == [("b", "1")]
    for name in ("a", "none"):
        with pytest.raises(ModelNotFoundError, match="there is b"):
            await served.loader.unload(name)
    put(tmp_path, "a", "2", **BAD)
    for _ in range(2):  # asked for by name, it is tried each time
        with pytest.raises(LoadError, match="golden answer"):
            await served.loader.load("a")
    assert served.ready == [("a", "1"), ("b", "1")]
    assert served.loads.count("a/2") == 2
    with pytest.raises(ModelNotFoundError, match="no model 'none' in the repository; there is a, b"):
        await served.loader.load("none")
    await served.close()


async def test_the_event_loop_goes_on_while_a_model_is_loaded(tmp_path):
    """And what is loaded is seen to be."""
    put(tmp_path, "a", "1")
    served = await Served(tmp_path).start()
    put(tmp_path, "a", "2")
    loads, go = threading.Event(), threading.Event()

    def hold():
        loads.set()
        assert go.wait(60)

    served.before_load = hold
    reload = asyncio.create_task(served.loader.reload())
    assert await asyncio.to_thread(loads.wait, 60)
    states = {(s.name, s.version): s.state for s in served.table.statuses()}
    assert states == {("a", "1"): ModelState.READY, ("a", "2"): ModelState.LOADING}
    assert served.table.find("a", "").version == "1"
    go.set()
    await reload
    assert served.table.find("a", "").version == "2"
    await served.close()


async def test_a_caller_who_gives_up_waiting_changes_nothing(tmp_path):
    """What it asked to load is loaded, and what it asked to unload drains all the same."""
    put(tmp_path, "a", "1")
    served = await Served(tmp_path).start()
    put(tmp_path, "a", "2")
    loads, go = threading.Event(), threading.Event()

    def hold():
        loads.set()
        assert go.wait(60)

    served.before_load = hold
    caller = asyncio.create_task(served.loader.load("a"))
    assert await asyncio.to_thread(loads.wait, 60)
    caller.cancel()
    await asyncio.wait([caller])
    go.set()
    while served.ready != [("a", "2")]:
        await asyncio.sleep(0)
    with served.table.leases() as leases:
        model = leases.model("a", "")
        caller = asyncio.create_task(served.loader.unload("a"))
        while served.ready:
            await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])
        assert (await model.pipeline.generate("abc", DecodingOptions())).text == "abc"
    while served.table.num_loaded:
        await asyncio.sleep(0)
    await served.close()


async def test_a_folder_is_polled(tmp_path):
    """After poll_seconds, again and again; 0 is never."""
    put(tmp_path, "a", "1")
    served = await Served(tmp_path, poll_seconds=0.01).start()
    polling = served.loader.start_polling()
    for version in ("2", "3"):
        put(tmp_path, "a", version)
        while served.table.find("a", "").version != version:
            await asyncio.sleep(0)
    polling.cancel()
    await served.close()
    assert Served(tmp_path).loader.start_polling() is None
