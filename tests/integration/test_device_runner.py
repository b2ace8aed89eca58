"""The runner that keeps everything on a device, on the CPU in a GPU's place: a toy model's own fp16 graphs."""

import asyncio
import dataclasses
import random
import threading

import numpy as np
import onnxruntime as ort
import pytest

from dragoman.config import DeviceConfig, EngineConfig
from dragoman.engine import device as device_module
from dragoman.engine.device import Binding, Buffer, Device
from dragoman.engine.device_memory import MemoryPlan
from dragoman.engine.device_runner import DeviceRunner
from dragoman.engine.engine import Engine, ReplicaThread
from dragoman.engine.replica import generate_all
from dragoman.engine.runner import OrtModel, OrtRunner
from dragoman.errors import BundleError, ConfigError, OverloadedError, RequestCancelledError
from dragoman.pipeline import TextLimits
from dragoman.served_model import ServedModel, open_device_runners, token_rules
from dragoman.types import GenerationRequest, SearchOptions, Steering

LIMITS = TextLimits(65536, 256)
DRY = Device("cuda-dry")
SEARCHES = [
    SearchOptions(beam_size=4, num_hypotheses=3),
    SearchOptions(beam_size=2, length_penalty=0.0),
    SearchOptions(temperature=0.7, top_p=0.9, seed=3, num_hypotheses=2),
    SearchOptions(num_hypotheses=3, alternatives=True),
]


class Toy:
    """A bundle with graphs for a device."""

    def __init__(self, bundle):
        self.bundle = bundle
        self.manifest = self.bundle.manifest
        self.graphs = self.bundle.graph_set("cuda")
        self.rules = token_rules(self.manifest)
        self.host = OrtModel(self.manifest.model, self.graphs, self.bundle.read)

    def runner(self, num_slots=8, device=DRY, max_encode_tokens=4096, without_graphs=False):
        manifest = self.manifest
        return DeviceRunner(
            device,
            manifest.model,
            dataclasses.replace(self.graphs, device=None) if without_graphs else self.graphs,
            self.bundle.read,
            num_slots,
            manifest.limits,
            max_encode_tokens,
            manifest.special_ids.never_generated,
        )

    def answers(self, runner, requests):
        outcomes = generate_all(runner, self.rules, requests, EngineConfig())
        return [outcome.hypotheses for outcome in outcomes]

    def alone(self, requests):
        runner = self.runner(4)
        return [self.answers(runner, [request])[0] for request in requests]


@pytest.fixture(scope="module")
def toy(half_export):
    return Toy(half_export("pre-norm, gelu")[1])


def greedy(index, max_new_tokens=12, scores=True, **options):
    rng = random.Random(index)
    source = tuple(rng.choices(range(4, 12), k=rng.randint(1, 60)))
    return GenerationRequest(source, max_new_tokens, scores, **options)


def mixed(index):
    """Greedy every other time; else something else, always the same."""
    rng = random.Random(index)
    return greedy(
        index,
        search=rng.choice([SearchOptions()] * len(SEARCHES) + SEARCHES),
        steering=rng.choice([None, None, Steering(min_new_tokens=3, repetition_penalty=1.2, no_repeat_ngram_size=2)]),
        prefix=tuple(rng.choices(range(4, 12), k=rng.choice([0, 0, 2]))),
        num_top=rng.choice([0, 0, 5]),
    )


def scored(index):
    """An answer to be scored."""
    return greedy(index, 1, prefix=tuple(random.Random(-index).choices(range(4, 12), k=6)), score_prefix=True)


# What rows say


