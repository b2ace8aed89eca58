"""Turns a checkpoint into a bundle: ONNX graphs with attention born fused, verified against PyTorch before saving."""
