"""Readers: what a user has (an ONNX file, a torch module) -> ir.Graph with static types."""
