"""Matrix products, their quantised, packed and fused relatives, and Einsum."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from partitioner.ir.ops.local import same_node
from partitioner.ir.ops.rules.contraction import contraction, matmul, matmul_dims
from partitioner.ir.ops.signature import OpaqueError, broadcast, compound, names
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule


def _fused_matmul(view: OpView) -> Rule:
    """MatMul with factors of two or more dims transposed, and scaled."""
    if view.int_attr("transBatchA", 0) or view.int_attr("transBatchB", 0):
        raise OpaqueError("transBatchA or transBatchB is set")
    return matmul(
        view,
        transpose_a=bool(view.int_attr("transA", 0)) and view.rank(0) > 1,
        transpose_b=bool(view.int_attr("transB", 0)) and view.rank(1) > 1,
    )


def _quantised(view: OpView, operands: str, *, rounded: bool = False) -> Rule:
    """Product of quantised factors a and b, with a bias c that is added once.

    A scale or zero point is named after what it is of, a, b or the result y, and a line of that,
    or a dot if it is one for all: ``am``, ``a.``. Where the sum is `rounded` to a quantised
    result, k is whole.
    """
    words = operands.split()
    dims = dict(zip("aby", gemm_dims(view, words.index("b")), strict=True))
    listed: list[list[str] | None] = []
    for index, word in enumerate(words):
        kind = view.type(index)
        if word == "c":
            listed.append(None if kind is None else broadcast(kind.shape, dims["y"]))
        else:
            listed.append(dims.get(word) or setting(view, index, dims[word[0]], word[1]))
    addends = [words.index("c")] if "c" in words else []
    return contraction(view, listed, dims["y"], rounded=rounded, addends=addends)


def setting(view: OpView, index: int, dims: list[str], line: str) -> list[str] | None:
    """Dims of a scale or zero point: one for all, one a row or column, or of the tensor's rank."""
    setting = view.type(index)
    if setting is None:
        return None
    many = setting.rank > 1 and setting.rank != len(dims)
    if many or (line == "." and setting.numel > 1):
        raise OpaqueError(
            f"operand {index} of shape {setting.shape} has a scale form without a rule"
        )
    return broadcast(setting.shape, dims if setting.rank > 1 else [line])


def gemm_dims(view: OpView, second: int) -> tuple[list[str], list[str], list[str]]:
    """Dims of operands 0 and `second`, either of which may be transposed, and of the result."""
    return matmul_dims(
        view.shape(0),
        view.shape(second),
        view.out_shape,
        transpose_a=bool(view.int_attr("transA", 0)),
        transpose_b=bool(view.int_attr("transB", 0)),
    )


def _gemm(view: OpView, *, rounded: bool = False) -> Rule:
    """``m k, k n, (m|1) (n|1) -> m n``; `rounded` if an activation needs the whole sum."""
    left, right, result = gemm_dims(view, 1)
    operands = [left, right]
    if view.type(2) is not None:
        operands.append(broadcast(view.shape(2), result))
    return contraction(view, operands, result, rounded=rounded, addends={2})


def _einsum(view: OpView) -> Rule:
    """Letters are loops, of one nest; runtimes contract operands in pairs, in fewer FLOPs."""
    equation = str(view.attr("equation", ""))
    terms, result = _terms(equation, [len(shape or ()) for shape in view.shapes])
    for term in (*terms, result):
        if len(set(term)) != len(term):
            raise OpaqueError(f"equation {equation!r} takes a diagonal")
    operands = [broadcast(s or (), term) for term, s in zip(terms, view.shapes, strict=True)]
    flops = 2.0 if len(terms) > 1 else 1.0
    return contraction(view, operands, broadcast(view.out_shape, result), flops=flops)


def _terms(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Factor names of each operand and of the result; ``...`` becomes ``e0 e1 ...``."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    widths = [rank - len(text.replace("...", "")) for text, rank in zip(texts, ranks, strict=True)]
    most = max((w for w, text in zip(widths, texts, strict=True) if "..." in text), default=0)
    terms = [_letters(text, width, most) for text, width in zip(texts, widths, strict=True)]
    if not arrow:  # the ellipsis, then letters that occur once, sorted
        counts = Counter(re.findall(r"[A-Za-z]", left))
        once = sorted(letter for letter, count in counts.items() if count == 1)
        right = "..." * ("..." in left) + "".join(once)
    return terms, _letters(right, most, most)


def _letters(text: str, width: int, most: int) -> list[str]:
    """Names of one term whose ellipsis covers the last `width` of `most` dims."""
    letters: list[str] = []
    for part in re.findall(r"\.\.\.|[A-Za-z]", text):
        ellipsis = [f"e{i}" for i in range(most - width, most)]
        letters += ellipsis if part == "..." else [f"i{part}"]
    return letters


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


def _dynamic(view: OpView) -> Rule:
    """DynamicQuantizeMatMul: A, B, its scale and zero point, bias; all of A makes A's scale."""
    left, right, result = matmul_dims(view.shape(0), view.shape(1), view.out_shape)
    operands = [left, right, setting(view, 2, [], "n"), setting(view, 3, [], "n"), ["n"]]
    factors = {name for dims in (left, right) for name in dims if name != "1"}
    return view.rule(operands, [result], whole=factors - {"n"}, flops=2)


ROWS: Mapping[str, OpRow] = {
    "Einsum": OpRow(_einsum),
    "Gemm": OpRow(_gemm),
    "MatMul": OpRow(matmul),
    "MatMulInteger": OpRow(partial(_quantised, operands="a b am bn")),
    "QLinearMatMul": OpRow(partial(_quantised, operands="a am am b bn bn ym yn", rounded=True)),
    "com.microsoft::FusedGemm": OpRow(lambda view: _gemm(view, rounded=True)),
    "com.microsoft::FusedMatMul": OpRow(_fused_matmul),
    "com.microsoft::DynamicQuantizeMatMul": OpRow(_dynamic),
    "com.microsoft::MatMulIntegerToFloat": OpRow(partial(_quantised, operands="a b a. bn a. bn c")),
    "com.microsoft::MatMulNBits": OpRow(
        _packed_matmul,
        lambda view, local: same_node(view, K=local.shapes[0][-1], N=local.out_shapes[0][-1]),
    ),
    "com.microsoft::QGemm": OpRow(  # sums, where the result has no scale and zero point
        lambda view: _quantised(view, "a a. a. b bn bn c", rounded=view.type(8) is not None)
    ),
}
