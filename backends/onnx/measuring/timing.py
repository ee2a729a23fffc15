"""Kernels by ONNX Runtime's own profile: their time, and the nodes that each of them computed.

ONNX Runtime fuses nodes and names the results in many ways. The graph that it runs, which it writes
on request, has the names of tensors that are left; the nodes between two such tensors belong to the
kernel that makes the latter.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import NodeProto

from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.backends.onnx.sessions.segments import SessionConfig, opened, session_options
from partitioner.backends.onnx.sessions.whole import bound_run
from partitioner.backends.prepared import Prepared
from partitioner.ir.graph import Graph
from partitioner.ir.program import Programs

NAME = f"onnxruntime {ort.__version__}"
#: Kernels that change a layout at the border of a session; within a model neighbours agree on one.
_REORDERS = ("ReorderInput", "ReorderOutput")
#: The profiler counts whole microseconds: a kernel that it gives none takes about half of one.
_LEAST_S = 0.5e-6
#: Suffix of the names of kernels on blocked layouts: the name of the tensor is in front.
_BLOCKED = "_nchwc"
#: Prefix of the names of fused kernels: the name of the first node is behind.
_FUSED = "fused "
_KERNEL = "_kernel_time"
_MICROSECOND = 1e-6


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
    """
    if device != "cpu":
        raise BackendError(f"ONNX Runtime's operators are not measured on {device!r}")
    (model,) = emit_models(programs, graph)
    folder = Path(tempfile.mkdtemp(prefix="partitioner-kernels-"))
    options = session_options(SessionConfig(threads=threads, profile=folder), None)
    try:
        session = opened(model, options, plain=bool(programs.plain))
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


@dataclass(frozen=True)
class Kernel:
    """A kernel in one run of a session."""

    name: str  #: Its name in the graph that ONNX Runtime runs.
    op: str  #: Its operator.
    begin_s: float  #: Seconds from the end of the run, negative.
    end_s: float  #: The same of its end.
    in_use_bytes: int  #: Bytes that the session's allocator has handed out at its end.
    taken_bytes: int  #: The same that it took itself.


def kernel_runs(profile: Path) -> list[tuple[Kernel, ...]]:
    """The kernels of each run of a session, from the profile that it wrote.

    Raises:
        BackendError: The profile does not report bytes.
    """
    return [tuple(_kernel(one, end) for one in events) for events, end in kernel_events(profile)]


def kernel_events(profile: Path) -> Iterator[tuple[Sequence[Mapping[str, Any]], int]]:
    """The events of the kernels in each run of a session, and the end of the run."""
    events: list[Mapping[str, Any]] = []
    for event in json.loads(profile.read_text()):
        if event["name"].endswith(_KERNEL):
            events.append(event)
        elif event["name"] == "model_run":
            yield events, event["ts"] + event["dur"]
            events = []


def _kernel(event: Mapping[str, Any], end: int) -> Kernel:
    facts = event["args"]
    if "mem_bytes_requested_in_use" not in facts:
        raise BackendError("this ONNX Runtime's profile does not report bytes in use")
    begin = event["ts"] - end
    return Kernel(
        event["name"].removesuffix(_KERNEL),
        facts["op_name"],
        begin * _MICROSECOND,
        (begin + event["dur"]) * _MICROSECOND,
        int(facts["mem_bytes_requested_in_use"]),
        int(facts["mem_requested_in_use_delta"]),
    )


def nodes_of_kernels(
    nodes: Sequence[NodeProto], optimized: Path
) -> Mapping[str, tuple[NodeProto, ...]]:
    """The nodes that each kernel of a session's `optimized` graph computes, by the kernel's name.

    Nodes that ONNX Runtime removed or computed beforehand belong to the kernel that reads their
    results. Kernels that no node asked for, which change layouts, are left out.
    """
    kernels = onnx.load(optimized, load_external_data=False).graph.node
    owners = dict(_anchored(nodes, kernels))
    readers: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in node.input:
            readers.setdefault(name, []).append(index)
    _claim_backwards(nodes, kernels, owners)
    _spread_forwards(nodes, owners)
    for index in reversed(range(len(nodes))):
        if index not in owners:
            read = (i for name in nodes[index].output for i in readers.get(name, ()))
            owner = next((owners[reader] for reader in read if reader in owners), None)
            if owner is not None:
                owners[index] = owner
    by_kernel: dict[str, tuple[NodeProto, ...]] = {}
    for index in sorted(owners):
        by_kernel[owners[index]] = (*by_kernel.get(owners[index], ()), nodes[index])
    return by_kernel


def _anchored(
    nodes: Sequence[NodeProto], kernels: Iterable[NodeProto]
) -> Iterable[tuple[int, str]]:
    """The nodes whose kernel is known by a name: their own, or that of a tensor that they make."""
    by_name = {node.name: index for index, node in enumerate(nodes) if node.name}
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    for kernel in kernels:
        named = by_name.get(kernel.name, by_name.get(kernel.name.removeprefix(_FUSED)))
        if kernel.op_type != "ReorderOutput":  # it makes a tensor that another kernel computed
            made = [makers[name] for name in kernel.output if name in makers]
            for index in made if named is None else (named, *made):
                yield index, kernel.name
        blocked = kernel.name.removesuffix(_BLOCKED)
        if blocked != kernel.name and blocked in makers:
            yield makers[blocked], kernel.name


def _claim_backwards(
    nodes: Sequence[NodeProto], kernels: Iterable[NodeProto], owners: dict[int, str]
) -> None:
    """Give a kernel the nodes from its own operator to its last, which it is named after."""
    makers = {name: at for at, node in enumerate(nodes) for name in node.output if name}
    ops = {kernel.name: kernel.op_type.removeprefix("Fused") for kernel in kernels}
    for index, kernel in sorted(owners.items()):
        path = [index]
        while nodes[path[-1]].op_type != ops[kernel]:
            before = [makers[name] for name in nodes[path[-1]].input if name in makers]
            if len(before) != 1 or before[0] in owners:
                break
            path.append(before[0])
        else:
            owners.update(dict.fromkeys(path, kernel))


def _spread_forwards(nodes: Sequence[NodeProto], owners: dict[int, str]) -> None:
    """Give nodes behind a blocked kernel (a sum, an activation) to it: its result is renamed."""
    made_by: dict[str, str] = {}
    for index, node in enumerate(nodes):
        if index not in owners:
            makers = [made_by[name] for name in node.input if name in made_by]
            if makers and makers[-1].endswith(_BLOCKED):
                latest = {owners[at]: at for at in range(len(nodes)) if at in owners}
                owners[index] = max(makers, key=latest.__getitem__)
        if index in owners:
            made_by.update(dict.fromkeys(node.output, owners[index]))
