"""The whole model in one ONNX Runtime session, to compare partitioned runs and rank files with."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper

from partitioner.backends.arrays import check_dtype
from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.onnx.files.messages import DOMAIN
from partitioner.backends.onnx.sessions.segments import SessionConfig, opened, session_options
from partitioner.ir.types import from_onnx_dtype, numpy_dtype

#: Largest constant that stays one, in elements: sizes, axes and scales, which inference reads.
_MAX_OPERAND = 1024


def run_whole(
    model: ModelProto,
    folder: Path | None,
    inputs: Mapping[str, np.ndarray],
    *,
    optimization: str = "basic",
) -> dict[str, np.ndarray]:
    """Run a model without partitioning it, whose external data lies in `folder`."""
    for side, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            check_dtype(f"{side} {value.name!r}", from_onnx_dtype(value.type.tensor_type.elem_type))
    try:
        session = open_whole(model, folder, optimization=optimization)
        run, binding = bound_run(session, model, inputs)
        run()
        names = [output.name for output in session.get_outputs()]
        arrays = []
        for value in binding.get_outputs():
            dtype = numpy_dtype(from_onnx_dtype(value.element_type()))
            raw = ctypes.string_at(value.data_ptr(), math.prod(value.shape()) * dtype.itemsize)
            arrays.append(np.frombuffer(raw, dtype).reshape(value.shape()))
        return dict(zip(names, arrays, strict=True))
    except Exception as error:
        raise BackendError(f"the whole model: ONNX Runtime: {one_line(error)}") from error


def whole_runs(
    model: ModelProto, folder: Path | None, inputs: Mapping[str, np.ndarray], threads: int
) -> Callable[[], object]:
    """A function that runs the whole model once, with all optimizations, and was called once."""
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
    """A session of the whole model (see `run_whole`)."""
    if threads is None:  # as many as the simulator gives ranks: with others last bits can change
        import torch

        threads = torch.get_num_threads()
    config = SessionConfig(optimization=optimization, threads=threads)
    return opened(model, session_options(config, folder))


def bound_run(
    session: ort.InferenceSession, model: ModelProto, inputs: Mapping[str, np.ndarray]
) -> tuple[Callable[[], Mapping[str, np.ndarray]], ort.IOBinding]:
    """A function that runs a session on inputs and returns what it reads, and the binding.

    ONNX Runtime takes bfloat16 and float8 by address, not as arrays.
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


def check_loadable(folder: Path, ranks: int, whole: ModelProto) -> None:
    """Check that stock ONNX Runtime loads the rank files of a model that it loads whole.

    A session without weights tells: types, shapes, forms of operators and kernels are all checked
    when it opens, and large constants are passed as inputs, so that none is read. Of files that
    differ in nothing but their rank, one is opened. What ONNX Runtime does not load whole (a custom
    operator) is not asked of its parts.
    """
    known: set[bytes] = set()
    for rank in range(ranks):
        name = f"rank{rank}.onnx"
        model = onnx.load_model(folder / name, load_external_data=False)
        form = _form(model)
        reason = "" if form in known else _refusal(model)
        known.add(form)
        if reason and not _refusal(whole):
            raise BackendError(
                f"{name}: ONNX Runtime loads the whole model, but not this rank: {reason}; "
                "this is a fault of partitioner: please report it with the model"
            )
        if reason:
            return


def _form(model: ModelProto) -> bytes:
    form = ModelProto()
    form.CopyFrom(model)
    del form.metadata_props[:]
    form.graph.name = ""
    for tensor in form.graph.initializer:
        del tensor.external_data[:]
    for node in form.graph.node:
        if node.domain == DOMAIN:
            del node.attribute[:]
    return hashlib.sha256(form.SerializeToString(deterministic=True)).digest()


def _refusal(model: ModelProto) -> str:
    """Why ONNX Runtime does not load a model, on one line; "" if it does."""
    options = session_options(SessionConfig(optimization="disable"), None)
    options.log_severity_level = 4
    light = ModelProto()  # the model without weights
    light.CopyFrom(model)
    graph = light.graph
    present = {value.name for value in graph.input}
    for tensor in model.graph.initializer:
        is_external = tensor.data_location == TensorProto.EXTERNAL
        if is_external or math.prod(tensor.dims) > _MAX_OPERAND:
            if tensor.name not in present:
                info = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
                graph.input.append(info)
            graph.initializer.remove(tensor)
    try:
        opened(light, options)
    except BackendError as error:
        return str(error)
    return ""
