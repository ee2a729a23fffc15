"""The whole model in one ONNX Runtime session: what partitioned runs are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.onnx.sessions import SessionConfig, session_options


def run_whole(
    model: ModelProto,
    folder: Path | None,
    inputs: Mapping[str, np.ndarray],
    *,
    optimization: str = "basic",
) -> dict[str, np.ndarray]:
    """Run a model without partitioning it.

    Args:
        model: The model; its external data lies in `folder`.
        folder: None without external data.
        inputs: Whole inputs by name.
        optimization: See `SessionConfig`.

    Raises:
        BackendError: ONNX Runtime cannot load or run the model.
    """
    try:
        session = open_whole(model, folder, optimization=optimization)
        names = [output.name for output in session.get_outputs()]
        fed = {item.name: inputs[item.name] for item in session.get_inputs()}
        return dict(zip(names, session.run(names, fed), strict=True))
    except Exception as error:
        raise BackendError(f"the whole model: ONNX Runtime: {one_line(error)}") from error


def open_whole(
    model: ModelProto, folder: Path | None, *, optimization: str = "basic", threads: int = 0
) -> ort.InferenceSession:
    """A session of the whole model (see `run_whole`); 0 threads takes all cores."""
    options = session_options(SessionConfig(optimization=optimization, threads=threads), folder)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
