"""Several models and versions in one server: routing, swaps under load, health of each, lists and tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import signal
import sys
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from dragoman.bundle import MANIFEST_NAME, ModelBundle, load_manifest, save_bundle
from dragoman.client import AsyncClient
from dragoman.config import RepositoryConfig, ServerConfig, embedded_bundle
from dragoman.errors import BundleError, InvalidRequestError, ModelNotFoundError, NotReadyError
from dragoman.metrics import ServerMetrics
from dragoman.model_loader import ModelLoader
from dragoman.model_repository import ModelRepository
from dragoman.model_status import ModelState, ModelStatus
from dragoman.model_table import ModelTable
from dragoman.retries import NO_RETRIES
from dragoman.server import Server
from dragoman.testing import ALPHABET, ScriptedRunner, copy_script, scripted_manifest, scripted_model
from dragoman.tokenization import TextToken, TokenizerSide
from dragoman.v1 import generation_pb2 as pb

SERVICE = "dragoman.v1.GenerationService"
SERVING, NOT_SERVING, UNKNOWN = (
    HealthCheckResponse.SERVING,
    HealthCheckResponse.NOT_SERVING,
    HealthCheckResponse.SERVICE_UNKNOWN,
)
FILES = dict.fromkeys(("source.json", "target.json", "none.onnx", "golden.jsonl"), b"{}")


def put(folder, name, version):
    manifest = dataclasses.replace(scripted_manifest(name), version=version)
    save_bundle(manifest, FILES, folder / name / version)


def shifted_script(source, fed):
    """Answers with the letters behind those of the source."""
    logits = copy_script(source, fed)
    letter = logits.index(5.0)
    return logits if letter < 4 else [*logits[-1:], *logits[:-1]]


def load(path):
    """Odd versions answer with the text, even ones with each letter's next."""
    bundle = ModelBundle.load(path)
    if bundle.manifest.version == "13":
        raise BundleError("this machine does not reproduce the golden answer")
    script = copy_script if int(bundle.manifest.version) % 2 else shifted_script
    return scripted_model([ScriptedRunner(script)], manifest=bundle.manifest)


def expected(text, version):
    return text if int(version) % 2 else "".join(ALPHABET[ALPHABET.index(letter) + 1] for letter in text)


@asynccontextmanager
async def serving(folder, load=load, start=True, **settings):
    """A server over a folder of models."""
    metrics, table = ServerMetrics(), ModelTable(default=settings.get("default_model", ""))
    config = ServerConfig(host="127.0.0.1", port=0, metrics_port=0, drain_seconds=60.0)
    loader = ModelLoader(table, ModelRepository(folder=folder), load, RepositoryConfig(**settings), 60.0)
    server = Server(table, config, metrics, loader)
    starting = asyncio.create_task(server.start())
    if start:
        await starting
    while not server.port and not starting.done():
        await asyncio.sleep(0)
    target = f"127.0.0.1:{server.port}"
    async with grpc.aio.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        clients: list[AsyncClient] = []

        def client(model="", version=""):
            clients.append(AsyncClient(target, model=model, version=version, retries=NO_RETRIES))
            return clients[-1]

        try:
            yield SimpleNamespace(
                server=server,
                loader=loader,
                table=table,
                metrics=metrics,
                channel=channel,
                client=client,
                starting=starting,
            )
        finally:
            for one in clients:
                await one.close()
            await asyncio.wait((starting,))
            await server.close()


async def call(running, method, request, reply_type):
    path = f"/{SERVICE}/{method}"
    return await running.channel.unary_unary(path, type(request).SerializeToString, reply_type.FromString)(request)


async def check(running, service=""):
    method = running.channel.unary_unary(
        "/grpc.health.v1.Health/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
    )
    return (await method(HealthCheckRequest(service=service))).status


def watch(running, service):
    method = running.channel.unary_stream(
        "/grpc.health.v1.Health/Watch", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
    )
    return aiter(method(HealthCheckRequest(service=service)))


async def test_requests_are_routed_by_name_and_version(tmp_path):
    """The newest where none is named; a request that names no model needs a default."""
    for name, version in (("a", "9"), ("a", "10"), ("b", "1")):
        put(tmp_path, name, version)
    async with serving(tmp_path, versions=2, default_model="b") as running:
        for model, version, answered in (("", "", "1"), ("a", "", "10"), ("a", "9", "9"), ("b", "1", "1")):
            answer = await running.client(model, version).generate("abc")
            assert (answer.model, answer.version) == (model or "b", answered)
            assert answer.text == expected("abc", answered)
            assert (await running.client(model, version).model_info()).version == answered
        with pytest.raises(ModelNotFoundError, match="a version 10, a version 9"):
            await running.client("a", "8").generate("abc")


