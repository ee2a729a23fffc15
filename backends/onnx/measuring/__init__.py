"""Measurements of ONNX ranks: records of steps, and programs that are timed."""
