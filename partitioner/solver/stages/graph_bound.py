"""A bound on all plans of a graph in stages, whatever their cuts.

A *slot* is a kind of stage: its data degree d, its tensor degree, and the micro-batches y that it
holds. For a load L the linear program

    min  sum_s devices_s n_s
    s.t. sum_s,c x[v,s,c] = 1                                              for each node
         sum_v,c seconds[v,s,c] x[v,s,c] + least_cut_s n_s <= L n_s        for each slot
         sum_v,c (flying[v,c] y_s + resident[v,c]) x[v,s,c] <= limit n_s   for each slot
         sum of d_s n_s over slots with d_s y_s <= h  <=  h                for each h
         sum_s d_s n_s <= micro-batches

spreads the nodes over n_s stages of each slot in any parts. A stage with y micro-batches in flight
and degree d lies, with all later ones, within d * y degrees: so no more of them than have room
there. If the program takes more devices than there are, no plan has the load L: nodes that no
slot can run within L and the limit make it infeasible. The least cut counts the edges that part
any nodes from all others at least, which every stage pays if there are several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partitioner.solver.milp.engines import HIGHS, Engine, solve_milp
from partitioner.solver.milp.program import Milp, MilpBuilder
from partitioner.solver.stages.graph import Sharded, StageGraph
from partitioner.solver.work import Work

#: Columns of a program at most; flights are taken in wider ranges until it has no more.
MOST_COLUMNS = 30_000
#: Trials of loads, each halves what is left between the bound and the plan.
TRIALS = 10
#: Relative error of a solved program.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Slot:
    """A kind of stage that holds `first` to `last` micro-batches."""

    data: int
    tensor: int
    first: int
    last: int


@dataclass(frozen=True)
class EqualNodes:
    """Nodes that are equal but for their edges: how many, and each on its numbers of devices."""

    count: int
    shards: Mapping[int, Sharded]


def bound_plans(graph: StageGraph, load_s: float, work: Work, engine: Engine = HIGHS) -> float:
    """Bound the load from below: no plan of several stages has a lower one, up to `load_s`.

    With an infinite load that is known, an infinite bound says that no plan fits at all.
    """
    by_key: dict[object, list[Mapping[int, Sharded]]] = {}
    for shards in graph.nodes.values():
        key = tuple((t, of.parameter_bytes, of.configs) for t, of in shards.items())
        by_key.setdefault(key, []).append(shards)
    groups = [EqualNodes(len(members), members[0]) for members in by_key.values()]
    slots = _slots(graph, len(groups))
    least_bytes = 0.0 if work.over else least_cut(graph)
    # the nodes' least seconds of devices, over all devices; none runs faster than alone
    seconds = (
        of.count * min(t * c.time_s for t, on in of.shards.items() for c in on.configs)
        for of in groups
        if of.shards
    )
    low, high = math.fsum(seconds) / graph.devices * (1 - ROUNDING), load_s
    for trial in range(TRIALS):
        # the plan's own load comes first: it is often the bound
        tried = high * (1 - ROUNDING) if not trial else (low + high) / 2
        if work.over or tried <= low or (trial and math.isinf(high)):
            break
        program = _program(graph, groups, slots, least_bytes, tried)
        result = solve_milp(program, work, gap=0.0, engine=engine)
        if result.status == "time_limit":
            break
        devices = math.inf if result.status == "infeasible" else result.bound
        if devices > graph.devices * (1 + ROUNDING):
            low = tried
            if not trial:
                break
        else:
            high = tried
    return min(low, load_s)


def _slots(graph: StageGraph, groups: int) -> list[Slot]:
    """All slots, their flights in ranges that are wider where there are too many."""
    most = graph.most_in_flight
    growth = 1.0
    while True:
        slots = []
        for data, tensor in graph.degrees:
            first = 1
            while first <= -(-most // data):
                last = max(first, math.floor(first * growth))
                slots.append(Slot(data, tensor, first, last))
                first = last + 1
        if 2 * groups * len(slots) <= MOST_COLUMNS or growth > most:
            return slots
        growth *= 1.2


def least_cut(graph: StageGraph) -> float:
    """The fewest bytes of edges between some nodes and all others; 0 if there is one node."""
    import networkx as nx

    net: nx.Graph[int] = nx.Graph()
    net.add_nodes_from(graph.nodes)
    for (u, v), size in graph.edges.items():
        weight = size + net.get_edge_data(u, v, {"weight": 0.0})["weight"]
        net.add_edge(u, v, weight=weight)
    if len(net) < 2 or not nx.is_connected(net):
        return 0.0
    return float(nx.stoer_wagner(net)[0])


def _program(
    graph: StageGraph,
    groups: Sequence[EqualNodes],
    slots: Sequence[Slot],
    least_bytes: float,
    load_s: float,
) -> Milp:
    """The program of a load; seconds are in shares of the load, bytes of the limit."""
    build = MilpBuilder()
    stages = [build.column(cost=float(slot.data * slot.tensor)) for slot in slots]
    placed: list[list[tuple[int, float]]] = [[] for _ in groups]
    bandwidth, batch = graph.bandwidth_bytes_per_s, graph.microbatches
    unit = max(graph.limit_bytes, 1.0)
    for slot, stage in zip(slots, stages, strict=True):
        d = slot.data
        busy = [(stage, 2 * least_bytes / d / bandwidth / load_s - 1.0)]
        held = [(stage, -graph.limit_bytes / unit)]
        for index, of in enumerate(groups):
            if (on := of.shards.get(slot.tensor)) is None:
                continue
            renewed_s = 4 * (d - 1) / d * on.parameter_bytes / batch / bandwidth
            for config in on.configs:
                seconds = config.time_s / d + renewed_s
                size = config.flying_bytes * slot.first + config.resident_bytes
                if seconds > load_s * (1 + ROUNDING) or size > graph.limit_bytes:
                    continue
                part = build.column()
                placed[index].append((part, 1.0))
                busy.append((part, seconds / load_s))
                held.append((part, size / unit))
        build.row(busy, -1, 0.0)
        build.row(held, -1, 0.0)
    for of, parts in zip(groups, placed, strict=True):
        build.row(parts, 0, float(of.count))
    degrees = [(slot, (stage, float(slot.data))) for slot, stage in zip(slots, stages, strict=True)]
    for most in sorted({slot.data * slot.last for slot in slots}):
        # the stages that lie within so many degrees of the end
        within = (term for slot, term in degrees if slot.data * slot.last <= most)
        build.row(within, -1, float(most))
    build.row((term for _, term in degrees), -1, float(graph.microbatches))
    return build.build()
