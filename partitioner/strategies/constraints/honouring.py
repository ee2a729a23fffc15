"""Pins and strategies of a node: which pin binds it, and which strategy honours a pin."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from partitioner.ir.graph import Node
from partitioner.ir.layout import Sharding
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode
from partitioner.strategies.constraints.values import Pin


def names(pin: Pin, node: Node) -> bool:
    """Test whether a pin of nodes is of this one."""
    return node.op == pin.op or any(fnmatchcase(node.name, pattern) for pattern in pin.nodes)


def concerns(pin: Pin, node: Node) -> bool:
    """Test whether a pin of a tensor binds a node that makes or reads it."""
    if pin.side and (pin.tensor in node.outputs) != (pin.side == "made"):
        return False
    row = row_of(node)
    return pin.side != "read" or row is None or row.in_place is None


def honours(pin: Pin, node: Node, placed: PlacedNode) -> bool:
    """Test whether a strategy of a node is as a pin demands."""
    if pin.devices:
        return not names(pin, node) or set(placed.mesh.devices) == set(pin.devices)
    if not concerns(pin, node):
        return True
    sides = placed.results() if pin.tensor in node.outputs else placed.operands()
    return all(_fits(pin, at.sharding) for value, at in sides if value == pin.tensor)


def why_not(pin: Pin, candidates: Sequence[PlacedNode]) -> str:
    """Why no strategy of a node honours a pin of a tensor that is to be cut; "" if none is."""
    if not (pin.cut or pin.dim is not None) or not any(placed.mesh.axes for placed in candidates):
        return ""
    along = "any dim" if pin.dim is None else f"dim {pin.dim}"
    over = f" over axis {pin.axis!r}" if pin.axis else ""
    return f"it cannot be cut along {along} of {pin.tensor!r}{over}"


def _fits(pin: Pin, sharding: Sharding) -> bool:
    if pin.replicate:
        return pin.axis not in sharding.axes if pin.axis else sharding.is_replicated
    if pin.cut:
        cut = {axis for layout in sharding.dims for axis in layout.axes}
        return pin.axis in cut if pin.axis else bool(cut)
    if pin.dim is None:
        return True
    axes = sharding.dims[pin.dim].axes
    return pin.axis in axes if pin.axis else bool(axes)
