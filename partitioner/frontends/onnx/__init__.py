"""ONNX models: read, checked, folded, and built into graphs."""
