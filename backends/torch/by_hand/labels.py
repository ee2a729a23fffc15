"""Labels: the description that travels ahead of every tensor of `partitioner.functional`.

From a label a receiver allocates memory of the right type and shape. Collectives first gather the
labels of all ranks, so that calls that do not fit together raise one error on every rank instead of
hanging or mixing up data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import chain
from typing import Any

import torch

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import dtype_word

#: Element types that can be sent; a label holds the index.
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32),
    *(torch.int64, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
)
NAMES = (
    *("send", "bcast", "scatter", "gather"),
    *("allgather", "alltoall", "allreduce", "reduce_scatter"),
)
REDUCTIONS = ("sum", "mean", "max", "min")
#: Index of an element type or reduction that is none of those above.
UNKNOWN = -1
#: First number of every label: other data that arrives in its place is refused.
_MAGIC = 0x7061_7274_0001
MAX_DIMS = 64


@dataclass(frozen=True)
class Label:
    """A rank's description of a call and of the tensors that it passes to it."""

    name: int  #: Index in `NAMES`.
    backward: bool
    number: int  #: Number of the call; a backward has its forward's.
    root: int  #: `src` or `dst`; -1 without.
    reduction: int  #: Index in `REDUCTIONS`.
    count: int
    needs: bool  #: Whether a tensor needs a gradient.
    enabled: bool  #: Whether this rank records gradients.
    smooth: bool  #: Whether every tensor could have a gradient.
    near: bool  #: Whether every tensor lies on an accelerator.
    dtype: int  #: Index in `DTYPES` of the first tensor's type; UNKNOWN if a tensor cannot be sent.
    digest: int  #: Hash of all element types and shapes.
    shape: tuple[int, ...]

    def pack(self) -> list[int]:
        """The label as `LABEL_SIZE` numbers."""
        fixed = [int(getattr(self, field.name)) for field in fields(self)[:-1]]
        padding = [0] * (MAX_DIMS - len(self.shape))
        return [_MAGIC, *fixed, len(self.shape), *self.shape, *padding]

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> Label:
        """The label that `pack` made numbers of."""
        magic, *rest = numbers
        if magic != _MAGIC:
            raise BackendError("what arrived was not sent by partitioner.functional")
        scalars = fields(cls)[:-1]
        values: dict[str, Any] = {
            field.name: bool(value) if field.type == "bool" else value
            for field, value in zip(scalars, rest, strict=False)
        }
        dims, *shape = rest[len(scalars) :]
        return cls(**values, shape=tuple(shape[:dims]))

    def __str__(self) -> str:
        return f"{dtype_word(DTYPES[self.dtype])} {self.shape}"


#: int64 numbers of a packed label: magic, fields, number of dims, dims.
LABEL_SIZE = 1 + len(fields(Label)) + MAX_DIMS


def label_of(
    tensors: Sequence[object],
    *,
    name: str,
    number: int,
    backward: bool = False,
    root: int = -1,
    reduction: str = "sum",
) -> Label:
    """The label of the tensors that this rank passes to a call."""
    enabled = torch.is_grad_enabled()
    sendable = [x for x in tensors if isinstance(x, torch.Tensor) and is_sendable(x)]
    first = sendable[0] if sendable else None
    known = first is not None and len(sendable) == len(tensors)
    digest = blake2b(repr([(x.dtype, tuple(x.shape)) for x in sendable]).encode(), digest_size=7)
    return Label(
        name=NAMES.index(name),
        backward=backward,
        number=number,
        root=root,
        reduction=REDUCTIONS.index(reduction) if reduction in REDUCTIONS else UNKNOWN,
        count=len(tensors),
        needs=enabled and any(x.requires_grad for x in sendable),
        enabled=enabled,
        smooth=all(x.is_floating_point() or x.is_complex() for x in sendable),
        near=all(x.device.type != "cpu" for x in sendable),
        dtype=DTYPES.index(first.dtype) if first is not None and known else UNKNOWN,
        digest=int.from_bytes(digest.digest()),
        shape=tuple(first.shape) if first is not None else (),
    )


def is_sendable(tensor: torch.Tensor) -> bool:
    """Test whether a tensor is dense, with a type and a number of dims that a label can hold."""
    dense = tensor.layout is torch.strided and not tensor.is_meta
    return dense and tensor.dtype in DTYPES and tensor.dim() <= MAX_DIMS


def conflict(labels: Sequence[Label], wanted: int) -> str | None:
    """The reason why labels, of `wanted` tensors each, are not of one call; None if they are."""
    root = labels[0].root
    from_root = NAMES[labels[0].name] in ("bcast", "scatter")
    givers = [rank for rank in range(len(labels)) if not from_root or rank == root]
    return next(chain(_differences(labels), _shortcomings(labels, givers, wanted)), None)


def _differences(labels: Sequence[Label]) -> Iterator[str]:
    """Fields that must be equal on all ranks and are not."""
    first = labels[0]
    for rank, label in enumerate(labels):
        if (label.name, label.backward) != (first.name, first.backward):
            yield f"rank {rank} is in {_call(label)}, rank 0 in {_call(first)}"
        if first.backward and label.number != first.number:
            yield (
                f"rank {rank} runs the backward of another {NAMES[label.name]} than rank 0: "
                "backward order follows the graph, so chain the calls in the same way on all ranks"
            )
        if label.root != first.root:
            yield f"the root is {label.root} at rank {rank} and {first.root} at rank 0"
        if label.reduction == UNKNOWN:
            yield f"op at rank {rank} is not one of {', '.join(REDUCTIONS)}"
        if label.reduction != first.reduction:
            yield (
                f"op is {REDUCTIONS[label.reduction]} at rank {rank} "
                f"and {REDUCTIONS[first.reduction]} at rank 0"
            )


def _call(label: Label) -> str:
    return f"{'the backward of ' if label.backward else ''}{NAMES[label.name]}"


def _shortcomings(labels: Sequence[Label], givers: Sequence[int], wanted: int) -> Iterator[str]:
    """Faults of the tensors that ranks pass."""
    needy = next((rank for rank in givers if labels[rank].needs), None)
    for rank in givers:
        label = labels[rank]
        if label.count != wanted:
            yield f"rank {rank} gives {label.count} tensors, not {wanted}"
        if label.dtype == UNKNOWN:
            yield f"rank {rank} gives what is no dense tensor of at most {MAX_DIMS} dims"
        if needy is not None and not label.smooth:
            yield (
                f"rank {rank} gives integers or bools while rank {needy} gives a tensor that "
                "needs a gradient: send them in two calls"
            )
    for rank, label in enumerate(labels):
        if needy is not None and not label.enabled:
            yield (
                f"rank {needy} gives a tensor that needs a gradient while gradients are off at "
                f"rank {rank}: turn them off on all ranks, or detach the tensor"
            )


def unlike(labels: Sequence[Label]) -> str | None:
    """Types or shapes by which tensors cannot be added across ranks; None if they can."""
    first = labels[0]
    for rank, label in enumerate(labels):
        if (label.dtype, label.shape) != (first.dtype, first.shape):
            return f"rank {rank} gives {label}, rank 0 {first}"
        if label.digest != first.digest:
            return f"element types or shapes at rank {rank} are not those at rank 0"
    return None
