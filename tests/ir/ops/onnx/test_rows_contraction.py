"""Rows of matrix products."""

import pytest

from helpers.op_rows.rows import Case, Draw, case, check_opaque, check_row, f32, ints


def u8(*shape: int) -> Draw:
    """Quantised contents or zero points."""
    return ints(*shape, low=0, high=60, dtype="uint8")


def steps(*shape: int) -> Draw:
    """Quantisation steps."""
    return f32(*shape, low=0.01, high=0.1)


def step() -> tuple[Draw, Draw]:
    """One step and zero point for a whole tensor."""
    return f32(low=0.5, high=1.0), u8()


def quantised(*shape: int) -> tuple[Draw, Draw, Draw]:
    """Contents, one step and one zero point."""
    return u8(*shape), steps(), u8()


def einsum(equation: str, *inputs: Draw, min_cuts: int) -> Case:
    """An Einsum node."""
    return case("Einsum", *inputs, attrs={"equation": equation}, opset=12, min_cuts=min_cuts)


CASES = (
    case("MatMul", f32(5, 4), f32(4, 3), min_cuts=3),
    case("MatMul", f32(7), f32(7, 3), min_cuts=2),
    case("MatMul", f32(5, 7), f32(7), min_cuts=2),
    case("MatMul", f32(7), f32(7), min_cuts=1),
    case("MatMul", f32(2, 1, 5, 4), f32(3, 4, 3), min_cuts=5, opset=13),
    case("MatMul", f32(4, 3), f32(6, 3, 2), min_cuts=4, opset=9),
    case("Gemm", f32(5, 4), f32(4, 3), f32(3), min_cuts=3),
    case("Gemm", f32(4, 5), f32(3, 4), f32(5, 1), attrs={"transA": 1, "transB": 1}, min_cuts=3),
    case("Gemm", f32(5, 4), f32(4, 3), f32(), attrs={"alpha": 0.5, "beta": 2.0}, min_cuts=3),
    case("Gemm", f32(5, 7), f32(7, 3), f32(1, 3), min_cuts=3),
    case("Gemm", f32(5, 7), f32(7, 3), f32(1), min_cuts=3),
    case("Gemm", f32(5, 7), f32(7, 3), f32(5, 3), min_cuts=3, opset=9),
    case("Gemm", f32(5, 7), f32(7, 3), min_cuts=3, opset=11),
    case("Gemm", f32(5, 7), f32(7, 3), None, min_cuts=3, opset=13),
    case("MatMulInteger", u8(5, 4), u8(4, 3), opset=10, min_cuts=3),
    case("MatMulInteger", u8(5, 4), u8(4, 3), u8(), u8(3), opset=10, min_cuts=3),
    case("MatMulInteger", u8(2, 5, 4), u8(2, 4, 3), None, u8(2, 1, 3), opset=10, min_cuts=4),
    case("QLinearMatMul", *quantised(5, 4), *quantised(4, 3), *step(), opset=10, min_cuts=2),
    case("QLinearMatMul", *quantised(2, 5, 4), *quantised(2, 4, 3), *step(), min_cuts=3),
    case("QLinearMatMul", *quantised(5, 4), u8(4, 3), steps(3), u8(3), *step(), min_cuts=2),
    case("com.microsoft::FusedMatMul", f32(2, 5, 4), f32(4, 3), opset=1, min_cuts=4),
    case(
        "com.microsoft::FusedMatMul",
        f32(2, 4, 5),
        f32(2, 3, 4),
        attrs={"transA": 1, "transB": 1, "alpha": 0.5},
        opset=1,
        min_cuts=4,
    ),
    case(
        "com.microsoft::FusedGemm",
        f32(5, 4),
        f32(4, 3),
        f32(3),
        attrs={"activation": "Relu"},
        opset=1,
        min_cuts=2,
    ),
    einsum("ij,jk->ik", f32(5, 4), f32(4, 3), min_cuts=3),
    einsum("bhqd,bhkd->bhqk", f32(2, 3, 5, 4), f32(2, 3, 6, 4), min_cuts=5),
    einsum("...ij,...jk", f32(3, 2, 5, 4), f32(3, 2, 4, 3), min_cuts=5),
    einsum("i,j", f32(5), f32(4), min_cuts=2),
    einsum("ij->j", f32(5, 4), min_cuts=2),
    einsum("ij->ji", f32(5, 1), min_cuts=1),
    einsum("ij,jk,k->i", f32(5, 4), f32(4, 3), f32(3), min_cuts=3),
    einsum("ij , jk -> k", f32(5, 4), f32(4, 3), min_cuts=3),
    einsum("bij,bjk->bik", f32(1, 5, 4), f32(3, 4, 2), min_cuts=4),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


def test_a_diagonal_is_opaque() -> None:
    assert "takes a diagonal" in check_opaque(einsum("ii->i", f32(4, 4), min_cuts=0))


def test_transposed_batches_are_opaque() -> None:
    node = case(
        "com.microsoft::FusedMatMul",
        f32(5, 2, 4),
        f32(2, 4, 3),
        attrs={"transBatchA": 1},
        opset=1,
    )
    assert "transBatchA" in check_opaque(node)
