"""Labels: the description that travels ahead of every tensor of `partitioner.functional`.

From a label a receiver allocates memory of the right type and shape. Collectives first gather the
labels of all ranks, so that calls that do not fit together raise one error on every rank instead of
hanging or mixing up data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain

import torch

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import dtype_word

#: Element types that can be sent.
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32),
    *(torch.int64, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
)
REDUCTIONS = ("sum", "mean", "max", "min")
#: In place of an element type or reduction that is none of those above.
UNKNOWN = ""
MAX_DIMS = 64
#: Bytes of a packed label, whose sizes have up to 19 digits.
LABEL_BYTES = 2048


@dataclass(frozen=True)
class Label:
    """A rank's description of a call and of the tensors that it passes to it."""

    name: str  #: The communication.
    backward: bool
    number: int  #: Number of the call; a backward has its forward's.
    root: int  #: `src` or `dst`; -1 without.
    reduction: str  #: One of `REDUCTIONS`, or UNKNOWN.
    count: int
    needs: bool  #: Whether a tensor needs a gradient.
    enabled: bool  #: Whether this rank records gradients.
    smooth: bool  #: Whether every tensor could have a gradient.
    near: bool  #: Whether every tensor lies on an accelerator.
    dtype: str  #: Type of the first tensor; UNKNOWN if a tensor cannot be sent.
    digest: str  #: Hash of all element types and shapes.
    shape: tuple[int, ...]

    def pack(self) -> bytes:
        """The label as JSON, filled up to `LABEL_BYTES`."""
        return json.dumps(vars(self)).encode().ljust(LABEL_BYTES)

    @classmethod
    def unpack(cls, packed: bytes) -> Label:
        """The label that `pack` made bytes of; a BackendError for other data in its place."""
        try:
            values = json.loads(packed)
            return cls(**{**values, "shape": tuple(values["shape"])})
        except (ValueError, TypeError, LookupError):
            raise BackendError("what arrived was not sent by partitioner.functional") from None

    @property
    def element_type(self) -> torch.dtype:
        """Type of the first tensor."""
        return next(dtype for dtype in DTYPES if dtype_word(dtype) == self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


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
    shapes = repr([(x.dtype, tuple(x.shape)) for x in sendable])
    return Label(
        name=name,
        backward=backward,
        number=number,
        root=root,
        reduction=reduction if reduction in REDUCTIONS else UNKNOWN,
        count=len(tensors),
        needs=enabled and any(x.requires_grad for x in sendable),
        enabled=enabled,
        smooth=all(x.is_floating_point() or x.is_complex() for x in sendable),
        near=all(x.device.type != "cpu" for x in sendable),
        dtype=dtype_word(first.dtype) if first is not None and known else UNKNOWN,
        digest=blake2b(shapes.encode(), digest_size=8).hexdigest(),
        shape=tuple(first.shape) if first is not None else (),
    )


def is_sendable(tensor: torch.Tensor) -> bool:
    """Test whether a tensor is dense, with a type and a number of dims that a label can hold."""
    dense = tensor.layout is torch.strided and not tensor.is_meta
    return dense and tensor.dtype in DTYPES and tensor.dim() <= MAX_DIMS


def conflict(labels: Sequence[Label], wanted: int) -> str | None:
    """The reason why labels, of `wanted` tensors each, are not of one call; None if they are."""
    root = labels[0].root
    from_root = labels[0].name in ("bcast", "scatter")
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
                f"rank {rank} runs the backward of another {label.name} than rank 0: "
                "backward order follows the graph, so chain the calls in the same way on all ranks"
            )
        if label.root != first.root:
            yield f"the root is {label.root} at rank {rank} and {first.root} at rank 0"
        if label.reduction == UNKNOWN:
            yield f"op at rank {rank} is not one of {', '.join(REDUCTIONS)}"
        if label.reduction != first.reduction:
            yield f"op is {label.reduction} at rank {rank} and {first.reduction} at rank 0"


def _call(label: Label) -> str:
    return f"{'the backward of ' if label.backward else ''}{label.name}"


def _shortcomings(labels: Sequence[Label], givers: Sequence[int], wanted: int) -> Iterator[str]:
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
