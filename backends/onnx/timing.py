"""A rank's program in ONNX Runtime, ready to be run over and over: for measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnxruntime as ort

from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.onnx.emit import emit_models
from partitioner.backends.onnx.sessions import SessionConfig, session_options
from partitioner.ir.graph import Graph
from partitioner.ir.onnx_types import onnx_dtype
from partitioner.ir.program import Programs

NAME = f"onnxruntime {ort.__version__}"


def prepared(
    programs: Programs, graph: Graph, inputs: Mapping[str, np.ndarray], threads: int
) -> Callable[[], object]:
    """A function that runs the program of a single rank once, with all optimizations.

    Raises:
        BackendError: ONNX Runtime does not take or run the program.
    """
    (model,) = emit_models(programs, graph)
    try:
        session = ort.InferenceSession(
            model.SerializeToString(),
            session_options(SessionConfig(threads=threads), None),
            providers=["CPUExecutionProvider"],
        )
        binding = session.io_binding()
        held = {name: np.ascontiguousarray(inputs[name]) for name in programs.ranks[0].inputs}
        for name, array in held.items():
            element = onnx_dtype(programs.inputs[name].dtype)
            binding.bind_input(name, "cpu", 0, element, inputs[name].shape, array.ctypes.data)
        for output in session.get_outputs():
            binding.bind_output(output.name, "cpu")

        def run() -> object:
            session.run_with_iobinding(binding)
            return held  # which the binding reads

        run()
    except Exception as error:
        raise BackendError(one_line(error)) from error
    return run
