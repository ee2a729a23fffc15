"""Rows of matrix products with packed or quantised factors."""

import pytest

from helpers.op_rows.rows import Case, Draw, case, check_opaque, check_row, f32, ints

MS = "com.microsoft::"
STEP = f32(low=0.5, high=1.0)


def u8(*shape: int, high: int = 200) -> Draw:
    """Packed or quantised contents, or zero points."""
    return ints(*shape, low=0, high=high, dtype="uint8")


def steps(*shape: int) -> Draw:
    """Quantisation steps."""
    return f32(*shape, low=0.01, high=0.1)


def packed(
    depth: int, columns: int, *others: Draw | None, rows: Draw, bits: int = 4, **options: int
) -> Case:
    """A MatMulNBits of blocks of 16; operands after A and B are given."""
    blocks = -(-depth // 16)
    attrs = {"K": depth, "N": columns, "bits": bits, "block_size": 16}
    weight = u8(columns, blocks, 16 * bits // 8, high=255)
    cuts = options.pop("min_cuts")
    return case(
        f"{MS}MatMulNBits",
        rows,
        weight,
        *others,
        attrs={**attrs, **options},
        opset=1,
        min_cuts=cuts,
        tolerance=2e-5,
    )


CASES = (
    packed(64, 6, steps(6, 4), rows=f32(5, 64), min_cuts=3),
    packed(64, 6, steps(24), rows=f32(2, 5, 64), min_cuts=4),
    packed(64, 6, steps(6, 4), u8(6, 2), rows=f32(5, 64), min_cuts=2),
    packed(64, 6, steps(24), u8(12), rows=f32(5, 64), min_cuts=2),
    packed(64, 6, steps(6, 4), f32(6, 4), rows=f32(5, 64), min_cuts=3),
    packed(64, 6, steps(6, 4), None, None, f32(6), rows=f32(5, 64), min_cuts=3),
    packed(40, 6, steps(6, 3), rows=f32(5, 40), min_cuts=2),
    packed(16, 6, steps(6, 1), rows=f32(5, 16), min_cuts=2),
    packed(64, 6, steps(6, 4), rows=f32(1, 64), bits=8, min_cuts=2),
    case(f"{MS}QGemm", u8(5, 4), STEP, u8(), u8(4, 3), STEP, u8(), opset=1, min_cuts=3),
    case(
        f"{MS}QGemm",
        *(u8(4, 5), STEP, u8(), u8(3, 4), steps(3), u8(3)),
        *(ints(3, dtype="int32"), STEP, u8()),
        attrs={"transA": 1, "transB": 1},
        opset=1,
        min_cuts=2,
    ),
    case(
        f"{MS}QGemm",
        *(u8(5, 4), STEP, u8(), u8(4, 3), steps(3), u8(3), ints(3, dtype="int32")),
        opset=1,
        min_cuts=3,
    ),
    case(
        f"{MS}MatMulIntegerToFloat",
        *(u8(2, 5, 4), u8(4, 3), STEP, steps(3), u8(), u8(3), f32(3)),
        opset=1,
        min_cuts=4,
    ),
    case(
        f"{MS}DynamicQuantizeMatMul",
        *(f32(5, 4), u8(4, 6), STEP, u8(), f32(6)),
        opset=1,
        min_cuts=1,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


def test_forms_without_a_rule() -> None:
    order = packed(64, 6, steps(6, 4), None, ints(64, low=0, high=3, dtype="int32"),
                   rows=f32(5, 64), min_cuts=0)  # fmt: skip
    assert "g_idx" in check_opaque(order)
