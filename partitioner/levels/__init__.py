"""Planning by levels: many devices, in time that grows with distinct blocks and mesh axes.

Up to `EXPLICIT` devices every device has its own column in the problem. Beyond that, devices of
a stage do alike (all cuts are even), stages of a size lie alike in the cluster, and repeated
blocks of the model are planned once. See docs/concepts/levels.md.
"""

from partitioner.levels.search import search_levels

__all__ = ["search_levels"]
