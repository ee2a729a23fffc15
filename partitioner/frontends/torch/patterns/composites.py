"""Keeps what a trace would take apart, or would not find in an exported graph.

A trace replaces upsampling by index computations, RMS norm by pointwise operators, and the average
of a plane in some memory formats by writes through strides, before it asks any decomposition table.
So they are replaced in the exported graph, before the trace, as are attention, losses, bags of rows
and indices that only count. Adaptive pools become pools where their windows are of one size.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial

import torch
from torch import fx

import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators
from partitioner.frontends.torch.patterns.attention import attention
from partitioner.frontends.torch.patterns.counted import view
from partitioner.frontends.torch.patterns.losses import cross_entropy, negative_log_likelihood
from partitioner.frontends.torch.patterns.rewrite import (
    Arguments,
    Replacement,
    Rewriter,
    arguments_of,
    is_tensor,
    replace_calls,
    rewrite_nodes,
    value,
)
from partitioner.frontends.torch.patterns.strides import make_contiguous
from partitioner.ir.ops.aten.windows import UPSAMPLING

_aten = torch.ops.aten
_BAGS = {_aten.embedding_bag.default, _aten.embedding_bag.padding_idx}


def keep_composites(module: fx.GraphModule) -> None:
    """Replace calls by what can be cut, in place, and write down what other calls depend on."""
    rewrite_nodes(module, _state_dtype)
    replace_calls(module, REPLACEMENTS)
    rewrite_nodes(module, lambda node: node.target in _BAGS and _replace_bag(node))
    make_contiguous(module)


def _state_dtype(node: fx.Node) -> bool:
    """Give a call that makes a tensor of no tensor, as `torch.ones`, its element type.

    It has PyTorch's default type, which a module may set for a part of its forward pass, and which
    may be another one where the graph is traced again.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or node.all_input_nodes:
        return False
    names = {argument.name for argument in node.target._schema.arguments}
    makes = isinstance(node.meta.get("val"), torch.Tensor)
    is_left = makes and "dtype" in names and node.kwargs.get("dtype") is None
    if is_left:
        node.kwargs = {**node.kwargs, "dtype": value(node).dtype}
    return is_left


def _replace_bag(bag: fx.Node) -> bool:
    """Replace `embedding_bag` by our own operator, whose table can be cut.

    Those whose gradients are sparse or scaled by frequency stay, and those of which more than the
    result is used.
    """
    args = arguments_of(bag)
    used = [user for user in bag.users if user.users]
    if args["scale_grad_by_freq"] or args["sparse"]:
        return False
    if len(used) != 1 or used[0].target is not operator.getitem or used[0].args[1] != 0:
        return False
    result, table, indices, offsets = used[0], args["weight"], args["indices"], args["offsets"]
    if not all(map(is_tensor, (table, indices, offsets, result))):
        return False
    weights = args["per_sample_weights"]
    if weights is not None and value(weights).dtype != value(table).dtype:
        return False
    size, total = value(table).shape[0], value(indices).shape[0]
    bags = value(offsets).shape[0] - bool(args["include_last_offset"])
    padding = args.get("padding_idx")
    padding = -1 if padding is None else padding % size
    settings = (args["mode"], bags, padding, size, total, [0], [size], [0], [total], [0], [bags])
    write, embedding_bag = Rewriter(result), torch.ops.partitioner.embedding_bag.default
    write.give(write.call(embedding_bag, table, indices, offsets, weights, *settings))
    for user in list(bag.users):
        bag.graph.erase_node(user)
    bag.graph.erase_node(bag)
    return True


def _upsample(mode: str, write: Rewriter, args: Arguments) -> fx.Node:
    size = list(value(write.node).shape[2:])
    settings = (mode, size, bool(args.get("align_corners", False)), args["scale_factors"] or [])
    return write.call(torch.ops.partitioner.upsample.default, args["input"], *settings)


def _rms_norm(write: Rewriter, args: Arguments) -> fx.Node:
    operands = (args[name] for name in ("input", "normalized_shape", "weight", "eps"))
    norm = write.call(torch.ops.partitioner.rms_norm.default, *operands)
    return write.call(operator.getitem, norm, 0)


def _adaptive_average(dims: int, write: Rewriter, args: Arguments) -> fx.Node | None:
    """The average of whole planes, or of windows of one size, which can be cut."""
    if all(size == 1 for size in value(write.node).shape[-dims:]):
        return write.call(_aten.mean.dim, args["self"], list(range(-dims, 0)), True)
    kernel = _window(value(args["self"]), value(write.node), dims)
    if kernel is None:
        return None
    pool = getattr(_aten, f"avg_pool{dims}d").default
    return write.call(pool, args["self"], kernel, kernel)


def _adaptive_max(dims: int, write: Rewriter, args: Arguments) -> fx.Node | None:
    """Maxima of windows of one size; indices count in the whole plane in both."""
    kernel = _window(value(args["self"]), write.node.meta["val"][0], dims)
    if kernel is None:
        return None
    pool = getattr(_aten, f"max_pool{dims}d_with_indices").default
    return write.call(pool, args["self"], kernel, kernel)


def _window(data: torch.Tensor, result: torch.Tensor, dims: int) -> list[int] | None:
    """Sizes of the windows of an adaptive pool; None if they are not equal and apart."""
    sizes = list(zip(data.shape[-dims:], result.shape[-dims:], strict=True))
    if any(after == 0 or before % after for before, after in sizes):
        return None
    return [before // after for before, after in sizes]


REPLACEMENTS: Mapping[torch._ops.OpOverload, Replacement] = {
    **{
        getattr(_aten, name).vec: partial(
            _upsample, mode + "-antialias" * ("_aa" in name) + "-exact" * ("_exact" in name)
        )
        for name, (mode, _) in UPSAMPLING.items()
    },
    _aten.adaptive_avg_pool2d.default: partial(_adaptive_average, 2),
    _aten.adaptive_avg_pool3d.default: partial(_adaptive_average, 3),
    _aten.adaptive_max_pool2d.default: partial(_adaptive_max, 2),
    _aten.adaptive_max_pool3d.default: partial(_adaptive_max, 3),
    _aten.cross_entropy_loss.default: cross_entropy,
    _aten.index.Tensor: view,
    _aten.nll_loss_nd.default: negative_log_likelihood,
    _aten.rms_norm.default: _rms_norm,
    _aten.scaled_dot_product_attention.default: attention,
}
