"""Messages: all that a phase of one rank sends to a phase of another, as one flat tensor.

Each communication between the two phases has a part in it. Parts of one element type lie one after
the other; where types differ, all are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from partitioner.backends.torch.graphs.comms import carried
from partitioner.ir.program import Comm
from partitioner.ir.types import item_bytes

aten = torch.ops.aten


@dataclass(frozen=True)
class MessagePart:
    """The tensors that a communication sends from one rank to another."""

    number: int  #: Number of the communication.
    numel: int  #: Number of elements as they are carried.
    dtype: torch.dtype  #: Their type as they are carried.

    @classmethod
    def of(cls, comm: Comm, source: int, target: int) -> MessagePart:
        """The part of a communication."""
        dtype, width = carried(comm.dtype)
        pair = source, target
        numel = sum(t.numel for t in comm.transfers if (t.source, t.target) == pair)
        return cls(comm.seq, width * numel, dtype)


@dataclass(frozen=True)
class Message:
    """All that a phase of one rank sends to a phase of another."""

    source: int  #: The rank that sends it.
    target: int  #: The rank that receives it.
    phases: tuple[int, int]  #: The phase that sends it, and the one that receives it.
    #: Those of the widest elements first, so that each part lies where its elements may; among them
    #: by number.
    parts: tuple[MessagePart, ...]

    @classmethod
    def of(cls, comms: Iterable[Comm], source: int, target: int) -> Message:
        """The message of communications between two phases."""
        ordered = sorted(comms, key=lambda comm: (-item_bytes(comm.dtype), comm.seq))
        parts = tuple(MessagePart.of(comm, source, target) for comm in ordered)
        return cls(source, target, (ordered[0].phase, ordered[0].target_phase), parts)

    @property
    def name(self) -> str:
        """Name the message among the arguments and results of graphs."""
        phase, target_phase = self.phases
        return message_name(phase, self.source, target_phase, self.target)

    @property
    def dtype(self) -> torch.dtype:
        """Type of its elements."""
        dtypes = {part.dtype for part in self.parts}
        return dtypes.pop() if len(dtypes) == 1 else torch.uint8

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of its elements that each part takes."""
        width = self.dtype.itemsize
        return tuple(part.numel * part.dtype.itemsize // width for part in self.parts)

    @property
    def padding(self) -> int:
        """Number of its last elements, which fill a memory of whole elements of every type."""
        widest = max(part.dtype.itemsize for part in self.parts)
        return -sum(self.sizes) % max(1, widest // self.dtype.itemsize)

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return sum(self.sizes) + self.padding

    def packed(self, graph: fx.Graph, parts: Mapping[int, fx.Node]) -> fx.Node:
        """Add the nodes that make the message, in the graph that sends it; `parts` are flat."""
        if len(self.parts) == 1:
            return parts[self.parts[0].number]
        flat = []
        for part in self.parts:
            node = parts[part.number]
            if part.dtype != self.dtype:
                # a view of bytes needs a stride of one, which one element alone need not have
                dense: dict[str, fx.node.Argument] = {"memory_format": torch.contiguous_format}
                node = graph.call_function(aten.clone.default, (node,), dense)
                node = graph.call_function(aten.view.dtype, (node, self.dtype))
            flat.append(node)
        if self.padding:
            flat.append(graph.call_function(aten.new_zeros.default, (flat[0], (self.padding,))))
        return graph.call_function(aten.cat.default, (flat,))

    def unpacked(self, graph: fx.Graph, message: fx.Node) -> dict[int, fx.Node]:
        """Add the nodes that take the message apart; returns each part by number, flat."""
        if len(self.parts) == 1:
            return {self.parts[0].number: message}
        parts, start = {}, 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            where = message, 0, start, start + size
            node = graph.call_function(aten.slice.Tensor, where)
            if part.dtype != self.dtype:
                node = graph.call_function(aten.view.dtype, (node, part.dtype))
            parts[part.number] = node
            start += size
        return parts


def message_name(phase: int, source: int, target_phase: int, target: int) -> str:
    """The name of the message from a phase of one rank to a phase of another."""
    return f"message of {phase} on {source} for {target_phase} on {target}"
