"""Labelled tensors between processes, without gradients.

Data travels as bytes, which works for every element type. Ranks are counted within the group.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.backends.errors import BackendError, failing
from partitioner.backends.process_group import REDUCTIONS, Group, free_default_arguments
from partitioner.backends.tensors import REDUCIBLE, bytes_of, combine
from partitioner.backends.torch.by_hand.labels import (
    LABEL_BYTES,
    Label,
    conflict,
    is_sendable,
    label_of,
)

#: Bytes: tensors packed together start at multiples of the largest element's size.
_ALIGN = 16
_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Call:
    """Describe the part of this rank in one communication."""

    name: str
    #: Process group; weak, as autograd's graphs keep calls: a group that outlives
    #: `destroy_process_group` would end its threads too late, and abort the process.
    handle: weakref.ref[Any]
    rank: int  #: Rank of this process in the group.
    size: int
    number: int  #: Number of the call on this rank, by which backwards are told apart.
    backward: bool = False

    @property
    def group(self) -> Group:
        """The process group."""
        group = self.handle()
        if group is None:
            raise self.error("the process group was destroyed")
        return group

    def label(
        self, tensors: Sequence[object] = (), root: int = -1, reduction: str = "sum"
    ) -> Label:
        """The label of the tensors that this rank passes; a `recv` has labels of a `send`."""
        return label_of(
            tensors,
            name="send" if self.name == "recv" else self.name,
            number=self.number,
            backward=self.backward,
            root=root,
            reduction=reduction,
        )

    def transposed(self, number: int | None = None) -> Call:
        """The call's backward."""
        return replace(self, backward=True, number=self.number if number is None else number)

    def error(self, text: str) -> BackendError:
        """An error that names the rank and the call."""
        return BackendError(f"{self}: {text}")

    def __str__(self) -> str:
        return f"rank {self.rank}: {'backward of ' if self.backward else ''}{self.name}"

    @property
    def others(self) -> str:
        """``with ranks 0, 2``: the other ranks, for messages."""
        others = [str(rank) for rank in range(self.size) if rank != self.rank]
        return f"with rank{'s' * (len(others) > 1)} {', '.join(others)}"

    def check_rank(self, rank: object, word: str) -> int:
        """The argument called `word`, if it is a rank of the group."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise self.error(f"{word} is {rank!r}, not one of the ranks 0..{self.size - 1}")
        return rank

    def check_peer(self, rank: object, word: str) -> int:
        """The argument called `word`, if it is another rank of the group."""
        if self.check_rank(rank, word) == self.rank:
            raise self.error(f"{word} is this rank itself")
        return self.check_rank(rank, word)


def open_call(name: str, group: Group = None) -> Call:
    """A call on a group; None stands for the default group."""
    if not dist.is_available() or not dist.is_initialized():
        raise BackendError(
            f"{name}: no process group; call torch.distributed.init_process_group first"
        )
    free_default_arguments()
    if group is None:
        group = dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0:
        raise BackendError(f"{name}: process {dist.get_rank()} is not in the group")
    return Call(name, weakref.ref(group), rank, dist.get_world_size(group), next(_NUMBERS))


# Devices -----------------------------------------------------------------------------------------


def _carriers(group: Group) -> tuple[str, ...]:
    """Types of devices whose memory the group sends; gloo sends only the CPU's point to point."""
    pairs = [pair.split(":") for pair in dist.get_backend_config(group).split(",")]
    return tuple(device for device, backend in pairs if device == "cpu" or backend != "gloo")


def _label_device(group: Group) -> torch.device:
    carriers = _carriers(group)
    return torch.device("cpu" if "cpu" in carriers else carriers[0])


def carrier(group: Group, labels: Sequence[Label]) -> torch.device:
    """Device that data is sent from: an accelerator if all data is on one and the group can."""
    accelerators = [device for device in _carriers(group) if device != "cpu"]
    if accelerators and all(label.near for label in labels):
        return torch.device(accelerators[0])
    return _label_device(group)


def _onto(tensor: Tensor, device: torch.device) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return (plain if plain.device.type == device.type else plain.to(device)).contiguous()


# Between two ranks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaving:
    """A tensor that is being sent; its buffers must live until `wait` returns."""

    call: Call
    target: int
    works: Sequence[Any]
    buffers: Sequence[Tensor]

    def wait(self) -> None:
        """Wait until it is sent."""
        with failing(self.call, f"to rank {self.target}"):
            for work in self.works:
                work.wait()


def put(call: Call, tensor: object, target: int) -> Leaving:
    """Start to send a tensor."""
    if not isinstance(tensor, Tensor) or not is_sendable(tensor):
        said = type(tensor).__name__
        if isinstance(tensor, Tensor):
            said = f"{tensor.dtype} tensor of layout {tensor.layout} with {tensor.dim()} dims"
        raise call.error(f"{said} to rank {target}, where a dense tensor is wanted")
    label = call.label([tensor])
    data = _onto(tensor, carrier(call.group, [label]))
    ahead = _packed([label], call.group)
    buffers = (ahead, bytes_of(data)) if data.numel() else (ahead,)
    with failing(call, f"to rank {target}"):
        works = [dist.isend(buffer, group=call.group, group_dst=target) for buffer in buffers]
    return Leaving(call, target, works, buffers)


