"""Which model answers, and how one makes room for another."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from dragoman.config import EngineConfig
from dragoman.errors import ConfigError, EngineDeadError, ModelNotFoundError, NotReadyError
from dragoman.model_status import ModelState
from dragoman.model_table import ModelTable, version_order
from dragoman.testing import ScriptedRunner, scripted_manifest, scripted_model
from dragoman.types import DecodingOptions


class Listener:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_ready(self, model):
        self.told.append(f"{model.name} {model.version} is ready")

    def on_gone(self, model):
        self.told.append(f"{model.name} {model.version} is gone")

    def on_change(self):
        pass


def model(name="a", version="1", runner=None, config=None):
    return scripted_model(
        [runner or ScriptedRunner()], config, manifest=dataclasses.replace(scripted_manifest(name), version=version)
    )


def states(table):
    return {(s.name, s.version): s.state for s in table.statuses()}


def test_the_newest_version_is_the_highest_number_not_the_first_text():
    """Numbers count as such wherever they stand; the order is total."""
    versions = ["1", "1.9", "1.10", "2", "10", "10b2", "10b10", "2024-09-01", "2024-10-01"]
    assert sorted(sorted(versions, reverse=True), key=version_order) == versions
    assert version_order("1") != version_order("01")


@pytest.mark.parametrize("order", [("9", "10"), ("10", "9")])
def test_a_request_goes_to_the_newest_version_or_to_the_one_it_names(order):
    """However the models were given."""
    models = {version: model(version=version) for version in order}
    table = ModelTable(list(models.values()))
    assert table.find("a", "") is table.find("", "") is models["10"]
    assert table.find("a", "9") is table.find("", "9") is models["9"]
    with pytest.raises(ModelNotFoundError, match=r"no model 'a' version '11'.*a version 10, a version 9"):
        table.find("a", "11")


def test_a_request_without_a_name_goes_to_the_default_or_the_only_model():
    """Where there are several and no default, it must name one."""
    first, second = model("b"), model("a")
    assert ModelTable([first, second]).find("", "") is first
    assert ModelTable([first, second], default="a").find("", "") is second
    assert ModelTable([first], default="").find("", "") is first
    with pytest.raises(ModelNotFoundError, match="name one; there is a version 1, b version 1"):
        ModelTable([first, second], default="").find("", "")
    with pytest.raises(ModelNotFoundError, match="no default model is served; there is a version 1"):
        ModelTable([second], default="b").find("", "")


def test_two_models_alike_are_refused():
    """Names and versions route requests."""
    with pytest.raises(ConfigError, match="a version 1"):
        ModelTable([model(), model()])


def test_what_is_being_loaded_is_not_ready_rather_than_unknown():
    """By its name, and for a request that names nothing; what failed is not found, and the reason can be read."""
    table = ModelTable()
    table.announce("a", "2", ModelState.LOADING)
    for name, version in (("a", ""), ("a", "2"), ("", "")):
        with pytest.raises(NotReadyError, match="loaded"):
            table.find(name, version)
    with pytest.raises(ModelNotFoundError):
        table.find("b", "")
    table.announce("a", "2", ModelState.FAILED, "cut short")
    with pytest.raises(ModelNotFoundError, match="there is none"):
        table.find("a", "")
    (status,) = table.statuses()
    assert (status.state, status.reason) == (ModelState.FAILED, "cut short")


async def test_a_call_keeps_its_model_while_another_takes_over():
    """It gets the same one again, others the new one; the old one is closed when the call ends, not before."""
    listener, old, new = Listener(), model(version="1"), model(version="2")
    table = ModelTable([old])
    table.start(listener)
    with table.leases() as leases:
        assert leases.model("a", "") is old
        assert table.add(new) is None
        table.retire(old)
        finishing = asyncio.create_task(table.finish(old, seconds=60))
        assert states(table) == {("a", "1"): ModelState.DRAINING, ("a", "2"): ModelState.READY}
        assert leases.model("a", "") is old
        assert table.find("a", "") is new
        with pytest.raises(ModelNotFoundError):
            leases.model("a", "1")
        assert (await old.pipeline.generate("abc", DecodingOptions())).text == "abc"
    assert await finishing is True
    assert states(table) == {("a", "2"): ModelState.READY}
    assert listener.told == ["a 1 is ready", "a 2 is ready", "a 1 is gone"]
    with pytest.raises(NotReadyError):
        await old.pipeline.generate("abc", DecodingOptions())
    await table.close()


async def test_a_model_that_takes_too_long_to_drain_is_closed_all_the_same():
    """And it is told that requests were lost."""
    table = ModelTable([old := model()])
    table.start(Listener())
    with table.leases() as leases:
        leases.model("a", "")
        table.retire(old)
        assert await table.finish(old, seconds=0) is False
        assert table.num_loaded == 0
    await table.close()


async def test_a_bundle_that_was_changed_stands_in_for_itself():
    """The same name and version: the table hands out what is to be closed."""
    table = ModelTable([old := model()])
    table.start(Listener())
    assert table.add(new := model()) is old
    assert table.find("a", "1") is new
    assert await table.finish(old, seconds=60) is True
    assert await table.finish(old, seconds=60) is True  # nothing more happens
    await table.close()
    assert table.models == ()


@pytest.mark.parametrize("added", [False, True])
async def test_the_death_of_any_engine_is_told(added):
    """Also of a model that came later."""

    def explode():
        raise RuntimeError

    runner = ScriptedRunner()
    runner.before_decode = explode
    table = ModelTable([model("other")] + ([] if added else [model(runner=runner)]))
    table.start(Listener())
    if added:
        table.add(model(runner=runner))
    assert table.is_live
    with pytest.raises(EngineDeadError):
        await table.find("a", "").pipeline.generate("abc", DecodingOptions())
    assert isinstance(await table.failed(), EngineDeadError)
    assert not table.is_live
    await table.close()


async def test_work_that_no_thread_takes_is_a_dead_engine():
    """A heartbeat while work waits: a thread that sleeps beside a waiting request is as dead as one that hangs."""
    table = ModelTable([sleeper := model(config=EngineConfig(stuck_seconds=0.2))])
    queue, wait = sleeper.engine._queue, sleeper.engine._queue.wait

    def sleep_on():
        with queue._lock:
            while not queue.closed:
                queue._changed.wait()
        return wait()

    queue.wait = sleep_on
    table.start(Listener())
    with pytest.raises(EngineDeadError):
        await sleeper.pipeline.generate("abc", DecodingOptions())
    assert isinstance(await table.failed(), EngineDeadError)
    await table.close()
