"""The first value of a graph that the ranks compute otherwise than one device does.

The same graph runs twice, on the ranks and whole on one device. Each run keeps a growing set of
values, until a value differs. A backend runs the programs; this module knows only arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from partitioner.api.lowering import lower
from partitioner.api.verify.compare import TOLERANCE, Difference, FirstDifference, compare, largest
from partitioner.backends.regions import cut, write_region
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.schedule.task_list import schedule
from partitioner.ir.exchange import Region
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import is_stored, is_view
from partitioner.ir.plan import NodePlan, Pipeline, Plan, resolve
from partitioner.ir.program import Programs
from partitioner.ir.types import numpy_dtype

#: Values of the first run; each run after it keeps twice as many.
FIRST_VALUES = 16

#: Runs programs that keep some local values, named by rank, and returns these values, by rank and
#: name; values that the backend cannot look at are left out.
Run = Callable[[Mapping[int, Collection[str]]], Mapping[int, Mapping[str, np.ndarray]]]


@dataclass(frozen=True)
class Side:
    """Programs of a graph, and the function that runs them."""

    programs: Programs
    run: Run

    def values(self, batch: Sequence[str]) -> Mapping[int, Mapping[str, np.ndarray]]:
        """Arrays of some values of the graph, by rank and local name."""
        homes = [self.programs.homes[value] for value in batch]
        keep = {
            rank: [home.name for home in homes if rank in home.placement.mesh.devices]
            for rank in range(len(self.programs.ranks))
        }
        return self.run(keep)


def first_difference(
    graph: Graph,
    ranks: Side,
    alone: Side,
    floor: float = 0.0,
    table: Mapping[str, float] = TOLERANCE,
) -> FirstDifference | None:
    """The first value, in graph order, that differs between two runs; None if none does.

    Errors in the backward pass are relative to a magnitude of at least `floor`.
    """
    homes = ranks.programs.homes
    allowed = tolerances(graph, table)
    values = [value for node in graph.nodes for value in node.writes if value in homes]
    start, size = 0, FIRST_VALUES
    while start < len(values):
        batch = values[start : start + size]
        start, size = start + size, 2 * size
        by_rank, on_one = ranks.values(batch), alone.values(batch)[0]
        for value in batch:
            home = homes[value]
            devices = home.placement.mesh.devices
            parts = {d: by_rank[d][home.name] for d in devices if home.name in by_rank.get(d, {})}
            whole = on_one.get(alone.programs.homes[value].name)
            if whole is None or len(parts) < len(devices):
                continue
            node = graph.producers[value]
            scale = max(floor if node.name in graph.backward else 0.0, largest(whole))
            wrong: list[tuple[tuple[int, ...], Difference]] = []
            if home.placement.sharding.partial:  # terms, of which only the sum can be compared
                pairs = [(tuple(sorted(parts)), join(parts, home.placement), whole)]
            else:
                regions = home.placement.parts()
                pairs = [((at,), parts[at], cut(whole, region)) for at, region in regions]
            for holders, part, expected in pairs:
                found = compare(value, part, expected, scale, table=table)
                # Of integers and booleans the tolerance is the share that may differ.
                elements = part.size if found.counts else 1
                found = replace(found, tolerance=elements * allowed[value])
                wrong += [] if found.equal else [(holders, found)]
            if wrong:
                worst = max(
                    (part for _, part in wrong), key=lambda d: (math.isnan(d.error), d.error)
                )
                wrong_ranks = tuple(sorted({rank for holders, _ in wrong for rank in holders}))
                named = f"{node.name!r} ({node.op})"
                return FirstDifference(worst, named, wrong_ranks, str(home.placement))
    return None


def tolerances(graph: Graph, table: Mapping[str, float] = TOLERANCE) -> dict[str, float]:
    """Tolerance of each value: that of the coarsest element type in its computation."""
    by_value: dict[str, float] = {}
    for node in graph.nodes:
        computes = not (is_view(node) or is_stored(node))
        read = [by_value.get(value, 0.0) for value in node.reads]
        for value in node.writes:
            real = np.zeros((), numpy_dtype(graph.types[value].dtype)).real.dtype
            by_value[value] = max(table.get(real.name, 0.0) if computes else 0.0, *read, 0.0)
    return by_value


def uncut_programs(
    graph: Graph, *, deliver_all: bool = False, micro_batches: int | None = None
) -> Programs:
    """The graph on one rank, nothing cut or sent; `micro_batches` make it a pipeline's stage."""
    cluster = resolve_cluster(None, 1)
    nodes = {node.name: NodePlan(0) for node in graph.nodes}
    name = "gpipe" if graph.backward else "forward"
    pipeline = None if micro_batches is None else Pipeline(name, micro_batches)
    groups = (DeviceMesh.single(0),)
    plan = Plan(graph.digest, cluster.to_data(), groups, nodes, pipeline=pipeline)
    tasks = schedule(graph, resolve(graph, plan), cluster, pipeline=pipeline)
    return lower(graph, tasks, 1, deliver_all=deliver_all)


def join(parts: Mapping[int, np.ndarray], placement: Placement) -> np.ndarray:
    """The whole tensor from the parts of all devices of its placement."""
    whole: dict[Region, np.ndarray] = {}
    points = dict(placement.mesh.coords())
    axes = [axis for axis, _ in placement.sharding.partial]
    how = placement.sharding.partial[0][1] if axes else ""
    merge = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
    seen: set[tuple[Region, tuple[int, ...]]] = set()
    for device, region in placement.parts():
        term = (region, tuple(points[device][axis] for axis in axes))
        if term in seen:
            continue
        seen.add(term)
        part = parts[device]
        whole[region] = merge[how](whole[region], part) if region in whole else part
    first = next(iter(parts.values()))
    shape = placement.sharding.shape
    out = np.empty((*shape, *first.shape[len(shape) :]), first.dtype)
    for region, part in whole.items():
        write_region(out, region, part)
    return out
