"""Layers of experts as single nodes, which `frontends.torch.experts` puts in their place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from partitioner.ir.ops.local import interval_attrs, same_node
from partitioner.ir.ops.rules.experts import experts, experts_backward
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView


def _local_experts(view: OpView, local: LocalView, up: int) -> LocalOp:
    """A device is told which experts it has; `up` is the operand of their first products."""
    return same_node(view, **interval_attrs(local.regions[up][0]))


ROWS: Mapping[str, OpRow] = {
    "partitioner::experts": OpRow(experts, partial(_local_experts, up=3), where=True),
    "partitioner::experts_backward": OpRow(
        partial(experts_backward, sums=[0]), partial(_local_experts, up=4), where=True
    ),
}
