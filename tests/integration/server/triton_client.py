"""What test_server_triton.py runs in an environment of its own: NVIDIA's client, unchanged, against a server.

    python triton_client.py HOST:PORT MODEL

Prints one JSON object of what it saw; the test knows what that should be.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from google import protobuf
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

target, model = sys.argv[1:]
seen: dict[str, Any] = {"protobuf": protobuf.__version__}


def texts(*values: str, column: bool = True) -> list[Any]:
    """The input, of shape [N, 1] or [N]."""
    array = np.array([value.encode() for value in values], dtype=np.object_)
    tensor = triton.InferInput("text_input", [len(values), 1] if column else [len(values)], "BYTES")
    tensor.set_data_from_numpy(array.reshape(-1, 1) if column else array)
    return [tensor]


def answers(result: Any, output: str = "text_output") -> Any:
    """An output as nested lists."""
    array = result.as_numpy(output)
    if array.dtype == np.object_:
        array = np.vectorize(bytes.decode, otypes=[object])(array)
    return array.tolist()


def failure(call: Any, *arguments: Any, **options: Any) -> list[str]:
    """Status and beginning of the message of a call that fails."""
    try:
        call(*arguments, **options)
    except InferenceServerException as error:
        return [str(error.status()), error.message()[:60]]
    return ["OK", ""]


def stream(requests: list[dict[str, Any]], **options: Any) -> list[Any]:
    """What a stream gets for some requests, one after the other: [id, text, final], or [None, error]."""
    found: list[Any] = []
    results: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(target) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)), **options)
        for values in requests:
            inputs = texts(*values.pop("texts"))
            client.async_stream_infer(model, inputs, **values)
            while True:
                result, error = results.get(timeout=60)
                if error is not None:
                    found.append([None, str(error)[:60]])
                    break
                response = result.get_response()
                final = response.parameters["triton_final_response"].bool_param
                text = answers(result) if response.outputs else None
                found.append([response.id, text, final])
                if final:
                    break
        client.stop_stream()
    return found


async def stream_aio() -> list[Any]:
    """The asyncio client's stream."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": texts("giraffe"), "request_id": "a"}
        yield {"model_name": model, "inputs": texts("queue"), "request_id": "b"}

    parts: dict[str, str] = {}
    async with triton_aio.InferenceServerClient(target) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            name = result.get_response().id
            parts[name] = parts.get(name, "") + answers(result)[0][0]
    return sorted(parts.items())


client = triton.InferenceServerClient(target)
seen["live"] = client.is_server_live()
seen["ready"] = client.is_server_ready()
seen["model_ready"] = [client.is_model_ready(model), client.is_model_ready(model, "no"), client.is_model_ready("no")]
seen["server"] = client.get_server_metadata(as_json=True)
seen["metadata"] = client.get_model_metadata(model, as_json=True)
seen["config"] = client.get_model_config(model, as_json=True)["config"]

words = ("giraffe", "", "two\nlines")
seen["column"] = answers(client.infer(model, texts(*words)))
seen["row"] = answers(client.infer(model, texts(*words, column=False)))
seen["compressed"] = answers(client.infer(model, texts(*words), compression_algorithm="gzip"))
outputs = [triton.InferRequestedOutput(name) for name in ("score", "finish_reason", "text_output")]
result = client.infer(
    model,
    texts("giraffe"),
    outputs=outputs,
    request_id="mine",
    priority=1,
    timeout=60_000_000,
    parameters={"num_beams": 2, "num_return_sequences": 2, "max_tokens": 30},
)
seen["id"] = result.get_response().id
seen["beams"] = {name: answers(result, name) for name in ("score", "finish_reason", "text_output")}
later: queue.Queue[Any] = queue.Queue()
client.async_infer(model, texts("giraffe"), lambda result, error: later.put((result, error)))
result, error = later.get(timeout=60)
assert error is None, error
seen["asynchronous"] = answers(result)

seen["failures"] = [
    failure(client.infer, "no", texts("a")),
    failure(client.infer, model, texts("a"), parameters={"beams": 2}),
    failure(client.infer, model, texts("a"), sequence_id=7),
    failure(client.infer, model, texts("giraffe", "a" * 70_000)),
    failure(client.get_trace_settings),
    failure(client.unload_model, "no"),
]

seen["stream"] = stream([{"texts": ["giraffe", "queue"], "request_id": "1"}])
seen["stream_empty_final"] = stream([{"texts": ["giraffe"], "enable_empty_final_response": True}])
seen["stream_error"] = stream([{"texts": ["a" * 70_000]}, {"texts": ["queue"], "request_id": "2"}])
seen["stream_status"] = stream([{"texts": ["a" * 70_000]}], headers={"triton_grpc_error": "true"})
seen["stream_aio"] = asyncio.run(stream_aio())

with grpc.insecure_channel(target) as channel:  # typed contents, which other clients of the protocol send
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    request = service_pb2.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"giraffe")
    contents = stub.ModelInfer(request).outputs[0].contents.bytes_contents
    seen["typed"] = [content.decode() for content in contents]

statistics = client.get_inference_statistics(model, as_json=True)["model_stats"][0]
seen["statistics"] = {
    "name": statistics["name"],
    "inferences": int(statistics["inference_count"]),
    "failed": int(statistics["inference_stats"]["fail"]["count"]),
    "measured": sorted(name for name, value in statistics["inference_stats"].items() if int(value.get("ns", 0)) > 0),
}

seen["index"] = client.get_model_repository_index(as_json=True)["models"]
client.unload_model(model)
seen["unloaded"] = [client.is_model_ready(model), failure(client.infer, model, texts("a"))[0]]
seen["index_ready"] = (
    service_pb2_grpc.GRPCInferenceServiceStub(client._channel)
    .RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True))
    .models.__len__()
)
client.load_model(model)
seen["loaded"] = [client.is_model_ready(model), answers(client.infer(model, texts("giraffe")))]
client.close()
print(json.dumps(seen))
