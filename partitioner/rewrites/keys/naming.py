"""Names and element types of attention in parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from partitioner.rewrites.node_writer import NodeWriter

#: Element types that sums of exponentials are taken in; others are cast to the first.
WIDE = ("float32", "float64")


@dataclass
class KeysWriter(NodeWriter):
    """Numbers the nodes and the constants that stand in the place of one node."""

    written: Iterator[int] = field(default_factory=itertools.count)
    constants: Iterator[int] = field(default_factory=itertools.count)

    def node_name(self, _: str) -> str:
        """The next name of a node."""
        return f"{self.node.name}/keys/{next(self.written)}"

    def constant_name(self, _: str) -> str:
        """The next name of a constant."""
        return f"{self.node.name}/keys/constant{next(self.constants)}"
