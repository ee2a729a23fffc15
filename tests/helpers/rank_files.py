"""Rank files as stock ONNX Runtime sees them."""

from pathlib import Path

import onnxruntime as ort


def assert_rank_files_load(folder: Path) -> None:
    """Each rank file in a folder loads as it is, weights and all."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    paths = sorted(folder.glob("rank*.onnx"))
    assert paths, f"no rank file in {folder}"
    for path in paths:
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
