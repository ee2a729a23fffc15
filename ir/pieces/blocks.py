"""Stretches of a graph that run in blocks, one after the other on the same device.

A stretch is a run of nodes in the graph's order. What it hands on is cut into equal parts along
one dim or several, and each block computes one part from what that part needs, halos included. See
ADR 28.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from partitioner.ir.checks import value_of


@dataclass(frozen=True)
class Chunk:
    """A dim that the blocks of a stretch cut."""

    value: str  #: A value that the stretch makes; the dims of all others follow from the rules.
    dim: int  #: The dim of it.
    parts: int  #: Number of parts, at least 2.


@dataclass(frozen=True)
class Stretch:
    """A run of nodes in blocks."""

    first: str  #: Name of its first node.
    last: str  #: Name of its last node, in the order of the graph.
    #: The dims that are cut; blocks are their product. Without any, the stretch is one block, and
    #: only its constants come and go.
    chunks: tuple[Chunk, ...]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return math.prod(chunk.parts for chunk in self.chunks)


@dataclass(frozen=True)
class Blocks:
    """The parts of a model that run in turn."""

    stretches: tuple[Stretch, ...] = ()  #: The stretches, in order; no node is in two.

    def __bool__(self) -> bool:
        """Tell whether anything runs in blocks."""
        return bool(self.stretches)

    def to_data(self) -> list[dict[str, Any]]:
        """The blocks as JSON data."""
        return [
            {"first": s.first, "last": s.last, "chunks": [dict(vars(c)) for c in s.chunks]}
            for s in self.stretches
        ]

    @classmethod
    def from_data(cls, data: Any) -> Blocks:
        """Inverse of `to_data`; KeyError, TypeError or ValueError if a field is malformed."""
        return cls(value_of("blocks", data, tuple[Stretch, ...]))
