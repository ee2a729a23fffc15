"""The plan of the stages that a search by levels chose."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.ir.layout import DimLayout
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan
from partitioner.ir.rule import Cut
from partitioner.search.levels.meshes import device_pools
from partitioner.search.levels.stages import Staged


def groups(staged: Staged, cluster: Cluster) -> tuple[DeviceMesh, ...]:
    """The devices of each stage, in the order of the stages.

    Larger stages take their devices first, so that all of them lie aligned in the cluster.
    """
    free = {index: pool.first for index, pool in enumerate(device_pools(cluster))}
    layouts = [option.layout for option in staged.options]
    meshes: dict[int, DeviceMesh] = {}
    for stage in sorted(range(len(layouts)), key=lambda k: (-layouts[k].mesh.size(), k)):
        layout = layouts[stage]
        first, size = free[layout.pool], layout.mesh.size()
        meshes[stage] = DeviceMesh(layout.mesh.axes, tuple(range(first, first + size)))
        free[layout.pool] = first + size
    return tuple(meshes[stage] for stage in range(len(layouts)))


def decisions(
    staged: Staged, meshes: Sequence[DeviceMesh]
) -> tuple[tuple[DeviceMesh, ...], dict[str, NodePlan]]:
    """Groups and decisions of a plan; none for nodes that are left out.

    Ops that are kept whole are on their stage's first device.
    """
    indices: dict[DeviceMesh, int] = {}
    plans: dict[str, NodePlan] = {}
    graph, places = staged.folded.whole, staged.folded.places
    for option, mesh, span in zip(staged.options, meshes, spans(staged), strict=True):
        home = DeviceMesh.single(mesh.devices[0])
        for position in span:
            placed = option.sharded.picks[places[position]]
            if placed.absent:
                continue
            group = mesh if placed.mesh.axes or not mesh.axes else home
            cuts = {name: _real(layout, mesh) for name, layout in placed.layouts.items()}
            index = indices.setdefault(group, len(indices))
            plans[graph.nodes[position].name] = NodePlan(index, cuts)
    return tuple(indices), plans


def spans(staged: Staged) -> list[range]:
    """Positions of the nodes of each stage."""
    ends = (0, *staged.block_ends)
    return [range(ends[stage.start], ends[stage.stop]) for stage in staged.cut.stages]


@lru_cache(maxsize=65536)
def _real(layout: DimLayout, mesh: DeviceMesh) -> Cut:
    """A cut of a stand-in at the mesh's real size."""
    parts = mesh.size(layout.axes)
    rows = [(sum(cuts) // parts,) * parts for cuts in layout.segments]
    return Cut.of(DimLayout.cut(layout.axes, rows), mesh)
