"""Programs of one device, as they are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from partitioner.api.lowering import lower
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.schedule.task_list import schedule
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import place
from partitioner.ir.program import Compute, Programs


def on_one_device(graph: Graph) -> Programs:
    """The program of a graph that one device runs whole."""
    single = DeviceMesh.single(0)
    placed = [place(graph, node, single, {}, None) for node in graph.nodes]
    return lower(graph, schedule(graph, placed, resolve_cluster("ideal", 1)), 1)


def in_phases(programs: Programs, bounds: Sequence[int]) -> Programs:
    """The one rank's program in phases; in ONNX Runtime each is a session of its own.

    Args:
        programs: Of one rank without communications.
        bounds: Positions of the steps with which the phases but the first begin.
    """
    (program,) = programs.ranks
    steps = [
        replace(step, phase=sum(index >= bound for bound in bounds))
        for index, step in enumerate(program.steps)
        if isinstance(step, Compute)
    ]
    return replace(programs, ranks=(replace(program, steps=tuple(steps)),))
