"""Reports of any size that keep to the schema, for the page's tests and benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from partitioner.report.schema import (
    VERSION,
    BlockMoveRow,
    BlockRow,
    BoxRow,
    Changes,
    CommRow,
    DeviceRow,
    Diff,
    EdgeRow,
    Figure,
    GroupRow,
    Head,
    Memory,
    Moved,
    NodeRow,
    Point,
    Report,
    Ribbon,
    RunnerUp,
    Sweep,
    TensorRow,
    Timeline,
    Traffic,
)

GIB = 2**30
HIDDEN = 1024
#: Op, name, sources (positions in the layer; -1: the layer's input), FLOPs, cut.
LAYER = (
    ("LayerNormalization", "norm_1", (-1,), 5e6, ""),
    ("MatMul", "attn/q_proj", (0,), 2e9, "n/x"),
    ("MatMul", "attn/k_proj", (0,), 2e9, "n/x"),
    ("MatMul", "attn/v_proj", (0,), 2e9, "n/x"),
    ("MatMul", "attn/scores", (1, 2), 5e8, "h/x"),
    ("Softmax", "attn/softmax", (4,), 2e7, "h/x"),
    ("MatMul", "attn/mix", (5, 3), 5e8, "h/x"),
    ("MatMul", "attn/out_proj", (6,), 2e9, "k/x"),
    ("Add", "residual_1", (7, -1), 1e6, ""),
    ("LayerNormalization", "norm_2", (8,), 5e6, ""),
    ("MatMul", "mlp/up_proj", (9,), 8e9, "n/x"),
    ("Gelu", "mlp/gelu", (10,), 8e6, "n/x"),
    ("MatMul", "mlp/down_proj", (11,), 8e9, "k/x"),
    ("Add", "residual_2", (12, 8), 1e6, ""),
)
REDUCED = (7, 12)  #: Positions whose sums are all-reduced.
FLOPS_PER_S = 50e12


@dataclass
class Made:
    """A report's tables while they are filled."""

    nodes: list[NodeRow] = field(default_factory=list)
    edges: list[EdgeRow] = field(default_factory=list)
    comms: list[CommRow] = field(default_factory=list)
    blocks: list[BlockRow] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)


def report(
    layers: int = 4,
    devices: int = 4,
    requests: tuple[int, ...] = (1, 4),
    names: tuple[str, ...] = (),
    overlapping: bool = False,
) -> Report:
    """Stages of two devices each, or groups that overlap; `names` replace those of nodes."""
    groups = _groups(devices, overlapping)
    made = Made()
    last = _node(made, "Gather", "embed_tokens", [], 0, groups, 1e6, "")
    for layer in range(layers):
        last = _layer(made, layer, layers, last, groups, overlapping)
    last = _node(made, "LayerNormalization", "final_norm", [last], _top(groups), groups, 5e6, "")
    _node(made, "MatMul", "lm_head", [last], _top(groups), groups, 3e10, "n/x")
    for index, name in enumerate(names):
        made.nodes[index]["name"] = name
        made.nodes[index]["outputs"][0]["name"] = name
    timelines = [_timeline(made, groups, devices, count) for count in requests]
    memory = [_memory(made, groups, device, timelines[0]) for device in range(devices)]
    rows = _devices(made, groups, memory)
    step = max(row["compute_s"] + row["comm_s"] for row in rows)
    return {
        "version": VERSION,
        "kind": "plan",
        "title": f"transformer of {layers} layers",
        "head": _head(rows, step, timelines[0]["end_s"]),
        "devices": rows,
        "groups": groups,
        "nodes": made.nodes,
        "edges": made.edges,
        "terminals": [
            {
                "name": "input_ids",
                "kind": "input",
                "shape": [8, 512],
                "dtype": "int64",
                "nodes": [0],
            },
            {
                "name": "logits",
                "kind": "output",
                "shape": [8, 512, 32000],
                "dtype": "float32",
                "nodes": [len(made.nodes) - 1],
            },
        ],
        "comms": made.comms,
        "blocks": made.blocks,
        "moves": _moves(made),
        "ribbon": _ribbon(made, groups, overlapping),
        "tasks": made.tasks,
        "timelines": timelines,
        "memory": memory,
        "traffic": _traffic(made, devices),
        "measured": None,
    }