def test_answers_are_those_of_the_same_graphs_on_the_cpu_runner(toy):
    """All kinds of requests side by side: tokens, reasons and the most probable tokens equal, scores to fp32."""
    requests = [*map(mixed, range(60)), *map(scored, range(6))]
    expected = toy.answers(OrtRunner(toy.host, 16, 1 << 28), requests)
    for found, right in zip(toy.answers(toy.runner(16), requests), expected, strict=True):
        assert [(h.tokens, h.finish_reason) for h in found] == [(h.tokens, h.finish_reason) for h in right]
        for one, other in zip(found, right, strict=True):
            assert one.score == pytest.approx(other.score, rel=1e-5, abs=1e-5)
            assert one.token_scores == pytest.approx(other.token_scores, rel=1e-5, abs=1e-5)
            assert [[t for t, _ in step] for step in one.top] == [[t for t, _ in step] for step in other.top]


def test_number_of_slots_order_and_neighbours_change_nothing(toy):
    """Alone, in 5 slots and in 16, in order and reversed: equal to the last bit of every score."""
    requests = [mixed(i) for i in range(30)]
    expected = toy.alone(requests)
    for num_slots in (5, 16):
        for order in (range(30), range(29, -1, -1)):
            found = toy.answers(toy.runner(num_slots), [requests[i] for i in order])
            assert found == [expected[i] for i in order]


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_requests_with_random_cancels_equal_each_alone(toy, num_replicas):
    """Sent at random moments, a third cancelled at others: every one that ends has the answer it has alone."""
    requests = [mixed(i) for i in range(100, 150)]
    expected = toy.alone(requests)
    rng = random.Random(7)
    engine = Engine([toy.runner() for _ in range(num_replicas)], toy.rules, EngineConfig())
    engine.prepare(lambda runner: runner.warm_up())
    engine.start()

    async def one(request):
        cancel_after = rng.choice([None, None, rng.randint(0, 6)])
        for _ in range(rng.randint(0, 50)):
            await asyncio.sleep(0)
        stream, seen = engine.submit(request), 0
        try:
            async for update in stream:
                seen += len(update.tokens)
                if update.result is not None:
                    return update.result.hypotheses
                if cancel_after is not None and seen >= cancel_after:
                    stream.cancel()
        except RequestCancelledError:
            return None
        raise AssertionError("a stream ends with a result or an error")

    outcomes = await asyncio.gather(*map(one, requests))
    await engine.drained()
    assert engine.snapshot().slots_used == 0
    await engine.close()
    survivors = [i for i, outcome in enumerate(outcomes) if outcome is not None]
    assert 20 < len(survivors) < 50
    for i in survivors:
        assert outcomes[i] == expected[i], i


def test_a_row_that_fails_harms_no_other(toy):
    """NaN among one row's keys: that request fails, the rows beside it, idle ones too, do not notice."""
    runner, requests = toy.runner(4), [greedy(i) for i in range(3)]
    expected = toy.alone(requests)
    original = runner.kv.install

    def install(outputs, slots, rows, lengths):
        original(outputs, slots, rows, lengths)
        buffer = runner.kv.cross_buffers["key_0"]
        held = buffer.read()
        held[1] = np.nan
        buffer.write(held)

    runner.kv.install = install
    first, failed, third = generate_all(runner, toy.rules, requests, EngineConfig())
    assert (first.hypotheses, third.hypotheses) == (expected[0], expected[2])
    assert "no finite score" in str(failed)


def test_a_source_alone_is_encoded_in_few_shapes(toy):
    """For what looks at the encoder's outputs: padded on the way in, and not on the way out."""
    runner, shapes = toy.runner(1), []
    run = runner._encoder.run

    class Session:
        def run(self, names, feeds):
            shapes.append(feeds["source"].shape)
            return run(names, feeds)

    runner._encoder = Session()
    for length in (1, 15, 16, 17, 40, 64):
        source = np.arange(length)[None] % 8 + 4
        feeds = {"source": source, "source_lengths": np.array([length], np.int32)}
        for found, expected in zip(
            runner.encoder.run(["cross_key_0", "cross_value_0"], feeds),
            toy.host.encoder.run(["cross_key_0", "cross_value_0"], feeds),
            strict=True,
        ):
            assert found.shape == expected.shape
            np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), rtol=0.01, atol=0.01)
    assert shapes == [(1, 16)] * 3 + [(1, 32)] + [(1, 64)] * 2


