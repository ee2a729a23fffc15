"""Gives contiguous operands to operators whose results, or whose gradients, depend on strides.

A trace bakes in the strides of its example, and a rank's part of a tensor has others. For these
operators both are contiguous: here the operands of the trace, and on the ranks those of
`partitioner.backends.torch.graphs.calls.DENSE`. `as_strided` reads memory by number: it is right
where the trace's operand is dense, whose dims are put in the order of its memory first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.patterns.rewrite import Rewriter, rewrite_nodes

aten = torch.ops.aten

#: PyTorch (2.13) gives `embedding_bag` results of other sizes, and factorises the matrix or its
#: transpose, by strides; the gradient asks the trace's operand which of the two was done.
_BY_STRIDES = frozenset(
    {
        *(aten.embedding_bag, aten._embedding_bag, aten._embedding_bag_forward_only),
        *(aten.det, aten.linalg_det, aten._linalg_det, aten.logdet),
        *(aten.slogdet, aten.linalg_slogdet, aten._linalg_slogdet),
        *(aten.linalg_solve, aten.linalg_solve_ex, aten._linalg_solve_ex),
    }
)


def make_contiguous(module: fx.GraphModule) -> None:
    """Insert copies before operators that go by strides, where an operand is not contiguous."""

    def insert(node: fx.Node) -> bool:
        if getattr(node.target, "overloadpacket", 0) not in _BY_STRIDES:
            return False
        write = Rewriter(node)
        for operand in node.all_input_nodes:
            tensor = operand.meta.get("val")
            if isinstance(tensor, Tensor) and not tensor.is_contiguous():
                dense = {"memory_format": torch.contiguous_format}
                node.replace_input_with(operand, write.call(aten.clone.default, operand, **dense))
        return True

    rewrite_nodes(module, insert)


def as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """The same of a contiguous operand; FrontendError if memory is not the operand's."""
    start = _check_inside("as_strided", x, size, stride, storage_offset)
    if x.is_contiguous() and x.storage_offset() == 0:
        return NotImplemented  # type: ignore[no-any-return]
    dims = memory_order(x)
    ordered: Tensor = aten.as_strided.default(x.permute(dims).clone(), size, stride, start)
    return ordered


def as_strided_scatter(
    x: Tensor,
    src: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Tensor:
    """The same of a contiguous operand; FrontendError if memory is not the operand's."""
    start = _check_inside("as_strided_scatter", x, size, stride, storage_offset)
    if x.is_contiguous() and x.storage_offset() == 0:
        return NotImplemented  # type: ignore[no-any-return]
    dims = memory_order(x)
    written: Tensor = aten.as_strided_scatter.default(
        x.permute(dims).clone(), src, size, stride, start
    )
    return written.permute([dims.index(dim) for dim in range(x.dim())])


def memory_order(x: Tensor) -> list[int]:
    """The dims by their strides, the longest first; those of one element keep their places."""
    longer = sorted((dim for dim in range(x.dim()) if x.shape[dim] > 1), key=x.stride, reverse=True)
    dims = iter(longer)
    return [next(dims) if x.shape[dim] > 1 else dim for dim in range(x.dim())]


def _check_inside(
    name: str, x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None
) -> int:
    """Where the first element lies in the operand's own memory."""
    start = 0 if storage_offset is None else storage_offset - int(x.storage_offset())
    last = start + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    is_inside = math.prod(size) == 0 or (start >= 0 and last < x.numel())
    if not (x.permute(memory_order(x)).is_contiguous() and is_inside):
        raise FrontendError(
            f"{name}({list(size)}, {list(stride)}) of a part of a larger tensor: ranks have no "
            "memory around a part; index or slice the larger one"
        )
    return start
