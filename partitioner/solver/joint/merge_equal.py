"""Nodes that an edge makes equal become one: copies of a block, above all.

Such an edge costs nothing and leaves each choice of one end at most one choice of the other. What
the follower costs, holds and shares with others is then its leader's. Followers keep their place
in the order, with one choice that costs nothing, so that positions stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partitioner.solver.problem import Choice, Edge, Hold, Pair, Problem

Items = tuple[int, ...]


@dataclass(frozen=True)
class Merged:
    """A problem with fewer choices and as good plans.

    Attributes:
        problem: The smaller problem.
        leader: The node that each node follows, itself if none.
        stands: For each node its choice under each choice of its leader.
    """

    problem: Problem
    leader: tuple[int, ...]
    stands: tuple[tuple[int, ...], ...]

    def restore(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """A plan of the smaller problem as one of the original."""
        return tuple(
            own[chosen[leader]] for own, leader in zip(self.stands, self.leader, strict=True)
        )

    def lower(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """A plan of the original, which takes no forbidden pair, as one of the smaller problem."""
        return tuple(
            own.index(pick) if leader == node else 0
            for node, (own, leader, pick) in enumerate(
                zip(self.stands, self.leader, chosen, strict=True)
            )
        )


def merge_alike(problem: Problem) -> Merged:
    """Merge nodes that edges make equal; a leader left without a choice means infeasible."""
    job = _Merge(problem)
    for edge in problem.edges:
        job.tie(edge)
    return job.run()


def _partners(edge: Edge) -> Mapping[int, int] | None:
    """Choice of the later end for each of the earlier one; None if there may be several."""
    if any(edge.items.values()):
        return None
    ours = {o: p for p, o in enumerate(edge.out_class)}
    theirs = {i: q for q, i in enumerate(edge.in_class)}
    distinct = len(ours) == len(edge.out_class) and len(theirs) == len(edge.in_class)
    if not distinct or len(edge.forbidden) < len(ours) * len(theirs) - min(len(ours), len(theirs)):
        return None
    allowed = [(o, i) for o in ours for i in theirs if (o, i) not in edge.forbidden]
    if len({o for o, _ in allowed}) < len(allowed) or len({i for _, i in allowed}) < len(allowed):
        return None
    return {ours[o]: theirs[i] for o, i in allowed}


@dataclass
class _Merge:
    problem: Problem
    leader: list[int] = field(init=False)
    #: Choice of each node under each choice of its leader; None where it has none.
    stands: list[list[int | None]] = field(init=False)
    members: dict[int, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.problem.nodes)
        self.leader = list(range(count))
        self.stands = [list(range(len(choices))) for choices in self.problem.nodes]
        self.members = {node: [node] for node in range(count)}

    def tie(self, edge: Edge) -> None:
        """Let the leader of the later end, and all that follow it, follow that of the earlier."""
        partners = _partners(edge)
        one, other = self.leader[edge.u], self.leader[edge.v]
        if partners is None or one == other:
            return
        under = {q: p for p, q in enumerate(self.stands[edge.v]) if q is not None}
        choices = [
            under.get(partners.get(p, -1)) if p is not None else None for p in self.stands[edge.u]
        ]
        for node in self.members.pop(other):
            own = self.stands[node]
            self.stands[node] = [own[q] if q is not None else None for q in choices]
            self.leader[node] = one
            self.members[one].append(node)

    def run(self) -> Merged:
        """The problem of the leaders."""
        self._keep()
        problem = self.problem
        holds = [self._hold(hold) for hold in problem.holds]
        edges = []
        for edge in problem.edges:
            if self.leader[edge.u] == self.leader[edge.v]:
                holds += self._inside(edge)
            else:
                edges.append(self._edge(edge))
        nodes = tuple(tuple(self._choices(node)) for node in range(len(problem.nodes)))
        return Merged(
            replace(problem, nodes=nodes, edges=tuple(edges), holds=tuple(holds)),
            tuple(self.leader),
            tuple(tuple(own) for own in self.picks),
        )

    def _keep(self) -> None:
        """Only the choices that all members have, and that no edge between them forbids."""
        dead: dict[int, set[int]] = {leader: set() for leader in self.members}
        for leader, members in self.members.items():
            for node in members:
                dead[leader].update(p for p, own in enumerate(self.stands[node]) if own is None)
        for edge in self.problem.edges:
            leader = self.leader[edge.u]
            if leader == self.leader[edge.v]:
                dead[leader].update(p for p, pair in self._pairs(edge) if pair in edge.forbidden)
        self.picks = [
            [p for q, p in enumerate(own) if p is not None and q not in dead[leader]]
            for own, leader in zip(self.stands, self.leader, strict=True)
        ]

    def _pairs(self, edge: Edge) -> Iterator[tuple[int, Pair]]:
        both = zip(self.stands[edge.u], self.stands[edge.v], strict=True)
        for choice, (p, q) in enumerate(both):
            if p is not None and q is not None:
                yield choice, (edge.out_class[p], edge.in_class[q])

    def _choices(self, node: int) -> Iterator[Choice]:
        """What a leader and its followers take together; nothing for a follower."""
        own = self.problem.nodes[node]
        if self.leader[node] != node:
            yield replace(own[0], load_s=(0.0,) * self.problem.devices)
            return
        members = self.members[node]
        for index, pick in enumerate(self.picks[node]):
            loads = [self.problem.nodes[m][self.picks[m][index]].load_s for m in members]
            yield replace(own[pick], load_s=tuple(map(sum, zip(*loads, strict=True))))

    def _edge(self, edge: Edge) -> Edge:
        outs = tuple(edge.out_class[p] for p in self.picks[edge.u])
        ins = tuple(edge.in_class[q] for q in self.picks[edge.v])
        u, v = self.leader[edge.u], self.leader[edge.v]
        live = {(o, i) for o in set(outs) for i in set(ins)}
        items = {pair: own for pair, own in edge.items.items() if pair in live}
        if u < v:
            return Edge(u, v, outs, ins, items, edge.forbidden & live)
        turned = {(i, o): own for (o, i), own in items.items()}
        return Edge(v, u, ins, outs, turned, frozenset((i, o) for o, i in edge.forbidden & live))

    def _inside(self, edge: Edge) -> Iterator[Hold]:
        """What an edge between two of the same leader costs, by the leader's choice."""
        if any(edge.items.values()):
            both = zip(self.picks[edge.u], self.picks[edge.v], strict=True)
            found = (edge.items.get((edge.out_class[p], edge.in_class[q]), ()) for p, q in both)
            yield Hold(self.leader[edge.u], tuple(found))

    def _hold(self, hold: Hold) -> Hold:
        items = tuple(hold.items[p] for p in self.picks[hold.node])
        return Hold(self.leader[hold.node], items)