async def test_versions_are_swapped_under_load_without_a_lost_or_mixed_request(tmp_path):
    """Whole answers, streams and batches, each by one version from start to end, and in the end by the newest."""
    put(tmp_path, "a", "1")
    answered: set[str] = set()
    async with serving(tmp_path) as running:
        client = running.client("a")
        done = False

        async def one():
            while not done:
                answer = await client.generate("abcdefgh")
                assert answer.text == expected("abcdefgh", answer.version)
                answered.add(answer.version)

        async def streamed():
            while not done:
                text = ""
                async for item in client.stream("abcdefghijklmnop"):
                    text += getattr(item, "delta", "")
                assert item.text == text == expected("abcdefghijklmnop", item.version)

        async def batched():
            while not done:
                answers = await client.batch(["abc"] * 20)
                assert {answer.text for answer in answers} == {expected("abc", answers[0].version)}

        callers = [asyncio.create_task(work()) for work in (one, streamed, batched) for _ in range(4)]
        for version in ("1", "2", "3", "4"):
            if version != "1":
                put(tmp_path, "a", version)
            await running.server.reload()
            while version not in answered:
                await asyncio.sleep(0)
                for caller in callers:
                    assert not caller.done() or caller.result()  # a fault of one is the test's, at once
        done = True
        await asyncio.gather(*callers)
        assert answered == {"1", "2", "3", "4"}
        await running.loader.close()
        assert [model.version for model in running.table.models] == ["4"] and running.table.num_loaded == 1
        registry = running.metrics.registry
        info = {"model": "a", "precision": "fp32", "provider": "cpu"}
        assert registry.get_sample_value("dragoman_model_info", {**info, "version": "4"}) == 1
        assert registry.get_sample_value("dragoman_model_info", {**info, "version": "1"}) is None
        assert registry.get_sample_value("dragoman_slots_total", {"model": "a"}) == 8


async def test_a_version_that_fails_takes_no_traffic_and_says_why(tmp_path):
    """Answers go on from the version before; the list has both, with the reason."""
    put(tmp_path, "a", "1")
    async with serving(tmp_path) as running:
        put(tmp_path, "a", "13")
        await running.server.reload()
        assert (await running.client().generate("abc")).version == "1"
        reason = "this machine does not reproduce the golden answer"
        assert await running.client().models() == [
            ModelStatus("a", "13", ModelState.FAILED, reason),
            ModelStatus("a", "1", ModelState.READY, is_default=True),
        ]
        assert await check(running, f"{SERVICE}/a/13") == NOT_SERVING
        assert await check(running, f"{SERVICE}/a/1") == await check(running, f"{SERVICE}/a") == SERVING


async def test_health_tells_of_a_model_that_loads_from_the_start(tmp_path):
    """The port answers before the model does: alive, not ready, calls UNAVAILABLE; each watcher sees the change."""
    put(tmp_path, "a", "1")
    go = threading.Event()

    def slow(path):
        assert go.wait(60)
        return load(path)

    async with serving(tmp_path, slow, start=False) as running:
        names = ("", SERVICE, "inference.GRPCInferenceService", f"{SERVICE}/a", f"{SERVICE}/a/1")
        assert [await check(running, name) for name in names] == [NOT_SERVING] * 5
        assert await check(running, "liveness") == SERVING
        watchers = [watch(running, name) for name in names]
        assert [(await anext(watcher)).status for watcher in watchers] == [NOT_SERVING] * 5
        with pytest.raises(NotReadyError, match="loaded"):
            await running.client("a").generate("abc")
        go.set()
        assert [(await anext(watcher)).status for watcher in watchers] == [SERVING] * 5
        assert (await running.client("a").generate("abc")).text == "abc"


async def test_a_server_whose_model_fails_to_load_was_never_ready(tmp_path):
    """Not at any time, and its start says why."""
    put(tmp_path, "a", "13")
    statuses = []

    def failing(path):
        statuses.append(asyncio.run_coroutine_threadsafe(check(running, ""), loop).result(60))
        return load(path)

    loop = asyncio.get_running_loop()
    async with serving(tmp_path, failing, start=False) as running:
        with pytest.raises(BundleError, match="golden answer"):
            await running.starting
        assert statuses == [NOT_SERVING]
        assert not running.server.is_ready()


