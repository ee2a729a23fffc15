"""Rows of normalizations."""

import pytest

from helpers.op_rows.rows import Case, Draw, case, check_opaque, check_row, f32


def variance(*shape: int) -> Draw:
    """Contents that are a variance."""
    return f32(*shape, low=0.5, high=2)


BATCH = (f32(5), f32(5), f32(5), variance(5))
MS = "com.microsoft::"

CASES = (
    case("BatchNormalization", f32(3, 5, 2, 2), *BATCH, opset=7, min_cuts=4),
    case("BatchNormalization", f32(3, 5, 7), *BATCH, attrs={"epsilon": 0.1}, opset=9, min_cuts=3),
    case("BatchNormalization", f32(3, 5), *BATCH, opset=15, min_cuts=2),
    case("BatchNormalization", f32(3, 5, 2, 3, 2), *BATCH, opset=14, min_cuts=5),
    case("LayerNormalization", f32(3, 5, 4), f32(4), f32(4), opset=17, min_cuts=2),
    case("LayerNormalization", f32(3, 5, 4), f32(4), opset=17, outputs=3, min_cuts=2),
    case("LayerNormalization", f32(3, 5, 4), f32(5, 4), f32(5, 4), attrs={"axis": 1}, outputs=2),
    case("LayerNormalization", f32(3, 5, 4), f32(4), None, outputs=("out", "", "out1"), min_cuts=2),
    case("RMSNormalization", f32(3, 5, 4), f32(4), opset=23, min_cuts=2),
    case("RMSNormalization", f32(3, 5, 4), f32(5, 4), attrs={"axis": -2}, opset=24),
    case(
        "GroupNormalization", f32(3, 10, 4), f32(10), f32(10), attrs={"num_groups": 5}, min_cuts=2
    ),
    case(
        "GroupNormalization",
        f32(3, 6, 2, 2),
        f32(3),
        f32(3),
        attrs={"num_groups": 3},
        opset=18,
        min_cuts=2,
    ),
    case("GroupNormalization", f32(3, 6, 2), f32(6), f32(6), attrs={"num_groups": 6}, min_cuts=2),
    case("GroupNormalization", f32(3, 6, 2), f32(6), f32(6), attrs={"num_groups": 1}, min_cuts=1),
    case("InstanceNormalization", f32(3, 5, 4), f32(5), f32(5), opset=7, min_cuts=2),
    case("InstanceNormalization", f32(2, 5, 4, 3), f32(5), f32(5), opset=22, min_cuts=2),
    case("LpNormalization", f32(3, 5, 4), opset=7, min_cuts=2),
    case("LpNormalization", f32(3, 5, 4), attrs={"axis": 1, "p": 1}, opset=22, min_cuts=2),
    case("MeanVarianceNormalization", f32(3, 5, 4, 2), opset=9),
    case("MeanVarianceNormalization", f32(3, 5, 4), attrs={"axes": (-1,)}, opset=13, min_cuts=2),
    case("SimplifiedLayerNormalization", f32(3, 5, 4), f32(4), outputs=2, min_cuts=2),
    case(f"{MS}SkipLayerNormalization", *(f32(3, 5, 4),) * 2, *(f32(4),) * 3, opset=1, min_cuts=2),
    case(
        f"{MS}SkipLayerNormalization",
        *(f32(3, 5, 4), f32(5, 4), f32(4), None, f32(4)),
        outputs=("out0", "", "", "out3"),
        opset=1,
        min_cuts=2,
    ),
    case(
        f"{MS}SkipSimplifiedLayerNormalization",
        *(f32(3, 5, 4), f32(1, 5, 4), f32(4)),
        outputs=("out0", "", "", "out3"),
        opset=1,
        min_cuts=2,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


def test_batch_statistics_are_opaque() -> None:
    node = case(
        "BatchNormalization",
        *(f32(3, 5, 2), *BATCH),
        attrs={"training_mode": 1},
        outputs=3,
        opset=15,
    )
    assert "training mode" in check_opaque(node)
