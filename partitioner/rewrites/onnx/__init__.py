"""Nodes of ONNX in parts that can be cut along more dims."""
