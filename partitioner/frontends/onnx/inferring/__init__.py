"""Static types of all values, inferred as ONNX Runtime has them, and checks of nodes with them."""