async def test_health_of_a_model_follows_its_loads_and_unloads(tmp_path):
    """A watcher of what is not there yet hears of it; unloaded, it is unknown again; the others serve on."""
    put(tmp_path, "a", "1")
    async with serving(tmp_path) as running:
        watcher = watch(running, f"{SERVICE}/b")
        assert (await anext(watcher)).status == UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(running, f"{SERVICE}/b")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND and "/MODEL" in (caught.value.details() or "")
        put(tmp_path, "b", "1")
        await running.loader.load("b")
        while (await anext(watcher)).status != SERVING:  # it may see that the model loads, or be too late for that
            pass
        await running.loader.unload("b")
        assert (await anext(watcher)).status in (NOT_SERVING, UNKNOWN)
        assert await check(running) == await check(running, f"{SERVICE}/a") == SERVING
        with pytest.raises(ModelNotFoundError):
            await running.client("b").generate("abc")
        await running.loader.unload("a")
        assert await check(running) == NOT_SERVING  # nothing can be answered
        assert await check(running, "liveness") == SERVING


async def test_probes_are_answered_while_the_engine_is_full_and_a_model_loads(start_server):
    """All slots and places of the queue are taken: readiness and liveness come all the same."""
    running = await start_server(ScriptedRunner(num_slots=2))
    gate = running.gate()
    calls = [asyncio.create_task(running.client.generate("a" * (1 + i % 60))) for i in range(300)]
    await gate.wait_reached()
    for service in ("", "liveness", f"{SERVICE}/scripted"):
        assert await asyncio.wait_for(check(running, service), 10) == SERVING
    gate.open()
    await asyncio.gather(*calls)


async def test_tokens_of_both_sides_have_their_places_in_the_text(start_server):
    """Blanks around the line count as characters, and are no tokens; the template stands for no text."""
    running = await start_server()

    async def tokenize(**fields):
        reply = await call(running, "Tokenize", pb.TokenizeRequest(**fields), pb.TokenizeResponse)
        assert (reply.model, reply.version, reply.request_id) == ("scripted", "1", "r")
        return [(t.token, t.id, (t.span.start, t.span.end) if t.HasField("span") else None) for t in reply.tokens]

    source = [("b", 5, (2, 3)), ("a", 4, (3, 4)), ("</s>", 2, None)]
    assert await tokenize(text="\n ba ", request_id="r") == source
    assert await tokenize(text="\n ba ", request_id="r", side=pb.TOKENIZER_SIDE_TARGET) == source[:2]
    assert await tokenize(text=" ", request_id="r") == [("</s>", 2, None)]
    assert await running.client.tokenize("\n ba ") == [TextToken(*token) for token in source]
    assert await running.client.tokenize("ba", TokenizerSide.TARGET) == [
        TextToken("b", 5, (0, 1)),
        TextToken("a", 4, (1, 2)),
    ]
    with pytest.raises(InvalidRequestError, match="side is 'target'"):
        await running.client.tokenize("ba", "target")
    for fields, code in (
        ({"text": "a\nb"}, "INVALID_ARGUMENT"),
        ({"text": "a1"}, "INVALID_ARGUMENT"),
        ({"text": "a", "side": 7}, "INVALID_ARGUMENT"),
        ({"text": "a", "target_language": "de"}, "FAILED_PRECONDITION"),
        ({"text": "a", "target_language": "de", "side": pb.TOKENIZER_SIDE_TARGET}, "INVALID_ARGUMENT"),
        ({"text": "a" * 70_000}, "INVALID_ARGUMENT"),
        ({"text": "a", "model": "other"}, "NOT_FOUND"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokenize(**fields)
        assert caught.value.code().name == code


async def test_serve_follows_a_folder_of_models_on_sighup(tmp_path):
    """A real process with a real model: the new version takes over, and a broken one changes nothing."""
    embedded = embedded_bundle("g2p-en")
    manifest = load_manifest(embedded)

    def copy(version):
        path = tmp_path / manifest.name / f".{version}"
        shutil.copytree(embedded, path)
        (path / MANIFEST_NAME).write_text(dataclasses.replace(manifest, version=version).to_json())
        return path, path.with_name(version)

    first, place = copy("9")
    first.rename(place)
    arguments = ["serve", "--models", str(tmp_path), "--host", "127.0.0.1", "--port", "0", "--metrics-port", "0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "dragoman.cli.main",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
    assert ready["models"] == [manifest.name]

    async def told(words):
        assert process.stderr is not None
        while words not in await asyncio.wait_for(process.stderr.readline(), 60):
            pass

    async with AsyncClient(f"127.0.0.1:{ready['port']}") as client:
        before = await client.generate("hello")
        assert before.version == "9"
        second, place = copy("10")
        second.rename(place)
        process.send_signal(signal.SIGHUP)
        await told(b"version 9 is unloaded")
        after = await client.generate("hello")
        assert (after.version, after.text) == ("10", before.text)
        third, place = copy("11")
        (third / "golden.cpu.int8.jsonl").write_text("")
        third.rename(place)
        process.send_signal(signal.SIGHUP)
        await told(b"version 11 cannot be served")
        assert (await client.generate("hello")).version == "10"
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 60) == 0
