"""The triggers of each item: one node alone, one edge alone, or several together (an offer)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from partitioner.solver.problem import Problem, SolverError
from partitioner.solver.sites import Site, item_sites

Span = tuple[int, int]  #: First and last position at which something is held, inclusive.
Wanted = tuple[tuple[int, frozenset[int]], ...]  #: (node, its choices that trigger), by node.


@dataclass(frozen=True)
class Offer:
    """Items that the same choices of the same nodes trigger, each under other choices of a hub."""

    hub: int | None  #: The node whose choice decides which items are offered; None if nothing does.
    #: The items offered under each choice of the hub, () where none are; one entry without a hub.
    items: tuple[tuple[int, ...], ...]
    wanted: Wanted  #: The choices of other nodes, any of which triggers the offered items.
    span: Span | None  #: Interval in which the bytes of the items are held; None if none count.


@dataclass(frozen=True)
class Triggers:
    """The items of a problem by what triggers them, less those without cost and bytes that count.

    Attributes:
        private: For each node and choice the items that it alone brings about.
        on_edge: For each edge the items without bytes that it alone triggers.
        offers: All other items.
    """

    private: tuple[tuple[tuple[int, ...], ...], ...]
    on_edge: tuple[frozenset[int], ...]
    offers: tuple[Offer, ...]


def span_of(problem: Problem, item: int) -> Span | None:
    """Interval in which an item's bytes are held; None where they do not count."""
    held = problem.items[item]
    return (held.first, held.last) if problem.limited and any(held.bytes) else None


def triggers(problem: Problem) -> Triggers:
    """Sort the items of a problem that has no parallel edges.

    Raises:
        SolverError: Edges without a common node trigger one item.
    """
    private: list[list[list[int]]] = [[[] for _ in choices] for choices in problem.nodes]
    on_edge: list[set[int]] = [set() for _ in problem.edges]
    offers: dict[tuple[int | None, Wanted, Span | None], list[list[int]]] = {}
    counted = {
        index
        for index, item in enumerate(problem.items)
        if any(item.load_s) or (problem.limited and any(item.bytes))
    }
    for item, sites in enumerate(item_sites(problem, counted)):
        edges = [site.edge for site in sites if site.edge is not None]
        span = span_of(problem, item)
        if len(sites) == 1 and edges and span is None:
            on_edge[edges[0]].add(item)
            continue
        for hub, choice, wanted in _terms(problem, item, sites):
            if not wanted:
                assert hub is not None
                private[hub][choice].append(item)
                continue
            width = 1 if hub is None else len(problem.nodes[hub])
            offered = offers.setdefault((hub, wanted, span), [[] for _ in range(width)])
            offered[choice].append(item)
    return Triggers(
        tuple(tuple(map(tuple, choices)) for choices in private),
        tuple(map(frozenset, on_edge)),
        tuple(
            Offer(hub, tuple(map(tuple, offered)), wanted, span)
            for (hub, wanted, span), offered in offers.items()
        ),
    )


def _terms(
    problem: Problem, item: int, sites: Sequence[Site]
) -> Iterator[tuple[int | None, int, Wanted]]:
    """(hub, choice of it, choices of others that trigger the item then); () if it alone does."""
    alone: dict[int, set[int]] = {}
    for site in sites:
        if site.hold is not None:
            alone.setdefault(problem.holds[site.hold].node, set()).update(site.choices)
    edges = [site for site in sites if site.edge is not None]
    if len(alone) > 1 and not edges:
        yield None, 0, _by_node(alone)
        return
    hub = _hub(problem, item, edges) if edges else next(iter(alone), None)
    if hub is None:
        return  # nothing triggers it
    choices_of_hub = alone.pop(hub, set())
    for choice in range(len(problem.nodes[hub])):
        if choice in choices_of_hub:
            yield hub, choice, ()
            continue
        wanted = {node: set(choices) for node, choices in alone.items()}
        for other, choices in _triggering(problem, edges, hub, choice):
            wanted.setdefault(other, set()).update(choices)
        if wanted := {node: choices for node, choices in wanted.items() if choices}:
            yield hub, choice, _by_node(wanted)


def _hub(problem: Problem, item: int, edges: Iterable[Site]) -> int:
    """The node that all edges of an item share; of a single edge its producer."""
    ends = [problem.edges[site.edge] for site in edges if site.edge is not None]
    common = set.intersection(*({edge.u, edge.v} for edge in ends))
    if not common:
        names = ", ".join(f"{problem.names[e.u]!r} - {problem.names[e.v]!r}" for e in ends[:3])
        raise SolverError(f"item {item} is triggered by edges without a common node: {names}")
    return ends[0].u if ends[0].u in common else ends[0].v


def _triggering(
    problem: Problem, edges: Iterable[Site], hub: int, choice: int
) -> Iterator[tuple[int, set[int]]]:
    """Other end of each edge, and its choices that trigger beside this one of the hub."""
    for site in edges:
        assert site.edge is not None
        edge, pairs = problem.edges[site.edge], set(site.pairs)
        if hub == edge.u:
            left = edge.out_class[choice]
            yield edge.v, {q for q, wanted in enumerate(edge.in_class) if (left, wanted) in pairs}
        else:
            wanted = edge.in_class[choice]
            yield edge.u, {p for p, left in enumerate(edge.out_class) if (left, wanted) in pairs}


def _by_node(wanted: dict[int, set[int]]) -> Wanted:
    return tuple((node, frozenset(choices)) for node, choices in sorted(wanted.items()))
