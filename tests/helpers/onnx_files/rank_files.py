"""Rank files as stock ONNX Runtime sees them."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from partitioner.backends.onnx.files.weights import DIGEST_KEY

#: NumPy's element types by ONNX Runtime's names where they are not the same.
_DTYPES = {"float": "float32", "double": "float64"}


def assert_rank_files_run(folder: Path) -> None:
    """Each rank file in a folder loads as it is, weights and all, and runs on zeros.

    Communications are the stubs that the file has for them, so only shapes and types are tried.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    paths = sorted(folder.glob("rank*.onnx"))
    assert paths, f"no rank file in {folder}"
    for path in paths:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        outputs = session.run(None, {value.name: _zeros(value) for value in session.get_inputs()})
        for value, array in zip(session.get_outputs(), outputs, strict=True):
            assert list(array.shape) == value.shape, f"{path.name}: {value.name} is {array.shape}"


def _zeros(value: ort.NodeArg) -> np.ndarray:
    dtype = value.type.removeprefix("tensor(").removesuffix(")")
    return np.zeros(value.shape, _DTYPES.get(dtype, dtype))


def save_edited(model: onnx.ModelProto, path: Path) -> None:
    """Save a rank file that was changed on purpose: without its digest it is not refused."""
    kept = [entry for entry in model.metadata_props if entry.key != DIGEST_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    onnx.save(model, path)
