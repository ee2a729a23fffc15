"""A step for one axis that found no plan that fits, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from partitioner.cost_model.even_mesh import EvenMesh
from partitioner.ir.graph import Graph
from partitioner.problem.build import Built
from partitioner.problem.memory_kinds import parts_text, planned_parts
from partitioner.solver import Infeasible, evaluate_choices
from partitioner.solver.joint.shortage import shortage_message


def refused(
    graph: Graph, even: EvenMesh, built: Built, chosen: Sequence[int], room: float
) -> Infeasible:
    """A refusal that tells of a plan, as if the axes after this one cut all that it holds.

    Args:
        graph: What is planned.
        even: The mesh.
        built: The problem.
        chosen: The plan, by node.
        room: Bytes that a device counts as having.
    """
    outcome = evaluate_choices(built.problem, chosen)
    position = outcome.peak_position[0]
    name = built.problem.names[position]
    limit = even.cluster.devices[even.device].memory_bytes
    lines = room / limit
    held = math.ceil(outcome.peak_bytes[0] / lines)
    message = shortage_message(
        proven=False,
        least=False,
        where=f"on each device at {name!r}",
        short=held - limit,
        held=held,
        limit=limit,
    )
    parts = planned_parts(graph, built, chosen, position)
    each = parts_text({kind: round(size / lines) for kind, size in parts.items()})
    return Infeasible(
        f"{message}; there it holds {each}; this is {even.mesh}",
        device=even.device,
        position=position,
        name=name,
        bytes_short=float(held - limit),
        proven=False,
    )
