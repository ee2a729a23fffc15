"""Rewrites of ONNX graphs: folded constants, and nodes as parts that can be cut."""
