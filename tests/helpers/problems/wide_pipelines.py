"""Piper files of graphs in which every node differs: convolutions in branches, cells of a grid."""

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

Json = dict[str, Any]
Arcs = dict[tuple[int, int], float]

#: Operations a second and bytes a second of the devices that the seconds are of.
FLOPS = 5e12
BANDWIDTH = 25e9
#: Part of an operator's time that more devices share; the rest each does alone.
SHARED = 0.9


def convolutional(count: int = 177, seed: int = 0) -> Json:
    """Blocks of 2 to 4 branches of 1 to 3 convolutions, joined, with ever more channels."""
    rng = random.Random(seed)
    flops, saved, weight, arcs = [], [], [], {}
    side, channels = 112, 64

    def add(inputs: list[int], joins: bool) -> int:
        out = channels + rng.randrange(channels)
        size = 4.0 * side * side * out
        kernel = 1 if joins else rng.choice((1, 3, 5))
        node = len(flops)
        weight.append(4.0 * kernel * kernel * channels * out // 8)
        flops.append(6.0 * side * side * kernel * kernel * channels * out / 8)
        saved.append(size + 4.0 * side * side * rng.randrange(channels))
        for source in inputs:
            arcs[source, node] = 4.0 * side * side * rng.randrange(channels // 2, channels)
        return node

    last = add([], joins=False)
    while len(flops) < count:
        ends = [last]
        for _ in range(rng.randint(2, 4)):
            tail = last
            for _ in range(rng.randint(1, 3)):
                if len(flops) < count - 1:
                    tail = add([tail], joins=False)
            ends.append(tail)
        last = add(sorted({*ends}), joins=True)
        if len(flops) * 5 // count > int(math.log2(112 / side)):
            side, channels = max(7, side // 2), channels * 2
    return _file(rng, flops, saved, weight, arcs, microbatches=64, limit_gib=0.375)


def recurrent(layers: int = 6, steps: int = 13, seed: int = 0, limit_gib: float = 0.25) -> Json:
    """A recurrent net unrolled: a cell feeds the next step and the next layer, all of other sizes.

    Weights of a layer are shared by its steps in the model; here each cell has its own.
    """
    rng = random.Random(seed)
    flops, saved, weight, arcs = [], [], [], {}
    for layer in range(layers):
        width = rng.randrange(768, 1280)
        for step in range(steps):
            node = len(flops)
            flops.append(48.0 * 64 * width * width * rng.uniform(0.8, 1.25))
            saved.append(4.0 * 64 * width * rng.randint(9, 15))
            weight.append(32.0 * width * width // steps)
            if layer:
                arcs[node - steps, node] = 4.0 * 64 * rng.randrange(768, 1280)
            if step:
                arcs[node - 1, node] = 4.0 * 64 * 2 * width
    return _file(rng, flops, saved, weight, arcs, microbatches=64, limit_gib=limit_gib)


def _file(
    rng: random.Random,
    flops: list[float],
    saved: list[float],
    weight: list[float],
    arcs: Arcs,
    *,
    microbatches: int,
    limit_gib: float,
) -> Json:
    """Each node on 1 or 2 devices, its activations kept or computed again."""

    def ways(v: int, t: int) -> list[Json]:
        shared = SHARED / t + 1 - SHARED
        again = rng.uniform(1.28, 1.36)
        kept = rng.uniform(0.05, 0.3)
        common = {
            "parameterSize": weight[v] / t,
            "syncTimeFw": {str(u): moved * (t > 1) for (u, w), moved in arcs.items() if w == v},
            "syncTimeBw": {str(w): moved * (t > 1) for (u, w), moved in arcs.items() if u == v},
        }
        plain = {
            "id": "vanilla",
            "timePerSample": flops[v] / FLOPS * shared,
            "memoryUsageA": float(round(saved[v] / t)),
            "memoryUsageB": 4 * weight[v] / t,
        }
        small = {
            "id": "activation recomp",
            "timePerSample": plain["timePerSample"] * again,
            "memoryUsageA": float(round(saved[v] * kept / t)),
            "memoryUsageB": 4 * weight[v] / t + float(round(saved[v] / t)),
        }
        return [plain | common, small | common]

    return {
        "maxDevices": 8,
        "maxMemoryPerDevice": limit_gib * 2.0**30,
        "bandwidth": BANDWIDTH,
        "mbsInBatch": microbatches,
        "nodes": [
            {"id": v, "TMPCs": {str(t): ways(v, t) for t in (1, 2)}} for v in range(len(flops))
        ],
        "edges": [
            {"sourceId": u, "destId": v, "communicationCost": moved}
            for (u, v), moved in arcs.items()
        ],
    }


#: The graphs of the benchmark: name -> file content.
WIDE: Mapping[str, Callable[[], Json]] = {
    "convolutional": convolutional,
    "on 16 devices": lambda: (
        convolutional() | {"maxDevices": 16, "maxMemoryPerDevice": 4 * 2.0**30}
    ),
    "one a stage": lambda: one_device_a_stage(convolutional()),
    "recurrent": recurrent,
    "grid of 12": lambda: recurrent(12, 24, limit_gib=0.625),
}


def one_device_a_stage(data: Json) -> Json:
    """The same graph where no stage takes several devices: one micro-batch on one device."""
    nodes = [{"id": node["id"], "TMPCs": {"1": node["TMPCs"]["1"]}} for node in data["nodes"]]
    return data | {"nodes": nodes, "mbsInBatch": 11}
