"""Replaces indices that count a dim from its begin to its end by views.

Libraries make attention masks so: `mask[batch[:, None], keys[None]]`, where both indices are an
`arange` of a whole dim. What an index picks by number cannot be cut with the batch; a view can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.frontends.torch.patterns.rewrite import Arguments, Rewriter, value

_aten = torch.ops.aten
#: Most elements of an index that are computed to see what they are, and most calls that make them.
_MOST, _DEEPEST = 1 << 20, 20


def view(write: Rewriter, args: Arguments) -> fx.Node | None:
    """The view that such indices give."""
    x, indices = args["self"], args["indices"]
    shape = value(x).shape
    dims = []
    for length, index in zip(shape, indices, strict=False):
        counts = None if index is None else _computed(index)
        if counts is None or counts.dtype != torch.int64 or length not in counts.shape:
            return None
        if not torch.equal(counts.flatten(), torch.arange(length)):
            return None
        dims.append(counts.shape.index(length) - counts.dim())  # from the last one
    longest = {dim for dim, length in zip(dims, shape, strict=False) if length > 1}
    if len(longest) < sum(length > 1 for length in shape[: len(dims)]):
        return None  # two indices count along one dim: a diagonal
    order = sorted(range(len(dims)), key=lambda index: dims[index])
    moved = write.call(_aten.permute.default, x, [*order, *range(len(dims), len(shape))])
    viewed = write.call(_aten.reshape.default, moved, list(value(write.node).shape))
    return write.call(_aten.clone.default, viewed)  # which nothing writes through


def _computed(node: fx.Node, depth: int = 0) -> Tensor | None:
    """The contents of a value that is made of numbers alone; None if it depends on data."""
    result = node.meta.get("val")
    if depth > _DEEPEST or not isinstance(result, Tensor) or not _is_plain(node):
        return None
    if any(not isinstance(size, int) for size in result.shape) or result.numel() > _MOST:
        return None
    made: dict[fx.Node, Tensor] = {}
    for operand in node.all_input_nodes:
        contents = _computed(operand, depth + 1)
        if contents is None:
            return None
        made[operand] = contents
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
    with torch.no_grad():
        contents = node.target(*args, **kwargs)  # type: ignore[operator]
    return contents if isinstance(contents, Tensor) else None


def _is_plain(node: fx.Node) -> bool:
    """Tell whether a call computes always the same, and nothing writes to its result."""
    calls: Sequence[Any] = [node.target, *(user.target for user in node.users)]
    overloads = [one for one in calls if isinstance(one, torch._ops.OpOverload)]
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and not any(one._schema.is_mutable for one in overloads)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )
