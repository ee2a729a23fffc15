"""Communications of rank programs as functional collectives in graphs.

Each is started where the program has it, and waited for where its result is read first: what is
computed between the two overlaps with it. Collectives run in the group of the ranks that take
part, whose name says which (`group_name`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import fx

from partitioner.backends.regions import region_shape
from partitioner.backends.tensors import torch_dtype
from partitioner.backends.torch.pieces import join, take
from partitioner.ir.exchange import Transfer
from partitioner.ir.program import Comm, CommKind

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

#: Makes the graph's node of a result that is on its way.
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
    """Add waits for what a rank only sends: PyTorch keeps communications that nobody waits for.

    To be called where the pass ends; the others of the group are in the same pass.
    """
    for node in [n for n in graph.nodes if n.target in COLLECTIVES and not n.users]:
        _wait(graph, node)


def group_name(ranks: Sequence[int]) -> str:
    """Name under which the process group of these ranks is registered."""
    return "ranks_" + "_".join(map(str, ranks))


def start(
    graph: fx.Graph,
    comm: Comm,
    rank: int,
    source: fx.Node | None,
    source_shape: Shape,
    target_shape: Shape,
    device: torch.device,
) -> Arrival | None:
    """Add a communication to a rank's graph.

    Args:
        graph: The graph.
        comm: The communication.
        rank: The rank.
        source: What the rank sends; None if it only receives.
        source_shape: Local sizes of it.
        target_shape: Local sizes of what the rank gets.
        device: Where the rank's tensors are.

    Returns:
        What adds the nodes that wait for the result; None if the rank gets none.
    """
    if comm.kind is CommKind.SLICE:
        return _local(graph, comm, rank, source, source_shape, target_shape)
    if comm.kind is CommKind.ALL_REDUCE:
        assert source is not None
        return _all_reduce(graph, comm, source, source_shape)
    if comm.kind is CommKind.REDUCE_SCATTER:
        assert source is not None
        return _reduce_scatter(graph, comm, rank, source, source_shape, target_shape)
    if comm.kind is CommKind.ALL_GATHER and _is_even(comm):
        assert source is not None
        return _all_gather(graph, comm, rank, source, target_shape)
    return _exchange(graph, comm, rank, source, source_shape, target_shape, device)


def _local(
    graph: fx.Graph,
    comm: Comm,
    rank: int,
    source: fx.Node | None,
    source_shape: Shape,
    target_shape: Shape,
) -> Arrival:
    assert source is not None
    held = source
    own = [t for t in comm.transfers if t.target == rank]
    return lambda: join(
        graph, [(t.write, take(graph, held, t.read, source_shape)) for t in own], target_shape
    )


def _all_reduce(graph: fx.Graph, comm: Comm, source: fx.Node, shape: Shape) -> Arrival:
    reduce = "product" if comm.reduce == "prod" else comm.reduce
    args = (_summable(graph, comm, _dense(graph, source)), reduce, group_name(comm.ranks))
    sent = graph.call_function(c10d.all_reduce.default, args)
    if comm.dtype not in _AS_BYTES:
        sent.meta["operand"] = torch_dtype(comm.dtype), shape
    return lambda: _reduced(graph, comm, _wait(graph, sent))


def _reduce_scatter(
    graph: fx.Graph,
    comm: Comm,
    rank: int,
    source: fx.Node,
    source_shape: Shape,
    target_shape: Shape,
) -> Arrival:
    """Parts in order of rank; where they differ in size, all is reduced and a part kept."""
    mine = [t for t in comm.transfers if t.source == rank]
    by_target = {t.target: t for t in mine}
    sizes = {t.numel for t in comm.transfers}
    name = group_name(comm.ranks)
    if len(sizes) == 1 and set(by_target) == set(comm.ranks):
        parts = [
            _flat(graph, take(graph, source, by_target[r].read, source_shape)) for r in comm.ranks
        ]
        packed = graph.call_function(aten.cat.default, (parts,))
        reduce = "product" if comm.reduce == "prod" else comm.reduce
        args = (_summable(graph, comm, packed), reduce, len(comm.ranks), name)
        sent = graph.call_function(c10d.reduce_scatter_tensor.default, args)
        if comm.dtype not in _AS_BYTES:
            sent.meta["operand"] = torch_dtype(comm.dtype), (math.prod(source_shape),)
        return lambda: _shaped(graph, _reduced(graph, comm, _wait(graph, sent)), target_shape)
    arrival = _all_reduce(graph, comm, source, source_shape)
    own = by_target[rank]
    return lambda: take(graph, arrival(), own.read, source_shape)


def _all_gather(
    graph: fx.Graph, comm: Comm, rank: int, source: fx.Node, target_shape: Shape
) -> Arrival:
    own = {t.source: t for t in comm.transfers if t.target == rank}
    packed = _coded(graph, comm, _dense(graph, source))
    args = (_flat(graph, packed), len(comm.ranks), group_name(comm.ranks))
    sent = graph.call_function(c10d.all_gather_into_tensor.default, args)
    if comm.dtype not in _AS_BYTES:
        sent.meta["operand"] = torch_dtype(comm.dtype), (own[rank].numel,)

    def arrive() -> fx.Node:
        flat = _decoded(graph, comm, _wait(graph, sent))
        ordered = [own[r] for r in comm.ranks]
        if _fill_rows(ordered, target_shape):
            return _shaped(graph, flat, target_shape)
        size = own[rank].numel
        return _unpacked(graph, flat, ordered, [size] * len(ordered), target_shape)

    return arrive


def _exchange(
    graph: fx.Graph,
    comm: Comm,
    rank: int,
    source: fx.Node | None,
    source_shape: Shape,
    target_shape: Shape,
    device: torch.device,
) -> Arrival | None:
    """Any parts between any ranks, in one all-to-all; what stays on the rank is not sent."""
    leaving = _by_peer([t for t in comm.transfers if t.source == rank], lambda t: t.target)
    arriving = _by_peer([t for t in comm.transfers if t.target == rank], lambda t: t.source)
    parts: list[fx.Node] = []
    for peer in comm.ranks:
        for transfer in leaving.get(peer, []) if peer != rank else []:
            assert source is not None
            parts.append(_flat(graph, take(graph, source, transfer.read, source_shape)))
    if parts:
        packed = parts[0] if len(parts) == 1 else graph.call_function(aten.cat.default, (parts,))
    else:
        empty: dict[str, fx.node.Argument] = {"dtype": torch_dtype(comm.dtype), "device": device}
        packed = graph.call_function(aten.empty.memory_format, ([0],), empty)
    width = _AS_BYTES.get(comm.dtype, 1)
    splits = [
        [width * sum(t.numel for t in by.get(p, [])) if p != rank else 0 for p in comm.ranks]
        for by in (arriving, leaving)
    ]
    data = _coded(graph, comm, _dense(graph, packed))
    args = (data, splits[0], splits[1], group_name(comm.ranks))
    sent = graph.call_function(c10d.all_to_all_single.default, args)
    if not arriving:
        return None

    def arrive() -> fx.Node:
        flat = _decoded(graph, comm, _wait(graph, sent))
        ordered = [t for p in comm.ranks if p != rank for t in arriving.get(p, [])]
        made = _split(graph, flat, ordered, [t.numel for t in ordered]) if ordered else []
        for transfer in arriving.get(rank, []):
            assert source is not None
            made.append((transfer, take(graph, source, transfer.read, source_shape)))
        return join(graph, [(t.write, part) for t, part in made], target_shape)

    return arrive


def _by_peer(
    transfers: list[Transfer], peer: Callable[[Transfer], int]
) -> dict[int, list[Transfer]]:
    found: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        if transfer.numel:
            found.setdefault(peer(transfer), []).append(transfer)
    return found


def _is_even(comm: Comm) -> bool:
    """Whether every rank sends its part, all of one size, to every rank."""
    pairs = {(t.source, t.target) for t in comm.transfers}
    sizes = {t.numel for t in comm.transfers}
    return len(sizes) == 1 and pairs == {(a, b) for a in comm.ranks for b in comm.ranks}


def _fill_rows(ordered: Sequence[Transfer], shape: Shape) -> bool:
    """Whether the parts, one after the other, are the target's memory."""
    if not shape:
        return len(ordered) == 1
    at = 0
    for transfer in ordered:
        rows, *others = transfer.write
        rest = all(i == ((0, size),) for i, size in zip(others, shape[1:], strict=True))
        if not rest or len(rows) != 1 or rows[0][0] != at:
            return False
        at += rows[0][1]
    return at == shape[0]


