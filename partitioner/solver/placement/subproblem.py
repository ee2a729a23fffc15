"""A few nodes of a plan set free, the rest fixed: a small problem of its own, exactly priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from partitioner.solver.presolve.simplify import presolve, restrict
from partitioner.solver.problem import Choice, Edge, Hold, Problem

Free = Mapping[int, Sequence[int]]  #: The choices that each free node may take.


@dataclass(frozen=True)
class Subproblem:
    """The free nodes of a plan."""

    #: Presolved; its loads and bytes include all that is fixed. Items keep the positions of the
    #: whole problem, so only the MILP may read them.
    problem: Problem
    kept: tuple[tuple[int, ...], ...]  #: For each node the whole problem's choice of each choice.
    nodes: tuple[int, ...]  #: The whole problem's node of each node; -1 for the fixed ones.
    plan: tuple[int, ...]  #: The plan of the whole problem.

    @property
    def start(self) -> tuple[int, ...]:
        """The plan itself; a choice that presolve dropped is replaced by the first one left."""
        return tuple(
            choices.index(self.plan[node]) if node >= 0 and self.plan[node] in choices else 0
            for node, choices in zip(self.nodes, self.kept, strict=True)
        )

    def restore(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """A plan of the whole problem."""
        plan = list(self.plan)
        for node, choices, pick in zip(self.nodes, self.kept, chosen, strict=True):
            if node >= 0:
                plan[node] = choices[pick]
        return tuple(plan)


def set_free(problem: Problem, plan: Sequence[int], free: Free) -> Subproblem:
    """The problem of choosing again for the free nodes only.

    Args:
        problem: The whole problem.
        plan: A plan of it that takes no forbidden pair.
        free: For each free node the choices that it may take, the plan's among them.
    """
    cut = [e for e in problem.edges if e.u in free or e.v in free]
    nodes = sorted({*free, *(n for e in cut for n in (e.u, e.v))})
    kept = [tuple(free.get(node, (plan[node],))) for node in nodes]
    at = {node: index for index, node in enumerate(nodes)}
    fixed = _fixed_items(problem, plan, free)
    number: dict[int, int] = {}  # of each item that counts, in the order in which they are met

    def numbered(items: Sequence[int]) -> tuple[int, ...]:
        return tuple(number.setdefault(item, len(number)) for item in items)

    def varying(items: Sequence[int]) -> tuple[int, ...]:
        return numbered([item for item in items if item not in fixed])

    def moved(edge: Edge) -> Edge:
        edge = restrict(edge, kept[at[edge.u]], kept[at[edge.v]])
        items = {pair: varying(edge.items[pair]) for pair in sorted(edge.items)}
        return replace(edge, u=at[edge.u], v=at[edge.v], items=items)

    edges = tuple(map(moved, cut))
    holds = [
        Hold(at[h.node], tuple(varying(h.items[p]) for p in free[h.node]))
        for h in problem.holds
        if h.node in free
    ]
    if problem.limited:
        held = [item for item in sorted(fixed) if any(problem.items[item].bytes)]
        holds.append(Hold(len(nodes), (numbered(held),)))
    nothing = (0.0,) * problem.devices
    small = Problem(
        devices=problem.devices,
        limit_bytes=problem.limit_bytes,
        nodes=(
            *(
                tuple(problem.nodes[node][p] for p in choices)
                if node in free
                else (Choice(nothing, problem.nodes[node][choices[0]].group, ""),)
                for node, choices in zip(nodes, kept, strict=True)
            ),
            (Choice(_fixed_load(problem, plan, free, fixed), -1, ""),),
        ),
        names=(*(problem.names[node] for node in nodes), "fixed"),
        edges=edges,
        holds=tuple(holds),
        items=tuple(
            replace(problem.items[i], load_s=nothing) if i in fixed else problem.items[i]
            for i in number
        ),
    )
    reduced = presolve(small)
    left = tuple(
        tuple(choices[index] for index in indices)
        for choices, indices in zip([*kept, (0,)], reduced.kept, strict=True)
    )
    return Subproblem(reduced.problem, left, (*nodes, -1), tuple(plan))


def _fixed_items(problem: Problem, plan: Sequence[int], free: Free) -> frozenset[int]:
    """Items that are paid whatever the free nodes choose."""
    items: set[int] = set()
    for edge in problem.edges:
        if edge.u not in free and edge.v not in free:
            items.update(edge.items.get(edge.pair(plan), ()))
    for hold in problem.holds:
        if hold.node not in free:
            items.update(hold.items[plan[hold.node]])
    return frozenset(items)


def _fixed_load(
    problem: Problem, plan: Sequence[int], free: Free, fixed: frozenset[int]
) -> tuple[float, ...]:
    """Seconds on each device of the fixed nodes and items."""
    loads = [
        choices[pick].load_s
        for node, (choices, pick) in enumerate(zip(problem.nodes, plan, strict=True))
        if node not in free
    ]
    total = [0.0] * problem.devices
    for load_s in (*loads, *(problem.items[i].load_s for i in sorted(fixed))):
        for device, seconds in enumerate(load_s):
            total[device] += seconds
    return tuple(total)
