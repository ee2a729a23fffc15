"""Plans as ONNX's multi-device annotations (IR 11): written and checked."""
