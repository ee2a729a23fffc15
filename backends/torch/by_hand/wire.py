"""Tensors with labels between processes; nothing here has a gradient.

Data travels as bytes, so that every element type does. Ranks count within the group.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from partitioner.backends.errors import BackendError, CommunicationError, one_line
from partitioner.backends.process_group import Group
from partitioner.backends.tensors import REDUCIBLE, combine
from partitioner.backends.torch.by_hand.labels import (
    DTYPES,
    LABEL_SIZE,
    Label,
    conflict,
    is_sendable,
    label_of,
)

#: Tensors that travel together start at multiples of the largest element.
_ALIGN = 16
_NUMBERS = itertools.count(1)
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class Call:
    """One communication, as this rank takes part in it.

    Attributes:
        name: Of the function.
        handle: Of the process group; weak, as graphs of autograd keep calls: a group that outlives
            `destroy_process_group` would end its threads too late, and abort the process.
        rank: Of this process in the group.
        size: Ranks of the group.
        number: Tells the backward of one call from that of another.
        backward: Whether it is the backward.
    """

    name: str
    handle: weakref.ref[Any]
    rank: int
    size: int
    number: int
    backward: bool = False

    @property
    def group(self) -> Group:
        """The process group.

        Raises:
            BackendError: It was destroyed.
        """
        found = self.handle()
        if found is None:
            raise self.error("the process group was destroyed")
        return found

    @property
    def topic(self) -> str:
        """Name that the call's labels bear: of a send, on both sides."""
        return "send" if self.name == "recv" else self.name

    def transposed(self, number: int | None = None) -> Call:
        """The call's backward."""
        return replace(self, backward=True, number=self.number if number is None else number)

    def error(self, text: str) -> BackendError:
        """An error in the call's words."""
        return BackendError(f"{self}: {text}")

    def __str__(self) -> str:
        return f"rank {self.rank}: {'backward of ' if self.backward else ''}{self.name}"

    @property
    def others(self) -> str:
        """The other ranks, for messages."""
        others = [str(rank) for rank in range(self.size) if rank != self.rank]
        return f"with rank{'s' * (len(others) > 1)} {', '.join(others)}"

    def check_rank(self, rank: object, word: str) -> int:
        """A rank of the group that the caller named.

        Raises:
            BackendError: It is none.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise self.error(f"{word} is {rank!r}, not one of the ranks 0..{self.size - 1}")
        return rank

    def check_peer(self, rank: object, word: str) -> int:
        """A rank of the group other than this one.

        Raises:
            BackendError: It is none.
        """
        if self.check_rank(rank, word) == self.rank:
            raise self.error(f"{word} is this rank itself")
        return self.check_rank(rank, word)


def open_call(name: str, group: Group = None) -> Call:
    """A call on a group; None is the default group.

    Raises:
        BackendError: There is no group yet, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise BackendError(
            f"{name}: no process group; call torch.distributed.init_process_group first"
        )
    found = dist.group.WORLD if group is None else group
    rank = dist.get_rank(found)
    if rank < 0:
        raise BackendError(f"{name}: process {dist.get_rank()} is not in the group")
    return Call(name, weakref.ref(found), rank, dist.get_world_size(found), next(_NUMBERS))


# Devices -----------------------------------------------------------------------------------------


def _carriers(group: Group) -> tuple[str, ...]:
    """Device types whose memory the group sends from; gloo's point-to-point takes the CPU's."""
    pairs = [pair.split(":") for pair in dist.get_backend_config(group).split(",")]
    return tuple(device for device, backend in pairs if device == "cpu" or backend != "gloo")


def _label_device(group: Group) -> torch.device:
    carriers = _carriers(group)
    return torch.device("cpu" if "cpu" in carriers else carriers[0])


def carrier(group: Group, labels: Sequence[Label]) -> torch.device:
    """Where data must lie to travel: on accelerators if all of it does and the group can."""
    near = [device for device in _carriers(group) if device != "cpu"]
    if near and all(label.near for label in labels):
        return torch.device(near[0])
    return _label_device(group)


