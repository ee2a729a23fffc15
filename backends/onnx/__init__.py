"""ONNX models as output, and ONNX Runtime to run them."""
