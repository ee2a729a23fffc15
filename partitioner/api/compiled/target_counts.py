"""Counts of targets in the micro-batches of a module's example inputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from partitioner.api.verify.first_difference import uncut_programs
from partitioner.backends.torch.running.all_ranks import AllRanks
from partitioner.frontends.torch.trace import TracedModule
from partitioner.ir.graph import Graph, needed
from partitioner.rewrites.graph_writer import GraphWriter


def unlike_counts(module: TracedModule, values: Sequence[str]) -> str | None:
    """The first of these values that differs between micro-batches of the example inputs.

    A mean over the targets that are not ignored divides by such a value. What does not follow
    from the inputs alone is not compared.

    Args:
        module: The module as traced with one of several equal micro-batches.
        values: Values of its graph, scalars.

    Returns:
        The value's name; None if all are alike, or if the example inputs have no contents.
    """
    inputs = dict(zip(module.signature.inputs, module.signature.example, strict=True))
    given = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    if any(isinstance(value, FakeTensor) or value.is_meta for value in given.values()):
        return None
    assert module.micro is not None
    parts = module.micro.parts(given)
    for value in values:
        counting = _leading_to(module.graph, value)
        if not {*counting.inputs} <= given.keys():
            continue
        ranks = AllRanks(uncut_programs(counting, deliver_all=True), counting)
        reads, counts = counting.inputs, set()
        for part in parts:
            results = ranks.step({name: part[name].cpu() for name in reads}, {}).results
            counts.add(float(results[value]))
        if len(counts) > 1:
            return value
    return None


def _leading_to(graph: Graph, value: str) -> Graph:
    """The nodes that a value follows from, as a graph of inference."""
    writer = GraphWriter(source=graph, nodes=needed(graph.nodes, (value,)))
    read = {each for node in writer.nodes for each in node.reads}
    inputs = tuple(name for name in graph.inputs if name in read)
    return writer.graph((), inputs=inputs, outputs=(value,))
