"""Dragoman serves encoder-decoder transformers: text in, text out, over gRPC.

This package is the runtime. It never imports torch, onnx, the training or the export package; what they made reaches it
as a bundle (``dragoman.bundle``).
"""

__version__ = "0.1.0"
