"""A first plan of a problem that no exact method takes: node after node, what costs least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partitioner.solver.problem import Edge, Problem

#: Steps for each choice of a node, and for each item that it may trigger.
CHOICE_STEPS, ITEM_STEPS = 2, 1


def along(problem: Problem, byte_price: float = 0.0) -> tuple[tuple[int, ...] | None, float]:
    """The choices that cost least beside those of the nodes before, in the global order.

    A choice costs its own load on all devices and that of the items that it triggers with its
    predecessors and that are not paid yet. With a `byte_price` (per byte that is held during the
    whole order) choices that hold less are preferred.

    Returns:
        The choice of each node, None if those before forbid all of a node's, and the steps that
        finding it took.
    """
    arriving: list[list[Edge]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        arriving[edge.v].append(edge)
    held: list[list[tuple[tuple[int, ...], ...]]] = [[] for _ in problem.nodes]
    for hold in problem.holds:
        held[hold.node].append(hold.items)
    by_place = byte_price / max(1, len(problem.nodes))
    prices = [
        sum(item.load_s) + by_place * sum(item.bytes) * (item.last - item.first + 1)
        for item in problem.items
    ]
    paid: set[int] = set()
    chosen: list[int] = []
    steps = 0.0

    def triggered(choice: int) -> Iterator[int]:
        node = len(chosen)
        for edge in arriving[node]:
            yield from edge.items.get((edge.out_class[chosen[edge.u]], edge.in_class[choice]), ())
        for items in held[node]:
            yield from items[choice]

    for node, choices in enumerate(problem.nodes):
        costs_s: dict[int, float] = {}
        for choice, option in enumerate(choices):
            if _is_forbidden(arriving[node], chosen, choice):
                continue
            fresh = set(triggered(choice)) - paid
            steps += CHOICE_STEPS + ITEM_STEPS * len(fresh)
            costs_s[choice] = sum(option.load_s) + sum(prices[item] for item in fresh)
        if not costs_s:
            return None, steps
        best = min(costs_s, key=costs_s.__getitem__)
        paid.update(triggered(best))
        chosen.append(best)
    return tuple(chosen), steps


def _is_forbidden(arriving: Sequence[Edge], chosen: Sequence[int], choice: int) -> bool:
    """Test whether the choices of a node's predecessors forbid one of its own."""
    return any(
        (edge.out_class[chosen[edge.u]], edge.in_class[choice]) in edge.forbidden
        for edge in arriving
    )
