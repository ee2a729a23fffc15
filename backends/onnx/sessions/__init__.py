"""Sessions of ONNX Runtime: of a rank's segments, of blocks, and of a whole model."""
