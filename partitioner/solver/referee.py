"""The cost of a plan, computed apart from every search; the best plan by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from partitioner.solver.problem import Edge, Problem, SolverError

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
    free = [0.0] * problem.devices
    ready: dict[int, float] = {}  # seconds at which each item is there
    done: list[float] = []
    following: dict[int, list[tuple[int, int]]] = {}  # node -> (item, producer), in order
    for index, producer, anchor in _anchors(problem, chosen):
        following.setdefault(anchor, []).append((index, producer))
    operands: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        operands[edge.v].append((edge.u, edge.items.get(edge.pair(chosen), ())))
    for node, choices in enumerate(problem.nodes):
        start = 0.0
        for producer, items in operands[node]:
            start = (
                max([start, *(ready[i] for i in items)]) if items else max(start, done[producer])
            )
        done.append(_occupy(free, choices[chosen[node]].load_s, start))
        for index, producer in following.get(node, ()):
            ready[index] = _occupy(free, problem.items[index].load_s, done[producer])
    return max([0.0, *done, *free])


def _anchors(problem: Problem, chosen: Sequence[int]) -> list[tuple[int, int, int]]:
    """(item, producer, node after which it runs) of every item that takes time, in order."""
    last_busy = [-1] * problem.devices
    seen: set[int] = set()
    anchors = []
    incoming: list[list[Edge]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        incoming[edge.v].append(edge)
    for node, edges in enumerate(incoming):
        for edge in edges:
            source = problem.nodes[edge.u][chosen[edge.u]].load_s
            for index in edge.items.get(edge.pair(chosen), ()):
                if index in seen:
                    continue
                seen.add(index)
                load = problem.items[index].load_s
                receivers = [d for d in range(problem.devices) if load[d] > 0 and source[d] <= 0]
                anchor = min(max([edge.u, *(last_busy[d] for d in receivers)]), node - 1)
                anchors.append((index, edge.u, anchor))
        for device, seconds in enumerate(problem.nodes[node][chosen[node]].load_s):
            if seconds > 0:
                last_busy[device] = node
    alone: dict[int, int] = {}  # items of holds alone, each with the first of their nodes
    held = ((hold.node, i) for hold in problem.holds for i in hold.items[chosen[hold.node]])
    for node, index in held:
        if any(problem.items[index].load_s) and index not in seen:
            alone[index] = min(node, alone.get(index, node))
    following = sorted(alone.items(), key=lambda entry: (entry[1], entry[0]))
    return anchors + [(i, node, node) for i, node in following]


def _occupy(free: list[float], load: Sequence[float], start: float) -> float:
    """Run one task on the devices that it loads; return when it is finished."""
    used = [d for d, seconds in enumerate(load) if seconds > 0]
    start = max([start, *(free[d] for d in used)])
    for device in used:
        free[device] = start + load[device]
    return max([start, *(free[d] for d in used)])
