"""Communications of rank programs as functional collectives in graphs, and as messages between.

A collective is started where the program has the communication, and waited for where its result is
first read: the computation between the two overlaps with it. Collectives run in the group of the
ranks that take part, whose name lists them (`group_name`).

All that a phase of one rank sends to a phase of another is one message, one flat tensor, in which
each communication between the two has a part. Parts of one element type lie one after the other;
where types differ, all are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from partitioner.backends.regions import boxes, is_whole, region_shape
from partitioner.backends.tensors import torch_dtype
from partitioner.backends.torch.operators.registry import group_name
from partitioner.ir.exchange import Region, Transfer
from partitioner.ir.program import Comm, CommKind
from partitioner.ir.types import item_bytes

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

#: Adds the nodes that wait for a result, and returns the result's node.
Arrival = Callable[[], fx.Node]
Shape = tuple[int, ...]

#: The operators that start a communication.
COLLECTIVES = frozenset(
    {
        c10d.all_reduce.default,
        c10d.all_gather_into_tensor.default,
        c10d.reduce_scatter_tensor.default,
        c10d.all_to_all_single.default,
    }
)
#: Bytes of element types that no backend of torch.distributed carries: they travel as bytes.
_AS_BYTES = {"int16": 2, "float8e4m3fn": 1, "float8e5m2": 1, "complex64": 8, "complex128": 16}


def wait_for_unread(graph: fx.Graph) -> None:
    """Add waits for results that a rank does not read: PyTorch keeps what nobody waits for."""
    for node in [n for n in graph.nodes if n.target in COLLECTIVES and not n.users]:
        graph.call_function(c10d.wait_tensor.default, (node,))


@dataclass(frozen=True)
class RankComm:
    """A rank's part in a communication, to be added to its graph."""

    graph: fx.Graph
    comm: Comm
    rank: int
    source: fx.Node | None  #: Node of the tensor that the rank sends; None if it only receives.
    source_shape: Shape  #: Its local sizes.
    target_shape: Shape  #: Local sizes of the tensor that the rank gets.
    device: torch.device

    def start(self) -> Arrival | None:
        """Add the nodes that start it; None if the rank gets no result."""
        kind = self.comm.kind
        if kind is CommKind.SLICE:
            parts = [t for t in self.comm.transfers if t.target == self.rank]
            return lambda: join(
                self.graph, [(t.write, self._part(t)) for t in parts], self.target_shape
            )
        if kind is CommKind.ALL_REDUCE:
            return self._all_reduce()
        if kind is CommKind.REDUCE_SCATTER:
            return self._reduce_scatter()
        if kind is CommKind.ALL_GATHER and self.comm.is_even:
            return self._all_gather()
        return self._exchange()

    def _all_reduce(self) -> Arrival:
        operand = self._summable(self._dense(self._sent))
        collective = self._call(c10d.all_reduce.default, operand, self._reduction, self._group)
        shape = self._carried(self.source_shape)
        collective.meta["shapes"] = shape, shape  # by which collectives are joined
        return lambda: self._reduced(self._wait(collective))

    def _reduce_scatter(self) -> Arrival:
        """Parts in order of rank; where they differ in size, all is reduced and a part kept."""
        comm = self.comm
        by_target = {t.target: t for t in comm.transfers if t.source == self.rank}
        if len({t.numel for t in comm.transfers}) != 1 or set(by_target) != set(comm.ranks):
            arrival = self._all_reduce()
            kept = by_target[self.rank]
            return lambda: take(self.graph, arrival(), kept.read, self.source_shape)
        ordered = [by_target[rank] for rank in comm.ranks]
        if _fill_rows([t.read for t in ordered], self.source_shape):
            packed = self._flat(self._dense(self._sent))
        else:
            packed = self._call(aten.cat.default, [self._flat(self._part(t)) for t in ordered])
        operand = self._summable(packed)
        collective = self._call(
            c10d.reduce_scatter_tensor.default,
            operand,
            self._reduction,
            len(comm.ranks),
            self._group,
        )
        size = math.prod(self.target_shape)  # ranks outside the group may keep the rest
        shapes = self._carried((size * len(comm.ranks),)), self._carried((size,))
        collective.meta["shapes"] = shapes
        return lambda: self._shaped(self._reduced(self._wait(collective)), self.target_shape)

    def _all_gather(self) -> Arrival:
        comm = self.comm
        by_source = {t.source: t for t in comm.transfers if t.target == self.rank}
        operand = self._flat(self._coded(self._dense(self._sent)))
        collective = self._call(
            c10d.all_gather_into_tensor.default, operand, len(comm.ranks), self._group
        )
        size = by_source[self.rank].numel * _AS_BYTES.get(comm.dtype, 1)
        collective.meta["shapes"] = (size,), (size * len(comm.ranks),)

        def arrive() -> fx.Node:
            flat = self._decoded(self._wait(collective))
            ordered = [by_source[rank] for rank in comm.ranks]
            if _fill_rows([t.write for t in ordered], self.target_shape):
                return self._shaped(flat, self.target_shape)
            return join(
                self.graph,
                [(t.write, part) for t, part in self._split(flat, ordered)],
                self.target_shape,
            )

        return arrive

    def _exchange(self) -> Arrival | None:
        """Any parts between any ranks, in one all-to-all; the rank's own parts are not sent."""
        comm, others = self.comm, [rank for rank in self.comm.ranks if rank != self.rank]
        leaving: dict[int, list[Transfer]] = {rank: [] for rank in comm.ranks}
        arriving: dict[int, list[Transfer]] = {rank: [] for rank in comm.ranks}
        for transfer in comm.transfers:
            if transfer.numel and transfer.source == self.rank:
                leaving[transfer.target].append(transfer)
            if transfer.numel and transfer.target == self.rank:
                arriving[transfer.source].append(transfer)
        parts = [self._flat(self._part(t)) for rank in others for t in leaving[rank]]
        if not parts:
            call, dtype = self.graph.call_function, torch_dtype(comm.dtype)
            parts = [
                call(aten.empty.memory_format, ([0],), {"dtype": dtype, "device": self.device})
            ]
        packed = parts[0] if len(parts) == 1 else self._call(aten.cat.default, parts)
        width = _AS_BYTES.get(comm.dtype, 1)
        splits = [
            [
                width * sum(t.numel for t in transfers) if rank != self.rank else 0
                for rank, transfers in by_rank.items()
            ]
            for by_rank in (arriving, leaving)
        ]
        operand = self._coded(self._dense(packed))
        collective = self._call(c10d.all_to_all_single.default, operand, *splits, self._group)
        if not any(arriving.values()):
            return None

        def arrive() -> fx.Node:
            flat = self._decoded(self._wait(collective))
            received = self._split(flat, [t for rank in others for t in arriving[rank]])
            received += [(t, self._part(t)) for t in arriving[self.rank]]
            return join(self.graph, [(t.write, part) for t, part in received], self.target_shape)

        return arrive

    # Messages between phases -----------------------------------------------------------------

    def packed(self, target: int) -> fx.Node:
        """All that the rank sends to a target, as one flat tensor of the carried type."""
        leaving = [t for t in self.comm.transfers if (t.source, t.target) == (self.rank, target)]
        parts = [self._flat(self._part(t)) for t in leaving]
        packed = parts[0] if len(parts) == 1 else self._call(aten.cat.default, parts)
        return self._flat(self._coded(self._dense(packed)))

    def unpacked(self, messages: Mapping[int, fx.Node]) -> fx.Node:
        """The rank's result, of the messages from each source."""
        pieces = []
        for source, message in messages.items():
            pair = source, self.rank
            arriving = [t for t in self.comm.transfers if (t.source, t.target) == pair]
            pieces += self._split(self._decoded(message), arriving)
        return join(self.graph, [(t.write, part) for t, part in pieces], self.target_shape)

    # Nodes -----------------------------------------------------------------------------------

    @property
    def _sent(self) -> fx.Node:
        assert self.source is not None
        return self.source

    @property
    def _group(self) -> str:
        return group_name(self.comm.ranks)

    @property
    def _reduction(self) -> str:
        return "product" if self.comm.reduce == "prod" else self.comm.reduce

    def _call(self, target: Callable[..., object], *args: fx.node.Argument) -> fx.Node:
        return self.graph.call_function(target, args)

    def _wait(self, collective: fx.Node) -> fx.Node:
        return self._call(c10d.wait_tensor.default, collective)

    def _carried(self, shape: Shape) -> Shape:
        """Sizes of a tensor that is reduced: complex numbers are pairs."""
        return (*shape, 2) if torch_dtype(self.comm.dtype).is_complex else shape

    def _part(self, transfer: Transfer) -> fx.Node:
        return take(self.graph, self._sent, transfer.read, self.source_shape)

    def _split(
        self, flat: fx.Node, transfers: Sequence[Transfer]
    ) -> list[tuple[Transfer, fx.Node]]:
        """The parts of transfers that lie one after the other in a flat tensor."""
        parts = []
        start = 0
        for transfer in transfers:
            part, end = flat, start + transfer.numel
            if len(transfers) > 1:
                part = self._call(aten.slice.Tensor, flat, 0, start, end)
            parts.append((transfer, self._shaped(part, region_shape(transfer.write))))
            start = end
        return parts

    def _dense(self, tensor: fx.Node) -> fx.Node:
        return self.graph.call_method("contiguous", (tensor,))

    def _flat(self, tensor: fx.Node) -> fx.Node:
        return self._call(aten.reshape.default, tensor, [-1])

    def _shaped(self, tensor: fx.Node, shape: Shape) -> fx.Node:
        return self._call(aten.reshape.default, tensor, list(shape))

    def _cast(self, tensor: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.graph.call_function(aten._to_copy.default, (tensor,), {"dtype": dtype})

    def _summable(self, tensor: fx.Node) -> fx.Node:
        """The operand in a type that is reduced: a copy, as reductions may be in place."""
        if torch_dtype(self.comm.dtype).is_complex:
            return self._call(aten.view_as_real_copy.default, tensor)
        return self._cast(tensor, torch.int32) if self.comm.dtype == "int16" else tensor

    def _reduced(self, tensor: fx.Node) -> fx.Node:
        if torch_dtype(self.comm.dtype).is_complex:
            return self._call(aten.view_as_complex.default, tensor)
        return self._cast(tensor, torch.int16) if self.comm.dtype == "int16" else tensor

    def _coded(self, tensor: fx.Node) -> fx.Node:
        """The operand in a type that is carried."""
        if self.comm.dtype == "bool":
            # inductor (2.13) makes wrong code of a mask that was gathered
            return self._cast(tensor, torch.uint8)
        if self.comm.dtype not in _AS_BYTES:
            return tensor
        # a view of bytes needs a stride of one, which one element alone need not have
        dense = self.graph.call_function(
            aten.clone.default, (tensor,), {"memory_format": torch.contiguous_format}
        )
        return self._call(aten.view.dtype, self._flat(dense), torch.uint8)

    def _decoded(self, tensor: fx.Node) -> fx.Node:
        if self.comm.dtype == "bool":
            return self._call(aten.ne.Scalar, tensor, 0)
        if self.comm.dtype not in _AS_BYTES:
            return tensor
        return self._call(aten.view.dtype, tensor, torch_dtype(self.comm.dtype))


def carried(dtype: str) -> tuple[torch.dtype, int]:
    """The element type in which a tensor travels, and how many such elements each of its own is."""
    if dtype == "bool":
        return torch.uint8, 1
    if dtype in _AS_BYTES:
        return torch.uint8, _AS_BYTES[dtype]
    return torch_dtype(dtype), 1


def _fill_rows(regions: Sequence[Region], shape: Shape) -> bool:
    """Test whether the parts of a tensor, one after the other, are its memory."""
    if not shape:
        return len(regions) == 1
    end = 0
    for rows, *others in regions:
        rest = all(i == ((0, size),) for i, size in zip(others, shape[1:], strict=True))
        if not rest or len(rows) != 1 or rows[0][0] != end:
            return False
        end += rows[0][1]
    return end == shape[0]


def take(graph: fx.Graph, tensor: fx.Node, region: Region, shape: tuple[int, ...]) -> fx.Node:
    """The region of a tensor of this shape, as views and, where it has gaps, a copy."""
    for dim, intervals in enumerate(region):
        if is_whole((intervals,), (shape[dim],)):
            continue
        slices = [
            graph.call_function(aten.slice.Tensor, (tensor, dim, start, start + length))
            for start, length in intervals or ((0, 0),)
        ]
        tensor = (
            slices[0] if len(slices) == 1 else graph.call_function(aten.cat.default, (slices, dim))
        )
    return tensor


def join(
    graph: fx.Graph, parts: Sequence[tuple[Region, fx.Node]], shape: tuple[int, ...]
) -> fx.Node:
    """The tensor of this shape whose regions are the parts, which tile it."""
    if len(parts) == 1 and is_whole(parts[0][0], shape):
        return parts[0][1]
    split = {
        dim
        for region, _ in parts
        for dim, intervals in enumerate(region)
        if not is_whole((intervals,), (shape[dim],))
    }
    dim = next(iter(split)) if len(split) == 1 else None
    if dim is not None and all(len(region[dim]) == 1 for region, _ in parts):  # without gaps
        ordered = sorted(parts, key=lambda part: part[0][dim][0][0])
        return graph.call_function(aten.cat.default, ([part for _, part in ordered], dim))
    regions = tuple(region for region, _ in parts)
    tensors = [part for _, part in parts]
    return graph.call_function(assemble, (tensors, regions, shape))


def assemble(parts: Sequence[Tensor], regions: Sequence[Region], shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape with each part written to its region."""
    whole = parts[0].new_empty(shape)
    for part, region in zip(parts, regions, strict=True):
        dense = part.reshape(region_shape(region))
        for index, packed in boxes(region):
            whole[index] = dense[packed]
    return whole


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
