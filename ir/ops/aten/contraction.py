"""Matrix products."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.contraction import matmul
from partitioner.ir.ops.dims import names
from partitioner.ir.ops.table import OpaqueError, OpRow, OpView
from partitioner.ir.rule import Rule


def addmm(view: OpView) -> Rule:
    """``bias + m k, k n -> m n``; the bias counts once where k is cut.

    Raises:
        OpaqueError: beta or alpha is not 1.
    """
    return _added(view, ["m", "k"], ["k", "n"], ["m", "n"])


def addmv(view: OpView) -> Rule:
    """``bias + m k, k -> m``.

    Raises:
        OpaqueError: beta or alpha is not 1.
    """
    return _added(view, ["m", "k"], ["k"], ["m"])


def addr(view: OpView) -> Rule:
    """``bias + m, n -> m n``.

    Raises:
        OpaqueError: beta or alpha is not 1.
    """
    return _added(view, ["m"], ["n"], ["m", "n"])


def baddbmm(view: OpView) -> Rule:
    """``bias + b m k, b k n -> b m n``.

    Raises:
        OpaqueError: beta or alpha is not 1.
    """
    return _added(view, ["b", "m", "k"], ["b", "k", "n"], ["b", "m", "n"])


def addbmm(view: OpView) -> Rule:
    """``bias + b m k, b k n -> m n``.

    Raises:
        OpaqueError: beta or alpha is not 1.
    """
    return _added(view, ["b", "m", "k"], ["b", "k", "n"], ["m", "n"])


def _added(view: OpView, left: list[str], right: list[str], result: list[str]) -> Rule:
    """Rule of a product and a bias that broadcasts to it; what the result lacks is summed."""
    if view.attr("beta") != 1 or view.attr("alpha") != 1:
        raise OpaqueError("beta or alpha is not 1")
    sizes = view.shape(0)
    last = result[len(result) - len(sizes) :]
    bias = ["1" if size == 1 else name for size, name in zip(sizes, last, strict=True)]
    loops = dict.fromkeys((*left, *right))
    return Rule.of(
        [bias, left, right],
        [result],
        view.shapes,
        view.out_shapes,
        reduce={name: "sum" for name in loops if name not in result},
        addends={0},
        points=loops,
        flops=2,
    )


def linear(view: OpView) -> Rule:
    """``.. k, n k, n -> .. n``, the weights transposed."""
    rows = names("m", len(view.shape(0)) - 1)
    columns = ["n"] if len(view.shape(1)) > 1 else []
    return Rule.of(
        view.present([[*rows, "k"], [*columns, "k"], columns]),
        [[*rows, *columns]],
        view.shapes,
        view.out_shapes,
        reduce={"k": "sum"},
        addends={2},
        flops=2,
    )


def trilinear(view: OpView) -> Rule:
    """Product of three tensors, each with dims of size 1 put in, summed over `sumdim`."""
    rank = len(view.shape(0)) + len(view.ints("expand1") or ())
    dims, summed = names("d", rank), set(view.ints("sumdim") or ())
    operands = []
    for index in range(3):
        added = set(view.ints(f"expand{index + 1}") or ())
        kept = [name for i, name in enumerate(dims) if i not in added]
        sizes = view.shape(index)
        operands.append(["1" if n == 1 else name for n, name in zip(sizes, kept, strict=True)])
    held = {name for names_ in operands for name in names_}
    result = [name if name in held else "1" for i, name in enumerate(dims) if i not in summed]
    return Rule.of(
        operands,
        [result],
        view.shapes,
        view.out_shapes,
        reduce={dims[i]: "sum" for i in summed},
        flops=3,
    )


ROWS: Mapping[str, OpRow] = {
    "aten::_trilinear": OpRow(trilinear),
    "aten::addbmm": OpRow(addbmm),
    "aten::addmm": OpRow(addmm),
    "aten::addmv": OpRow(addmv),
    "aten::addr": OpRow(addr),
    "aten::baddbmm": OpRow(baddbmm),
    "aten::bmm": OpRow(matmul),
    "aten::dot": OpRow(matmul),
    "aten::linear": OpRow(linear),
    "aten::matmul": OpRow(matmul),
    "aten::mm": OpRow(matmul),
    "aten::mv": OpRow(matmul),
}
