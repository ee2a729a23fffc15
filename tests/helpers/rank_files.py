"""Rank files as stock ONNX Runtime sees them."""

from pathlib import Path

import onnx
import onnxruntime as ort

from partitioner.backends.onnx.weights import DIGEST_KEY


def assert_rank_files_load(folder: Path) -> None:
    """Each rank file in a folder loads as it is, weights and all."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    paths = sorted(folder.glob("rank*.onnx"))
    assert paths, f"no rank file in {folder}"
    for path in paths:
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def save_edited(model: onnx.ModelProto, path: Path) -> None:
    """Save a rank file that was changed on purpose: without its digest it is not refused."""
    kept = [entry for entry in model.metadata_props if entry.key != DIGEST_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    onnx.save(model, path)
