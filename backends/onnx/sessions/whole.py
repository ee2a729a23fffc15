"""The whole model in one ONNX Runtime session, to compare partitioned runs with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from onnx import ModelProto

from partitioner.backends.arrays import check_dtype
from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.onnx.sessions.segments import SessionConfig, opened, session_options
from partitioner.ir.onnx_types import from_onnx_dtype
from partitioner.ir.types import numpy_dtype


def run_whole(
    model: ModelProto,
    folder: Path | None,
    inputs: Mapping[str, np.ndarray],
    *,
    optimization: str = "basic",
) -> dict[str, np.ndarray]:
    """Run a model without partitioning it.

    Args:
        model: The model.
        folder: Where its external data lies; None without any.
        inputs: Whole inputs by name (ml_dtypes for the types that NumPy lacks).
        optimization: See `SessionConfig`.

    Raises:
        BackendError: ONNX Runtime cannot load or run the model, or an input or output holds
            elements that cannot be passed.
    """
    for side, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            check_dtype(f"{side} {value.name!r}", from_onnx_dtype(value.type.tensor_type.elem_type))
    try:
        session = open_whole(model, folder, optimization=optimization)
        run, binding = bound_run(session, model, inputs)
        run()
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, map(_array, binding.get_outputs()), strict=True))
    except Exception as error:
        raise BackendError(f"the whole model: ONNX Runtime: {one_line(error)}") from error


def whole_runs(
    model: ModelProto, folder: Path | None, inputs: Mapping[str, np.ndarray], threads: int
) -> Callable[[], object]:
    """A function that runs the whole model once, with all optimizations, and was called once.

    Args:
        model: The model.
        folder: Where its external data lies; None without any.
        inputs: Whole inputs by name.
        threads: Of one operator.

    Raises:
        BackendError: ONNX Runtime cannot load or run the model.
    """
    try:
        session = open_whole(model, folder, optimization="all", threads=threads)
        run, _ = bound_run(session, model, inputs)
        run()
        return run
    except Exception as error:
        raise BackendError(f"the whole model: ONNX Runtime: {one_line(error)}") from error


def open_whole(
    model: ModelProto,
    folder: Path | None,
    *,
    optimization: str = "basic",
    threads: int | None = None,
) -> ort.InferenceSession:
    """A session of the whole model (see `run_whole`).

    By default with as many threads as the simulator gives the ranks: how kernels share their work
    out can change the last bits.
    """
    count = torch.get_num_threads() if threads is None else threads
    config = SessionConfig(optimization=optimization, threads=count)
    return opened(model, session_options(config, folder))


def bound_run(
    session: ort.InferenceSession, model: ModelProto, inputs: Mapping[str, np.ndarray]
) -> tuple[Callable[[], Mapping[str, np.ndarray]], ort.IOBinding]:
    """A function that runs a session on inputs, and the binding.

    ONNX Runtime takes bfloat16 and float8 by address, not as arrays. The function returns the
    arrays that the binding reads.
    """
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    held = {item.name: np.ascontiguousarray(inputs[item.name]) for item in session.get_inputs()}
    binding = session.io_binding()
    for name, array in held.items():
        shape = inputs[name].shape
        binding.bind_input(name, "cpu", 0, types[name], shape, array.ctypes.data)
    for output in session.get_outputs():
        binding.bind_output(output.name, "cpu")

    def run() -> Mapping[str, np.ndarray]:
        session.run_with_iobinding(binding)
        return held

    return run, binding


def _array(value: ort.OrtValue) -> np.ndarray:
    """A copy of a tensor's elements."""
    dtype, shape = numpy_dtype(from_onnx_dtype(value.element_type())), tuple(value.shape())
    raw = ctypes.string_at(value.data_ptr(), int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    return np.frombuffer(raw, dtype).reshape(shape)