def _unpacked(
    graph: fx.Graph,
    flat: fx.Node,
    ordered: Sequence[Transfer],
    sizes: Sequence[int],
    target_shape: Shape,
) -> fx.Node:
    made = _split(graph, flat, ordered, sizes)
    return join(graph, [(t.write, part) for t, part in made], target_shape)


def _split(
    graph: fx.Graph, flat: fx.Node, ordered: Sequence[Transfer], sizes: Sequence[int]
) -> list[tuple[Transfer, fx.Node]]:
    made = []
    at = 0
    for transfer, size in zip(ordered, sizes, strict=True):
        part = flat
        if len(ordered) > 1:
            part = graph.call_function(aten.slice.Tensor, (flat, 0, at, at + size))
        made.append((transfer, _shaped(graph, part, region_shape(transfer.write))))
        at += size
    return made


def _wait(graph: fx.Graph, sent: fx.Node) -> fx.Node:
    return graph.call_function(c10d.wait_tensor.default, (sent,))


def _dense(graph: fx.Graph, tensor: fx.Node) -> fx.Node:
    return graph.call_method("contiguous", (tensor,))


def _flat(graph: fx.Graph, tensor: fx.Node) -> fx.Node:
    return graph.call_function(aten.reshape.default, (tensor, [-1]))