def _groups(devices: int, overlapping: bool) -> list[GroupRow]:
    pairs = [[first, first + 1] for first in range(0, devices - 1, 2)] or [[0]]
    rows: list[GroupRow] = [
        {"devices": pair, "mesh": f"x={len(pair)} on {','.join(map(str, pair))}"} for pair in pairs
    ]
    if overlapping:
        rows += [{"devices": [device], "mesh": f"on {device}"} for device in range(devices)]
    return rows


def _top(groups: list[GroupRow]) -> int:
    """The group of the last stage."""
    return max(
        index for index, group in enumerate(groups) if len(group["devices"]) > 1 or not index
    )


def _layer(
    made: Made, layer: int, layers: int, before: int, groups: list[GroupRow], overlapping: bool
) -> int:
    stages = _top(groups) + 1
    stage = layer * stages // layers
    first = len(made.nodes)
    for at, (op, name, sources, flops, cut) in enumerate(LAYER):
        inputs = [before if source < 0 else first + source for source in sources]
        group = stage
        if overlapping and not cut:
            group = stages + groups[stage]["devices"][layer % len(groups[stage]["devices"])]
        node = _node(
            made, op, f"/model/layers.{layer}/{name}/{op}", inputs, group, groups, flops, cut
        )
        if at in REDUCED and len(groups[group]["devices"]) > 1:
            _comm(made, "all-reduce", node, node + 1, groups[group]["devices"])
    last = len(made.nodes) - 1
    outer = len(made.blocks)
    made.blocks.append(
        {"label": f"layers.{layer}", "first": first, "last": last, "parent": -1, "kind": 0,
         "nodes": [first, last], "part": "forward",
         "index": layer, "count": layers}
    )  # fmt: skip
    for kind, (label, start, end) in enumerate((("attn", 1, 7), ("mlp", 10, 12)), 1):
        made.blocks.append(
            {"label": f"layers.{layer}/{label}", "first": first + start, "last": first + end,
             "nodes": [first + start, first + end], "part": "forward",
             "parent": outer, "kind": kind, "index": 0, "count": 1}
        )  # fmt: skip
    return last


