"""From the stages of a search by levels to a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from partitioner.cost_model.cluster import Cluster
from partitioner.ir.layout import DimLayout
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan
from partitioner.ir.rule import Cut
from partitioner.search.levels.meshes import kinds
from partitioner.search.levels.stages import Staged


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
    """Groups and decisions of a plan; none for nodes that are left out.

    Ops that are kept whole are on their stage's first device.
    """
    used: dict[DeviceMesh, int] = {}
    plans: dict[str, NodePlan] = {}
    graph, places = staged.folded.whole, staged.folded.places
    for option, mesh, span in zip(staged.options, meshes, spans(staged), strict=True):
        real = _realizer(mesh)
        home = DeviceMesh.single(mesh.devices[0])
        for position in span:
            placed = option.sharded.picks[places[position]]
            if placed.absent:
                continue
            on = mesh if placed.mesh.axes or not mesh.axes else home
            cuts = {name: real(layout) for name, layout in placed.layouts.items()}
            plans[graph.nodes[position].name] = NodePlan(used.setdefault(on, len(used)), cuts)
    return tuple(used), plans


def spans(staged: Staged) -> list[range]:
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
