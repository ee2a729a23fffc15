"""Cross entropy of an exported program in parts of which batch and vocabulary may be cut."""

from __future__ import annotations

import operator

import torch
from torch import fx

import partitioner.backends.torch.library  # noqa: F401 - registers our own operators
from partitioner.frontends.torch_rewrite import Arguments, Rewriter, replace_calls, value

_aten = torch.ops.aten
_MEAN, _SUM = 1, 2  #: PyTorch's numbers for `reduction`; 0 keeps a loss a row.


def replace_cross_entropy(module: fx.GraphModule) -> int:
    """Rewrite every cross entropy with classes as targets, without weights and smoothing.

    The maximum of a row, the sum of its exponentials and the target's logit are reductions over
    the vocabulary; the mean is a sum of losses over a count of targets.

    Returns:
        How many were rewritten.
    """
    return replace_calls(module, {_aten.cross_entropy_loss.default: _cross_entropy})


def _cross_entropy(write: Rewriter, args: Arguments) -> fx.Node | None:
    logits, target = args["self"], args["target"]
    if (
        args["weight"] is not None
        or args["label_smoothing"] != 0
        or value(target).is_floating_point()
        or value(target).dim() != value(logits).dim() - 1
    ):
        return None
    return _reduced(write, args, _losses(write, args))


def _losses(write: Rewriter, args: Arguments) -> fx.Node:
    """The loss of each row, in float32; 0 where the target is ignored."""
    logits, target = args["self"], args["target"]
    dim = min(1, value(logits).dim() - 1)
    size = value(logits).shape[dim]
    fixed = write.call(_aten.detach.default, logits)  # the loss is the same for any maximum
    maximum = write.call(_aten.amax.default, fixed, [dim], True)
    parts = write.call(
        torch.ops.partitioner.cross_entropy_parts.default,
        *(logits, maximum, target, args["ignore_index"], size, [0], [size]),
    )
    total, chosen = (write.call(operator.getitem, parts, index) for index in (0, 1))
    losses = write.call(_aten.sub.Tensor, write.call(_aten.log.default, total), chosen)
    ignored = write.call(_aten.eq.Scalar, target, args["ignore_index"])
    return write.call(_aten.masked_fill.Scalar, losses, ignored, 0.0)


def _reduced(write: Rewriter, args: Arguments, losses: fx.Node) -> fx.Node:
    found = losses
    dims = list(range(value(losses).dim()))
    if args["reduction"] in (_MEAN, _SUM):
        found = write.call(_aten.sum.dim_IntList, losses, dims)
    if args["reduction"] == _MEAN:
        counted = write.call(_aten.ne.Scalar, args["target"], args["ignore_index"])
        kind = value(losses).dtype
        count = write.call(_aten.sum.dim_IntList, counted, dims, False, dtype=kind)
        found = write.call(_aten.div.Tensor, found, count)
    kind = value(args["self"]).dtype
    return found if value(found).dtype == kind else write.call(_aten.to.dtype, found, kind)
