"""Planning by levels: many devices, in time that grows with distinct blocks and mesh axes.

Devices of a stage do alike (all cuts are even), stages of a size lie alike in the cluster, and
repeated blocks of the model are planned once. See docs/concepts/levels.md.
"""

from partitioner.levels.figures import cheapest, evaluation
from partitioner.levels.layouts import Layout, layouts
from partitioner.levels.plan import decisions, groups
from partitioner.levels.search import Staged, search_levels
from partitioner.levels.whole import search_whole

__all__ = [
    "Layout",
    "Staged",
    "cheapest",
    "decisions",
    "evaluation",
    "groups",
    "layouts",
    "search_levels",
    "search_whole",
]
