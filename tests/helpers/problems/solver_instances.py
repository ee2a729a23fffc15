"""Random problems of the three kinds that the compiler makes: SPMD, placement, hybrid; programs."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from partitioner.solver.milp.program import Milp, MilpBuilder
from partitioner.solver.problem import Choice, Edge, Hold, Item, Problem

Json = dict[str, Any]


class Maker:
    """Collects one random problem."""

    def __init__(self, seed: int, count: int, devices: int) -> None:
        self.rng = random.Random(seed)
        self.count = count
        self.devices = devices
        self.items: list[Item] = []
        self.edges: list[Edge] = []
        self.holds: list[Hold] = []

    def item(self, load: Sequence[float], size: Sequence[float], first: int, last: int) -> int:
        self.items.append(Item(tuple(load), tuple(size), first, last))
        return len(self.items) - 1

    def arcs(self, extra: float = 0.4) -> list[tuple[int, int]]:
        """A random connected DAG, close to a chain."""
        arcs = {(max(0, v - self.rng.choice((1, 1, 1, 2))), v) for v in range(1, self.count)}
        for v in range(2, self.count):
            if self.rng.random() < extra:
                arcs.add((self.rng.randrange(v), v))
        return sorted(arcs)

    def seconds(self) -> float:
        return self.rng.choice((0.0, 1.0, 1.0, 2.0, 3.0, 5.0)) + round(self.rng.random(), 3)

    def build(
        self,
        nodes: Sequence[tuple[Choice, ...]],
        limit: float,
        interchangeable: tuple[tuple[int, ...], ...] = (),
    ) -> Problem:
        return Problem(
            self.devices,
            (limit,) * self.devices,
            tuple(nodes),
            tuple(f"n{v}" for v in range(self.count)),
            tuple(self.edges),
            tuple(self.holds),
            tuple(self.items),
            interchangeable,
        )


def _last_use(arcs: Sequence[tuple[int, int]], count: int) -> dict[int, int]:
    return {u: max([u, *(v for a, v in arcs if a == u)]) for u in range(count)}


def spmd(
    seed: int,
    count: int,
    choices: int,
    classes: int = 3,
    limit: float = math.inf,
    forbid: float = 0.05,
) -> Problem:
    """One group of all devices: equal loads, reshards between classes paid once a value."""
    make = Maker(seed, count, 2)
    rng = make.rng
    nodes = []
    outs, ins = [], []
    for _ in range(count):
        nodes.append(
            tuple(Choice((s, s), 0) for p, s in enumerate(make.seconds() for _ in range(choices)))
        )
        outs.append(tuple(rng.randrange(classes) for _ in range(choices)))
        ins.append(tuple(rng.randrange(classes) for _ in range(choices)))
    arcs = make.arcs()
    last = _last_use(arcs, count)
    paid: dict[tuple[int, int, int], int] = {}
    for u, v in arcs:
        table = {}
        for o in range(classes):
            for i in range(classes):
                if o != i:
                    if (u, o, i) not in paid:
                        s, b = make.seconds(), rng.randint(0, 4)
                        paid[(u, o, i)] = make.item((s, s), (b, b), u, last[u])
                    table[(o, i)] = (paid[(u, o, i)],)
        banned = frozenset(p for p in table if rng.random() < forbid)
        make.edges.append(Edge(u, v, outs[u], ins[v], table, banned))
    for v in range(count):
        hold_items = []
        for _ in range(choices):
            w, a = rng.randint(0, 6), rng.randint(0, 4)
            hold_items.append(
                (make.item((0, 0), (w, w), 0, count - 1), make.item((0, 0), (a, a), v, last[v]))
            )
        make.holds.append(Hold(v, tuple(hold_items)))
    return make.build(nodes, limit)


def placement(
    seed: int,
    count: int,
    devices: int,
    limit: float = math.inf,
    scale: float = 1.0,
    per_group: int = 1,
) -> Problem:
    """Whole operators on devices: a value is sent to each other device at most once.

    With `per_group` > 1 every device offers several choices with classes of their own.
    """
    make = Maker(seed, count, devices)
    rng = make.rng

    def only_on(device: int, value: float) -> tuple[float, ...]:
        return tuple(value if d == device else 0.0 for d in range(devices))

    nodes = []
    for _ in range(count):
        base = [make.seconds() for _ in range(per_group)]
        nodes.append(
            tuple(Choice(only_on(d, s), d) for d in range(devices) for p, s in enumerate(base))
        )
    arcs = make.arcs()
    last = _last_use(arcs, count)
    size = [rng.randint(1, 5) for _ in range(count)]
    classes = tuple(range(devices * per_group))
    sent: dict[tuple[int, int, int], int] = {}
    for u in range(count):
        for o in classes:
            for i in classes:
                a, b = o // per_group, i // per_group
                s = size[u] * 0.2 * scale
                if o != i:
                    load = (
                        only_on(a, s * 0.3)
                        if a == b
                        else tuple(x + y for x, y in zip(only_on(a, s), only_on(b, s), strict=True))
                    )
                    sent[(u, o, i)] = make.item(load, only_on(b, size[u]), u, last[u])
    for u, v in arcs:
        table = {(o, i): (sent[(u, o, i)],) for o in classes for i in classes if o != i}
        make.edges.append(Edge(u, v, classes, classes, table))
    for v in range(count):
        w = rng.randint(0, 6)
        hold_items = []
        for o in classes:
            d = o // per_group
            hold_items.append(
                (
                    make.item(only_on(d, 0), only_on(d, w), 0, count - 1),
                    make.item(only_on(d, 0), only_on(d, size[v]), v, last[v]),
                )
            )
        make.holds.append(Hold(v, tuple(hold_items)))
    return make.build(nodes, limit, (tuple(range(devices)),))


def shared_holds(problem: Problem, seed: int) -> Problem:
    """Weights that several nodes share, and items that edges and holds trigger together."""
    rng = random.Random(seed)
    items = list(problem.items)
    last = len(problem.nodes) - 1
    holds = list(problem.holds)
    for _ in range(3):
        items.append(Item((0.5, 0.5), (3.0, 3.0), 0, last))
        for node in rng.sample(range(len(holds)), 2):
            entries = [list(entry) for entry in holds[node].items]
            entries[rng.randrange(len(entries))].append(len(items) - 1)
            holds[node] = Hold(node, tuple(map(tuple, entries)))
    for edge in problem.edges[:2]:
        for paid in list(edge.items.values())[:2]:
            node = rng.randrange(len(holds))
            entries = [list(entry) for entry in holds[node].items]
            entries[rng.randrange(len(entries))] += paid
            holds[node] = Hold(node, tuple(map(tuple, entries)))
    return replace(problem, items=tuple(items), holds=tuple(holds), interchangeable=())


def hops(seed: int, count: int = 6) -> Problem:
    """Reshards of two hops: the first is shared by consumers that want different placements."""
    problem = spmd(seed, count, 4, classes=4, limit=16 + 4 * count + seed % 9)
    rng = random.Random(seed)
    items = list(problem.items)
    first: dict[tuple[int, int], int] = {}
    edges = []
    for edge in problem.edges:
        table = {}
        for (out, into), paid in edge.items.items():
            key = (edge.u, out)
            if key not in first:
                seconds = rng.choice((0.0, 0.5, 1.25))
                size = float(rng.randint(0, 3))
                last = problem.items[paid[0]].last
                items.append(Item((seconds,) * 2, (size,) * 2, edge.u, last))
                first[key] = len(items) - 1
            table[out, into] = (first[key], *paid) if out == 0 else paid
        edges.append(replace(edge, items=table))
    return replace(problem, edges=tuple(edges), items=tuple(items))


def uneven(problem: Problem) -> Problem:
    """Device 0 runs at half speed: nothing is interchangeable."""
    nodes = tuple(
        tuple(replace(c, load_s=(2 * c.load_s[0], *c.load_s[1:])) for c in choices)
        for choices in problem.nodes
    )
    return replace(problem, nodes=nodes, interchangeable=())


def dnnp(seed: int, count: int = 9) -> Json:
    """A random file: two accelerators, two CPUs, some nodes coloured, some for CPUs only."""
    rng = random.Random(seed)
    nodes = [
        {
            "id": 10 + v,
            "fpgaLatency": rng.choice((0.0, 1.5, 4.0)),
            "cpuLatency": rng.choice((2.0, 3.0, 40.0)),
            "size": rng.choice((0.0, 3.0, 5.0)),
            "colorClass": rng.choice((None, None, 0, 1, "c")),
            "isBackwardNode": 0,
            "supportedOnFpga": rng.random() < 0.8,
        }
        for v in range(count)
    ]
    cost = [rng.choice((0.0, 0.5, 1.0)) for _ in range(count)]
    edges = [
        {"sourceId": 10 + u, "destId": 10 + v, "cost": cost[u]}
        for v in range(count)
        for u in range(v)
        if rng.random() < 0.3
    ]
    return {"maxFPGAs": 2, "maxCPUs": 2, "maxSizePerFPGA": 16.0, "nodes": nodes, "edges": edges}


def knapsack(count: int) -> Milp:
    """A hard small knapsack: equal weights and values up to a little noise."""
    rng = random.Random(1)
    build = MilpBuilder()
    sizes = [rng.randint(1000, 2000) / 1000 for _ in range(count)]
    columns = [build.column(cost=-size, upper=1.0, integer=True) for size in sizes]
    build.row(zip(columns, sizes, strict=True), -1, sum(sizes) / 2.0007)
    return build.build()
