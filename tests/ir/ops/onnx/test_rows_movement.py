"""Rows of data movement, and what it is charged for."""

import re

import pytest

from helpers.op_rows.rows import Case, case, check_opaque, check_row, f32, ints, scalar, vec
from partitioner.ir.ops import ROWS


def reshape(before: tuple[int, ...], *after: int, min_cuts: int, **options: object) -> Case:
    """A Reshape to a constant shape."""
    return case("Reshape", f32(*before), vec(*after), constants=(1,), min_cuts=min_cuts, **options)


RESHAPES = (
    reshape((4, 6), 24, min_cuts=2),
    reshape((24,), 4, 6, min_cuts=2),
    reshape((2, 5, 12), 2, 5, 3, 4, min_cuts=4),
    reshape((2, 5, 3, 4), 0, 0, -1, min_cuts=4, opset=7),
    reshape((5, 6, 4), 0, -1, min_cuts=3, opset=13),
    reshape((6, 4), 8, 3, min_cuts=1),
    reshape((4, 6), 3, 8, min_cuts=1),
    reshape((6, 4), 4, 6, min_cuts=2),
    reshape((6, 4, 5, 4, 6), 8, 3, 5, 6, 4, min_cuts=4),
    reshape((2, 60), 3, 8, 5, min_cuts=2),
    reshape((3, 2, 7), 2, 3, 7, min_cuts=1),
    reshape((1, 6, 1, 4), 6, 2, 1, 2, 1, min_cuts=3),
    reshape((1, 1), 1, min_cuts=0),
    reshape((1,), min_cuts=0),
    reshape((3, 0), 0, 7, min_cuts=0, attrs={"allowzero": 1}, opset=14),
    reshape((3, 4), 3, 2, 2, min_cuts=3, attrs={"allowzero": 1}, opset=14),
    case("Reshape", f32(6, 5), vec(2, 3, 5), min_cuts=3),
    case("Flatten", f32(2, 3, 4), min_cuts=3),
    case("Flatten", f32(2, 3, 4), attrs={"axis": 0}, min_cuts=3, opset=9),
    case("Flatten", f32(2, 3, 4), attrs={"axis": -1}, min_cuts=3, opset=11),
    case("Flatten", f32(2, 3, 4), attrs={"axis": 3}, min_cuts=3),
    case("Squeeze", f32(1, 5, 1, 3), min_cuts=2),
    case("Squeeze", f32(1, 2, 3), min_cuts=2, opset=11),
    case("Squeeze", f32(1, 2, 1), attrs={"axes": (-1,)}, min_cuts=1, opset=11),
    case("Squeeze", f32(1, 2, 1, 3), vec(-2, 0), constants=(1,), min_cuts=2),
    case("Unsqueeze", f32(2, 3), attrs={"axes": (0, -1)}, min_cuts=2, opset=11),
    case("Unsqueeze", f32(2, 3), vec(3, 1), constants=(1,), min_cuts=2, opset=13),
    case("Unsqueeze", f32(), vec(-1), constants=(1,), min_cuts=0),
)

