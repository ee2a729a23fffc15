"""The op table: one row an op. Rows are the only place that knows operator names.

A row gives the factor rule of a node (with FLOPs an iteration), and where the node's own
attributes or constant operands depend on shapes, how they become a rank's local ones. An op
without a row is *opaque*: kept whole on one device and reported by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from partitioner.ir.errors import IRError
from partitioner.ir.exchange import Region
from partitioner.ir.graph import Attr, Graph, Node
from partitioner.ir.ops.signature import OpaqueError, Shape, Signature
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType


@dataclass(frozen=True)
class OpView(Signature):
    """A node as its row sees it: attributes, types, and the contents of small constants."""

    node: Node
    graph: Graph

    @cached_property
    def types(self) -> tuple[TensorType | None, ...]:
        """Types of the operands."""
        return tuple(self.graph.types[name] if name else None for name in self.node.inputs)

    @cached_property
    def out_types(self) -> tuple[TensorType | None, ...]:
        """Types of the results."""
        return tuple(self.graph.types[name] if name else None for name in self.node.outputs)

    @property
    def opset(self) -> int:
        """Operator-set version of the node's domain."""
        domain = self.node.op.rpartition("::")[0]
        return self.graph.opsets.get(domain, 1)

    def attr(self, name: str, default: Attr | None = None) -> Attr | None:
        """An attribute."""
        return self.node.attrs.get(name, default)

    def int_attr(self, name: str, default: int) -> int:
        """An integer attribute."""
        value = self.node.attrs.get(name, default)
        if not isinstance(value, int):
            raise OpaqueError(f"attribute {name!r} is {value!r}, not an integer")
        return value

    def positive(self, name: str, default: int) -> int:
        """An integer attribute of at least 1; IRError if it is less."""
        value = self.int_attr(name, default)
        if value < 1:
            raise IRError(f"attribute {name!r} is {value}; it must be at least 1")
        return value

    def dim(self, name: str, default: int, rank: int | None = None) -> int:
        """A dim of operand 0, or of `rank` dims, that an attribute gives; IRError without it."""
        dim, count = self.int_attr(name, default), max(self.rank() if rank is None else rank, 1)
        if not -count <= dim < count:
            raise IRError(f"attribute {name!r} is {dim}, not in {-count}..{count - 1}")
        return dim % count

    def ints(self, name: str, index: int | None = None) -> tuple[int, ...] | None:
        """Integers of an attribute or operand `index`, or None; OpaqueError if it is computed."""
        value = self.node.attrs.get(name)
        if isinstance(value, tuple):
            return tuple(int(v) for v in value)
        if index is None or self.type(index) is None:
            return None
        return tuple(int(v) for v in self.constant(index).reshape(-1))

    def constant(self, index: int) -> np.ndarray:
        """Contents of a constant operand; OpaqueError if computed at run time or too large."""
        array = self.graph.constant(self.node.inputs[index])
        if array is None:
            raise OpaqueError(f"operand {index} ({self.node.inputs[index]!r}) is not a constant")
        return array


@dataclass(frozen=True)
class LocalView:
    """A device's part of a node, from which its row makes the local op."""

    sizes: Mapping[str, int]  #: Local size of every factor.
    shapes: tuple[Shape, ...]  #: Local sizes of the operands (() where absent).
    out_shapes: tuple[Shape, ...]  #: Local sizes of the results (() where absent).
    #: The part of each whole operand that the device has; () unless the row says `where` or the
    #: loop of a sliding window is cut.
    regions: tuple[Region, ...] = ()
    out_regions: tuple[Region, ...] = ()  #: The same of the results.
    #: The devices that send each other iterations inside of the node; () if none do.
    group: tuple[int, ...] = ()
    held: tuple[tuple[Region, ...], ...] = ()  #: The operands' `regions` of each of them.


@dataclass(frozen=True)
class LocalOp:
    """The nodes that one device runs in place of a node."""

    #: In order; the results keep the original names. Names of temporaries start with the original
    #: node's name.
    nodes: tuple[Node, ...]
    #: New small constants by value name.
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    #: Types of temporaries by value name.
    types: Mapping[str, TensorType] = field(default_factory=dict)


Localize = Callable[[OpView, LocalView], LocalOp]


@dataclass(frozen=True)
class OpRow:
    """An op."""

    #: Factor rule of a node; raises OpaqueError for forms that have none.
    rule: Callable[[OpView], Rule]
    #: The local form of a node whose rule is cut; None if the node runs as it is.
    localize: Localize | None = None
    #: The result is the first operand's memory under another shape: no bytes, no kernel.
    view: bool = False
    #: Bytes that the op reads and writes, by local operand and result bytes; None for all. (Gather
    #: reads rows, not the table.)
    moved: Callable[[tuple[int, ...], tuple[int, ...]], int] | None = None
    #: The result is a value that is kept from step to step (a parameter): it is resident, with
    #: `node.attrs["state_bytes"]` more an element, and the node cuts it as it likes.
    stored: bool = False
    #: Operand that is written where it lies, so it is never moved to the node.
    in_place: int | None = None
    #: The result is the first operand with some of its elements written anew.
    overwrites: bool = False
    again: bool = False  #: The result is the first operand itself, under another name.
    where: bool = False  #: `localize` needs the regions of a device's parts, not their sizes alone.
    #: The result is one of the operands, whichever the plan reads, and counts as a value of its
    #: own: the operand is kept for it alone from the last other use on.
    either: bool = False
    ahead: bool = False  #: The op's operands are brought to it while nodes before it run.
    attention: bool = False  #: The op is attention, or a gradient of it, in one kernel.
    #: The sum over the reduced loops is divided by the number of their iterations.
    averages: bool = False
    #: The result has one number throughout, or repeats the operand's elements.
    uniform: bool = False
    #: The first operand is multiplied by the other, or divided by it: a tensor or, as
    #: `node.attrs["other"]`, a number.
    scales: Literal["", "times", "over"] = ""
    #: With a number as `node.attrs["other"]`, the result is the operand, or its negative, plus a
    #: number.
    shifts: bool = False
    #: The method of a running sum by which the operator's own kernel adds its result to the sum as
    #: it computes it; "" if a result is made first and then added.
    adds: str = ""
    #: The attribute that numbers the draws of random numbers of a graph: nodes that differ in it
    #: alone draw others of the same distribution; "" if none are drawn.
    draw: str = ""


class Family(Protocol):
    """A module of rows."""

    ROWS: Mapping[str, OpRow]


def merged(*families: Family) -> Mapping[str, OpRow]:
    """The rows of several families; IRError if an op has two."""
    rows: dict[str, OpRow] = {}
    for family in families:
        for op, row in family.ROWS.items():
            if op in rows:
                raise IRError(f"op {op!r} has two rows")
            rows[op] = row
    return rows
