"""What runs the programs of ranks, as far as plans cost other seconds or bytes with it."""

from __future__ import annotations

from dataclasses import dataclass

from partitioner.ir.graph import Graph


@dataclass(frozen=True)
class Executor:
    """An executor of programs.

    Attributes:
        name: Its name.
        domain: `Graph.domain` of the graphs that it runs.
        holder: In words, what holds bytes in it beside a graph's tensors.
        in_sessions: Whether the nodes between two communications are one session, which takes
            seconds to enter, and whose tensors share memory. Else each kernel takes memory.
        fuses: Whether one kernel computes several operators.
        joins: Whether small collectives travel together, in buckets.
        loads_blocks: Whether a block's constants are loaded when it runs, and dropped after. Else
            all constants are there throughout.
        copies_parts: Whether a part of a tensor is a copy, no view.
    """

    name: str
    domain: str
    holder: str
    in_sessions: bool
    fuses: bool
    joins: bool
    loads_blocks: bool
    copies_parts: bool


ONNX_RUNTIME = Executor(
    name="ONNX Runtime",
    domain="",
    holder="ONNX Runtime's session",
    in_sessions=True,
    fuses=True,
    joins=False,
    loads_blocks=True,
    copies_parts=True,
)
PYTORCH = Executor(
    name="PyTorch",
    domain="aten",
    holder="PyTorch's kernels",
    in_sessions=False,
    fuses=False,
    joins=True,
    loads_blocks=False,
    copies_parts=False,
)

#: By the domain of the operators that they run.
EXECUTORS = {executor.domain: executor for executor in (ONNX_RUNTIME, PYTORCH)}


def executor_of(graph: Graph) -> Executor:
    """Look up the executor that runs the operators of a graph."""
    return EXECUTORS[graph.domain]
