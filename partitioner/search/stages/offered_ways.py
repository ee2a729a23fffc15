"""The ways to recompute values in parts of a graph that do not depend on one another.

Offers that read from one another, or that give copies of the same value, make up a
*region*: about half a layer of a transformer. A way of a region is a set of its optional nodes that
are computed; it takes their seconds, and keeps the bytes of the values that are then still read as
the forward pass made them. The ways that no other beats come from small MILPs: the least seconds
within a limit of bytes, for several limits. Regions of equal nodes, seconds and bytes have theirs
in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import row_of
from partitioner.solver.milp.engines import Engine, solve_milp
from partitioner.solver.milp.program import Milp, MilpBuilder
from partitioner.solver.stages.knapsack import Ways, frontier
from partitioner.solver.work import Work

#: Limits of bytes for which the ways of a region are searched, beside keeping all.
LIMITS = 8
#: Weight of the bytes beside the seconds, both as shares: of equally fast ways the smallest counts.
BYTES_WEIGHT = 1e-4
#: Digits of the seconds by which regions are told apart.
DIGITS = 4


@dataclass(frozen=True)
class Region:
    """Offers that depend on one another, and the ways to take them."""

    unit: int  #: The unit of the forward pass (`StageFigures.units`) that it goes with.
    ways: Ways  #: Seconds and kept bytes of a micro-batch; all kept first, none beats another.
    again: tuple[frozenset[str], ...]  #: The optional nodes that are computed, of each way.
    kept: tuple[str, ...]  #: The values that may be kept.


def offered_regions(
    graph: Graph,
    seconds: Mapping[str, float],
    kept_bytes: Mapping[str, int],
    unit_of: Mapping[str, int],
    work: Work,
    engine: Engine,
) -> tuple[Region, ...]:
    """The regions of a graph with offers that have more ways than one.

    Args:
        seconds: Of each optional node, with the communications that it causes.
        kept_bytes: Of each value that may be kept for the backward pass.
        work: Pays for the MILPs; where it is over, a region has two ways: all kept, and the least.
    """
    known: dict[object, tuple[tuple[tuple[float, float], ...], tuple[tuple[int, ...], ...]]] = {}
    regions = []
    for members in _components(graph):
        part = _Part(graph, members, seconds, kept_bytes)
        key = part.key
        if key not in known:
            known[key] = part.ways(work, engine)
        ways, taken = known[key]
        if len(ways) > 1:
            names = [node.name for node in members]
            again = tuple(frozenset(names[i] for i in way) for way in taken)
            regions.append(Region(max(unit_of[name] for name in names), ways, again, part.kept))
    return tuple(regions)


def takes_either(node: Node) -> bool:
    """Tell whether a node takes a value as it was kept or, if it has a second operand, a copy."""
    return row_of(node).either


def _components(graph: Graph) -> Iterator[tuple[Node, ...]]:
    """Optional nodes and those that take either operand, joined where one bears on another."""
    import networkx as nx

    members = [n for n in graph.nodes if n.name in graph.optional or takes_either(n)]
    joined = nx.Graph()
    joined.add_nodes_from(node.name for node in members)
    first_reader: dict[str, str] = {}  # of a value that a node takes as it was kept
    for node in members:
        made_by = (graph.producers[value].name for value in node.reads if value in graph.producers)
        joined.add_edges_from((name, node.name) for name in made_by if name in graph.optional)
        if takes_either(node):
            joined.add_edge(first_reader.setdefault(node.inputs[0], node.name), node.name)
    for names in nx.connected_components(joined):
        yield tuple(graph.by_name[name] for name in sorted(names, key=graph.order.__getitem__))


@dataclass(frozen=True)
class _Part:
    """The nodes of a region, in the order of the graph."""

    graph: Graph
    nodes: tuple[Node, ...]
    seconds: Mapping[str, float]
    kept_bytes: Mapping[str, int]

    @cached_property
    def kept(self) -> tuple[str, ...]:
        taken = (node.inputs[0] for node in self.nodes if takes_either(node))
        return tuple(dict.fromkeys(taken))

    @cached_property
    def key(self) -> object:
        """Give what the ways depend on."""
        index = {v: (i, k) for i, n in enumerate(self.nodes) for k, v in enumerate(n.outputs)}
        kept = {value: number for number, value in enumerate(self.kept)}
        return (
            tuple(
                (
                    node.name in self.graph.optional,
                    takes_either(node),
                    float(f"{self._seconds_of(node):.{DIGITS}g}"),
                    tuple(index.get(v, kept.get(v, -1)) for v in node.inputs),
                )
                for node in self.nodes
            ),
            tuple(self.kept_bytes.get(value, 0) for value in self.kept),
        )

    def _seconds_of(self, node: Node) -> float:
        return self.seconds.get(node.name, 0.0) if node.name in self.graph.optional else 0.0

    def ways(
        self, work: Work, engine: Engine
    ) -> tuple[tuple[tuple[float, float], ...], tuple[tuple[int, ...], ...]]:
        """Seconds and bytes of the ways, and the numbers of the nodes that are computed."""
        needed = (n for n in self.nodes if takes_either(n) and n.name not in self.graph.optional)
        values = {node.inputs[0] for node in needed}
        most = float(sum(self.kept_bytes.get(value, 0) for value in values))
        keep_all: tuple[int, ...] = ()
        found = {keep_all: (0.0, most)}
        least = self._least(None, work, engine)
        if least is not None:
            found[least[0]] = least[1]
            low = least[1][1]
            for step in range(1, LIMITS):
                if work.over:
                    break
                limit = low + (most - low) * step / LIMITS
                better = self._least(limit, work, engine)
                if better is not None:
                    found[better[0]] = better[1]
        taken, ways = tuple(found), tuple(found.values())
        best = frontier(ways)
        return tuple(ways[i] for i in best), tuple(taken[i] for i in best)

    def _least(
        self, limit: float | None, work: Work, engine: Engine
    ) -> tuple[tuple[int, ...], tuple[float, float]] | None:
        """The way of least seconds within a limit of bytes or, without one, of least bytes."""
        milp, columns, kept = self._milp(limit)
        result = solve_milp(milp, work, 0.0, engine=engine)
        if not result.values:
            return None
        taken = tuple(i for i, column in columns.items() if result.values[column] > 0.5)
        seconds = sum(self._seconds_of(self.nodes[i]) for i in taken)
        sizes = (self.kept_bytes.get(v, 0) for v, c in kept.items() if result.values[c] > 0.5)
        return taken, (seconds, float(sum(sizes)))

    def _milp(self, limit: float | None) -> tuple[Milp, dict[int, int], dict[str, int]]:
        """The program, the column of each optional node, and of each value that may be kept."""
        build = MilpBuilder()
        total_s = sum(map(self._seconds_of, self.nodes)) or 1.0
        total = sum(self.kept_bytes.get(value, 0) for value in self.kept) or 1
        weights = (1.0, BYTES_WEIGHT) if limit is not None else (BYTES_WEIGHT, 1.0)
        columns: dict[int, int] = {}
        present: dict[str, int] = {}  # column of the node that makes a value
        for index, node in enumerate(self.nodes):
            if node.name in self.graph.optional:
                cost = weights[0] * self._seconds_of(node) / total_s
                columns[index] = build.column(cost=cost, upper=1.0, integer=True)
                present.update(dict.fromkeys(node.writes, columns[index]))
        kept: dict[str, int] = {}
        for value in self.kept:
            cost = weights[1] * self.kept_bytes.get(value, 0) / total
            kept[value] = build.column(cost=cost, upper=1.0, integer=True)
        for index, node in enumerate(self.nodes):
            due = [(columns[index], -1.0)] if index in columns else []
            if takes_either(node):  # kept, or computed; if the node is not computed, neither
                value, *copies = node.inputs
                copied = [(present[copy], 1.0) for copy in copies if copy in present]
                build.row([(kept[value], 1.0), *copied, *due], 1, 0.0 if due else 1.0)
            elif due:
                for value in node.reads:
                    if value in present:
                        build.row([(present[value], 1.0), *due], 1, 0.0)
        if limit is not None:
            shares = [(c, self.kept_bytes.get(v, 0) / total) for v, c in kept.items()]
            build.row(shares, -1, limit / total)
        return build.build(), columns, kept
