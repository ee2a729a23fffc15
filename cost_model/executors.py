"""What runs the programs of ranks, as far as plans cost other seconds or bytes with it."""

from __future__ import annotations

from dataclasses import dataclass

from partitioner.ir.graph import Graph

#: Most devices for which programs of ranks are made.
MOST_RANKS = 64


@dataclass(frozen=True)
class Executor:
    """An executor of programs."""

    domain: str  #: `Graph.domain` of the graphs that it runs.
    holder: str  #: In words, what holds bytes in it beside a graph's tensors.
    #: Whether the nodes between two communications are one session, which takes seconds to enter,
    #: and whose tensors share memory. Else each kernel takes memory.
    in_sessions: bool
    fuses: bool  #: Whether one kernel computes several operators.
    joins: bool  #: Whether small collectives travel together, in buckets.
    #: Whether a block's constants are loaded when it runs, and dropped after. Else all constants
    #: are there throughout.
    loads_blocks: bool
    copies_parts: bool  #: Whether a part of a tensor is a copy, no view.
    #: What submits its kernels in inference and in training, of `cluster.launches`, unless a
    #: cluster says it.
    launches: str
    launches_in_training: str
    #: In words, what makes it submit its kernels in CUDA graphs, which it does not by itself.
    graphs_by: str

    def submits(self, *, training: bool) -> str:
        """Name the way to submit kernels that it takes, unless a cluster names one."""
        return self.launches_in_training if training else self.launches


ONNX_RUNTIME = Executor(
    domain="",
    holder="ONNX Runtime's session",
    in_sessions=True,
    fuses=True,
    joins=False,
    loads_blocks=True,
    copies_parts=True,
    launches="native",
    launches_in_training="native",
    graphs_by="ONNX Runtime's enable_cuda_graph, which partition run does not set",
)
PYTORCH = Executor(
    domain="aten",
    holder="PyTorch's kernels",
    in_sessions=False,
    fuses=False,
    joins=True,
    loads_blocks=False,
    copies_parts=False,
    launches="eager",
    launches_in_training="autograd",
    graphs_by="compile(mode='reduce-overhead') of each rank's module, which is left to you",
)

#: By the domain of the operators that they run.
EXECUTORS = {executor.domain: executor for executor in (ONNX_RUNTIME, PYTORCH)}


def executor_of(graph: Graph) -> Executor:
    """Look up the executor that runs the operators of a graph."""
    return EXECUTORS[graph.domain]
