"""Bags of rows of a table, which `frontends.torch.patterns.composites` puts in place of PyTorch's.

Rows v of the table and indices n are sums of the result, or a maximum over v; bags b are cut in
results, and the gradients of the table are sums over them. Offsets are whole on every device: where
a bag ends is told by the next one. Means and maxima need all indices of a bag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from partitioner.ir.ops.local import in_whole, same_node
from partitioner.ir.ops.rules.indexing import moved_rows
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule

SUM, MAX = 0, 2  #: PyTorch's numbers of modes.


def _rule(
    view: OpView,
    tensors: Sequence[str],
    result: str,
    reduce: Mapping[str, str],
    sums: Sequence[int] = (),
) -> Rule:
    whole = "n" if view.attr("mode") != SUM else ""
    bags, size = view.int_attr("bags", 0), view.int_attr("size", 0)  # of the whole
    here = {"b": sum(view.ints("bag_lengths") or ()), "v": sum(view.ints("lengths") or ())}
    return view.rule(
        [*tensors, "n", None, "n"],
        [result],
        sizes=here,
        reduce={name: how for name, how in reduce.items() if name not in whole},
        whole=whole,
        points="n v b f",
        flops=2 / max(bags * size, 1),  # an index is of one row, and in one bag
        sums=sums,
    )


def _local(
    view: OpView, local: LocalView, rows: tuple[str, int], bags: tuple[str, int], indices: int
) -> LocalOp:
    """A device is told which rows, bags and indices it has; each by a tensor that has them."""
    sides = {"in": local.regions, "out": local.out_regions}
    return same_node(
        view,
        **in_whole(view, sides[rows[0]][rows[1]][0]),
        **in_whole(view, local.regions[indices][0], "index_"),
        **in_whole(view, sides[bags[0]][bags[1]][0], "bag_"),
    )


def _bag(view: OpView) -> Rule:
    """``v f, n, _, n -> b f``."""
    how = "max" if view.attr("mode") == MAX else "sum"
    return _rule(view, ["v f"], "b f", {"v": how, "n": "sum"}, sums=[0] if how == "sum" else [])


def _row(
    tensors: Sequence[str],
    result: str,
    reduce: Mapping[str, str],
    rows: tuple[str, int],
    sums: Sequence[int] = (0,),
) -> OpRow:
    """Row of ``b f, (tensors), n, _, n -> result``; `rows` is the tensor that has the table's."""
    rule = partial(_rule, tensors=tensors, result=result, reduce=reduce, sums=sums)
    localize = partial(_local, rows=rows, bags=("in", 0), indices=len(tensors))
    return OpRow(rule, localize, where=True)


ROWS: Mapping[str, OpRow] = {
    "partitioner::embedding_bag": OpRow(
        _bag,
        partial(_local, rows=("in", 0), bags=("out", 0), indices=1),
        moved=moved_rows,
        where=True,
    ),
    "partitioner::embedding_bag_backward": _row(
        ["b f"], "v f", {"b": "sum", "n": "sum"}, ("out", 0)
    ),
    "partitioner::embedding_bag_max_backward": _row(
        ["b f", "b f"], "v f", {"b": "sum"}, ("out", 0)
    ),
    # The place of the first maximum, wherever its row is.
    "partitioner::embedding_bag_places": _row(
        ["b f", "v f"], "b f", {"v": "min"}, ("in", 1), sums=()
    ),
    "partitioner::embedding_bag_weights_backward": _row(
        ["b f", "v f"], "n", dict.fromkeys("bvf", "sum"), ("in", 1)
    ),
}
