"""Matrix products, and decompositions of batches of matrices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from partitioner.ir.ops.rules.contraction import contraction, matmul
from partitioner.ir.ops.signature import OpaqueError, broadcast, names, pattern
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule


def _added(view: OpView, left: str, right: str, result: str) -> Rule:
    """A product and a bias that broadcasts to it; what the result lacks is summed."""
    if view.attr("beta") != 1 or view.attr("alpha") != 1:
        raise OpaqueError("beta or alpha is not 1")
    loops = list(dict.fromkeys(f"{left} {right}".split()))
    bias = broadcast(view.shape(), result.split())
    return view.rule(
        [bias, left, right], [result], reduce=loops, addends={0}, points=loops, flops=2
    )


def _linear(view: OpView) -> Rule:
    """``.. k, n k, n -> .. n``, the weights transposed."""
    rows, columns = names("m", view.rank() - 1), ["n"] if view.rank(1) > 1 else []
    operands = [[*rows, "k"], [*columns, "k"], columns]
    return contraction(view, operands, [*rows, *columns], addends={2})


def _trilinear(view: OpView) -> Rule:
    """Product of three tensors, each with dims of size 1 put in, summed over `sumdim`."""
    added = [set(view.ints(f"expand{index}") or ()) for index in (1, 2, 3)]
    dims, summed = names("d", view.rank() + len(added[0])), set(view.ints("sumdim") or ())
    operands = [
        broadcast(view.shape(index), [name for i, name in enumerate(dims) if i not in new])
        for index, new in enumerate(added)
    ]
    factors = {name for operand in operands for name in operand}
    result = [name if name in factors else "1" for i, name in enumerate(dims) if i not in summed]
    return contraction(view, operands, result, flops=3)


def _grouped(view: OpView, *, backward: bool = False) -> Rule:
    """``s k, e k n -> s n``: which rows are of which group is known at run time only."""
    options: dict[str, Any] = {"whole": "s e", "points": "s e k n"}
    flops = 2 / max(view.shape(1)[0], 1)
    if not backward:
        return view.rule("s k, e k n, _", "s n", reduce="k", flops=flops, **options)
    return view.rule("s k, e k n, _, s n", "s k, e k n", summed="n", flops=2 * flops, **options)


ROWS: Mapping[str, OpRow] = {
    "transformers::grouped_mm_fallback": OpRow(_grouped),
    "transformers::grouped_mm_fallback_backward": OpRow(partial(_grouped, backward=True)),
    **{f"aten::{op}": OpRow(matmul) for op in ("dot", "matmul", "mv")},
    "aten::bmm": OpRow(matmul, adds="baddbmm_"),
    "aten::mm": OpRow(matmul, adds="addmm_"),
    "aten::_trilinear": OpRow(_trilinear),
    "aten::addbmm": OpRow(partial(_added, left="b m k", right="b k n", result="m n")),
    "aten::addmm": OpRow(partial(_added, left="m k", right="k n", result="m n")),
    "aten::addmv": OpRow(partial(_added, left="m k", right="k", result="m")),
    "aten::addr": OpRow(partial(_added, left="m", right="n", result="m n")),
    "aten::baddbmm": OpRow(partial(_added, left="b m k", right="b k n", result="b m n")),
    "aten::linear": OpRow(_linear),
    **{
        f"aten::linalg_{op}": OpRow(pattern(f"b.. m n -> b.. m n, {rest}", whole="m n k"))
        for op, rest in (("cholesky_ex", "b.."), ("inv_ex", "b.."), ("lu_factor_ex", "b.. k, b.."))
    },
}
