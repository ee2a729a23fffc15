"""Small collectives of one group in one: what they cost is their latency.

Each small collective has a window, from where its operand is ready to where its result is waited
for; those that share a point of it go together in one flat tensor. Large ones stay alone: they are
paced by bandwidth, and copying them into one tensor would cost more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from partitioner.backends.torch.faults import COMM

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

#: Collectives of fewer bytes are small.
SMALL_BYTES = 128 << 10
#: So many bytes go together at most.
BUCKET_BYTES = 1 << 20

_REDUCES = (c10d.all_reduce.default, c10d.all_reduce_.default)
_GATHER = c10d.all_gather_into_tensor.default
_SCATTER = c10d.reduce_scatter_tensor.default

#: Operators that move elements and compute nothing.
_ARRANGING = frozenset(
    {"contiguous", aten.reshape.default, aten.slice.Tensor, aten.cat.default, aten.t.default}
)

#: What collectives must have in common: the kind, the other arguments, the element type.
Key = tuple[str, tuple[fx.node.Argument, ...], torch.dtype]


@dataclass(frozen=True)
class _Member:
    """A small collective.

    Attributes:
        sent: Its node.
        wait: The node that waits for it.
        ready: Position from which its operand can be had: what only arranges elements for the
            collective can move.
        due: Position of the wait.
        numel: Elements of the operand.
        shape: Sizes of the operand.
    """

    sent: fx.Node
    wait: fx.Node
    ready: int
    due: int
    numel: int
    shape: tuple[int, ...]


def bucket(graph: fx.Graph) -> None:
    """Join the small collectives of a pass; their nodes carry ``meta["operand"]``: type, sizes."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    found: dict[Key, list[_Member]] = {}
    for node in graph.nodes:
        key = _key(node)
        if key is not None:
            found.setdefault(key, []).append(_member(node, order))
    for key, members in found.items():
        for joined in _buckets(members, key[2]):
            if len(joined) > 1:
                _join(graph, key, joined)


def _key(node: fx.Node) -> Key | None:
    operand = node.meta.get("operand")
    if operand is None or len(node.users) != 1:
        return None
    (wait,) = node.users
    dtype, shape = operand
    if wait.target is not c10d.wait_tensor.default:
        return None
    if math.prod(shape) * dtype.itemsize >= SMALL_BYTES or not math.prod(shape):
        return None
    kind = "reduce" if node.target in _REDUCES else str(node.target)
    return kind, node.args[1:], dtype


def _member(node: fx.Node, order: Mapping[fx.Node, int]) -> _Member:
    (wait,) = node.users
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    _, shape = node.meta["operand"]
    return _Member(node, wait, _ready(operand, order), order[wait], math.prod(shape), shape)


def _arranges(node: fx.Node) -> bool:
    """Whether a node only moves elements."""
    return node.target in _ARRANGING


def _ready(node: fx.Node, order: Mapping[fx.Node, int]) -> int:
    if not _arranges(node):
        return order[node]
    return max(_ready(source, order) for source in node.all_input_nodes)


def _buckets(members: Sequence[_Member], dtype: torch.dtype) -> list[list[_Member]]:
    """As few points as possible that lie in every window; each takes what it can."""
    left = sorted(members, key=lambda m: (m.due, m.ready))
    found = []
    while left:
        point = left[0].due
        taken: list[_Member] = []
        size = 0
        for member in left:
            nbytes = member.numel * dtype.itemsize
            if member.ready < point and size + nbytes <= BUCKET_BYTES:
                taken.append(member)
                size += nbytes
        found.append(taken)
        left = [member for member in left if member not in taken]
    return found


def _join(graph: fx.Graph, key: Key, members: Sequence[_Member]) -> None:
    """One collective right before the first result is waited for."""
    kind, others, _ = key
    first = min(members, key=lambda m: m.due).wait
    with graph.inserting_before(first):
        parts = [_flat(graph, member, kind, others) for member in members]
        packed = graph.call_function(aten.cat.default, (parts, _side(kind)))
        if kind != "reduce":
            packed = graph.call_function(aten.reshape.default, (packed, [-1]))
        target = c10d.all_reduce_.default if kind == "reduce" else members[0].sent.target
        assert not isinstance(target, str)
        sent = graph.call_function(target, (packed, *others))
        sent.meta[COMM] = tuple(comm for m in members for comm in m.sent.meta.get(COMM, ()))
        arrived = graph.call_function(c10d.wait_tensor.default, (sent,))
        if kind == str(_GATHER):
            arrived = graph.call_function(aten.reshape.default, (arrived, [others[0], -1]))
    at = 0
    for member in members:
        size = member.numel // _parts(kind, others)
        with graph.inserting_before(member.wait):
            dim = 1 if kind == str(_GATHER) else 0
            part = graph.call_function(aten.slice.Tensor, (arrived, dim, at, at + size))
            shape = list(member.shape) if kind == "reduce" else [-1]
            part = graph.call_function(aten.reshape.default, (part, shape))
        at += size
        member.wait.replace_all_uses_with(part)
        operand = member.sent.args[0]
        for node in (member.wait, member.sent):
            graph.erase_node(node)
        assert isinstance(operand, fx.Node)
        _clear(graph, operand)


def _side(kind: str) -> int:
    """Dim along which packed operands lie side by side."""
    return 1 if kind == str(_SCATTER) else 0


def _parts(kind: str, others: Sequence[fx.node.Argument]) -> int:
    """Into how many parts the operand falls."""
    if kind != str(_SCATTER):
        return 1
    size = others[1]
    assert isinstance(size, int)
    return size


def _flat(
    graph: fx.Graph, member: _Member, kind: str, others: Sequence[fx.node.Argument]
) -> fx.Node:
    shape: list[int] = [-1]
    if kind == str(_SCATTER):
        shape = [_parts(kind, others), -1]
    operand = member.sent.args[0]
    assert isinstance(operand, fx.Node)
    return graph.call_function(aten.reshape.default, (_again(graph, operand), shape))


def _again(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The same arrangement of elements, made where the graph is written now."""
    if not _arranges(node):
        return node
    made = {source: _again(graph, source) for source in node.all_input_nodes}
    return graph.node_copy(node, made.__getitem__)


def _clear(graph: fx.Graph, node: fx.Node) -> None:
    """Remove an arrangement that nothing reads any more."""
    if _arranges(node) and not node.users:
        sources = node.all_input_nodes
        graph.erase_node(node)
        for source in sources:
            _clear(graph, source)
