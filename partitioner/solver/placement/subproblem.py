"""A few nodes of a plan set free, the rest fixed: a small problem of its own, exactly priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from partitioner.solver.joint.presolve import presolve
from partitioner.solver.problem import Choice, Edge, Hold, Item, Problem

Free = Mapping[int, Sequence[int]]  #: The choices that each free node may take.


@dataclass(frozen=True)
class Subproblem:
    """The free nodes of a plan.

    Attributes:
        problem: Presolved; its loads and bytes include all that is fixed. Items keep the
            positions of the whole problem, so only the MILP may read them.
        kept: For each node of it the whole problem's choice of each choice.
        nodes: For each node of it the whole problem's node; -1 for what is fixed.
        plan: The plan of the whole problem.
    """

    problem: Problem
    kept: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]
    plan: tuple[int, ...]

    @property
    def start(self) -> tuple[int, ...]:
        """The plan itself; a choice that presolve dropped is replaced by the first one left."""
        return tuple(
            own.index(self.plan[node]) if node >= 0 and self.plan[node] in own else 0
            for node, own in zip(self.nodes, self.kept, strict=True)
        )

    def restore(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """A plan of the whole problem."""
        plan = list(self.plan)
        for node, own, pick in zip(self.nodes, self.kept, chosen, strict=True):
            if node >= 0:
                plan[node] = own[pick]
        return tuple(plan)


def set_free(problem: Problem, plan: Sequence[int], free: Free) -> Subproblem:
    """The problem of choosing again for the free nodes only.

    Args:
        problem: The whole problem.
        plan: A plan of it that takes no forbidden pair.
        free: For each free node the choices that it may take, the plan's among them.
    """
    return _Extraction(problem, tuple(plan), free).run()


@dataclass
class _Extraction:
    problem: Problem
    plan: tuple[int, ...]
    free: Free
    number: dict[int, int] = field(default_factory=dict)

    def run(self) -> Subproblem:
        problem = self.problem
        cut = [e for e in problem.edges if e.u in self.free or e.v in self.free]
        nodes = sorted({*self.free, *(n for e in cut for n in (e.u, e.v))})
        kept = [tuple(self.free.get(node, (self.plan[node],))) for node in nodes]
        at = {node: index for index, node in enumerate(nodes)}
        fixed = self._fixed_items()
        edges = tuple(self._edge(edge, at, kept, fixed) for edge in cut)
        holds = [
            Hold(at[h.node], tuple(self._items(h.items[p], fixed) for p in self.free[h.node]))
            for h in problem.holds
            if h.node in self.free
        ]
        if problem.limited:
            held = [i for i in sorted(fixed) if any(problem.items[i].bytes)]
            holds.append(Hold(len(nodes), (self._items(held, frozenset()),)))
        small = Problem(
            devices=problem.devices,
            limit_bytes=problem.limit_bytes,
            nodes=(*self._choices(nodes, kept), (self._rest(fixed),)),
            names=(*(problem.names[node] for node in nodes), "fixed"),
            edges=edges,
            holds=tuple(holds),
            items=tuple(self._item(i, paid=i not in fixed) for i in self.number),
        )
        reduced = presolve(small)
        own = [
            tuple(choices[index] for index in left)
            for choices, left in zip([*kept, (0,)], reduced.kept, strict=True)
        ]
        return Subproblem(reduced.problem, tuple(own), (*nodes, -1), self.plan)

    def _fixed_items(self) -> frozenset[int]:
        """Items that are paid whatever the free nodes choose."""
        plan = self.plan
        found: set[int] = set()
        for edge in self.problem.edges:
            if edge.u not in self.free and edge.v not in self.free:
                pair = edge.out_class[plan[edge.u]], edge.in_class[plan[edge.v]]
                found.update(edge.items.get(pair, ()))
        for hold in self.problem.holds:
            if hold.node not in self.free:
                found.update(hold.items[plan[hold.node]])
        return frozenset(found)

    def _choices(
        self, nodes: Sequence[int], kept: Sequence[Sequence[int]]
    ) -> list[tuple[Choice, ...]]:
        nothing = (0.0,) * self.problem.devices
        return [
            tuple(self.problem.nodes[node][p] for p in own)
            if node in self.free
            else (Choice(nothing, self.problem.nodes[node][own[0]].group, ""),)
            for node, own in zip(nodes, kept, strict=True)
        ]

    def _rest(self, fixed: frozenset[int]) -> Choice:
        """All that the fixed nodes and items load, as one choice of one node."""
        load = [0.0] * self.problem.devices
        loads = [
            choices[pick].load_s
            for node, (choices, pick) in enumerate(zip(self.problem.nodes, self.plan, strict=True))
            if node not in self.free
        ]
        for vector in (*loads, *(self.problem.items[i].load_s for i in sorted(fixed))):
            for device, seconds in enumerate(vector):
                load[device] += seconds
        return Choice(tuple(load), -1, "")

    def _edge(
        self,
        edge: Edge,
        at: Mapping[int, int],
        kept: Sequence[Sequence[int]],
        fixed: frozenset[int],
    ) -> Edge:
        outs = tuple(edge.out_class[p] for p in kept[at[edge.u]])
        ins = tuple(edge.in_class[p] for p in kept[at[edge.v]])
        live = {(o, i) for o in set(outs) for i in set(ins)}
        items = {
            pair: self._items(edge.items[pair], fixed) for pair in sorted(live & edge.items.keys())
        }
        return Edge(at[edge.u], at[edge.v], outs, ins, items, edge.forbidden & live)

    def _items(self, items: Sequence[int], fixed: frozenset[int]) -> tuple[int, ...]:
        return tuple(self.number.setdefault(i, len(self.number)) for i in items if i not in fixed)

    def _item(self, index: int, *, paid: bool) -> Item:
        item = self.problem.items[index]
        return item if paid else replace(item, load_s=(0.0,) * self.problem.devices)
