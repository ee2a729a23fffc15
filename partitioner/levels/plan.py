"""From the stages of a search by levels to a plan, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.compute import sharded_flops_share
from partitioner.cost_model.evaluate import Evaluation
from partitioner.cost_model.memory import HEADROOM_PERCENT, MemoryPeak
from partitioner.ir.layout import DimLayout
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan
from partitioner.ir.rule import Cut
from partitioner.levels.layouts import kinds
from partitioner.levels.search import Staged
from partitioner.levels.stage import COMM, COMPUTE, SENT, WEIGHTS


def groups(staged: Staged, cluster: Cluster) -> tuple[DeviceMesh, ...]:
    """The devices of each stage, in the order of the stages.

    Larger stages take their devices first, so that all of them lie aligned in the cluster.
    """
    free = {index: kind.first for index, kind in enumerate(kinds(cluster))}
    layouts = [option.layout for option in staged.options]
    found: dict[int, DeviceMesh] = {}
    for stage in sorted(range(len(layouts)), key=lambda k: (-layouts[k].mesh.size(), k)):
        layout = layouts[stage]
        first, size = free[layout.kind], layout.mesh.size()
        found[stage] = DeviceMesh(layout.mesh.axes, tuple(range(first, first + size)))
        free[layout.kind] = first + size
    return tuple(found[stage] for stage in range(len(layouts)))


def decisions(
    staged: Staged, meshes: Sequence[DeviceMesh]
) -> tuple[tuple[DeviceMesh, ...], dict[str, NodePlan]]:
    """Groups and decisions of a plan; ops that are kept whole are on their stage's first device."""
    used: dict[DeviceMesh, int] = {}
    plans: dict[str, NodePlan] = {}
    graph, places = staged.folded.whole, staged.folded.places
    for option, mesh, positions in zip(staged.options, meshes, _positions(staged), strict=True):
        real = _realizer(mesh)
        home = DeviceMesh.single(mesh.devices[0])
        for position in positions:
            placed = option.sharded.picks[places[position]]
            on = mesh if placed.mesh.axes or not mesh.axes else home
            cuts = {name: real(layout) for name, layout in placed.layouts.items()}
            plans[graph.nodes[position].name] = NodePlan(used.setdefault(on, len(used)), cuts)
    return tuple(used), plans


def _positions(staged: Staged) -> list[range]:
    """The nodes of each stage."""
    ends = (0, *staged.blocks.ends)
    return [range(ends[stage.start], ends[stage.stop]) for stage in staged.cut.stages]


def _realizer(mesh: DeviceMesh) -> Callable[[DimLayout], Cut]:
    """Cuts of a stand-in at the mesh's real size."""

    @cache
    def real(layout: DimLayout) -> Cut:
        parts = mesh.size(layout.axes)
        rows = [(sum(cuts) // parts,) * parts for cuts in layout.segments]
        return Cut.of(DimLayout.cut(layout.axes, rows), mesh)

    return real


def evaluation(staged: Staged, meshes: Sequence[DeviceMesh], cluster: Cluster) -> Evaluation:
    """The figures of a plan whose stages' devices do alike, by stage.

    The latency is that of stages that run one after the other. Peaks are upper estimates: the
    weights of the stage and the most that all other values take anywhere in the model.
    """
    devices = range(len(cluster))
    compute = dict.fromkeys(devices, 0.0)
    comm = dict.fromkeys(devices, 0.0)
    sent = dict.fromkeys(devices, 0)
    peak = dict.fromkeys(devices, MemoryPeak(0, 0, 0, ""))
    bare = dict(peak)
    for option, mesh, stage in zip(staged.options, meshes, staged.cut.stages, strict=True):
        parts = option.parts[:, stage.start, stage.stop - 1]
        weights, passing = round(float(parts[WEIGHTS])), round(option.sharded.passing_bytes)
        without = passing * 100 // HEADROOM_PERCENT
        for device in mesh.devices:
            compute[device] = float(parts[COMPUTE])
            comm[device] = float(parts[COMM])
            sent[device] = round(float(parts[SENT]))
            peak[device] = MemoryPeak(weights + passing, weights, passing, "")
            bare[device] = MemoryPeak(weights + without, weights, without, "")
    loads: Mapping[int, float] = {d: compute[d] + comm[d] for d in devices}
    picks = [
        option.sharded.picks[staged.folded.places[position]]
        for option, positions in zip(staged.options, _positions(staged), strict=True)
        for position in positions
    ]
    return Evaluation(
        compute_s=compute,
        comm_s=comm,
        latency_s=sum(loads[mesh.devices[0]] for mesh in meshes),
        peak=peak,
        exact_peak=bare,
        limit_bytes={device: cluster.devices[device].memory_bytes for device in devices},
        sent_bytes=sent,
        devices_used=sum(mesh.size() for mesh in meshes),
        sharded_flops_share=sharded_flops_share(picks),
    )
