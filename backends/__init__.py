"""Writers and runtimes of rank programs, one package a target (ONNX Runtime first)."""
