"""Proof that a partitioned model computes what the whole model does.

All ranks run in this process over simulated communications and are compared with ONNX Runtime on
the user's own model. If an output differs, both sides run again with growing sets of
intermediate values until the first tensor that differs has a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from partitioner.comparison import Difference, Verification, check_memory, compare
from partitioner.cost_model.cluster import resolve_cluster
from partitioner.cost_model.schedule import schedule
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx import Traced
from partitioner.ir.exchange import Region
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, Plan, resolve
from partitioner.ir.program import Programs
from partitioner.lowering import lower

#: Level of ONNX Runtime's graph optimizations: none, on both sides. Fusions (BatchNormalization
#: into Conv) that a cut between two nodes breaks would change the last bits.
_EXACT = "disable"


def verify_directory(directory: Path, seed: int = 0) -> Verification:
    """Verify the rank files of a saved compilation.

    Raises:
        ResultError: See `partitioner.load`.
        DirectoryError: There are no rank files, they are of another plan, or they hold other
            weights than the model.
    """
    from partitioner.result import load

    return load(directory).verify_written(directory, seed)


def verify(traced: Traced, programs: Programs, directory: Path, seed: int = 0) -> Verification:
    """Compare all ranks with the whole model.

    Args:
        traced: The whole model.
        programs: What the ranks run (for the names of their values).
        directory: The rank files.
        seed: Of the random inputs, which are valid ones (indices within their tables).

    Raises:
        VerificationError: Both sides together would not fit this machine's free memory.
        BackendError: A rank fails.
    """
    from partitioner.backends.onnx.whole import run_whole
    from partitioner.backends.simulator import run_lockstep

    check_memory(traced.graph)
    inputs = random_inputs(traced.graph, seed)
    whole = run_whole(traced.whole, traced.folder, inputs, optimization=_EXACT)
    ranks = run_lockstep(directory, inputs, optimization=_EXACT)
    outputs = tuple(
        compare(name, ranks[ours], whole[name])
        for name, ours in zip(whole, traced.graph.outputs, strict=True)
    )
    if all(output.equal for output in outputs):
        return Verification(len(programs.ranks), seed, outputs)
    first, node = _first_difference(traced.graph, programs, directory, inputs)
    return Verification(len(programs.ranks), seed, outputs, first, node)


def _first_difference(
    graph: Graph, programs: Programs, directory: Path, inputs: Mapping[str, np.ndarray]
) -> tuple[Difference | None, str]:
    """The first tensor, in graph order, that differs from the same graph on one device."""
    from partitioner.backends.onnx.emit import emit_models
    from partitioner.backends.simulator import Simulator

    alone = emit_models(uncut_programs(graph), graph)
    values = [value for node in graph.nodes for value in node.writes if value in programs.homes]
    for batch in _growing(values):
        keep = {
            rank: [
                programs.homes[v].name
                for v in batch
                if rank in programs.homes[v].placement.mesh.devices
            ]
            for rank in range(len(programs.ranks))
        }
        got = Simulator(directory, keep=keep, optimization=_EXACT).run([inputs])[0].values
        want = Simulator(alone, keep={0: batch}, optimization=_EXACT).run([inputs])[0].values[0]
        for value in batch:
            home = programs.homes[value]
            parts = {d: got[d][home.name] for d in home.placement.mesh.devices}
            found = compare(value, join(parts, home.placement), want[value])
            if not found.equal:
                node = graph.producers[value]
                return found, f"{node.name!r} ({node.op})"
    return None, ""


def _growing(values: list[str]) -> Iterator[list[str]]:
    start, size = 0, 16
    while start < len(values):
        yield values[start : start + size]
        start, size = start + size, size * 2


def uncut_programs(graph: Graph) -> Programs:
    """The graph on one rank: every value under its own name, nothing cut or sent."""
    cluster = resolve_cluster(None, 1)
    nodes = {node.name: NodePlan(0) for node in graph.nodes}
    plan = Plan(graph.digest, cluster.to_data(), (DeviceMesh.single(0),), nodes)
    return lower(graph, schedule(graph, resolve(graph, plan), cluster), 1)


def join(parts: Mapping[int, np.ndarray], placement: Placement) -> np.ndarray:
    """The whole tensor from the parts of all devices of its placement."""
    whole: dict[Region, np.ndarray] = {}
    points = dict(placement.mesh.coords())
    axes = [axis for axis, _ in placement.sharding.partial]
    how = placement.sharding.partial[0][1] if axes else ""
    merge = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
    seen: set[tuple[Region, tuple[int, ...]]] = set()
    for device, region in placement.parts():
        term = (region, tuple(points[device][axis] for axis in axes))
        if term in seen:
            continue
        seen.add(term)
        whole[region] = (
            merge[how](whole[region], parts[device]) if region in whole else parts[device]
        )
    first = next(iter(parts.values()))
    out = np.empty(placement.sharding.shape, first.dtype)
    for region, part in whole.items():
        index = [np.concatenate([np.arange(s, s + n) for s, n in cut]) for cut in region]
        out[np.ix_(*index)] = part
    return out