MOVES = (
    case("Transpose", f32(2, 3, 5), min_cuts=3),
    case("Transpose", f32(2, 3, 4, 5), attrs={"perm": (0, 2, 1, 3)}, min_cuts=4, opset=9),
    case("Transpose", f32(1, 4), attrs={"perm": (1, 0)}, min_cuts=1),
    case("Expand", f32(3, 1), vec(2, 3, 4), constants=(1,), min_cuts=3),
    case("Expand", f32(3, 1), vec(4), constants=(1,), min_cuts=2, opset=8),
    case("Expand", f32(5, 4), vec(1, 1), constants=(1,), min_cuts=2),
    case("Expand", f32(), vec(5, 2), min_cuts=2),
    case("Tile", f32(2, 3), vec(1, 3), constants=(1,), min_cuts=3),
    case("Tile", f32(3, 4), vec(2, 5), min_cuts=4, opset=9),
    case("Tile", f32(1, 4), vec(5, 1), constants=(1,), min_cuts=2),
    case("Pad", f32(2, 3, 5), attrs={"pads": (0, 0, 1, 0, 0, 2)}, min_cuts=3, opset=10),
    case("Pad", f32(9, 8), vec(2, -1, 1, 2), constants=(1,), min_cuts=2),
    case("Pad", f32(9, 8), vec(-2, 1, -1, 0), scalar(3, "float32"), constants=(1,), min_cuts=2),
    case("Pad", f32(2, 9), vec(2, 1), None, vec(-1), constants=(1, 3), min_cuts=2, opset=18),
    case(
        "Pad",
        f32(2, 3, 5),
        vec(0, 1, 0, 0, -1, 0),
        scalar(7, "float32"),
        constants=(1,),
        min_cuts=2,
        opset=13,
    ),
    case(
        "Pad",
        f32(2, 3, 5),
        vec(2, 1),
        None,
        vec(-1),
        attrs={"mode": "reflect"},
        constants=(1, 3),
        min_cuts=2,
    ),
    case("Pad", f32(5, 3), vec(0, 0, 2, 0), constants=(1,), min_cuts=2),
    case("Pad", f32(5, 3), vec(0, 0, 0, 0), constants=(1,), attrs={"mode": "edge"}, min_cuts=2),
    case("CenterCropPad", f32(5, 4, 7), vec(5, 6, 3), constants=(1,), opset=18),
    case("CenterCropPad", f32(5, 4), vec(4, 3), attrs={"axes": (-1, 0)}, min_cuts=1, opset=18),
    case("DepthToSpace", f32(2, 12, 3, 4), attrs={"blocksize": 2}, min_cuts=4),
    case(
        "DepthToSpace",
        f32(2, 12, 3, 2),
        attrs={"blocksize": 2, "mode": "CRD"},
        min_cuts=4,
        opset=11,
    ),
    case("SpaceToDepth", f32(2, 3, 4, 6), attrs={"blocksize": 2}, min_cuts=4),
    case("Trilu", f32(2, 3, 5, 4), min_cuts=2, opset=14),
    case("Trilu", ints(3, 4, 4), scalar(-1), attrs={"upper": 0}, constants=(1,)),
    case("ReverseSequence", f32(4, 3, 5), vec(4, 2, 1), min_cuts=2, opset=10),
    case(
        "ReverseSequence",
        f32(3, 4, 2),
        vec(4, 2, 1),
        attrs={"batch_axis": 0, "time_axis": 1},
        min_cuts=2,
    ),
    case("DepthToSpace", f32(2, 12, 3, 5), attrs={"blocksize": 2}, opset=9, min_cuts=4, exact=True),
    case("DepthToSpace", f32(2, 20, 3, 5), attrs={"blocksize": 2, "mode": "CRD"}, min_cuts=4),
    case("DepthToSpace", f32(2, 20, 3, 5), attrs={"blocksize": 2, "mode": "DCR"}, min_cuts=4),
    case("SpaceToDepth", f32(2, 3, 6, 10), attrs={"blocksize": 2}, min_cuts=4, exact=True),
)

