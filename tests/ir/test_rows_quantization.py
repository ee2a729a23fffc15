"""Rows of quantised storage."""

import pytest
from rows import Case, Draw, case, check_row, f32, ints, scalar, vec


def i8(*shape: int) -> Draw:
    """Quantised contents."""
    return ints(*shape, low=-120, high=120, dtype="int8")


def scales(*shape: int) -> Draw:
    """Quantisation steps."""
    return f32(*shape, low=0.01, high=0.1)


CASES = (
    case("QuantizeLinear", f32(4, 5), scalar(0.05, "float32"), opset=10, min_cuts=2),
    case("QuantizeLinear", f32(4, 5), vec(0.05, dtype="float32"), ints(1, dtype="uint8", low=0)),
    case(
        "QuantizeLinear",
        f32(2, 5, 3),
        scales(5),
        i8(5),
        opset=13,
        min_cuts=3,
    ),
    case(
        "QuantizeLinear",
        f32(3, 12),
        scales(3, 4),
        attrs={"axis": -1, "block_size": 3},
        opset=21,
        min_cuts=2,
    ),
    case("DequantizeLinear", i8(4, 5), scalar(0.05, "float32"), opset=10, min_cuts=2),
    case(
        "DequantizeLinear",
        i8(2, 3, 5),
        scales(5),
        i8(5),
        attrs={"axis": -1},
        opset=19,
        min_cuts=3,
    ),
    case(
        "DequantizeLinear",
        i8(8, 5),
        scales(4, 5),
        None,
        attrs={"axis": 0, "block_size": 2},
        opset=21,
        min_cuts=2,
    ),
    case(
        "DequantizeLinear",
        i8(7, 5),
        scales(4, 5),
        attrs={"axis": 0, "block_size": 2},
        opset=21,
        min_cuts=1,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_cut_gives_the_whole_result(case: Case) -> None:
    check_row(case)
