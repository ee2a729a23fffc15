"""Strategies of a node that honour constraints, and what is to blame where none does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Mapping, Sequence
from fnmatch import fnmatchcase

from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import Sharding
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode
from partitioner.strategies.constraints.values import Along, Pin

#: By mesh axis and node, the factors that the node is cut along over the axis, see `Constraints`.
Busy = Mapping[str, Mapping[str, frozenset[str]]]


def kept_of(
    node: Node,
    candidates: Sequence[PlacedNode],
    pins: Sequence[Pin],
    along: Sequence[Along],
    busy: Busy,
) -> tuple[PlacedNode, ...]:
    """The strategies of a node that honour every pin."""
    kept, values = tuple(candidates), {*node.inputs, *node.outputs}
    for pin in pins:
        if not pin.tensor or pin.tensor in values:
            kept = tuple(placed for placed in kept if honours(pin, node, placed))
    for demand in along:
        kept = tuple(placed for placed in kept if demand.honoured(node, placed))
    for axis, nodes in busy.items():
        if node.name in nodes:
            cut = tuple(p for p in kept if _uses(p, axis, nodes[node.name]))
            kept = cut or tuple(p for p in kept if _uses(p, axis, p.layouts)) or kept
    return kept


def blamed(
    node: Node, candidates: Sequence[PlacedNode], pins: Sequence[Pin], along: Sequence[Along]
) -> tuple[str, str]:
    """The first constraint that leaves a node no strategy, and why: alone, or beside another."""
    kept: Sequence[PlacedNode] = candidates
    for number, pin in enumerate(pins):
        kept = [placed for placed in kept if honours(pin, node, placed)]
        if not kept:
            own = [placed for placed in candidates if honours(pin, node, placed)]
            if not own:
                return pin.text, _why_not(pin, candidates)
            beside = (
                f"none honours {other.text} too"
                for other in pins[:number]
                if not any(honours(other, node, placed) for placed in own)
            )
            return pin.text, next(beside, "")
    for demand in along:
        kept = [placed for placed in kept if demand.honoured(node, placed)]
        if not kept:
            return demand.text, ""
    return "its constraints", ""


def demands(
    graph: Graph, pins: Sequence[Pin], along: Sequence[Along], busy: Busy
) -> Mapping[str, Hashable]:
    """What is demanded of each node that constraints bind, equal where the demands are."""
    by_tensor: dict[str, list[Pin]] = defaultdict(list)
    for pin in pins:
        by_tensor[pin.tensor].append(pin)
    found: dict[str, list[Hashable]] = defaultdict(list)
    for node in graph.nodes:
        for index, value in enumerate((*node.inputs, *node.outputs)):
            found[node.name] += (
                (index, pin.dim, pin.axis, pin.replicate, pin.cut)
                for pin in by_tensor.get(value, ())
                if concerns(pin, node)
            )
    for number, demand in enumerate(along):
        for name, factors in demand.factors.items():
            found[name].append((number, factors))
    for axis, nodes in busy.items():
        for name, factors in nodes.items():
            found[name].append((axis, factors))
    return {name: tuple(demands) for name, demands in found.items() if demands}


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


def _why_not(pin: Pin, candidates: Sequence[PlacedNode]) -> str:
    """Why no strategy of a node honours a pin of a tensor that is to be cut; "" if none is."""
    if not (pin.cut or pin.dim is not None) or not any(placed.mesh.axes for placed in candidates):
        return ""
    along = "any dim" if pin.dim is None else f"dim {pin.dim}"
    over = f" over axis {pin.axis!r}" if pin.axis else ""
    return f"it cannot be cut along {along} of {pin.tensor!r}{over}"


def _uses(placed: PlacedNode, axis: str, factors: Container[str]) -> bool:
    """Test whether a node is cut over an axis along one of these factors."""
    return any(axis in at.axes for name, at in placed.layouts.items() if name in factors)


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
