"""Matrix products of ONNX Runtime whose factors are packed or quantised (``com.microsoft``)."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.local import same_node
from partitioner.ir.ops.onnx.contraction import gemm_dims, setting
from partitioner.ir.ops.rules.contraction import contraction, matmul_dims
from partitioner.ir.ops.rules.dims import broadcast, compound, names
from partitioner.ir.ops.signature import OpaqueError
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule


def _packed_matmul(view: OpView) -> Rule:
    """MatMulNBits: B is ``n blocks bytes``; a block of k has a scale and a zero point.

    Operands: A, B, scales, zero points, order of the blocks, bias. Scales and zero points have a
    row for each n, or are flat. Packed zero points, and a last block that k does not fill, keep k
    whole.
    """
    if view.int_attr("weight_prepacked", 0):
        raise OpaqueError("weight_prepacked is set")
    if view.type(4) is not None:
        raise OpaqueError("the blocks are in another order (g_idx)")
    depth, columns = view.int_attr("K", 0), view.int_attr("N", 0)
    size = view.int_attr("block_size", 0)
    if columns < 1 or view.rank(1) != 3:
        raise OpaqueError(f"N is {columns} and B has shape {view.shape(1)}")
    blocks = view.shape(1)[1]
    zeros = view.type(3)
    by_block = depth == blocks * size and (zeros is None or zeros.shape == view.shape(2))
    # k counts blocks, of e elements each, or else elements, beside the blocks j.
    inner = {"k": blocks, "e": size} if by_block else {"k": depth}
    block = "k" if by_block else "j"
    width = 0 if zeros is None else zeros.numel // columns
    batch = broadcast(view.shape()[:-1], names("b", view.rank() - 1))
    loops = [name for name in batch if name != "1"]
    return view.rule(
        [
            [*batch, compound(**inner)],
            ["n", compound(**{block: blocks}), "w"],
            _by_row(view, 2, n=columns, **{block: blocks}),
            _by_row(view, 3, n=columns, **{block if by_block else "z": width}),
            None,
            ["n"],
        ],
        [[*batch, "n"]],
        sizes={"n": columns, **inner, "j": blocks, "z": width},
        reduce=["k"] if by_block else (),
        whole=["e", "w"] if by_block else ["j", "k", "w", "z"],
        addends={5},
        points=[*loops, "n", *(name for name, length in inner.items() if length != 1)],
        flops=2,
    )


def _by_row(view: OpView, index: int, **factors: int) -> list[str]:
    """Dims of scales or zero points, ``n blocks`` or ``(n blocks)``."""
    if view.type(index) is not None and view.rank(index) == 1:
        return [compound(**factors)]
    return [name if size != 1 else "1" for name, size in factors.items()]


def _quantised_gemm(view: OpView) -> Rule:
    """QGemm: A, its scale and zero point, B, C, those of the result.

    B's scale and zero point are one, or one a column. A bias of quantised sums is added once; k is
    whole where the sum is rounded to a quantised result.
    """
    left, right, result = gemm_dims(view, 3)
    bias = view.type(6)
    operands = [
        *(left, None, None, right, setting(view, 4, [], "n"), setting(view, 5, [], "n")),
        None if bias is None else broadcast(bias.shape, result),
    ]
    return contraction(view, operands, result, rounded=view.type(8) is not None, addends={6})


def _integer_to_float(view: OpView) -> Rule:
    """MatMulIntegerToFloat: A, B, their scales, their zero points, bias."""
    left, right, result = matmul_dims(view.shape(0), view.shape(1), view.out_shape)
    if any(view.type(index) is not None and view.rank(index) > 1 for index in (2, 4)):
        raise OpaqueError("a scale or zero point for each row of A")
    if any(kind is not None and kind.shape not in {(), (1,)} for kind in map(view.type, (2, 4))):
        raise OpaqueError("a scale or zero point for each row of A")
    operands = [
        left,
        right,
        None,
        setting(view, 3, [], "n"),
        None,
        setting(view, 5, [], "n"),
        ["n"],
    ]
    return contraction(view, operands, result, addends={6})


def _dynamic(view: OpView) -> Rule:
    """DynamicQuantizeMatMul: A, B, its scale and zero point, bias; all of A makes A's scale."""
    left, right, result = matmul_dims(view.shape(0), view.shape(1), view.out_shape)
    operands = [left, right, setting(view, 2, [], "n"), setting(view, 3, [], "n"), ["n"]]
    factors = {name for dims in (left, right) for name in dims if name != "1"}
    return view.rule(operands, [result], whole=factors - {"n"}, flops=2)


ROWS: Mapping[str, OpRow] = {
    "com.microsoft::DynamicQuantizeMatMul": OpRow(_dynamic),
    "com.microsoft::MatMulIntegerToFloat": OpRow(_integer_to_float),
    "com.microsoft::MatMulNBits": OpRow(
        _packed_matmul,
        lambda view, local: same_node(view, K=local.shapes[0][-1], N=local.out_shapes[0][-1]),
    ),
    "com.microsoft::QGemm": OpRow(_quantised_gemm),
}