# What a step moves


class Watch:
    """Which memory outputs were bound to, told apart by address: a device's buffers, and the host's."""

    def __init__(self, monkeypatch):
        self.host: list[int] = []
        watch, buffers = self, []
        allocate, bind = Buffer.__init__, ort.IOBinding.bind_output

        def allocated(buffer, device, shape, dtype):
            allocate(buffer, device, shape, dtype)
            buffers.append((buffer.address(), buffer.address() + buffer.row_bytes * max(shape[0], 1)))

        def bound(binding, name, device_type="cpu", device_id=0, element_type=None, shape=None, buffer_ptr=None):
            if buffer_ptr is not None and not any(start <= buffer_ptr < end for start, end in buffers):
                watch.host.append(int(np.prod(shape)) * np.dtype(element_type).itemsize)
            return bind(binding, name, device_type, device_id, element_type, shape, buffer_ptr)

        def never(*_):
            raise AssertionError("a whole value was copied to the host")

        monkeypatch.setattr(Buffer, "__init__", allocated)
        monkeypatch.setattr(ort.IOBinding, "bind_output", bound)
        monkeypatch.setattr(ort.IOBinding, "copy_outputs_to_cpu", never)
        monkeypatch.setattr(ort.OrtValue, "numpy", never)


def test_greedy_and_beam_steps_bring_back_ids_scores_and_top_tokens_alone(toy, monkeypatch):
    """Counted, and seen in what runs were bound to: no output on the host is larger, and no value is read whole."""
    watch = Watch(monkeypatch)
    runner = toy.runner(8)
    size = toy.manifest.model.target_vocab_size
    toy.answers(runner, [greedy(i, scores=False) for i in range(20)])
    assert set(runner.copied) == {"best"}
    assert watch.host and max(watch.host) <= 8 * 4  # a number a row, twice
    toy.answers(runner, [greedy(i, search=SearchOptions(beam_size=2)) for i in range(20)])
    assert set(runner.copied) == {"best", "ranked"}
    assert max(watch.host) == 8 * 4 * 8 < 8 * size * 4  # the 2 x 2 most probable of each row
    watch.host.clear()
    toy.answers(runner, [greedy(0, search=SearchOptions(temperature=1.0, seed=1))])
    assert watch.host and set(watch.host) <= {4, size * 4}  # a row, whole
    assert set(runner.copied) == {"best", "ranked", "sampling"}


def test_nothing_is_bound_again_and_no_address_changes(toy, monkeypatch):
    """What was captured stays valid, whatever comes: the decoder is bound once a bucket, when it is opened."""
    runner = toy.runner(6)
    assert runner.row_buckets == (1, 2, 4, 6)

    def never(*_):
        raise AssertionError("bound again")

    monkeypatch.setattr(runner._decoder, "io_binding", never)
    buffers = [*runner.kv.self_buffers.values(), *runner.kv.cross_buffers.values(), runner.logits]
    addresses = [buffer.address() for buffer in buffers]
    bindings = dict(runner._bindings)
    toy.answers(runner, [mixed(i) for i in range(12)])
    assert addresses == [buffer.address() for buffer in buffers]
    assert runner._bindings == bindings and len(bindings) == 4


def test_only_the_rows_in_use_are_paid_for(toy, monkeypatch):
    """A step runs over the least bucket that holds its rows."""
    runner, buckets = toy.runner(8), []
    step = runner._step
    monkeypatch.setattr(runner, "_step", lambda bucket, *rest: (buckets.append(bucket), step(bucket, *rest)))
    for count in (1, 2, 3, 5, 8):
        toy.answers(runner, [greedy(index, 1) for index in range(count)])
    assert buckets == [1, 2, 4, 8, 8]