def _onto(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor dense on a type of device, cut off from autograd."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return (plain if plain.device.type == device.type else plain.to(device)).contiguous()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


@contextlib.contextmanager
def _failing(call: Call, peers: str) -> Iterator[None]:
    """Name the call and the peers in what the library raises."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"{call} {peers}: {one_line(error)}") from error


# Between two ranks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaving:
    """A tensor on its way; its buffers must live until `wait` returns."""

    call: Call
    target: int
    works: Sequence[Any]
    buffers: Sequence[torch.Tensor]

    def wait(self) -> None:
        """Wait until it has left.

        Raises:
            CommunicationError: The receiver is gone, or the group's time is up.
        """
        with _failing(self.call, f"to rank {self.target}"):
            for work in self.works:
                work.wait()


def put(call: Call, tensor: object, target: int) -> Leaving:
    """Start to send a tensor.

    Raises:
        BackendError: It is none, or of a kind that cannot be sent.
    """
    if not isinstance(tensor, torch.Tensor) or not is_sendable(tensor):
        raise call.error(f"{_kind(tensor)} to rank {target}, where a dense tensor is wanted")
    label = label_of([tensor], name=call.topic, number=call.number, backward=call.backward)
    data = _onto(tensor, carrier(call.group, [label]))
    ahead = torch.tensor(label.pack(), dtype=torch.int64, device=_label_device(call.group))
    buffers = (ahead, _bytes(data)) if data.numel() else (ahead,)
    with _failing(call, f"to rank {target}"):
        works = [dist.isend(buffer, group=call.group, group_dst=target) for buffer in buffers]
    return Leaving(call, target, works, buffers)


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} tensor of layout {value.layout} with {value.dim()} dims"
    return type(value).__name__


def get(call: Call, source: int) -> tuple[Label, torch.Tensor]:
    """Receive what a rank sends next, on the device that it travelled by.

    Raises:
        BackendError: It does not belong to such a call.
        CommunicationError: The sender is gone, or the group's time is up.
    """
    ahead = torch.empty(LABEL_SIZE, dtype=torch.int64, device=_label_device(call.group))
    with _failing(call, f"from rank {source}"):
        dist.recv(ahead, group=call.group, group_src=source)
    label = _unpacked(call, ahead)
    device = carrier(call.group, [label])
    data = torch.empty(label.shape, dtype=DTYPES[label.dtype], device=device)
    if data.numel():
        with _failing(call, f"from rank {source}"):
            dist.recv(_bytes(data), group=call.group, group_src=source)
    _check_pair(call, source, label)
    return label, data


def _unpacked(call: Call, numbers: torch.Tensor) -> Label:
    try:
        return Label.unpack(numbers.tolist())
    except BackendError as error:
        raise call.error(str(error)) from None


def _check_pair(call: Call, source: int, label: Label) -> None:
    wanted = label_of([], name=call.topic, number=0).name
    if (label.name, label.backward) == (wanted, call.backward):
        return
    kind = "a gradient" if label.backward else "a tensor"
    awaited = "a gradient" if call.backward else "a tensor"
    raise call.error(
        f"rank {source} sent {kind} {label}, and this rank waits for {awaited}: "
        "the calls are not in the same order on both"
    )


# Among all ranks ---------------------------------------------------------------------------------


def agree(
    call: Call,
    tensors: Sequence[object],
    *,
    wanted: int = 1,
    root: int = -1,
    reduction: str = "sum",
) -> list[Label]:
    """The labels of all ranks, which make one call.

    Args:
        call: The call.
        tensors: What this rank gives.
        wanted: How many a rank must give that gives any.
        root: `src` or `dst`.
        reduction: Name of the reduction.

    Raises:
        BackendError: They do not make one call; raised on all ranks.
        CommunicationError: A rank is gone, or the group's time is up.
    """
    own = label_of(
        tensors,
        name=call.topic,
        number=call.number,
        backward=call.backward,
        root=root,
        reduction=reduction,
    )
    device = _label_device(call.group)
    ahead = torch.tensor(own.pack(), dtype=torch.int64, device=device)
    rows = torch.empty(call.size * LABEL_SIZE, dtype=torch.int64, device=device)
    with _failing(call, call.others):
        dist.all_gather_single(rows, ahead, group=call.group)
    labels = [_unpacked(call, row) for row in rows.view(call.size, LABEL_SIZE)]
    problem = conflict(labels, wanted)
    if problem is not None:
        raise call.error(problem)
    return labels


def own_label(call: Call, tensor: torch.Tensor) -> Label:
    """The label of one tensor of this rank."""
    return label_of([tensor], name=call.topic, number=call.number)


def swap_labels(call: Call, tensors: Sequence[torch.Tensor]) -> list[Label]:
    """Each rank's label of what it has for this rank."""
    device = _label_device(call.group)
    own = [label_of([x], name=call.topic, number=call.number).pack() for x in tensors]
    ahead = torch.tensor(own, dtype=torch.int64, device=device)
    rows = torch.empty_like(ahead)
    with _failing(call, call.others):
        dist.all_to_all_single(rows, ahead, group=call.group)
    return [_unpacked(call, row) for row in rows]


def swap(
    call: Call, tensors: Sequence[torch.Tensor], labels: Sequence[Label], device: torch.device
) -> list[torch.Tensor]:
    """Give a tensor to each rank and take one from each.

    Args:
        call: The call.
        tensors: By receiver.
        labels: Of what arrives, by sender.
        device: Where data lies while it travels.
    """
    leaving = [_padded(_onto(x, device)) for x in tensors]
    sizes = [_padded_size(label) for label in labels]
    arriving = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    with _failing(call, call.others):
        dist.all_to_all_single(
            arriving, torch.cat(leaving), sizes, [x.numel() for x in leaving], group=call.group
        )
    return [
        part[: _size(label)].view(DTYPES[label.dtype]).view(label.shape)
        for label, part in zip(labels, torch.split(arriving, sizes), strict=True)
    ]


def _size(label: Label) -> int:
    return torch.Size(label.shape).numel() * DTYPES[label.dtype].itemsize


def _padded_size(label: Label) -> int:
    """Never 0: libraries differ on empty data."""
    return max(1, -(-_size(label) // _ALIGN)) * _ALIGN


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    data = _bytes(tensor)
    missing = _ALIGN - data.numel() % _ALIGN if data.numel() % _ALIGN or not data.numel() else 0
    return torch.cat((data, data.new_zeros(missing))) if missing else data


def all_gather(call: Call, tensor: torch.Tensor, labels: Sequence[Label]) -> Sequence[torch.Tensor]:
    """Every rank's tensor, by rank."""
    device = carrier(call.group, labels)
    first = labels[0]
    if any((label.dtype, label.shape) != (first.dtype, first.shape) for label in labels):
        return swap(call, [tensor] * call.size, labels, device)
    data = _onto(tensor, device)
    parts = data.new_empty((call.size, *data.shape))
    if data.numel():
        with _failing(call, call.others):
            dist.all_gather_single(_bytes(parts), _bytes(data), group=call.group)
    return parts.unbind()


def all_reduce(
    call: Call, tensor: torch.Tensor, labels: Sequence[Label], reduction: str
) -> torch.Tensor:
    """A tensor reduced over all ranks: one of "sum", "max", "min"."""
    data = _onto(tensor, carrier(call.group, labels))
    numbers = _real(data)
    if numbers.dtype not in REDUCIBLE:
        return combine(all_gather(call, tensor, labels), reduction)
    total = numbers.clone()
    if total.numel():
        with _failing(call, call.others):
            dist.all_reduce(total, _OPS[reduction], group=call.group)
    return torch.view_as_complex(total) if data.is_complex() else total


def reduce_to(
    call: Call, tensor: torch.Tensor, labels: Sequence[Label], target: int
) -> torch.Tensor:
    """The sum over all ranks, on one of them; elsewhere the result means nothing."""
    data = _onto(tensor, carrier(call.group, labels))
    numbers = _real(data)
    if numbers.dtype not in REDUCIBLE:
        return combine(all_gather(call, tensor, labels), "sum")
    total = numbers.clone()
    if total.numel():
        with _failing(call, call.others):
            dist.reduce(total, op=dist.ReduceOp.SUM, group=call.group, group_dst=target)
    return torch.view_as_complex(total) if data.is_complex() else total


def _real(data: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(data) if data.is_complex() else data


def broadcast(call: Call, tensor: torch.Tensor | None, label: Label, source: int) -> torch.Tensor:
    """The source's tensor, on every rank in memory of its own."""
    device = carrier(call.group, [label])
    if tensor is not None:
        data = _onto(tensor, device).clone()
    else:
        data = torch.empty(label.shape, dtype=DTYPES[label.dtype], device=device)
    if data.numel():
        with _failing(call, call.others):
            dist.broadcast(_bytes(data), group=call.group, group_src=source)
    return data
