"""Nodes whose choices an edge makes equal become one: copies of a block, above all.

Such an edge costs nothing and leaves each choice of one end at most one choice of the other. All
that the follower costs, holds and shares with others is then its leader's. Followers keep their
place in the order, with one choice that costs nothing, so that positions stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from partitioner.solver.presolve.simplify import Reduced, restrict
from partitioner.solver.problem import Edge, Hold, Problem


def merge_equal(problem: Problem) -> Reduced:
    """Merge nodes that edges make equal; a leader left without a choice means infeasible."""
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
