"""Rank files of ONNX: written, read as steps, and checked."""
