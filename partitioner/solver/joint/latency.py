"""The latency of one request: proposals by list scheduling and local search, and bounds.

Devices run their nodes in the given order, so a plan is still one choice a node. A plan is
proposed by the throughput solver, by each group alone, and by a list scheduler that lets each
node take the choice that finishes first; local search improves the best of them.

    bound = max(longest path of least node times with free communication,
                least load of the busiest device)

The second is the optimum itself where every node loads all devices alike (SPMD).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from partitioner.solver.joint.incumbents import (
    EFFORT_PER_CHOICE,
    Search,
    improve,
    offer_all,
    starts,
)
from partitioner.solver.joint.local_search import Sparse, Tables, tables
from partitioner.solver.problem import Problem

#: Local search may spend so many node evaluations: a plan's latency costs one a node.
EFFORT = 400_000
#: Steps of a move, for each node.
NODE_STEPS = 5.5


def critical_path_s(problem: Problem) -> float:
    """The longest path with the best choice of every node and nothing to pay on edges."""
    done = [min(max(choice.load_s) for choice in choices) for choices in problem.nodes]
    seconds = tuple(done)
    for edge in sorted(problem.edges, key=lambda edge: edge.v):
        done[edge.v] = max(done[edge.v], done[edge.u] + seconds[edge.v])
    return max(done)


def list_schedule(data: Tables) -> tuple[int, ...]:
    """Each node in order takes the choice that finishes first, the least loaded of equals."""
    free = [0.0] * data.problem.devices
    done: list[float] = []
    chosen: list[int] = []
    for node in range(len(data.load)):
        options = []
        for choice in range(len(data.load[node])):
            end, total, after = _finish(data, node, choice, chosen, done, free)
            options.append((end, total, choice, after))
        end, _, choice, free = min(options)
        chosen.append(choice)
        done.append(end)
    return tuple(chosen)


def _finish(
    data: Tables,
    node: int,
    choice: int,
    chosen: Sequence[int],
    done: Sequence[float],
    free: Sequence[float],
) -> tuple[float, float, list[float]]:
    """Run one more node, each of its values sent just before it.

    Returns:
        The second at which it is done, seconds on all devices, when each device is free then.
    """
    free = list(free)
    total = 0.0
    start = 0.0
    for other, table in data.near[node]:
        if other > node:
            continue
        items = table[choice][chosen[other]]
        if items is None:
            return math.inf, math.inf, free
        ready = done[other]
        for item in items:
            load = data.item_load[item]
            ready = _run(free, load, ready)
            total += sum(seconds for _, seconds in load)
        start = max(start, ready)
    load = data.load[node][choice]
    end = _run(free, load, start)
    return end, total + sum(seconds for _, seconds in load), free


class Latency:
    """The referee's seconds of one request (`referee.latency_s`), bit for bit, for many plans."""

    def __init__(self, data: Tables) -> None:
        self._data = data
        #: Of each choice of each node its producers, with the items by the producer's choice.
        self._reads = [
            [
                [
                    (other, tuple(one or () for one in table[choice]))
                    for other, table in near
                    if other < node
                ]
                for choice in range(len(data.load[node]))
            ]
            for node, near in enumerate(data.near)
        ]
        self._devices = [
            [tuple(device for device, _ in load) for load in choices] for choices in data.load
        ]
        #: Nodes whose choice alone may trigger items that take time.
        self._holding = [
            node
            for node, triggers in enumerate(data.hold_items)
            if any(data.item_load[item] for item in chain(*triggers))
        ]

    def __call__(self, chosen: Sequence[int]) -> float:
        """Seconds of a plan, one choice index a node, none of them a forbidden pair."""
        item_load = self._data.item_load
        producers, items, following = self._tasks(chosen)
        free = [0.0] * self._data.problem.devices
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
            done.append(_run(free, self._data.load[node][choice], start))
            for item, producer in following[node]:
                ready[item] = _run(free, item_load[item], done[producer])
        return max(0.0, *done, *free)

    def _tasks(
        self, chosen: Sequence[int]
    ) -> tuple[list[list[int]], list[list[int]], list[list[tuple[int, int]]]]:
        """List producers and awaited items of nodes, and items behind with their producers."""
        last_busy = [-1] * self._data.problem.devices
        item_load, devices = self._data.item_load, self._devices
        producers: list[list[int]] = []
        items: list[list[int]] = []
        following: list[list[tuple[int, int]]] = [[] for _ in chosen]
        seen: set[int] = set()
        for node, choice in enumerate(chosen):
            at_once: list[int] = []
            waited: list[int] = []
            for producer, by_choice in self._reads[node][choice]:
                triggered = by_choice[chosen[producer]]
                if not triggered:
                    at_once.append(producer)
                    continue
                waited += triggered
                sending = devices[producer][chosen[producer]]
                for item in triggered:
                    if item not in seen:
                        seen.add(item)
                        busy = [last_busy[d] for d, _ in item_load[item] if d not in sending]
                        anchor = min(max(producer, *busy), node - 1) if busy else producer
                        following[anchor].append((item, producer))
            producers.append(at_once)
            items.append(waited)
            for device in devices[node][choice]:
                last_busy[device] = node
        for node in self._holding:  # items of holds alone run behind the first of their nodes
            for item in sorted(self._data.hold_items[node][chosen[node]]):
                if item not in seen and item_load[item]:
                    seen.add(item)
                    following[node].append((item, node))
        return producers, items, following


def _run(free: list[float], load: Sparse, start: float) -> float:
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


def propose(search: Search) -> None:
    """Offer plans of short latency."""
    problem, data = search.problem, tables(search.problem)
    plans = [list_schedule(data), *starts(search)]
    if search.best is not None:
        plans.append(search.best)
    ranked = offer_all(search, plans, "list scheduling")
    effort = min(EFFORT // len(problem.nodes), EFFORT_PER_CHOICE * sum(map(len, problem.nodes)))
    seconds = Latency(data)
    improve(
        search,
        ranked,
        lambda state: (seconds(state.chosen),),
        effort,
        NODE_STEPS * len(problem.nodes),
    )
