"""Random piper files, and every plan of one priced straight from the file."""

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
#: Nodes and their configs, data degree, tensor degree.
Planned = tuple[dict[int, str], int, int]


def piper(seed: int, count: int = 3) -> Json:
    """Nodes on 1 or 2 devices (the first at times on 1 only), plain or slower and smaller."""
    rng = random.Random(seed)
    arcs = [(u, v) for v in range(count) for u in range(v) if rng.random() < 0.5]

    def way(v: int, t: int, name: str, small: bool, base: tuple[int, int, int]) -> Json:
        seconds, flying, weight = base
        saved = rng.choice((2, 3)) if small else 0
        return {
            "id": name,
            "timePerSample": (seconds + 2 * small * rng.choice((1, 1, 2))) / t,
            "parameterSize": weight / t,
            "memoryUsageA": max(0, flying - saved) / t,
            "memoryUsageB": (2 * weight + small) / t,
            "syncTimeFw": {str(7 * u): float(v % 2) for u, w in arcs if w == v},
            "syncTimeBw": {str(7 * w): float(t - 1) for u, w in arcs if u == v},
        }

    nodes = []
    for v in range(count):
        base = rng.randint(1, 6), rng.randint(2, 5), rng.randint(0, 4)
        degrees = (1,) if v == 0 and rng.random() < 0.3 else (1, 2)
        nodes.append(
            {
                "id": 7 * v,
                "TMPCs": {
                    str(t): [way(v, t, n, n == "small", base) for n in ("plain", "small")]
                    for t in degrees
                },
            }
        )
    rng.shuffle(nodes)
    edges = [
        {"sourceId": 7 * u, "destId": 7 * v, "communicationCost": float(rng.randint(0, 3))}
        for u, v in arcs
    ]
    return {
        "maxDevices": rng.randint(2, 5),
        "maxMemoryPerDevice": float(rng.choice((8, 12, 20, 40))),
        "bandwidth": 4.0,
        "mbsInBatch": rng.choice((2, 3, 4)),
        "nodes": nodes,
        "edges": edges,
    }


def price(data: Json, plan: list[Planned]) -> float:
    """Seconds a sample by the authors' definition; infinite if the plan is not allowed."""
    nodes = {node["id"]: node["TMPCs"] for node in data["nodes"]}
    where = {v: k for k, (configs, _, _) in enumerate(plan) for v in configs}
    if any(where[e["sourceId"]] > where[e["destId"]] for e in data["edges"]):
        return math.inf
    if sum(d * t for _, d, t in plan) > data["maxDevices"]:
        return math.inf
    if sum(d for _, d, _ in plan) > data["mbsInBatch"]:
        return math.inf
    return max(_stage_s(data, nodes, plan, k) for k in range(len(plan)))


def _stage_s(data: Json, nodes: Json, plan: list[Planned], k: int) -> float:
    configs, d, t = plan[k]
    batch = data["mbsInBatch"]
    if batch % d or any(str(t) not in nodes[v] for v in configs):
        return math.inf
    ways = {v: next(w for w in nodes[v][str(t)] if w["id"] == configs[v]) for v in configs}
    flying = math.ceil(sum(stage[1] for stage in plan[k:]) / d)
    held = sum(w["memoryUsageA"] * flying + w["memoryUsageB"] for w in ways.values())
    if held > data["maxMemoryPerDevice"]:
        return math.inf
    sent = 0.0
    for edge in data["edges"]:
        u, v = edge["sourceId"], edge["destId"]
        if u in configs and v not in configs:
            sent += 2 * (edge["communicationCost"] + ways[u]["syncTimeBw"][str(v)])
        if v in configs and u not in configs:
            sent += 2 * (edge["communicationCost"] + ways[v]["syncTimeFw"][str(u)])
    renewed = sum(4 * (d - 1) * w["parameterSize"] / d / batch for w in ways.values())
    return (sent / d + renewed) / data["bandwidth"] + sum(
        w["timePerSample"] for w in ways.values()
    ) / d


def all_plans(data: Json) -> Iterator[list[Planned]]:
    """Every split of the nodes into an order of stages, with all degrees and ways."""
    names = [node["id"] for node in data["nodes"]]
    shapes = [(d, t) for d in range(1, data["mbsInBatch"] + 1) for t in (1, 2)]
    for many in range(1, len(names) + 1):
        for homes in itertools.product(range(many), repeat=len(names)):
            if len(set(homes)) < many:
                continue
            for degrees in itertools.product(shapes, repeat=many):
                if sum(d * t for d, t in degrees) > data["maxDevices"]:
                    continue
                for ways in itertools.product(("plain", "small"), repeat=len(names)):
                    by_stage: list[dict[int, str]] = [{} for _ in range(many)]
                    for name, home, way in zip(names, homes, ways, strict=True):
                        by_stage[home][name] = way
                    yield [
                        (configs, *shape) for configs, shape in zip(by_stage, degrees, strict=True)
                    ]
