"""Training of encoder-decoder transformers: preparation, training, reference decoding, evaluation, in PyTorch."""
