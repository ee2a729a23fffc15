"""Keeps what a trace would take apart, or would not find in an exported graph.

A trace replaces upsampling by index computations, RMS norm by pointwise operators, and the average
of a plane in some memory formats by writes through strides, before it asks any decomposition table.
So they are replaced in the exported graph, before the trace, as are attention, losses, bags of rows
and indices that only count. Adaptive pools become pools where their windows are of one size.

Of losses over classes, the maximum of a row, the sum of its exponentials and the target's logit are
reductions over the vocabulary. The mean over a batch is a sum of losses over a count of targets (or
over the sum of their weights), so that no device needs to know which targets of the others count.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx

import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators
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
    """Give a call that makes a tensor of none, as `torch.ones`, the default type of its pass."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.all_input_nodes:
        return False
    names = {argument.name for argument in node.target._schema.arguments}
    makes = isinstance(node.meta.get("val"), torch.Tensor)
    is_left = makes and "dtype" in names and node.kwargs.get("dtype") is None
    if is_left:
        node.kwargs = {**node.kwargs, "dtype": value(node).dtype}
    return is_left


def _replace_bag(bag: fx.Node) -> bool:
    """Make `embedding_bag` ours, unless gradients are sparse or scaled, or more is used of it."""
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


def _attention(write: Rewriter, args: Arguments) -> fx.Node | None:
    """Our own operator, one node a call, or, with dropout, plain ones.

    PyTorch picks a kernel while it traces: a trace made on the CPU holds the CPU's, which no other
    device has. Ours is the same for every device. Calls of other forms than (batch, heads, rows,
    channels) and (batch, rows, channels) stay.
    """
    nodes = [args["query"], args["key"], args["value"]]
    ranks = {value(node).dim() for node in nodes}
    if ranks == {3}:
        with_heads = [write.call(_aten.unsqueeze.default, node, 1) for node in nodes]
        mask = args["attn_mask"]
        if mask is not None and value(mask).dim() >= 3:
            mask = write.call(_aten.unsqueeze.default, mask, 1)
        return write.call(_aten.squeeze.dim, _multi_head(write, args, with_heads, mask), 1)
    if ranks != {4}:
        return None
    query_heads, key_heads, value_heads = (value(node).shape[1] for node in nodes)
    if key_heads != value_heads or key_heads == 0 or query_heads % key_heads != 0:
        return None
    return _multi_head(write, args, nodes, args["attn_mask"])


def _multi_head(
    write: Rewriter, args: Arguments, operands: list[fx.Node], mask: fx.Node | None
) -> fx.Node:
    batch = max(value(node).shape[0] for node in operands)
    expanded = [
        node
        if value(node).shape[0] == batch
        else write.call(_aten.expand.default, node, [batch, *value(node).shape[1:]])
        for node in operands
    ]
    query, key, values = (write.cast(node, write.dtype) for node in expanded)
    depth = value(query).shape[-1]
    scale = depth**-0.5 if args["scale"] is None else args["scale"]
    if args["dropout_p"] > 0:
        return _with_dropout(write, args, (query, key, values, mask), scale)
    own = torch.ops.partitioner.attention.default
    results = write.call(own, query, key, values, mask, args["is_causal"], scale)
    return write.call(operator.getitem, results, 0)


def _with_dropout(
    write: Rewriter,
    args: Arguments,
    operands: tuple[fx.Node, fx.Node, fx.Node, fx.Node | None],
    scale: float,
) -> fx.Node:
    query, key, values, mask = operands
    group = value(query).shape[1] // value(key).shape[1]
    if group > 1:
        key, values = (
            write.call(_aten.repeat_interleave.self_int, node, group, 1) for node in (key, values)
        )
    scaled = write.call(_aten.mul.Tensor, query, scale)
    scores = write.call(_aten.matmul.default, scaled, write.call(_aten.mT.default, key))
    if args["is_causal"]:
        shape, device = list(value(scores).shape[-2:]), value(scores).device
        ones = write.call(_aten.ones.default, shape, dtype=torch.bool, device=device)
        mask = write.call(_aten.tril.default, ones)
    softmax = _aten.softmax.int if mask is None else _aten._safe_softmax.default
    if mask is not None and value(mask).dtype == torch.bool:
        hidden = write.call(_aten.logical_not.default, mask)
        scores = write.call(_aten.masked_fill.Scalar, scores, hidden, float("-inf"))
    elif mask is not None:
        scores = write.call(_aten.add.Tensor, scores, mask)
    weights = write.call(softmax, scores, -1)
    dropped = write.call(_aten.dropout.default, weights, args["dropout_p"], True)
    return write.call(_aten.matmul.default, dropped, values)


#: Most elements of an index that are computed to see what they are, and most calls that make them.
_MOST, _DEEPEST = 1 << 20, 20