def get(call: Call, source: int) -> tuple[Label, Tensor]:
    """Receive the tensor that a rank sends next, on the device that it is received on."""
    ahead = torch.empty(LABEL_BYTES, dtype=torch.uint8, device=_label_device(call.group))
    with failing(call, f"from rank {source}"):
        dist.recv(ahead, group=call.group, group_src=source)
    label = _unpacked(call, ahead)
    device = carrier(call.group, [label])
    data = torch.empty(label.shape, dtype=label.element_type, device=device)
    if data.numel():
        with failing(call, f"from rank {source}"):
            dist.recv(bytes_of(data), group=call.group, group_src=source)
    if (label.name, label.backward) != (call.label().name, call.backward):
        sent, awaited = (
            "a gradient" if backward else "a tensor" for backward in (label.backward, call.backward)
        )
        raise call.error(
            f"rank {source} sent {sent} {label}, and this rank waits for {awaited}: "
            "the calls are not in the same order on both"
        )
    return label, data


def _packed(labels: Sequence[Label], group: Group) -> Tensor:
    packed = b"".join(label.pack() for label in labels)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(_label_device(group))


def _unpacked(call: Call, packed: Tensor) -> Label:
    try:
        return Label.unpack(packed.cpu().numpy().tobytes())
    except BackendError as error:
        raise call.error(str(error)) from None


# Among all ranks ---------------------------------------------------------------------------------


def agree(
    call: Call,
    tensors: Sequence[object],
    *,
    wanted: int = 1,
    root: int = -1,
    reduction: str = "sum",
) -> list[Label]:
    """The labels of all ranks, which are those of one call.

    Args:
        wanted: Number of tensors from each rank that passes any.

    Raises:
        BackendError: The labels are not those of one call; raised on all ranks.
        CommunicationError: A rank is gone, or the group's timeout is over.
    """
    ahead = _packed([call.label(tensors, root, reduction)], call.group)
    rows = ahead.new_empty(call.size * LABEL_BYTES)
    with failing(call, call.others):
        dist.all_gather_single(rows, ahead, group=call.group)
    labels = [_unpacked(call, row) for row in rows.view(call.size, LABEL_BYTES)]
    problem = conflict(labels, wanted)
    if problem is not None:
        raise call.error(problem)
    return labels


def swap_labels(call: Call, tensors: Sequence[Tensor]) -> list[Label]:
    """Each rank's label of the tensor that it has for this rank."""
    ahead = _packed([call.label([x]) for x in tensors], call.group)
    rows = torch.empty_like(ahead)
    with failing(call, call.others):
        dist.all_to_all_single(rows, ahead, group=call.group)
    return [_unpacked(call, row) for row in rows.view(call.size, LABEL_BYTES)]


def swap(
    call: Call, tensors: Sequence[Tensor], labels: Sequence[Label], device: torch.device
) -> list[Tensor]:
    """Send a tensor to each rank and receive one from each; `labels` are of those that arrive."""
    leaving = []
    for data in (bytes_of(_onto(x, device)) for x in tensors):
        missing = _padded_size(data.numel()) - data.numel()
        leaving.append(torch.cat((data, data.new_zeros(missing))) if missing else data)
    sizes = [_padded_size(_nbytes(label)) for label in labels]
    arriving = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    with failing(call, call.others):
        dist.all_to_all_single(
            arriving, torch.cat(leaving), sizes, [x.numel() for x in leaving], group=call.group
        )
    return [
        part[: _nbytes(label)].view(label.element_type).view(label.shape)
        for label, part in zip(labels, torch.split(arriving, sizes), strict=True)
    ]


def _nbytes(label: Label) -> int:
    return torch.Size(label.shape).numel() * label.element_type.itemsize


def _padded_size(nbytes: int) -> int:
    """Never 0: libraries differ on empty data."""
    return max(1, -(-nbytes // _ALIGN)) * _ALIGN


def all_gather(call: Call, tensor: Tensor, labels: Sequence[Label]) -> Sequence[Tensor]:
    """Every rank's tensor, by rank."""
    device = carrier(call.group, labels)
    first = labels[0]
    if any((label.dtype, label.shape) != (first.dtype, first.shape) for label in labels):
        return swap(call, [tensor] * call.size, labels, device)
    data = _onto(tensor, device)
    parts = data.new_empty((call.size, *data.shape))
    if data.numel():
        with failing(call, call.others):
            dist.all_gather_single(bytes_of(parts), bytes_of(data), group=call.group)
    return parts.unbind()


def all_reduce(
    call: Call, tensor: Tensor, labels: Sequence[Label], reduction: str, target: int | None = None
) -> Tensor:
    """The tensors of all ranks reduced by "sum", "max" or "min".

    On other ranks than `target`, if there is one, the result means nothing.
    """
    data = _onto(tensor, carrier(call.group, labels))
    numbers = torch.view_as_real(data) if data.is_complex() else data
    if numbers.dtype not in REDUCIBLE:
        return combine(all_gather(call, tensor, labels), reduction)
    total = numbers.clone()
    if total.numel():
        with failing(call, call.others):
            if target is None:
                dist.all_reduce(total, REDUCTIONS[reduction], group=call.group)
            else:
                dist.reduce(total, op=REDUCTIONS[reduction], group=call.group, group_dst=target)
    return torch.view_as_complex(total) if data.is_complex() else total


def broadcast(call: Call, tensor: Tensor | None, label: Label, source: int) -> Tensor:
    """A copy of the source's tensor on every rank."""
    device = carrier(call.group, [label])
    if tensor is not None:
        data = _onto(tensor, device).clone()
    else:
        data = torch.empty(label.shape, dtype=label.element_type, device=device)
    if data.numel():
        with failing(call, call.others):
            dist.broadcast(bytes_of(data), group=call.group, group_src=source)
    return data
