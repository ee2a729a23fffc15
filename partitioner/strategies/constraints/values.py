"""Constraints as data: pins, named dims, and what these demand of the operators of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Node
from partitioner.ir.layout import Sharding
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode


class ConstraintError(PartitionerError, ValueError):
    """A constraint file that is malformed, or that names a part that the model does not have.

    `position` is that of the node that is left without a strategy; -1 in other errors.
    """

    def __init__(self, message: str, position: int = -1) -> None:
        super().__init__(message)
        self.position = position


@dataclass(frozen=True)
class Pin:
    """A constraint: its nodes or its tensor, and the demand on them; unset fields demand nothing.

    `side` is "made" if it binds only the producer of the tensor, "read" if only its readers (not
    as in-place operands), "" for both.
    """

    text: str  #: For errors.
    nodes: tuple[str, ...] = ()  #: Patterns of node names.
    op: str = ""  #: Op of nodes.
    devices: tuple[int, ...] = ()  #: Devices that the nodes run on; () for any.
    tensor: str = ""
    dim: int | None = None  #: Dim that the tensor is cut on.
    axis: str = ""  #: Mesh axis of `dim`, `replicate` or `cut`; "" for any.
    replicate: bool = False  #: The tensor is not cut.
    cut: bool = False  #: The tensor is cut on some dim.
    side: str = ""

    def names(self, node: Node) -> bool:
        """Test whether it is a pin of nodes, and of this one."""
        return node.op == self.op or any(fnmatchcase(node.name, name) for name in self.nodes)

    def concerns(self, node: Node) -> bool:
        """Test whether it binds a node as one that makes or reads its tensor."""
        if self.side and (self.tensor in node.outputs) != (self.side == "made"):
            return False
        row = row_of(node)
        return self.side != "read" or row is None or row.in_place is None

    def honoured(self, node: Node, placed: PlacedNode) -> bool:
        """Test whether a strategy of a node is as demanded."""
        if self.devices:
            return not self.names(node) or set(placed.mesh.devices) == set(self.devices)
        if not self.concerns(node):
            return True
        sides = placed.results() if self.tensor in node.outputs else placed.operands()
        return all(self._fits(at.sharding) for value, at in sides if value == self.tensor)

    def why_not(self, candidates: Sequence[PlacedNode]) -> str:
        """Why no strategy of a node honours a pin that cuts its tensor; "" if it cuts none."""
        is_cut = self.cut or self.dim is not None
        if not is_cut or not any(placed.mesh.axes for placed in candidates):
            return ""
        along = "any dim" if self.dim is None else f"dim {self.dim}"
        over = f" over axis {self.axis!r}" if self.axis else ""
        return f"it cannot be cut along {along} of {self.tensor!r}{over}"

    def _fits(self, sharding: Sharding) -> bool:
        if self.replicate:
            return self.axis not in sharding.axes if self.axis else sharding.is_replicated
        if self.cut:
            cut = {axis for layout in sharding.dims for axis in layout.axes}
            return self.axis in cut if self.axis else bool(cut)
        if self.dim is None:
            return True
        axes = sharding.dims[self.dim].axes
        return self.axis in axes if self.axis else bool(axes)


@dataclass(frozen=True)
class NamedDims:
    """Dims by name, and the mesh axes that they lie over."""

    #: By name, its dims as "PATTERN.DIM"; the pattern is of tensors, nodes, modules or operators,
    #: and the dim may be negative.
    dims: Mapping[str, tuple[str, ...]]
    #: By name, the mesh axes that the dim is cut over; none if it is not cut.
    layout: Mapping[str, tuple[str, ...]]
    source: str = ""  #: The file, for errors.

    @property
    def where(self) -> str:
        """The beginning of a message: where the names were given."""
        return f"{self.source}: " if self.source else ""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the layout."""
        return tuple(dict.fromkeys(axis for axes in self.layout.values() for axis in axes))


@dataclass(frozen=True)
class Along:
    """A demand on operators: those with a loop that is a named dim are cut along it."""

    text: str  #: For errors.
    name: str  #: The name of the dim.
    axes: tuple[str, ...]  #: The mesh axes; without any, the loop is not cut.
    factors: Mapping[str, frozenset[str]]  #: By node, the factors that stand for the dim.
    #: Operators, for people, that read values with the dim and cannot be cut along it.
    ends: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """Say how many operators it binds, and the first of those at which the dim ends."""
        count = len(self.factors)
        bound = f"{count} operator{' is' if count == 1 else 's are'}"
        if not self.axes:
            return f"{self.text}: {bound} not cut along it"
        more = f" and {len(self.ends) - 3} more" if len(self.ends) > 3 else ""
        end = f"; it ends at {', '.join(self.ends[:3])}{more}" if self.ends else ""
        return f"{self.text}: {bound} cut along it{end}"

    def honoured(self, node: Node, placed: PlacedNode) -> bool:
        """Test whether a strategy of a node is as demanded."""
        layouts = (placed.layouts.get(name) for name in self.factors.get(node.name, ()))
        return all(
            set(self.axes) <= set(at.axes if at else ()) if self.axes else not (at and at.axes)
            for at in layouts
        )
