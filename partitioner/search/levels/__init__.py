"""Planning by levels: many devices, in time that grows with distinct blocks and mesh axes.

Devices of a stage do equal work (all cuts are even), stages of a size have equal links to the rest
of the cluster, and repeated blocks of the model are planned once. See docs/concepts/levels.md.
"""