JOINS = (
    case("Concat", f32(3, 4), f32(3, 5), attrs={"axis": 1}, min_cuts=3),
    case("Concat", f32(2, 3, 2), f32(5, 3, 2), f32(4, 3, 2), attrs={"axis": -3}, min_cuts=5),
    case("Concat", f32(4, 3), attrs={"axis": 0}, min_cuts=2),
    case("Concat", f32(2, 0, 3), f32(2, 4, 3), attrs={"axis": 1}, min_cuts=3),
    case("Concat", f32(2, 1, 3), f32(2, 4, 3), attrs={"axis": 1}, min_cuts=4, opset=11),
    case("Concat", f32(2, 7, 3), f32(2, 1, 3), f32(2, 4, 3), attrs={"axis": 1}, min_cuts=5),
    case(
        "Split", f32(3, 9), attrs={"axis": 1, "split": (2, 4, 3)}, outputs=3, min_cuts=4, opset=11
    ),
    case("Split", f32(6, 2), outputs=2, opset=9, min_cuts=3),
    case(
        "Split",
        f32(3, 9),
        vec(2, 4, 3),
        attrs={"axis": -1},
        constants=(1,),
        outputs=3,
        opset=13,
        min_cuts=4,
    ),
    case("Split", f32(6, 2), outputs=2, opset=13, min_cuts=3),
    case("Split", f32(2, 8), attrs={"axis": 1, "num_outputs": 3}, outputs=3, opset=18, min_cuts=4),
    case("Split", f32(6, 2), attrs={"num_outputs": 2}, outputs=2, min_cuts=3),
    case("Split", f32(5, 2), vec(5, 0), constants=(1,), outputs=2, min_cuts=2),
    case(
        "Slice",
        f32(3, 9),
        attrs={"starts": (2,), "ends": (6,), "axes": (1,)},
        min_cuts=4,
        opset=9,
    ),
    case("Slice", f32(5, 4), attrs={"starts": (0, 2), "ends": (5, 99)}, min_cuts=3, opset=7),
    case("Slice", f32(3, 9), vec(-7), vec(-3), vec(-1), constants=(1, 2, 3), min_cuts=4),
    case(
        "Slice",
        f32(7, 9),
        vec(2, 0),
        vec(99, 5),
        None,
        vec(1, 1),
        constants=(1, 2, 4),
        min_cuts=4,
        opset=10,
    ),
    case(
        "Slice",
        f32(7, 9),
        vec(3, -1, dtype="int32"),
        vec(7, -99, dtype="int32"),
        vec(0, 1, dtype="int32"),
        vec(1, -2, dtype="int32"),
        constants=(1, 2, 3, 4),
        min_cuts=2,
        opset=11,
    ),
    case("Slice", f32(4, 9), vec(0), vec(9), vec(1), vec(3), constants=(1, 2, 3, 4)),
    case("Slice", f32(4, 9), vec(5), vec(5), vec(1), constants=(1, 2, 3)),
)

CASES = (*RESHAPES, *MOVES, *JOINS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (case("Squeeze", f32(1, 4), vec(0)), "operand 1 .* is not a constant"),
        (case("Unsqueeze", f32(1, 4), vec(0)), "operand 1 .* is not a constant"),
        (case("Pad", f32(4), vec(1, 1)), "operand 1 .* is not a constant"),
        (case("Slice", f32(4), vec(1), vec(3)), "operand 1 .* is not a constant"),
        (case("Split", f32(4), vec(1, 3), outputs=2), "operand 1 .* is not a constant"),
    ],
    ids=str,
)
def test_settings_of_unknown_value_have_no_rule(case: Case, reason: str) -> None:
    assert re.fullmatch(reason, check_opaque(case))


@pytest.mark.parametrize(
    ("op", "ins", "outs", "nbytes"),
    [
        ("Gather", (4000, 16), (40,), 96),
        ("GatherElements", (4000, 16), (8,), 32),
        ("GatherND", (4000, 16), (40,), 96),
        ("Slice", (4000, 8, 8), (40,), 80),
        ("Shape", (4000,), (16,), 16),
        ("Size", (4000,), (8,), 8),
    ],
)
def test_ops_that_do_not_read_a_whole_operand(
    op: str, ins: tuple[int, ...], outs: tuple[int, ...], nbytes: int
) -> None:
    moved = ROWS[op].moved
    assert moved is not None
    assert moved(ins, outs) == nbytes


@pytest.mark.parametrize("op", ["Flatten", "Reshape", "Squeeze", "Unsqueeze"])
def test_reshapes_move_nothing(op: str) -> None:
    assert ROWS[op].view
