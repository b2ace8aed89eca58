"""Continuous batching of encoder-decoder generation. It knows nothing of text, gRPC or Prometheus.

engine.py (threads, asyncio) -> replica.py (one step of all rows), which calls

- scheduler.py, slots.py (who runs, and in which row): no tensors
- queue.py, order.py, line.py, deadlines.py, forecast.py, work.py (who waits, whose turn it is, who comes too late): no
  tensors
- runner.py (ONNX Runtime), kv.py (the rows' memory), candidates.py, projection.py (the shortlist): no policy
- device_runner.py, device.py, device_kv.py, device_tails.py, device_memory.py, provider.py (the same on a GPU): no
  policy
- search.py, beam.py, repetition.py (how a request's rows go on)
- choice.py, steering.py, sampling.py, largest.py (what the rows' logits offer)

sequence.py is one request's life. aligner.py stands beside: a forced pass over a finished answer.
"""
