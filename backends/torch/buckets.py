"""Small collectives of one group in one: what they cost is their latency.

Each small collective has a window, from the step of the program that makes its operand to the one
that reads its result; those that share a point of it go together in one flat tensor, in the order
in which they are made, and leave as soon as the last of them is there. Large ones stay alone: they
are paced by bandwidth, and copying them into one tensor would cost more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from partitioner.backends.torch.faults import COMM
from partitioner.backends.torch.pieces import assemble
from partitioner.backends.torch.values import move_notes

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

#: Collectives of fewer bytes are small.
SMALL_BYTES = 128 << 10
#: So many bytes go together at most.
BUCKET_BYTES = 1 << 20

_REDUCE = str(c10d.all_reduce.default)
_GATHER = str(c10d.all_gather_into_tensor.default)
_SCATTER = str(c10d.reduce_scatter_tensor.default)

#: What arranges a part for a collective, and computes nothing.
_ARRANGING = frozenset(
    {
        *("contiguous", aten.reshape.default, aten.slice.Tensor, aten.cat.default, assemble),
        aten._to_copy.default,  # masks travel as bytes
    }
)

#: What collectives must have in common: the kind, the other arguments, the element type.
Key = tuple[str, tuple[fx.node.Argument, ...], torch.dtype]


@dataclass(frozen=True)
class _Member:
    """A small collective.

    Attributes:
        sent: Its node.
        wait: The node that waits for it.
        ready: Step that makes what is sent.
        due: Step that reads the result.
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
    """Join the small collectives of a pass.

    Their nodes carry ``meta["operand"]``, the operand's type and sizes, and ``meta["ready"]``;
    those that wait for them ``meta["due"]``. Ranks with equal steps join alike: how each arranges
    its parts for a collective does not count.
    """
    found: dict[Key, list[_Member]] = {}
    for node in graph.nodes:
        key = _key(node)
        if key is not None:
            found.setdefault(key, []).append(_member(node))
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
    if "due" not in wait.meta:
        return None
    if math.prod(shape) * dtype.itemsize >= SMALL_BYTES or not math.prod(shape):
        return None
    kind = str(node.target)
    return kind, node.args[1:], dtype


def _member(node: fx.Node) -> _Member:
    (wait,) = node.users
    _, shape = node.meta["operand"]
    return _Member(node, wait, node.meta["ready"], wait.meta["due"], math.prod(shape), shape)


def _arranges(node: fx.Node) -> bool:
    """Whether a node was made for a collective alone."""
    return node.target in _ARRANGING and bool(node.meta.get("arranges"))


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
    """One collective once all operands are there, waited for where the first result is due."""
    kind, others, _ = key
    order = {node: index for index, node in enumerate(graph.nodes)}
    first = min((member.wait for member in members), key=order.__getitem__)
    last = max((root for m in members for root in _roots(m.sent)), key=order.__getitem__)
    with graph.inserting_before(_after(last)):
        parts = [_flat(graph, member, kind, others) for member in members]
        packed = graph.call_function(aten.cat.default, (parts, _side(kind)))
        if kind != _REDUCE:
            packed = graph.call_function(aten.reshape.default, (packed, [-1]))
        target = members[0].sent.target
        assert not isinstance(target, str)
        sent = graph.call_function(target, (packed, *others))
        sent.meta[COMM] = tuple(comm for m in members for comm in m.sent.meta.get(COMM, ()))
    with graph.inserting_before(first):
        arrived = graph.call_function(c10d.wait_tensor.default, (sent,))
        if kind == _GATHER:
            arrived = graph.call_function(aten.reshape.default, (arrived, [others[0], -1]))
    at = 0
    for member in members:
        size = member.numel // _parts(kind, others)
        with graph.inserting_before(member.wait):
            dim = 1 if kind == _GATHER else 0
            part = graph.call_function(aten.slice.Tensor, (arrived, dim, at, at + size))
            shape = list(member.shape) if kind == _REDUCE else [-1]
            part = graph.call_function(aten.reshape.default, (part, shape))
        at += size
        member.wait.replace_all_uses_with(part)
        move_notes(member.wait, part)
        operand = member.sent.args[0]
        for node in (member.wait, member.sent):
            graph.erase_node(node)
        assert isinstance(operand, fx.Node)
        _clear(graph, operand)


def _roots(node: fx.Node) -> Iterator[fx.Node]:
    """What a collective's operand is arranged from."""
    for source in node.all_input_nodes:
        if _arranges(source):
            yield from _roots(source)
        else:
            yield source


def _after(node: fx.Node) -> fx.Node:
    """The node before which one may be put that reads this one."""
    found = node.next
    while found.op in ("placeholder", "get_attr"):
        found = found.next
    return found


def _side(kind: str) -> int:
    """Dim along which packed operands lie side by side."""
    return 1 if kind == _SCATTER else 0


def _parts(kind: str, others: Sequence[fx.node.Argument]) -> int:
    """Into how many parts the operand falls."""
    if kind != _SCATTER:
        return 1
    size = others[1]
    assert isinstance(size, int)
    return size


def _flat(
    graph: fx.Graph, member: _Member, kind: str, others: Sequence[fx.node.Argument]
) -> fx.Node:
    shape: list[int] = [-1]
    if kind == _SCATTER:
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
