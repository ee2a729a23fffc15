"""A rank's program in ONNX Runtime, ready to be run over and over: for measurements."""

from __future__ import annotations

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
from partitioner.backends.onnx.sessions.kernels import kernel_events
from partitioner.backends.onnx.sessions.segments import (
    SessionConfig,
    opened,
    optimizers_off,
    session_options,
)
from partitioner.backends.onnx.sessions.whole import bound_run
from partitioner.backends.prepared import Prepared
from partitioner.ir.graph import Graph
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
        session = opened(model, options, optimizers_off(bool(programs.plain)))
        run, _ = bound_run(session, model, inputs)
        held = run()
    except Exception as error:
        shutil.rmtree(folder)
        raise BackendError(one_line(error)) from error

    def own_seconds() -> Sequence[float]:
        seconds = [kernel_seconds(of) for of, _ in kernel_events(Path(session.end_profiling()))]
        shutil.rmtree(folder)
        return seconds[1:]  # without the first run

    weakref.finalize(own_seconds, shutil.rmtree, folder, ignore_errors=True)
    return Prepared(run, own_seconds, operands={**inputs, **held})


def kernel_seconds(kernels: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of the kernels of a run, by their events in the profile."""
    took = (event["dur"] for event in kernels if event["args"]["op_name"] not in _REORDERS)
    return max(float(sum(took)) * 1e-6, _LEAST_S)