# Before anything is served


def test_the_warm_up_runs_every_shape_that_comes_later(toy, monkeypatch):
    """Encoder and decoder, with what is done told; then no run has a shape that was not there."""
    runner, told = toy.runner(8, max_encode_tokens=128), []
    runs = []
    encode, step = runner._encode, runner._step
    monkeypatch.setattr(runner, "_encode", lambda batch, *rest: (runs.append(batch.shape), encode(batch, *rest)))
    monkeypatch.setattr(runner, "_step", lambda bucket, *rest: (runs.append(bucket), step(bucket, *rest)))
    runner.warm_up(lambda *progress: told.append(progress))
    warmed = set(runs)
    assert [(what, done) for what, done, _ in told if what == "decoder"] == [("decoder", i) for i in (1, 2, 3, 4)]
    assert told[-1] == ("decoder", 4, 4) and told[0][0] == "encoder"
    assert {(1, 16), (1, 64), (8, 16)} <= warmed and (8, 64) not in warmed  # 8 sources of 33 tokens are too many
    runs.clear()
    config = EngineConfig(max_encode_tokens=128)
    outcomes = generate_all(runner, toy.rules, [mixed(i) for i in range(40)], config)
    assert [o.hypotheses for o in outcomes] == toy.alone([mixed(i) for i in range(40)])
    assert len(set(runs)) > 6 and set(runs) <= warmed


def test_memory_is_planned_before_it_is_taken(toy):
    """The KV cache to the byte; a limit that is too low is refused with all figures, and allocates nothing."""
    runner = toy.runner(8)
    plan, shape = runner.plan, toy.manifest.model
    # Keys and values of 8 rows, each with room for 64 source and 64 target tokens, of two bytes.
    assert plan.kv_cache == runner.kv_cache_bytes == 8 * (64 + 64) * 2 * shape.decoder_layers * 64 * 2
    files = toy.manifest.files
    assert plan.weights == sum(files[g.file].bytes for g in (toy.graphs.encoder, toy.graphs.decoder))
    assert plan.total == plan.weights + plan.kv_cache + plan.workspace
    with pytest.raises(ConfigError, match=r"needs \d+ bytes .*weights .*KV cache .*limit 0.1 MiB.*--gpu-mem-limit"):
        toy.runner(8, Device("cuda-dry", DeviceConfig(mem_limit_bytes=100_000)))
    enough = toy.runner(8, Device("cuda-dry", DeviceConfig(mem_limit_bytes=plan.total)))
    assert enough.plan.for_sessions == plan.total - plan.kv_cache
    assert MemoryPlan(1, 2, 3, limit=0).for_sessions == 0


def test_a_model_that_does_not_fit_is_refused_by_name(toy, monkeypatch):
    """The allocator says no: the message has the bytes, and what to do."""

    def full(*_):
        raise RuntimeError("CUDA failure 2: out of memory ; GPU=0")

    monkeypatch.setattr(device_module.ort.OrtValue, "ortvalue_from_numpy", full)
    with pytest.raises(ConfigError, match=r"no room for \d+ bytes .* lower --slots"):
        toy.runner(8)


def test_graphs_without_those_for_a_device_are_refused(toy):
    """An older bundle: by name, with the remedy."""
    with pytest.raises(BundleError, match=r"cuda/fp16 graphs come without those for a device: export .* again"):
        toy.runner(8, without_graphs=True)


# When memory runs out