def _counted(write: Rewriter, args: Arguments) -> fx.Node | None:
    """A view, which can be cut, in place of indices that count whole dims, as masks have them."""
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
    if depth > _DEEPEST or not isinstance(result, Tensor) or node.op != "call_function":
        return None
    target, users = node.target, [user.target for user in node.users]
    if not isinstance(target, torch._ops.OpOverload):
        return None
    overloads = [one for one in (target, *users) if isinstance(one, torch._ops.OpOverload)]
    is_written = any(one._schema.is_mutable for one in overloads)
    if is_written or torch.Tag.nondeterministic_seeded in target.tags:
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
        contents = target(*args, **kwargs)
    return contents if isinstance(contents, Tensor) else None


_NONE, _MEAN = 0, 1  #: PyTorch's numbers for `reduction`; 2 is the sum.


def _cross_entropy(write: Rewriter, args: Arguments) -> fx.Node | None:
    """Cross entropy; with probabilities as targets, or both weights and smoothing, it stays."""
    logits, target = args["self"], args["target"]
    if args["weight"] is not None and args["label_smoothing"] != 0:
        return None
    if value(target).is_floating_point() or not _is_class_per_row(logits, target):
        return None
    loss = _Loss(write, args, _ignored(write, args))
    return loss.reduced(_cross_entropy_per_row(loss, args["label_smoothing"]))


def _negative_log_likelihood(write: Rewriter, args: Arguments) -> fx.Node | None:
    """Negative log-likelihood of target classes."""
    if not _is_class_per_row(args["self"], args["target"]):
        return None
    loss = _Loss(write, args, _ignored(write, args))
    index = write.call(_aten.unsqueeze.default, loss.classes(), loss.dim)
    log_probabilities = write.cast(loss.logits, write.dtype)
    targets = write.call(_aten.gather.default, log_probabilities, loss.dim, index)
    per_row = write.call(_aten.squeeze.dim, targets, loss.dim)
    return loss.reduced(write.call(_aten.neg.default, per_row))


def _is_class_per_row(logits: fx.Node, target: fx.Node) -> bool:
    return value(target).dim() == value(logits).dim() - 1


def _ignored(write: Rewriter, args: Arguments) -> fx.Node:
    return write.call(_aten.eq.Scalar, args["target"], args["ignore_index"])


@dataclass(frozen=True)
class _Loss:
    write: Rewriter
    args: Arguments
    ignored: fx.Node  #: True where a target is the ignored class.

    @property
    def logits(self) -> fx.Node:
        """Logits; for negative log-likelihood, log-probabilities."""
        node: fx.Node = self.args["self"]
        return node

    @property
    def dim(self) -> int:
        return min(1, value(self.logits).dim() - 1)

    def classes(self) -> fx.Node:
        return self.write.call(_aten.masked_fill.Scalar, self.args["target"], self.ignored, 0)

    def reduced(self, losses: fx.Node) -> fx.Node:
        call, weights = self.write.call, None
        if self.args["weight"] is not None:
            weights = call(_aten.index.Tensor, self.args["weight"], [self.classes()])
            losses = call(_aten.mul.Tensor, losses, weights)
        result = losses = call(_aten.masked_fill.Scalar, losses, self.ignored, 0.0)
        if self.args["reduction"] != _NONE:
            result = self._sum(losses)
        if self.args["reduction"] == _MEAN:
            if weights is None:
                counted = call(_aten.logical_not.default, self.ignored)
            else:
                counted = call(_aten.masked_fill.Scalar, weights, self.ignored, 0.0)
            result = call(_aten.div.Tensor, result, self._sum(counted, value(losses).dtype))
        return self.write.cast(result, self.write.dtype)

    def _sum(self, rows: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
        dims = list(range(value(rows).dim()))
        return self.write.call(_aten.sum.dim_IntList, rows, dims, False, dtype=dtype)


def _cross_entropy_per_row(loss: _Loss, smoothing: float) -> fx.Node:
    call, args = loss.write.call, loss.args
    size = value(loss.logits).shape[loss.dim]
    detached = call(_aten.detach.default, loss.logits)  # the loss is the same for any maximum
    maximum = call(_aten.amax.default, detached, [loss.dim], True)
    parts = call(
        torch.ops.partitioner.cross_entropy_parts.default,
        loss.logits,
        maximum,
        args["target"],
        args["ignore_index"],
        size,
        [0],
        [size],
    )
    total, target_logit = (call(operator.getitem, parts, index) for index in (0, 1))
    if smoothing:
        # All classes share a part of the target, which multiplies the mean of their logits.
        wide = loss.write.cast(loss.logits, value(total).dtype)
        shifted = call(_aten.sub.Tensor, wide, maximum)
        logit_sum = call(_aten.sum.dim_IntList, shifted, [loss.dim])
        of_target = call(_aten.mul.Tensor, target_logit, 1 - smoothing)
        of_all = call(_aten.mul.Tensor, logit_sum, smoothing / size)
        target_logit = call(_aten.add.Tensor, of_target, of_all)
    return call(_aten.sub.Tensor, call(_aten.log.default, total), target_logit)


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
    _aten.cross_entropy_loss.default: _cross_entropy,
    _aten.index.Tensor: _counted,
    _aten.nll_loss_nd.default: _negative_log_likelihood,
    _aten.rms_norm.default: _rms_norm,
    _aten.scaled_dot_product_attention.default: _attention,
}
