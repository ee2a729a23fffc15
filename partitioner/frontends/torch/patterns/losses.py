"""Replaces losses over classes by operators whose batch and, for cross entropy, vocabulary is cut.

The maximum of a row, the sum of its exponentials and the target's logit are reductions over the
vocabulary. The mean over a batch is a sum of losses over a count of targets (or over the sum of
their weights), so that no device needs to know which targets of the others count.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators
from partitioner.frontends.torch.patterns.rewrite import Arguments, Rewriter, value

_aten = torch.ops.aten
_NONE, _MEAN = 0, 1  #: PyTorch's numbers for `reduction`; 2 is the sum.


def cross_entropy(write: Rewriter, args: Arguments) -> fx.Node | None:
    """Cross entropy; with probabilities as targets, or both weights and smoothing, it stays."""
    logits, target = args["self"], args["target"]
    if args["weight"] is not None and args["label_smoothing"] != 0:
        return None
    if value(target).is_floating_point() or not _is_class_per_row(logits, target):
        return None
    loss = _Loss(write, args, _ignored(write, args))
    return loss.reduced(_cross_entropy_per_row(loss, args["label_smoothing"]))


def negative_log_likelihood(write: Rewriter, args: Arguments) -> fx.Node | None:
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
        """The target classes, 0 in the place of ignored ones."""
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