@pytest.mark.parametrize(
    "message",
    [
        "CUDA failure 2: out of memory ; GPU=0",
        "Failed to allocate memory for requested buffer of size 123",
        "Available memory of 5 is smaller than requested bytes of 9",
    ],
)
async def test_requests_are_refused_when_memory_runs_out(toy, monkeypatch, message):
    """The encoder has no room: these requests are told so, what runs goes on, and later ones are served."""
    run = Binding.run
    requests = [greedy(i) for i in range(6)]
    expected = toy.alone(requests)
    encoded, full, go_on = threading.Event(), threading.Event(), threading.Event()

    def scarce(binding, reason, options=None):
        if reason == "encode" and full.is_set():
            full.clear()
            raise RuntimeError(message)
        if reason == "decode":
            encoded.set()
            assert go_on.wait(timeout=60)
        run(binding, reason, options)

    monkeypatch.setattr(Binding, "run", scarce)
    engine = Engine([toy.runner()], toy.rules, EngineConfig())
    engine.start()

    async def outcome(stream):
        async for update in stream:
            if update.result is not None:
                return update.result.hypotheses
        raise AssertionError("a stream ends with its result")

    running = engine.submit(requests[0])
    assert await asyncio.to_thread(encoded.wait, 60)
    late = engine.submit(requests[1])
    full.set()
    go_on.set()
    with pytest.raises(OverloadedError, match=r"lacks the memory to read \d+ source tokens"):
        await outcome(late)
    assert not full.is_set()
    assert await outcome(running) == expected[0]
    assert [await outcome(engine.submit(request)) for request in requests[2:]] == expected[2:]
    assert engine.snapshot().failure is None
    await engine.close()


def test_memory_that_runs_out_while_rows_are_copied_is_no_refusal(toy, monkeypatch):
    """Half of the copies may be made: to say "retry" and to copy again would give running rows each other's tokens."""
    runner, run = toy.runner(4), Binding.run
    runner.admit([(5, 6), (7, 8)], [[0], [1]])
    runner.decode(np.array([1, 1]))
    runner.move(1, 0)

    def scarce(binding, reason, options=None):
        if reason == "settle":
            raise RuntimeError("CUDA failure 2: out of memory ; GPU=0")
        run(binding, reason, options)

    monkeypatch.setattr(Binding, "run", scarce)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.admit([(9, 9)], [[1]])


def test_a_request_beyond_the_model_is_refused(toy):
    """Rows have room for the model's limits, and never more."""
    runner = toy.runner(4)
    with pytest.raises(OverloadedError, match="65 source and 10 target tokens"):
        runner.reserve(65, 10)
    runner.reserve(64, 24)


# What CUDA is told


def test_cuda_graphs_are_for_the_decoder_alone_one_a_bucket(toy, monkeypatch):
    """Sessions are opened on the device that was asked for, with what float16 and the memory plan need."""
    opened = []

    class Session:
        def __init__(self, content, options, providers, enable_fallback):
            opened.append(providers)

    monkeypatch.setattr(device_module.ort, "InferenceSession", Session)
    monkeypatch.setattr(device_module, "check_placement", lambda session, file: None)
    monkeypatch.setattr(device_module, "check_signature", lambda graph, session: None)
    device = Device("cuda", DeviceConfig(device_id=1))
    device.open(toy.graphs.encoder, toy.bundle.read, mem_limit=77)
    device.open(toy.graphs.decoder, toy.bundle.read, captured=True)
    Device("cuda", DeviceConfig(cuda_graphs=False)).open(toy.graphs.decoder, toy.bundle.read, captured=True)
    ((_, first),), ((_, second),), ((_, third),) = opened
    assert [o["enable_cuda_graph"] for o in (first, second, third)] == ["0", "1", "0"]
    assert [o["device_id"] for o in (first, second, third)] == ["1", "1", "0"]
    assert (first["gpu_mem_limit"], "gpu_mem_limit" in second) == ("77", False)
    assert {o["enable_skip_layer_norm_strict_mode"] for o in (first, second, third)} == {"1"}
    assert {o["arena_extend_strategy"] for o in (first, second, third)} == {"kSameAsRequested"}
    numbers = [device.capture_options(bucket).get_run_config_entry("gpu_graph_id") for bucket in (1, 2, 4)]
    assert numbers == ["1", "2", "4"]
    assert Device("cuda", DeviceConfig(cuda_graphs=False)).capture_options(1) is None
    assert DRY.capture_options(1) is None