def _shaped(graph: fx.Graph, tensor: fx.Node, shape: Shape) -> fx.Node:
    return graph.call_function(aten.reshape.default, (tensor, list(shape)))


def _summable(graph: fx.Graph, comm: Comm, tensor: fx.Node) -> fx.Node:
    """The operand as a type that is reduced: a copy, as reductions may be in place."""
    if torch_dtype(comm.dtype).is_complex:
        return graph.call_function(aten.view_as_real_copy.default, (tensor,))
    if comm.dtype == "int16":
        return graph.call_function(aten._to_copy.default, (tensor,), {"dtype": torch.int32})
    return tensor


def _reduced(graph: fx.Graph, comm: Comm, tensor: fx.Node) -> fx.Node:
    if torch_dtype(comm.dtype).is_complex:
        return graph.call_function(aten.view_as_complex.default, (tensor,))
    if comm.dtype == "int16":
        return graph.call_function(aten._to_copy.default, (tensor,), {"dtype": torch.int16})
    return tensor


def _coded(graph: fx.Graph, comm: Comm, tensor: fx.Node) -> fx.Node:
    if comm.dtype == "bool":  # inductor (2.13) makes wrong code of a mask that was gathered
        return graph.call_function(aten._to_copy.default, (tensor,), {"dtype": torch.uint8})
    if comm.dtype not in _AS_BYTES:
        return tensor
    return graph.call_function(aten.view.dtype, (_flat(graph, tensor), torch.uint8))


def _decoded(graph: fx.Graph, comm: Comm, tensor: fx.Node) -> fx.Node:
    if comm.dtype == "bool":
        return graph.call_function(aten.ne.Scalar, (tensor, 0))
    if comm.dtype not in _AS_BYTES:
        return tensor
    return graph.call_function(aten.view.dtype, (tensor, torch_dtype(comm.dtype)))
