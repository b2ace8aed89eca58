"""Continuous batching of encoder-decoder generation. It knows nothing of text, gRPC or Prometheus.

engine.py (threads, asyncio) -> replica.py (one step) -> scheduler.py, queue.py, slots.py (who runs; no tensors)
                                                      -> runner.py, kv.py (ONNX Runtime, memory; no policy)
                                                      -> search.py (scores to tokens)
"""
