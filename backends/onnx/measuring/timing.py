"""A rank's program in ONNX Runtime, ready to be run over and over: for measurements."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.backends.onnx.sessions.segments import (
    SessionConfig,
    optimizers_off,
    session_options,
)
from partitioner.backends.prepared import Prepared
from partitioner.ir.graph import Graph
from partitioner.ir.onnx_types import onnx_dtype
from partitioner.ir.program import Programs

NAME = f"onnxruntime {ort.__version__}"
#: Kernels that change a layout at the border of a session; within a model neighbours agree on one.
_REORDERS = ("ReorderInput", "ReorderOutput")
#: The profiler counts whole microseconds: a kernel that it gives none takes about half of one.
_LEAST_S = 0.5e-6


def prepared(
    programs: Programs,
    graph: Graph,
    inputs: Mapping[str, np.ndarray],
    threads: int,
    device: str = "cpu",
) -> Prepared:
    """The program of a single rank with all optimizations, timed by ONNX Runtime's own profiler.

    Its seconds are those of the kernels: a session's start is paid once a segment, not once a node,
    and operands come in the layout that the kernel wants.

    Raises:
        BackendError: ONNX Runtime does not take or run the program, or the device is no "cpu".
    """
    if device != "cpu":
        raise BackendError(f"ONNX Runtime's operators are not measured on {device!r}")
    (model,) = emit_models(programs, graph)
    folder = Path(tempfile.mkdtemp(prefix="partitioner-kernels-"))
    options = session_options(SessionConfig(threads=threads, profile=folder), None)
    try:
        session = ort.InferenceSession(
            model.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=optimizers_off(bool(programs.plain)),
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
        shutil.rmtree(folder)
        raise BackendError(one_line(error)) from error

    def own_seconds() -> Sequence[float]:
        events = json.loads(Path(session.end_profiling()).read_text())
        shutil.rmtree(folder)
        return kernel_seconds(events)[1:]  # without the first run

    weakref.finalize(own_seconds, shutil.rmtree, folder, ignore_errors=True)
    return Prepared(run, own_seconds, operands={**inputs, **held})


def kernel_seconds(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of the kernels of each run, by the events of ONNX Runtime's profiler."""
    begins = sorted(event["ts"] for event in events if event["name"] == "model_run")
    seconds = [0.0] * len(begins)
    ends = [*begins[1:], float("inf")]
    kernels = (
        event
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    )
    run = 0
    for event in sorted(kernels, key=lambda one: one["ts"]):
        while event["ts"] >= ends[run]:
            run += 1
        if event["args"]["op_name"] not in _REORDERS:
            seconds[run] += event["dur"] * 1e-6
    return [max(one, _LEAST_S) for one in seconds]
