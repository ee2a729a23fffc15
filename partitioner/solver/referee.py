"""The cost of a plan, computed apart from every search; the best plan by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from partitioner.solver.problem import Problem, SolverError, Sparse

Objective = Literal["throughput", "memory", "latency"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "memory", "latency")

#: The memory objective takes the best throughput at this much above the least peak.
PEAK_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Outcome:
    """The cost of a plan."""

    load_s: tuple[float, ...]  #: Seconds of work on each device, items paid once.
    step_s: float  #: The largest load.
    peak_bytes: tuple[float, ...]  #: The most bytes held on each device.
    peak_position: tuple[int, ...]  #: The first position at which each device holds them.
    excess_bytes: float  #: By how much the worst device is over its limit; 0 if none is.
    problem: Problem = field(repr=False, compare=False)
    chosen: tuple[int, ...]  #: The plan.

    @cached_property
    def latency_s(self) -> float:
        """Seconds of one request, run in the given order; counted when it is first asked for."""
        return latency_s(self.problem, self.chosen)

    def value(self, objective: Objective) -> float:
        """The figure that the objective minimises."""
        if objective == "latency":
            return self.latency_s
        return self.step_s if objective == "throughput" else max(self.peak_bytes)


def evaluate_choices(problem: Problem, chosen: Sequence[int]) -> Outcome:
    """The cost of a plan, one choice index a node."""
    if len(chosen) != len(problem.nodes):
        raise SolverError(f"{len(chosen)} choices for {len(problem.nodes)} nodes")
    for edge in problem.edges:
        if (pair := edge.pair(chosen)) in edge.forbidden:
            raise SolverError(
                f"{problem.names[edge.u]!r} and {problem.names[edge.v]!r} "
                f"take the forbidden pair {pair}"
            )
    load = [0.0] * problem.devices
    for choices, index in zip(problem.nodes, chosen, strict=True):
        _add(load, choices[index].load_s)
    change = [[0.0] * (len(problem.nodes) + 1) for _ in load]
    for index in sorted(triggered(problem, chosen)):
        item = problem.items[index]
        _add(load, item.load_s)
        for row, size in zip(change, item.bytes, strict=True):
            if size:
                row[item.first] += size
                row[item.last + 1] -= size
    live_bytes = [list(itertools.accumulate(row[:-1])) for row in change]
    peak = [max(row, default=0.0) for row in live_bytes]
    excess = max(0.0, *(p - limit for p, limit in zip(peak, problem.limit_bytes, strict=True)))
    return Outcome(
        tuple(load),
        max(load),
        tuple(peak),
        tuple(row.index(most) if row else 0 for row, most in zip(live_bytes, peak, strict=True)),
        excess,
        problem,
        tuple(chosen),
    )


def _add(load: list[float], more: Sequence[float]) -> None:
    for device, seconds in enumerate(more):
        load[device] += seconds


def triggered(problem: Problem, chosen: Sequence[int]) -> set[int]:
    """The items that a plan pays and holds."""
    items: set[int] = set()
    for edge in problem.edges:
        items.update(edge.items.get(edge.pair(chosen), ()))
    for hold in problem.holds:
        items.update(hold.items[chosen[hold.node]])
    return items


def latency_s(problem: Problem, chosen: Sequence[int]) -> float:
    """Seconds of one request: every device does its share of one global order, in that order.

    An item runs as early in the order as it can without holding up its receivers: after its
    producer, and after the last node before it on the devices that only receive. An item that a
    hold alone triggers follows its node. All devices of a node or item start together.
    """
    loads, item_loads = problem.busy_s, problem.items_busy_s
    producers, items, following = _tasks(problem, chosen)
    free = [0.0] * problem.devices
    ready: dict[int, float] = {}  # seconds at which each item is there
    done: list[float] = []
    for node, choice in enumerate(chosen):
        start = 0.0
        for producer in producers[node]:
            if done[producer] > start:
                start = done[producer]
        for item in items[node]:
            if ready[item] > start:
                start = ready[item]
        done.append(_occupy(free, loads[node][choice], start))
        for item, producer in following[node]:
            ready[item] = _occupy(free, item_loads[item], done[producer])
    return max(0.0, *done, *free)


def _tasks(
    problem: Problem, chosen: Sequence[int]
) -> tuple[list[list[int]], list[list[int]], list[list[tuple[int, int]]]]:
    """List producers and awaited items of nodes, and items behind with their producers."""
    loads, item_loads, last_busy = problem.busy_s, problem.items_busy_s, [-1] * problem.devices
    producers: list[list[int]] = [[] for _ in chosen]
    items: list[list[int]] = [[] for _ in chosen]
    following: list[list[tuple[int, int]]] = [[] for _ in chosen]
    seen: set[int] = set()
    for node, choice in enumerate(chosen):
        for producer, out_class, in_class, paid in problem.incoming[node]:
            triggered = paid.get((out_class[chosen[producer]], in_class[choice]))
            if not triggered:
                producers[node].append(producer)
                continue
            items[node] += triggered
            sending = [device for device, _ in loads[producer][chosen[producer]]]
            for item in triggered:
                if item not in seen:
                    seen.add(item)
                    busy = [last_busy[d] for d, _ in item_loads[item] if d not in sending]
                    anchor = min(max(producer, *busy), node - 1) if busy else producer
                    following[anchor].append((item, producer))
        for device, _ in loads[node][choice]:
            last_busy[device] = node
    held = ((h.node, item) for h in problem.busy_holds for item in h.items[chosen[h.node]])
    for node, item in sorted(held):  # items of holds alone run behind the first of their nodes
        if item not in seen and item_loads[item]:
            seen.add(item)
            following[node].append((item, node))
    return producers, items, following


def _occupy(free: list[float], load: Sparse, start: float) -> float:
    """Run a task on the devices that it loads; return when it is finished."""
    for device, _ in load:
        if free[device] > start:
            start = free[device]
    end = start
    for device, seconds in load:
        free[device] = second = start + seconds
        if second > end:
            end = second
    return end