def _tensor(name: str, local: int, cut: str, constant: bool = False) -> TensorRow:
    return {
        "name": name,
        "dtype": "float32",
        "shape": [HIDDEN, HIDDEN] if constant else [8, 512, HIDDEN],
        "local": [HIDDEN, HIDDEN // local] if constant else [8, 512, HIDDEN // local],
        "sharding": ("-,x" if constant else "-,-,x") if cut else ("-,-" if constant else "-,-,-"),
        "constant": constant,
    }


def _node(
    made: Made,
    op: str,
    name: str,
    inputs: list[int],
    group: int,
    groups: list[GroupRow],
    flops: float,
    cut: str,
) -> int:
    index = len(made.nodes)
    ranks = groups[group]["devices"]
    parts = len(ranks) if cut else 1
    tensors = [_tensor(made.nodes[source]["outputs"][0]["name"], 1, "") for source in inputs]
    if op == "MatMul" and len(inputs) < 2:
        tensors.append(_tensor(f"{name}.weight", parts, cut, constant=True))
    local = flops / parts
    made.nodes.append(
        {
            "name": name,
            "op": op,
            "group": group,
            "stage": None,
            "times": 1,
            "kind": "sharded" if parts > 1 else "replicated" if len(ranks) > 1 else "whole",
            "cut": cut if parts > 1 else "",
            "opaque": "",
            "flops": flops,
            "local_flops": local,
            "bytes": 4.0 * 8 * 512 * HIDDEN * 2,
            "seconds": 2e-6 + local / FLOPS_PER_S,
            "inputs": tensors,
            "outputs": [_tensor(f"{name}_out", parts, cut if parts > 1 else "")],
            "options": 6,
            "runner_up": _runner_up(group, groups, local) if index % 5 else None,
        }
    )
    for source in dict.fromkeys(inputs):
        edge: EdgeRow = {
            "u": source,
            "v": index,
            "value": made.nodes[source]["outputs"][0]["name"],
            "bytes": 4 * 8 * 512 * HIDDEN,
            "comms": [],
        }
        made.edges.append(edge)
        there = groups[made.nodes[source]["group"]]["devices"]
        if there != ranks:
            edge["comms"] = [_comm(made, "send", source, index, sorted({*there, *ranks}))]
        elif made.comms and made.comms[-1]["producer"] == source:
            edge["comms"] = [len(made.comms) - 1]
    made.tasks.append(index)
    return index


def _runner_up(group: int, groups: list[GroupRow], local: float) -> RunnerUp:
    return {
        "group": groups[group]["mesh"],
        "cut": "m/x",
        "step_s": 1e-3 + local / FLOPS_PER_S,
        "step_change_s": local / FLOPS_PER_S,
        "why": "",
        "work_change_s": 2 * local / FLOPS_PER_S,
        "fits": True,
    }


def _comm(made: Made, kind: str, producer: int, consumer: int, ranks: list[int]) -> int:
    made.comms.append(
        {
            "kind": kind,
            "value": f"{made.nodes[producer]['name']}_out",
            "ranks": ranks,
            "times": 1,
            "bytes": 4 * 8 * 512 * HIDDEN,
            "seconds": 3.1e-5,
            "algorithm": "ring" if kind == "all-reduce" else "direct",
            "producer": producer,
            "consumer": consumer,
        }
    )
    made.tasks.append(-len(made.comms))
    return len(made.comms) - 1


def _timeline(made: Made, groups: list[GroupRow], devices: int, requests: int) -> Timeline:
    free = [0.0] * devices
    done: dict[tuple[int, int], float] = {}
    columns: dict[str, list[float]] = {
        name: [] for name in ("device", "kind", "ref", "request", "start_s", "duration_s")
    }
    for request in range(requests):
        reads = _reads(made)
        for ref in made.tasks:
            comm = made.comms[-1 - ref] if ref < 0 else None
            ranks = comm["ranks"] if comm else groups[made.nodes[ref]["group"]]["devices"]
            lasts = comm["seconds"] if comm else made.nodes[ref]["seconds"]
            ready = max((done[request, source] for source in reads[ref]), default=0.0)
            start = max([ready, *(free[rank] for rank in ranks)])
            done[request, ref] = start + lasts
            for rank in ranks:
                free[rank] = start + lasts
                row = (rank, int(ref < 0), ref, request, start, lasts)
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
    return {
        "label": "one request" if requests == 1 else f"a stream of {requests} requests",
        "turn": "request",
        "requests": requests,
        "end_s": max(free),
        "critical": _critical(columns["start_s"], columns["duration_s"]),
        "passes": None,
        "about": None,
        **columns,
    }  # type: ignore[typeddict-item]  # columns of ints and floats


def _ribbon(made: Made, groups: list[GroupRow], overlapping: bool) -> Ribbon:
    """A box a block and a node outside, one after the other; blocks inside blocks are opened."""
    inside = {node for block in made.blocks for node in range(block["first"], block["last"] + 1)}
    outer = [
        (block["first"], block["last"], block["label"], block["parent"]) for block in made.blocks
    ]
    alone = [(at, at, "", -1) for at in range(len(made.nodes)) if at not in inside]
    boxes: list[BoxRow] = []
    for first, last, label, parent in outer + alone:
        nodes = made.nodes[first : last + 1]
        group = groups[nodes[0]["group"]]
        own = group["devices"] if overlapping else [nodes[0]["group"]]
        before = sum(node["seconds"] for node in made.nodes[:first])
        seconds = sum(node["seconds"] for node in nodes)
        boxes.append(
            {"label": label, "ops": nodes[0]["op"], "parent": parent, "lanes": own,
             "part": "forward", "count": 1, "nodes": [first, last], "start_s": before,
             "end_s": before + seconds, "seconds": seconds,
             "cuts": [{"axis": "x", "words": ["columns", "rows"]}]}
        )  # fmt: skip
    lanes = (
        [[device] for device in sorted({at for row in groups for at in row["devices"]})]
        if overlapping
        else [row["devices"] for row in groups]
    )
    return {
        "lanes": [
            {
                "devices": lane,
                "stages": [],
                "mesh": "",
                "runs": f"layers {at}-9, part {at} of lm_head",
            }
            for at, lane in enumerate(lanes)
        ],
        "boxes": boxes,
        "end_s": sum(node["seconds"] for node in made.nodes),
        "training": False,
    }


def _reads(made: Made) -> dict[int, list[int]]:
    """What each task waits for."""
    reads: dict[int, list[int]] = {ref: [] for ref in made.tasks}
    for index, comm in enumerate(made.comms):
        reads[-1 - index].append(comm["producer"])
    for edge in made.edges:
        reads[edge["v"]].append(-1 - edge["comms"][0] if edge["comms"] else edge["u"])
    return reads


def _critical(starts: list[float], durations: list[float]) -> list[int]:
    """Events back from the last, each ending where the next starts."""
    ends: dict[float, int] = {}
    for event, (start, duration) in enumerate(zip(starts, durations, strict=True)):
        ends.setdefault(start + duration, event)
    path = [ends[max(ends)]]
    while starts[path[-1]] in ends:
        path.append(ends[starts[path[-1]]])
    return path[::-1]


def _memory(made: Made, groups: list[GroupRow], device: int, timeline: Timeline) -> Memory:
    starts = dict(zip(reversed(timeline["ref"]), reversed(timeline["start_s"]), strict=True))
    begins = list(accumulate((starts[ref] for ref in made.tasks), max))
    here = [
        index for index, node in enumerate(made.nodes) if device in groups[node["group"]]["devices"]
    ]
    weights = 4 * HIDDEN * HIDDEN * max(1, sum(made.nodes[at]["op"] == "MatMul" for at in here))
    position, activations, buffers = [0], [0], [0]
    for at, ref in enumerate(made.tasks):
        ranks = (
            made.comms[-1 - ref]["ranks"]
            if ref < 0
            else groups[made.nodes[ref]["group"]]["devices"]
        )
        mine = device in ranks
        value = 16 * 2**20 * (1 + ref % 4) if mine and ref >= 0 else 2**20
        if (value, 16 * 2**20 * int(ref < 0 and mine)) != (activations[-1], buffers[-1]):
            position.append(at)
            activations.append(value)
            buffers.append(16 * 2**20 * int(ref < 0 and mine))
    sums = [weights + a + b for a, b in zip(activations, buffers, strict=True)]
    peak = max(sums)
    return {
        "limit_bytes": 4 * peak // 3,
        "weights_bytes": weights,
        "position": position,
        "seconds": [begins[at] for at in position],
        "activations": activations,
        "buffers": buffers,
        "peak_bytes": peak,
        "executor_bytes": 0,
        "peak_position": position[sums.index(peak)],
        "peak_s": begins[position[sums.index(peak)]],
        "live": {
            "name": ["weights of the device", *(made.nodes[at]["name"] for at in here[:40])],
            "kind": ["weights", *("activations" for _ in here[:40])],
            "bytes": [weights, *(2**20 for _ in here[:40])],
            "times": [1] * (1 + len(here[:40])),
            "more": 12,
            "more_bytes": 345678,
        },
    }


def _devices(made: Made, groups: list[GroupRow], memory: list[Memory]) -> list[DeviceRow]:
    return [
        {
            "name": f"accelerator {device}",
            "members": [device],
            "limit_bytes": row["limit_bytes"],
            "compute_s": sum(
                node["seconds"] for node in made.nodes if device in groups[node["group"]]["devices"]
            ),
            "comm_s": sum(comm["seconds"] for comm in made.comms if device in comm["ranks"]),
            "peak_bytes": row["peak_bytes"],
            "weights_bytes": row["weights_bytes"],
            "sent_bytes": sum(comm["bytes"] for comm in made.comms if device in comm["ranks"]),
        }
        for device, row in enumerate(memory)
    ]


def _moves(made: Made) -> list[BlockMoveRow]:
    return [
        {
            "label": block["label"],
            "first": block["first"],
            "last": block["last"],
            "at": "x=2 on 0,1",
            "to": "x=2 on 2,3",
            "change": 1e-6 * (1 + at),
            "fits": True,
            "reason": "sends 4 MiB more, device 2 becomes the bottleneck: it computes 1 ms more",
        }
        for at, block in enumerate(made.blocks[:3])
    ]


def _figure(
    name: str,
    unit: Literal["s", "bytes", "share", "per_s", "count", "times"],
    before: float | None,
    after: float | None,
    better: Literal["less", "more", ""],
) -> Figure:
    return {"name": name, "unit": unit, "before": before, "after": after, "better": better}


def _changes() -> Changes:
    """A comparison in which one figure is better and one worse."""
    row = {"before": "x=2 on 0,1: whole", "after": "x=4 on 0,1,2,3: n/x"}
    return {
        "verdict": "intra (x=4) is slower by 100 % than the plan: 4 ms against 2 ms.",
        "figures": [
            _figure("step", "s", 2e-3, 4e-3, "less"),
            _figure("balance", "share", 0.5, 1.0, "more"),
            {
                "name": "devices used",
                "unit": "count",
                "before": 2,
                "after": 4,
                "better": "",
            },
        ],
        "moved": [
            {
                **row,  # type: ignore[typeddict-item]
                "name": "attn … mlp (14 nodes)",
                "op": "MatMul",
                "seconds_before": 1e-3,
                "seconds_after": 2e-3,
            }
        ],
        "moved_count": 14,
        "same": 3,
        "traffic": [
            {
                "kind": "send",
                "count_before": 4,
                "count_after": 0,
                "bytes_before": 4096,
                "bytes_after": 0,
            }
        ],
    }


def _head(rows: list[DeviceRow], step: float, latency: float) -> Head:
    loads = [row["compute_s"] + row["comm_s"] for row in rows]
    return {
        "cluster": f"{len(rows)} x accelerator",
        "strategy": "auto",
        "objective": "throughput",
        "status": "feasible",
        "solver": "highs and local search",
        "seed": 3,
        "folded": "12 layers as one",
        "searched": "Searched 6 strategies a node over stages of tensor parallelism.",
        "cost": step,
        "bound": 0.97 * step,
        "gap": 0.03,
        "step_s": step,
        "step_s_one": sum(loads) * 0.9,
        "latency_s": latency,
        "latency_s_one": sum(loads) * 0.9,
        "step_measured_s": None,
        "latency_measured_s": None,
        "turn": "request",
        "step": None,
        "speedup": sum(loads) * 0.9 / step,
        "gain": sum(loads) * 0.9 / step,
        "gain_of": "predicted; over one accelerator",
        "communication": sum(row["comm_s"] for row in rows) / sum(loads),
        "balance": sum(loads) / len(loads) / max(loads),
        "headroom": 0.25,
        "devices": len(rows),
        "devices_used": len(rows),
        "limit": "Device 1 is the busiest: matrix products take 71 % of its time, all-reduce 18 %.",
        "instead": "Instead: one accelerator 113/s.",
        "verdict": "3.1 times as fast as one accelerator; limit: arithmetic on device 1",
        "spaces": [
            {
                "space": "inter (2 groups of x=2)",
                "cost": step,
                "devices_used": len(rows),
                "chosen": True,
                "why": "",
                "changes": None,
                "bound": None,
            },
            {
                "space": "intra (x=4)",
                "cost": 2 * step,
                "devices_used": len(rows),
                "chosen": False,
                "why": "device 1 communicates 1.2 ms more",
                "changes": _changes(),
                "bound": None,
            },
            {
                "space": "hybrid (4 x one device)",
                "cost": None,
                "devices_used": None,
                "chosen": False,
                "why": "the time limit was over",
                "changes": None,
                "bound": None,
            },
            {
                "space": "intra (dp=2 tp=2)",
                "cost": None,
                "devices_used": None,
                "chosen": False,
                "why": "none of its plans costs less than 3 ms",
                "changes": None,
                "bound": 2 * step,
            },
        ],
        "trials": [],
        "notes": [
            "Seconds are the cost model's, not measured.",
            "Two ops have no row: kept whole.",
        ],
    }


def _traffic(made: Made, devices: int) -> Traffic:
    sums: dict[tuple[int, int], int] = {}
    for comm in made.comms:
        ring = list(zip(comm["ranks"], comm["ranks"][1:] + comm["ranks"][:1], strict=True))
        for pair in ring:
            sums[pair] = sums.get(pair, 0) + comm["bytes"] // len(ring)
    pairs = sorted(sums)
    total = sum(sums.values())
    return {
        "source": [source for source, _ in pairs],
        "target": [target for _, target in pairs],
        "bytes": [sums[pair] for pair in pairs],
        "links": [
            {
                "level": "NVLink",
                "size": min(devices, 2),
                "bytes": total // max(devices, 1),
                "total_bytes": total,
                "seconds": total / max(devices, 1) / 450e9,
                "bandwidth_bytes_per_s": 450e9,
            },
            {
                "level": "host",
                "size": devices,
                "bytes": 0,
                "total_bytes": 0,
                "seconds": 0.0,
                "bandwidth_bytes_per_s": None,
            },
        ],
    }


def diff() -> Diff:
    """A difference of two plans with every kind of row."""
    one, two = report(layers=2), report(layers=2)
    rows = two["devices"]
    moved: list[Moved] = [
        {
            "name": node["name"],
            "op": node["op"],
            "before": "whole on 0",
            "after": f"{node['cut'] or 'replicated'} on 0,1",
            "seconds_before": 2 * node["seconds"],
            "seconds_after": node["seconds"],
        }
        for node in one["nodes"]
    ]
    return {
        "version": VERSION,
        "kind": "diff",
        "title": "transformer: before and after",
        "before": "old.partition",
        "after": "new.partition",
        "verdict": "new.partition is faster by 33 % than old.partition: 1.4 ms against 2.1 ms.",
        "verdicts": (
            "old.partition: Predicted: runs on one h100: nothing is split.",
            "new.partition: Predicted: 1.5 times as fast as one h100: 714/s against 476/s.",
        ),
        "figures": [
            _figure("step time", "s", 2.1e-3, 1.4e-3, "less"),
            _figure("throughput", "per_s", 476.2, 714.3, "more"),
            _figure("peak memory", "bytes", 3.0 * GIB, 2.5 * GIB, "less"),
            _figure("communication", "share", 0.0, 0.18, "less"),
            _figure("devices used", "count", 1, 4, ""),
            _figure("speed-up", "count", None, 3.1, "more"),
            _figure("ideal throughput", "per_s", 476.2, None, "more"),
        ],
        "moved": moved,
        "only_before": ["/model/dropped"],
        "only_after": ["/model/added_1", "/model/added_2"],
        "same": 7,
        "traffic": [
            {"kind": "all-reduce", "count_before": 0, "count_after": 4, "bytes_before": 0,
             "bytes_after": 64 * 2**20},
            {"kind": "send", "count_before": 3, "count_after": 1, "bytes_before": 48 * 2**20,
             "bytes_after": 16 * 2**20},
        ],
        "devices": [(rows[0], rows[1]), (rows[1], rows[1]), (None, rows[2]), (None, rows[3])],
    }  # fmt: skip


def sweep() -> Sweep:
    """Two clusters and two memory limits over device counts; the small limit has no plan on one."""
    points = [
        _point(devices, cluster, memory)
        for cluster in ("NVLink node", "Ethernet")
        for memory in (None, 4 * GIB)
        for devices in (1, 2, 4, 8)
    ]
    return {
        "version": VERSION,
        "kind": "sweep",
        "title": "transformer: over devices",
        "objective": "throughput",
        "answer": "Worth it up to 4 devices of the NVLink node; over Ethernet one device is best.",
        "points": points,
    }


def _point(devices: int, cluster: str, memory: int | None) -> Point:
    speedup = devices ** (0.85 if cluster == "NVLink node" else 0.4)
    planned = memory is None or devices > 1
    return {
        "devices": devices,
        "cluster": cluster,
        "memory_bytes": memory,
        "strategy": "auto" if planned else "",
        "latency_s": 8e-3 / devices**0.5 if planned else None,
        "throughput_per_s": 125 * speedup if planned else None,
        "step_s": 8e-3 / speedup if planned else None,
        "peak_bytes": 6 * GIB // devices if planned else None,
        "devices_used": devices if planned else None,
        "gap": 0.02 if planned else None,
        "speedup": speedup if planned else None,
        "efficiency": speedup / devices if planned else None,
        "pareto": planned and cluster == "NVLink node",
        "why": "" if planned else "the weights of 6 GiB do not fit one device of 4 GiB",
    }
