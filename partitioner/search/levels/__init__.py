"""Planning by levels: many devices, in time that grows with distinct blocks and mesh axes.

Devices of a stage do equal work (all cuts are even), stages of a size have equal links to the rest
of the cluster, and repeated blocks of the model are planned once. See docs/concepts/levels.md.
"""

from partitioner.search.levels.decode import decisions, groups
from partitioner.search.levels.meshes import Layout, layouts
from partitioner.search.levels.one_mesh import search_whole
from partitioner.search.levels.stage_costs import counted, evaluation
from partitioner.search.levels.stages import Staged, search_levels

__all__ = [
    "Layout",
    "Staged",
    "counted",
    "decisions",
    "evaluation",
    "groups",
    "layouts",
    "search_levels",
    "search_whole",
]
