"""Joins the collectives that the schedule puts in one bucket (`cost_model.schedule.buckets`).

Their operands are copied into one flat tensor, which is sent as soon as the last of them is there,
but not before the first collective would start; each result is a part of what arrives.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from partitioner.backends.torch.graphs.comms import assemble
from partitioner.backends.torch.graphs.notes import (
    COMM,
    Task,
    join_tasks,
    move_notes,
    note_tasks,
    noted_tasks,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

#: Operators that arrange parts for a collective, and compute nothing.
_ARRANGING = frozenset(
    {
        *("contiguous", aten.reshape.default, aten.slice.Tensor, aten.cat.default, assemble),
        aten._to_copy.default,  # masks travel as bytes
        *(aten.clone.default, aten.view.dtype, aten.view_as_real_copy.default),  # other types
    }
)


@dataclass(frozen=True)
class _Member:
    """A collective of a bucket."""

    sent: fx.Node
    wait: fx.Node
    operand_shape: tuple[int, ...]  #: Shape of the tensor that it sends, as it is carried.
    result_shape: tuple[int, ...]  #: Shape of what it brings, as it is carried.

    @property
    def operand(self) -> fx.Node:
        operand = self.sent.args[0]
        assert isinstance(operand, fx.Node)
        return operand

    @property
    def settings(self) -> tuple[fx.node.Argument, ...]:
        return self.sent.args[1:]


def bucket(graph: fx.Graph) -> None:
    """Join the collectives of a pass that are in one bucket.

    Their nodes carry ``meta["shapes"]``, those of the operand and of the result, and their
    communication. How a rank arranges its parts for a collective does not count: all ranks join the
    same ones.
    """
    buckets: dict[int, list[_Member]] = defaultdict(list)
    for node in graph.nodes:
        if "shapes" not in node.meta:
            continue
        (comm,) = node.meta[COMM]
        if comm.bucket is not None:
            (wait,) = node.users
            buckets[comm.bucket].append(_Member(node, wait, *node.meta["shapes"]))
    tasks: dict[Task, Sequence[Task]] = {}
    for _, members in sorted(buckets.items()):
        together = [task for member in members for task in noted_tasks(member.sent)]
        tasks |= dict.fromkeys(together, together)
        _join(graph, members)
    join_tasks(graph, tasks)


def _join(graph: fx.Graph, members: Sequence[_Member]) -> None:
    """Replace collectives by one, which starts once all operands are there.

    It does not start before the first of them would, as the memory of its result is taken then, and
    is waited for where the first result is due.
    """
    target, settings = members[0].sent.target, members[0].settings
    assert isinstance(target, torch._ops.OpOverload)
    assert all(m.sent.target is target and m.settings == settings for m in members)
    scatters = target is c10d.reduce_scatter_tensor.default
    gathers = target is c10d.all_gather_into_tensor.default
    ranks = settings[-2] if scatters or gathers else 1  # the size of the group
    assert isinstance(ranks, int)
    order = {node: index for index, node in enumerate(graph.nodes)}
    tasks = [task for m in members for task in noted_tasks(m.sent)]
    first = min((member.wait for member in members), key=order.__getitem__)
    last = max((root for m in members for root in _roots(m.sent)), key=order.__getitem__)
    begin = min((member.sent for member in members), key=order.__getitem__)
    behind = last.next
    while behind.op in ("placeholder", "get_attr"):  # before which no call may stand
        behind = behind.next
    with graph.inserting_before(begin if order[last] < order[begin] else behind):
        shape = [ranks, -1] if scatters else [-1]
        parts = [
            graph.call_function(aten.reshape.default, (_copy(graph, m.operand), shape))
            for m in members
        ]
        packed = graph.call_function(aten.cat.default, (parts, 1 if scatters else 0))
        if scatters or gathers:
            packed = graph.call_function(aten.reshape.default, (packed, [-1]))
        sent = graph.call_function(target, (packed, *settings))
        sent.meta[COMM] = tuple(comm for m in members for comm in m.sent.meta.get(COMM, ()))
        shapes = zip(*((m.operand_shape, m.result_shape) for m in members), strict=True)
        sent.meta["shapes"] = tuple((sum(map(math.prod, of_all)),) for of_all in shapes)
    note_tasks((*parts, *packed.all_input_nodes, packed, sent), tasks)
    with graph.inserting_before(first):
        arrived = graph.call_function(c10d.wait_tensor.default, (sent,))
        if gathers:
            arrived = graph.call_function(aten.reshape.default, (arrived, [ranks, -1]))
    note_tasks((arrived, *arrived.all_input_nodes), tasks)
    start = 0
    for member in members:
        end = start + math.prod(member.operand_shape) // (ranks if scatters else 1)
        with graph.inserting_before(member.wait):
            part = graph.call_function(aten.slice.Tensor, (arrived, int(gathers), start, end))
            part = graph.call_function(aten.reshape.default, (part, [*member.result_shape]))
        note_tasks((part, *part.all_input_nodes), tasks)
        start = end
        member.wait.replace_all_uses_with(part)
        move_notes(member.wait, part)
        operand = member.operand
        for node in (member.wait, member.sent):
            graph.erase_node(node)
        _clear(graph, operand)


def _arranges(node: fx.Node) -> bool:
    """Test whether a node was made for a collective alone."""
    return node.target in _ARRANGING and bool(node.meta.get("arranges"))


def _roots(node: fx.Node) -> Iterator[fx.Node]:
    for source in node.all_input_nodes:
        if _arranges(source):
            yield from _roots(source)
        else:
            yield source


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The same arrangement of elements, made where nodes are inserted now."""
    if not _arranges(node):
        return node
    copies = {source: _copy(graph, source) for source in node.all_input_nodes}
    return graph.node_copy(node, copies.__getitem__)


def _clear(graph: fx.Graph, node: fx.Node) -> None:
    if _arranges(node) and not node.users:
        sources = node.all_input_nodes
        graph.erase_node(node)
        for source in sources:
            _clear(graph, source)
