"""Work for every device: the plan nearest to a given one that leaves no device idle.

The best throughput of a small model may need fewer devices than the request names. A request for
four parts gets four, and a note says what fewer would cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partitioner.solver.joint.local_search import State, tables
from partitioner.solver.problem import Problem

#: Nodes that are tried for each idle device, those with the least load first.
MAX_TRIES = 200
#: Relative difference of two costs that is rounding.
ROUNDING = 1e-12


def cover(problem: Problem, chosen: Sequence[int]) -> tuple[int, ...] | None:
    """Give each idle device the node whose move costs least; None if no plan that fits is near."""
    state = State(tables(problem), chosen, bytes_matter=problem.limited)
    for device in range(problem.devices):
        if _node_counts(problem, state.chosen)[device]:
            continue
        # the cheapest node and choice that give the device work, and more devices than before
        best: tuple[int, int] | None = None
        least = (float("inf"), float("inf"))
        for node, pick in _moves(problem, state.chosen, device):
            if not state.allowed(node, pick):
                continue
            before = state.chosen[node]
            state.move(node, pick)
            cost = max(state.load), sum(state.load)
            if state.excess_bytes() <= 0 and _is_less(cost, least):
                best, least = (node, pick), cost
            state.move(node, before)
        if best is None:
            return None
        state.move(*best)
    return tuple(state.chosen)


def _node_counts(problem: Problem, chosen: Sequence[int]) -> list[int]:
    """Nodes that load each device; communications are left out."""
    counts = [0] * problem.devices
    for choices, pick in zip(problem.nodes, chosen, strict=True):
        for device, seconds in enumerate(choices[pick].load_s):
            counts[device] += seconds > 0
    return counts


def _moves(problem: Problem, chosen: Sequence[int], device: int) -> Iterator[tuple[int, int]]:
    counts = _node_counts(problem, chosen)
    nodes = sorted(
        (choices[pick].load_s[d], node)
        for node, (choices, pick) in enumerate(zip(problem.nodes, chosen, strict=True))
        for d in range(problem.devices)
        if choices[pick].load_s[d] > 0
    )
    for _, node in nodes[:MAX_TRIES]:
        now = problem.nodes[node][chosen[node]].load_s
        for pick, choice in enumerate(problem.nodes[node]):
            pairs = enumerate(zip(now, choice.load_s, strict=True))
            idle = sum(old > 0 and new == 0 and counts[d] == 1 for d, (old, new) in pairs)
            gained = sum(new > 0 and counts[d] == 0 for d, new in enumerate(choice.load_s))
            if choice.load_s[device] > 0 and gained > idle:
                yield node, pick


def _is_less(new: tuple[float, float], old: tuple[float, float]) -> bool:
    if abs(new[0] - old[0]) > ROUNDING * old[0]:
        return new[0] < old[0]
    return new[1] < old[1] * (1 - ROUNDING)
