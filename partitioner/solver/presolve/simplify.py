"""Exact simplifications of a problem: each keeps at least one best plan.

- Parallel edges become one, over pairs of classes.
- Classes of an edge that behave the same become one; an edge that can cost nothing goes.
- A choice whose every pair on some edge is forbidden goes.
- A memory limit goes that a device meets even with the fullest choice of each node.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from partitioner.solver.problem import Edge, Hold, Pair, Problem

T = TypeVar("T")


@dataclass(frozen=True)
class Reduced:
    """A smaller problem with equal best cost."""

    problem: Problem
    #: For each node the original index of each choice left, by the choices of its leader.
    kept: tuple[tuple[int, ...], ...]
    leaders: Sequence[int]  #: The node that each node follows, itself if none.

    def restore(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """A plan of the smaller problem as one of the original."""
        by_node = zip(self.kept, self.leaders, strict=True)
        return tuple(kept[chosen[leader]] for kept, leader in by_node)

    def lower(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """A plan of the original, allowed and of choices that were kept, as one of the smaller."""
        by_node = enumerate(zip(self.kept, self.leaders, chosen, strict=True))
        return tuple(k.index(pick) if leader == node else 0 for node, (k, leader, pick) in by_node)


def presolve(problem: Problem) -> Reduced:
    """Simplify until nothing changes; a node left without a choice means infeasible."""
    kept = tuple(tuple(range(len(choices))) for choices in problem.nodes)
    reduced = Reduced(simplify_edges(problem), kept, range(len(kept)))
    while True:
        # choices that some edge forbids whatever the other end does
        drop: list[set[int]] = [set() for _ in reduced.problem.nodes]
        for edge in reduced.problem.edges:
            if not edge.forbidden:
                continue
            outs, ins = set(edge.out_class), set(edge.in_class)
            dead_out = {o for o in outs if all((o, i) in edge.forbidden for i in ins)}
            dead_in = {i for i in ins if all((o, i) in edge.forbidden for o in outs)}
            drop[edge.u] |= {p for p, o in enumerate(edge.out_class) if o in dead_out}
            drop[edge.v] |= {q for q, i in enumerate(edge.in_class) if i in dead_in}
        if not any(drop):
            return replace(reduced, problem=_binding_limits(reduced.problem))
        left = [
            [index for index in range(len(indices)) if index not in dropped]
            for indices, dropped in zip(reduced.kept, drop, strict=True)
        ]
        smaller = keep_choices(reduced.problem, left)
        kept = tuple(
            tuple(indices[index] for index in remaining)
            for indices, remaining in zip(reduced.kept, left, strict=True)
        )
        reduced = replace(
            reduced, problem=simplify_edges(smaller, reduced.problem.edges), kept=kept
        )
        if not all(kept):
            return reduced


def keep_choices(problem: Problem, kept: Sequence[Sequence[int]]) -> Problem:
    """The problem with only these choices of each node, in this order."""
    whole = [len(left) == len(choices) for left, choices in zip(kept, problem.nodes, strict=True)]

    def keep(node: int, values: Sequence[T]) -> tuple[T, ...]:
        return tuple(values[index] for index in kept[node])

    return replace(
        problem,
        nodes=tuple(keep(node, choices) for node, choices in enumerate(problem.nodes)),
        edges=tuple(
            edge if whole[edge.u] and whole[edge.v] else restrict(edge, kept[edge.u], kept[edge.v])
            for edge in problem.edges
        ),
        holds=tuple(replace(hold, items=keep(hold.node, hold.items)) for hold in problem.holds),
    )


def restrict(edge: Edge, kept_u: Sequence[int], kept_v: Sequence[int]) -> Edge:
    """The edge with only these choices of its ends, and only the pairs of their classes."""
    out_class = tuple(edge.out_class[index] for index in kept_u)
    in_class = tuple(edge.in_class[index] for index in kept_v)
    live = {(o, i) for o in set(out_class) for i in set(in_class)}
    items = {pair: paid for pair, paid in edge.items.items() if pair in live}
    return Edge(edge.u, edge.v, out_class, in_class, items, edge.forbidden & live)


def simplify_edges(problem: Problem, simple: Sequence[Edge] = ()) -> Problem:
    """The problem with one edge between two nodes, few classes, and no edge that costs nothing.

    The classes of `simple` edges are known to be few.
    """
    known = set(map(id, simple))
    groups: dict[tuple[int, int], list[Edge]] = {}
    for edge in problem.edges:
        groups.setdefault((edge.u, edge.v), []).append(edge)
    merged = (
        edges[0]
        if len(edges) == 1 and id(edges[0]) in known
        else _merge_classes(_merge_parallel(edges))
        for edges in groups.values()
    )
    return replace(problem, edges=tuple(e for e in merged if e.forbidden or any(e.items.values())))


def _merge_parallel(edges: Sequence[Edge]) -> Edge:
    if len(edges) == 1:
        return edges[0]
    outs = list(zip(*(edge.out_class for edge in edges), strict=True))
    ins = list(zip(*(edge.in_class for edge in edges), strict=True))
    out_ids = {key: index for index, key in enumerate(dict.fromkeys(outs))}
    in_ids = {key: index for index, key in enumerate(dict.fromkeys(ins))}
    items: dict[Pair, tuple[int, ...]] = {}
    forbidden = set()
    for out_key, out_id in out_ids.items():
        for in_key, in_id in in_ids.items():
            pairs = list(zip(out_key, in_key, strict=True))
            if any(pair in edge.forbidden for edge, pair in zip(edges, pairs, strict=True)):
                forbidden.add((out_id, in_id))
            paid = {
                item
                for edge, pair in zip(edges, pairs, strict=True)
                for item in edge.items.get(pair, ())
            }
            if paid:
                items[(out_id, in_id)] = tuple(sorted(paid))
    return Edge(
        edges[0].u,
        edges[0].v,
        tuple(out_ids[key] for key in outs),
        tuple(in_ids[key] for key in ins),
        items,
        frozenset(forbidden),
    )


def _merge_classes(edge: Edge) -> Edge:
    """Number classes that cost the same against every class of the other end as one."""
    outs, ins = sorted(set(edge.out_class)), sorted(set(edge.in_class))
    paid, forbidden = edge.items.get, edge.forbidden
    rows: list[list[tuple[int, ...] | None]] = [[paid((o, i), ()) for i in ins] for o in outs]
    for row, o in zip(rows, outs, strict=True) if forbidden else ():
        row[:] = [None if (o, i) in forbidden else cell for i, cell in zip(ins, row, strict=True)]
    out_id = _number(outs, rows)
    in_id = _number(ins, [[row[k] for row in rows] for k in range(len(ins))])
    items: dict[Pair, tuple[int, ...]] = {}
    barred = set()
    for o, row in zip(outs, rows, strict=True):
        for i, cell in zip(ins, row, strict=True):
            if cell is None:
                barred.add((out_id[o], in_id[i]))
            elif cell:
                items[out_id[o], in_id[i]] = cell
    return Edge(
        edge.u,
        edge.v,
        tuple(out_id[o] for o in edge.out_class),
        tuple(in_id[i] for i in edge.in_class),
        items,
        frozenset(barred),
    )


def _number(classes: Sequence[int], keys: Sequence[Sequence[Hashable]]) -> dict[int, int]:
    ids: dict[tuple[Hashable, ...], int] = {}
    return {
        old: ids.setdefault(tuple(key), len(ids)) for old, key in zip(classes, keys, strict=True)
    }


def _binding_limits(problem: Problem) -> Problem:
    """The problem without the limits that no plan can break, lifetimes left aside."""
    if not problem.limited:
        return problem
    size = np.array([item.bytes for item in problem.items]).reshape(-1, problem.devices)
    most = np.zeros(problem.devices)
    for hold in problem.holds:
        most += _fullest(hold.items, size)
    for edge in problem.edges:
        most += _fullest(edge.items.values(), size)
    limits = (
        math.inf if fullest <= limit else limit
        for fullest, limit in zip(most, problem.limit_bytes, strict=True)
    )
    return replace(problem, limit_bytes=tuple(limits))


def _fullest(
    options: Iterable[Sequence[int]], size: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    sets = [items for items in options if items]
    if not sets:
        return np.zeros(size.shape[1])
    flat = np.fromiter(itertools.chain.from_iterable(sets), np.intp)
    starts = np.cumsum([0, *map(len, sets[:-1])])
    most: npt.NDArray[np.float64] = np.add.reduceat(size[flat], starts).max(axis=0)
    return most


def merge_equal(problem: Problem) -> Reduced:
    """Merge nodes that edges make equal, as copies of a block; without a choice means infeasible.

    Such an edge costs nothing and leaves each choice of one end at most one choice of the other.
    All that a follower costs, holds and shares with others is then its leader's. Followers keep
    their place in the order, with one choice that costs nothing, so that positions stay as they
    are.
    """
    leader, members, stands = _tie(problem)
    picks = _common_choices(problem, leader, stands)
    holds = [
        Hold(leader[hold.node], tuple(hold.items[p] for p in picks[hold.node]))
        for hold in problem.holds
    ]
    edges = []
    for edge in problem.edges:
        if leader[edge.u] != leader[edge.v]:
            u, v = leader[edge.u], leader[edge.v]
            edge = restrict(edge, picks[edge.u], picks[edge.v])
            if u < v:
                edges.append(replace(edge, u=u, v=v))
                continue
            # turned, as the leader of the first node is the later one
            turned = {(i, o): items for (o, i), items in edge.items.items()}
            forbidden = frozenset((i, o) for o, i in edge.forbidden)
            edges.append(Edge(v, u, edge.in_class, edge.out_class, turned, forbidden))
        elif any(edge.items.values()):  # the leader's choice decides both ends
            both = zip(picks[edge.u], picks[edge.v], strict=True)
            pairs = ((edge.out_class[p], edge.in_class[q]) for p, q in both)
            holds.append(Hold(leader[edge.u], tuple(edge.items.get(pair, ()) for pair in pairs)))
    nothing = (0.0,) * problem.devices
    nodes = [tuple(replace(c, load_s=nothing) for c in choices[:1]) for choices in problem.nodes]
    for node, followers in members.items():  # a leader has the loads of all that follow it
        choices = []
        for index, pick in enumerate(picks[node]):
            loads = [problem.nodes[member][picks[member][index]].load_s for member in followers]
            load_s = tuple(map(sum, zip(*loads, strict=True)))
            choices.append(replace(problem.nodes[node][pick], load_s=load_s))
        nodes[node] = tuple(choices)
    smaller = replace(problem, nodes=tuple(nodes), edges=tuple(edges), holds=tuple(holds))
    return Reduced(smaller, tuple(map(tuple, picks)), leader)


def _tie(problem: Problem) -> tuple[list[int], dict[int, list[int]], list[list[int | None]]]:
    """The leader of each node, the nodes of each leader, and choices under the leader's choices.

    The leader of an edge's later end, and all that follow it, follow the leader of its earlier end.
    Where a node has no choice under one of its leader's it is None.
    """
    leader = list(range(len(problem.nodes)))
    stands: list[list[int | None]] = [list(range(len(choices))) for choices in problem.nodes]
    members = {node: [node] for node in leader}
    for edge in problem.edges:
        partners = _partners(edge)
        first, second = leader[edge.u], leader[edge.v]
        if partners is None or first == second:
            continue
        under = {q: p for p, q in enumerate(stands[edge.v]) if q is not None}
        choices = [
            under.get(partners.get(p, -1)) if p is not None else None for p in stands[edge.u]
        ]
        for node in members.pop(second):
            stands[node] = [stands[node][q] if q is not None else None for q in choices]
            leader[node] = first
            members[first].append(node)
    return leader, members, stands


def _partners(edge: Edge) -> Mapping[int, int] | None:
    """Choice of the later end for each of the earlier one; None if there may be several."""
    if any(edge.items.values()):
        return None
    by_out = {o: p for p, o in enumerate(edge.out_class)}
    by_in = {i: q for q, i in enumerate(edge.in_class)}
    distinct = len(by_out) == len(edge.out_class) and len(by_in) == len(edge.in_class)
    if not distinct or len(edge.forbidden) < len(by_out) * len(by_in) - min(
        len(by_out), len(by_in)
    ):
        return None
    allowed = [(o, i) for o in by_out for i in by_in if (o, i) not in edge.forbidden]
    if len({o for o, _ in allowed}) < len(allowed) or len({i for _, i in allowed}) < len(allowed):
        return None
    return {by_out[o]: by_in[i] for o, i in allowed}


def _common_choices(
    problem: Problem, leader: Sequence[int], stands: Sequence[Sequence[int | None]]
) -> list[list[int]]:
    """The choices of `stands` that every member has and no edge between members forbids."""
    dead: list[set[int]] = [set() for _ in problem.nodes]  # of leaders
    for first, choices in zip(leader, stands, strict=True):
        dead[first].update(index for index, choice in enumerate(choices) if choice is None)
    for edge in problem.edges:
        if leader[edge.u] != leader[edge.v]:
            continue
        for index, (p, q) in enumerate(zip(stands[edge.u], stands[edge.v], strict=True)):
            if p is None or q is None:
                continue
            if (edge.out_class[p], edge.in_class[q]) in edge.forbidden:
                dead[leader[edge.u]].add(index)
    return [
        [p for index, p in enumerate(choices) if p is not None and index not in dead[first]]
        for first, choices in zip(leader, stands, strict=True)
    ]
