"""Joins small collectives of one group: their cost is latency.

Each small collective has a window, from the step of the program that makes its operand to the one
that reads its result; those whose windows share a point go together in one flat tensor, in the
order in which they are made, and start as soon as the last operand is there or the tensor is full,
but not before the first of them would, so that they travel while the pass goes on. Large ones stay
alone: bandwidth sets their pace, and copying them into one tensor would cost more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from partitioner.backends.torch.faults import COMM
from partitioner.backends.torch.pieces import assemble
from partitioner.backends.torch.values import Task, join_tasks, move_notes, note_tasks, noted_tasks
from partitioner.ir.program import BUCKET_BYTES, SMALL_BYTES

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

#: Operators that arrange parts for a collective, and compute nothing.
_ARRANGING = frozenset(
    {
        *("contiguous", aten.reshape.default, aten.slice.Tensor, aten.cat.default, assemble),
        aten._to_copy.default,  # masks travel as bytes
    }
)


@dataclass(frozen=True)
class _Kind:
    """Properties that collectives have in common if they can be joined.

    Attributes:
        settings: Its arguments after the operand.
    """

    target: torch._ops.OpOverload
    settings: tuple[fx.node.Argument, ...]
    dtype: torch.dtype

    @property
    def reduces(self) -> bool:
        return self.target is c10d.all_reduce.default

    @property
    def gathers(self) -> bool:
        return self.target is c10d.all_gather_into_tensor.default

    @property
    def ranks(self) -> int:
        """Size of the group of a gather or a scatter."""
        size = self.settings[-2]
        assert isinstance(size, int)
        return size

    @property
    def scatters(self) -> bool:
        return self.target is c10d.reduce_scatter_tensor.default


@dataclass(frozen=True)
class _Member:
    """A small collective.

    Attributes:
        ready: Step that makes its operand.
        due: Step that reads its result.
        shape: Sizes of the operand.
    """

    sent: fx.Node
    wait: fx.Node
    ready: int
    due: int
    shape: tuple[int, ...]

    @property
    def operand(self) -> fx.Node:
        operand = self.sent.args[0]
        assert isinstance(operand, fx.Node)
        return operand


def bucket(graph: fx.Graph) -> None:
    """Join the small collectives of a pass.

    Their nodes carry ``meta["operand"]``, the operand's type and sizes, and ``meta["ready"]``;
    those that wait for them ``meta["due"]``. Ranks with equal steps join the same collectives: how
    each arranges its parts for a collective does not count.
    """
    by_kind: dict[_Kind, list[_Member]] = {}
    for node in graph.nodes:
        kind = _kind_if_small(node)
        if kind is not None:
            (wait,) = node.users
            shape = node.meta["operand"][1]
            member = _Member(node, wait, node.meta["ready"], wait.meta["due"], shape)
            by_kind.setdefault(kind, []).append(member)
    tasks: dict[Task, Sequence[Task]] = {}
    for kind, members in by_kind.items():
        for joined in _buckets(members, kind.dtype):
            if len(joined) > 1:
                together = [task for member in joined for task in noted_tasks(member.sent)]
                tasks |= dict.fromkeys(together, together)
                _join(graph, kind, joined)
    join_tasks(graph, tasks)


def _kind_if_small(node: fx.Node) -> _Kind | None:
    """The kind of a small collective that can be joined; None for any other node."""
    if "operand" not in node.meta or len(node.users) != 1:
        return None
    (wait,) = node.users
    dtype, shape = node.meta["operand"]
    if "due" not in wait.meta or not 0 < math.prod(shape) * dtype.itemsize < SMALL_BYTES:
        return None
    assert isinstance(node.target, torch._ops.OpOverload)
    return _Kind(node.target, node.args[1:], dtype)


def _buckets(members: Sequence[_Member], dtype: torch.dtype) -> list[list[_Member]]:
    """As few points as possible that lie in every window; each takes as many members as fit."""
    left = sorted(members, key=lambda m: (m.due, m.ready))
    buckets = []
    while left:
        point = left[0].due
        taken: list[_Member] = []
        size = 0
        for member in left:
            nbytes = math.prod(member.shape) * dtype.itemsize
            if member.ready < point and size + nbytes <= BUCKET_BYTES:
                taken.append(member)
                size += nbytes
        buckets.append(taken)
        left = [member for member in left if member not in taken]
    return buckets


def _join(graph: fx.Graph, kind: _Kind, members: Sequence[_Member]) -> None:
    """Replace collectives by one, which starts once all operands are there.

    It does not start before the first of them would, as the memory of its result is taken then, and
    is waited for where the first result is due.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    tasks = [task for m in members for task in noted_tasks(m.sent)]
    first = min((member.wait for member in members), key=order.__getitem__)
    last = max((root for m in members for root in _roots(m.sent)), key=order.__getitem__)
    begin = min((member.sent for member in members), key=order.__getitem__)
    with graph.inserting_before(begin if order[last] < order[begin] else _after(last)):
        shape = [kind.ranks, -1] if kind.scatters else [-1]
        parts = [
            graph.call_function(aten.reshape.default, (_copy(graph, m.operand), shape))
            for m in members
        ]
        packed = graph.call_function(aten.cat.default, (parts, 1 if kind.scatters else 0))
        if not kind.reduces:
            packed = graph.call_function(aten.reshape.default, (packed, [-1]))
        sent = graph.call_function(kind.target, (packed, *kind.settings))
        sent.meta[COMM] = tuple(comm for m in members for comm in m.sent.meta.get(COMM, ()))
    note_tasks((*parts, *packed.all_input_nodes, packed, sent), tasks)
    with graph.inserting_before(first):
        arrived = graph.call_function(c10d.wait_tensor.default, (sent,))
        if kind.gathers:
            arrived = graph.call_function(aten.reshape.default, (arrived, [kind.ranks, -1]))
    note_tasks((arrived, *arrived.all_input_nodes), tasks)
    start = 0
    for member in members:
        end = start + math.prod(member.shape) // (kind.ranks if kind.scatters else 1)
        dim = 1 if kind.gathers else 0
        with graph.inserting_before(member.wait):
            part = graph.call_function(aten.slice.Tensor, (arrived, dim, start, end))
            shape = list(member.shape) if kind.reduces else [-1]
            part = graph.call_function(aten.reshape.default, (part, shape))
        note_tasks((part, *part.all_input_nodes), tasks)
        start = end
        member.wait.replace_all_uses_with(part)
        move_notes(member.wait, part)
        operand = member.operand
        for node in (member.wait, member.sent):
            graph.erase_node(node)
        _clear(graph, operand)


def _arranges(node: fx.Node) -> bool:
    """Whether a node was made for a collective alone."""
    return node.target in _ARRANGING and bool(node.meta.get("arranges"))


def _roots(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that a collective's operand is arranged from."""
    for source in node.all_input_nodes:
        if _arranges(source):
            yield from _roots(source)
        else:
            yield source


def _after(node: fx.Node) -> fx.Node:
    """The first node behind this one before which calls may stand."""
    behind = node.next
    while behind.op in ("placeholder", "get_attr"):
        behind = behind.next
    return behind


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The same arrangement of elements, made where nodes are inserted now."""
    if not _arranges(node):
        return node
    copies = {source: _copy(graph, source) for source in node.all_input_nodes}
    return graph.node_copy(node, copies.__getitem__)


def _clear(graph: fx.Graph, node: fx.Node) -> None:
    """Remove an arrangement that nothing reads any more."""
    if _arranges(node) and not node.users:
        sources = node.all_input_nodes
        graph.erase_node(node)
        for source in sources:
            _clear(graph, source)