def test_weights_that_do_not_fit_are_no_fault_of_the_bundle(toy, monkeypatch):
    """The message has the file, and what to do."""

    def full(*_, **__):
        raise RuntimeError("Available memory of 5 is smaller than requested bytes of 9")

    monkeypatch.setattr(device_module.ort, "InferenceSession", full)
    with pytest.raises(ConfigError, match=r"no room for the weights of decoder\.cuda\.fp16\.onnx: .*--gpu-mem-limit"):
        Device("cuda").open(toy.graphs.decoder, toy.bundle.read)


# As it is served


def replica_threads():
    return {thread for thread in threading.enumerate() if isinstance(thread, ReplicaThread)}


async def test_a_bundle_is_served_dry(toy):
    """Warmed up and proven on the thread that will serve, then answering as the graphs do on the CPU runner."""
    told, threads = [], replica_threads()
    served = ServedModel.load(
        toy.bundle.path,
        EngineConfig(num_slots=4),
        LIMITS,
        provider="cuda-dry",
        progress=lambda *what: told.append((threading.current_thread().name, *what)),
    )
    assert {name for name, *_ in told} == {"replica-0"}
    assert told[-1][1:] == ("decoder", 3, 3)
    assert served.plan is not None and served.plan.kv_cache > 0
    served.start()
    requests = [greedy(i) for i in range(8)]
    expected = toy.answers(OrtRunner(toy.host, 4, 1 << 28), requests)

    async def tokens(request):
        async for update in served.engine.submit(request):
            if update.result is not None:
                return [h.tokens for h in update.result.hypotheses]
        raise AssertionError("a stream ends with its result")

    found = await asyncio.gather(*map(tokens, requests))
    assert found == [[h.tokens for h in hypotheses] for hypotheses in expected]
    await served.close()
    assert replica_threads() <= threads


def test_replicas_share_the_memory_that_the_process_may_take(toy):
    """Each plans with its part: what one replica fits into may be too little for two."""
    total = toy.runner(4).plan.total
    device, config = DeviceConfig(mem_limit_bytes=total), EngineConfig(num_slots=4)
    (alone,) = open_device_runners(toy.bundle, toy.graphs, config, "cuda-dry", device)
    assert alone.plan.limit == total
    with pytest.raises(ConfigError, match=f"needs {total} bytes"):
        open_device_runners(toy.bundle, toy.graphs, dataclasses.replace(config, num_replicas=2), "cuda-dry", device)


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        ("no kernel image", BundleError, "fail on the device: no kernel image"),
        (
            "CUDA failure 2: out of memory ; GPU=0",
            ConfigError,
            r"no room for the largest runs \(weights .*lower --slots",
        ),
    ],
)
def test_a_device_that_fails_its_first_runs_is_not_served(toy, monkeypatch, failure, error, message):
    """The replica's thread says so where the bundle is loaded, and is gone; a lack of memory comes with its remedy."""

    def fail(*_):
        raise RuntimeError(failure)

    monkeypatch.setattr(Binding, "run", fail)
    threads = replica_threads()
    with pytest.raises(error, match=message):
        ServedModel.load(toy.bundle.path, EngineConfig(num_slots=2), LIMITS, provider="cuda-dry")
    for thread in replica_threads() - threads:
        thread.join(timeout=60)
    assert replica_threads() <= threads


def test_a_shortlist_is_refused_by_name(toy):
    """It is for the CPU's graphs of 8 bits."""
    with pytest.raises(BundleError, match="has no shortlist: serve it without --shortlist"):
        ServedModel.load(toy.bundle.path, EngineConfig(), LIMITS, provider="cuda-dry", shortlist=True)
