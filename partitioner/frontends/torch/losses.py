"""Losses over classes in parts: batch and, for cross entropy, vocabulary may be cut.

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
from partitioner.frontends.torch.rewrite import Arguments, Rewriter, replace_calls, value

_aten = torch.ops.aten
_NONE, _MEAN = 0, 1  #: PyTorch's numbers for `reduction`; 2 is the sum.


def replace_losses(module: fx.GraphModule) -> int:
    """Rewrite cross entropy and negative log-likelihood with classes as targets.

    Cross entropy with probabilities as targets, or with both weights and smoothing, stays.

    Returns:
        How many were rewritten.
    """
    forms = {
        _aten.cross_entropy_loss.default: _cross_entropy,
        _aten.nll_loss_nd.default: _likelihood,
    }
    return replace_calls(module, forms)


def _cross_entropy(write: Rewriter, args: Arguments) -> fx.Node | None:
    logits, target = args["self"], args["target"]
    both = args["weight"] is not None and args["label_smoothing"] != 0
    if both or value(target).is_floating_point() or not _fits(logits, target):
        return None
    loss = _Loss.of(write, args)
    return loss.reduced(_entropies(loss, args["label_smoothing"]))


def _likelihood(write: Rewriter, args: Arguments) -> fx.Node | None:
    if not _fits(args["self"], args["target"]):
        return None
    loss = _Loss.of(write, args)
    places = write.call(_aten.unsqueeze.default, loss.chosen_class(), loss.dim)
    wide = write.cast(loss.logits, write.dtype)
    found = write.call(_aten.gather.default, wide, loss.dim, places)
    picked = write.call(_aten.squeeze.dim, found, loss.dim)
    return loss.reduced(write.call(_aten.neg.default, picked))


def _fits(logits: fx.Node, target: fx.Node) -> bool:
    """Whether there is one target a row."""
    return value(target).dim() == value(logits).dim() - 1


@dataclass(frozen=True)
class _Loss:
    """What the losses of one call are made of, and how they are joined."""

    write: Rewriter
    logits: fx.Node
    target: fx.Node
    weight: fx.Node | None
    reduction: int
    ignore_index: int
    ignored: fx.Node  #: Which targets do not count.

    @classmethod
    def of(cls, write: Rewriter, args: Arguments) -> _Loss:
        """From the arguments of a call."""
        ignored = write.call(_aten.eq.Scalar, args["target"], args["ignore_index"])
        return cls(
            write=write,
            logits=args["self"],
            target=args["target"],
            weight=args["weight"],
            reduction=args["reduction"],
            ignore_index=args["ignore_index"],
            ignored=ignored,
        )

    @property
    def dim(self) -> int:
        """Dim of the classes."""
        return min(1, value(self.logits).dim() - 1)

    def chosen_class(self) -> fx.Node:
        """The targets, 0 for those that are ignored."""
        return self.write.call(_aten.masked_fill.Scalar, self.target, self.ignored, 0)

    def reduced(self, losses: fx.Node) -> fx.Node:
        """The losses of all rows, weighted and joined."""
        call = self.write.call
        weights = self._weights()
        if weights is not None:
            losses = call(_aten.mul.Tensor, losses, weights)
        losses = call(_aten.masked_fill.Scalar, losses, self.ignored, 0.0)
        found = losses if self.reduction == _NONE else self._total(losses)
        if self.reduction == _MEAN:
            found = call(_aten.div.Tensor, found, self._count(weights, value(losses).dtype))
        return self.write.cast(found, self.write.dtype)

    def _weights(self) -> fx.Node | None:
        """Weight of each row's class."""
        if self.weight is None:
            return None
        return self.write.call(_aten.index.Tensor, self.weight, [self.chosen_class()])

    def _total(self, rows: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
        dims = list(range(value(rows).dim()))
        return self.write.call(_aten.sum.dim_IntList, rows, dims, False, dtype=dtype)

    def _count(self, weights: fx.Node | None, dtype: torch.dtype) -> fx.Node:
        """Targets that count, or the sum of their weights."""
        call = self.write.call
        if weights is None:
            return self._total(call(_aten.logical_not.default, self.ignored), dtype)
        return self._total(call(_aten.masked_fill.Scalar, weights, self.ignored, 0.0), dtype)


def _entropies(loss: _Loss, smoothing: float) -> fx.Node:
    """The cross entropy of each row, in at least float32."""
    call = loss.write.call
    size = value(loss.logits).shape[loss.dim]
    fixed = call(_aten.detach.default, loss.logits)  # the loss is the same for any maximum
    maximum = call(_aten.amax.default, fixed, [loss.dim], True)
    parts = call(
        torch.ops.partitioner.cross_entropy_parts.default,
        *(loss.logits, maximum, loss.target, loss.ignore_index, size, [0], [size]),
    )
    total, chosen = (call(operator.getitem, parts, index) for index in (0, 1))
    if smoothing:
        # A share of the target goes to all classes: it meets the mean of their logits.
        wide = loss.write.cast(loss.logits, value(total).dtype)
        less = call(_aten.sub.Tensor, wide, maximum)
        mean = call(_aten.sum.dim_IntList, less, [loss.dim])
        shares = ((chosen, 1 - smoothing), (mean, smoothing / size))
        own, others = (call(_aten.mul.Tensor, node, share) for node, share in shares)
        chosen = call(_aten.add.Tensor, own, others)
    return call(_aten.sub.Tensor, call(_aten.log.default, total), chosen)
