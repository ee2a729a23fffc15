"""Gather, scatter and sorting in PyTorch."""

import numpy as np
import pytest

from helpers.op_rows.aten_rows import aten
from helpers.op_rows.rows import Case, check_opaque, check_row, f32, flags, ints, vec

CASES = [
    aten("index.Tensor", f32(4, 6, 5), [ints(7, low=0, high=3)], options={"min_cuts": 4}),
    aten("index.Tensor", f32(4, 6, 5), [None, ints(7, low=0, high=5)], options={"min_cuts": 4}),
    aten(
        "index.Tensor",
        *(f32(4, 6, 5), [None, ints(3, 1, low=0, high=5), ints(4, low=0, high=4)]),
        options={"min_cuts": 4},
    ),
    aten(
        "index.Tensor",
        *(f32(4, 6, 5), [ints(3, low=0, high=3), None, ints(3, low=0, high=4)]),
        options={"min_cuts": 3},
    ),
    aten("index.Tensor", f32(4, 6), [ints(1, 1, low=0, high=3)], options={"min_cuts": 2}),
    aten(
        "_unsafe_index.Tensor", f32(4, 6), [None, ints(8, low=0, high=5)], options={"min_cuts": 3}
    ),
    aten(
        "index_put",
        *(f32(4, 6, 5), [None, vec(1, 4, 0)], f32(4, 3, 5)),
        options={"min_cuts": 3, "exact": True},
    ),
    aten(
        "index_put",
        *(f32(4, 6, 5), [None, vec(-1, 4, 0)], f32(3, 1)),
        options={"min_cuts": 3, "exact": True},
    ),
    aten(
        "_unsafe_index_put",
        *(f32(4, 3, 7), [None, None, vec(5, 2, dtype="int32")], f32(4, 3, 2)),
        options={"min_cuts": 3, "exact": True},
    ),
    aten(
        "index_put",
        *(f32(4, 6, 5), [vec(1, 3, 0), vec(1, 4, 0)], f32(3, 5)),
        options={"min_cuts": 1, "exact": True},
    ),
    aten(
        "index_put",
        *(f32(4, 6, 5), [None, ints(7, low=0, high=5)], f32(4, 7, 1), True),
        options={"min_cuts": 4},
    ),
    aten(
        "index_put",
        *(f32(4, 6, 5), [ints(3, 2, low=0, high=3), ints(2, low=0, high=5)], f32(5), True),
        options={"min_cuts": 4},
    ),
    aten(
        "_unsafe_index_put",
        *(f32(4, 6), [ints(7, low=0, high=3)], f32(7, 6), True),
        options={"min_cuts": 3},
    ),
    aten("index_select", f32(4, 6, 5), 1, ints(8, low=0, high=5), options={"min_cuts": 4}),
    aten("index_add", f32(4, 6), 1, ints(7, low=0, high=5), f32(4, 7), options={"min_cuts": 3}),
    aten(
        "index_add",
        *(f32(4, 6), 0, ints(7, low=0, high=3), f32(7, 6)),
        options={"min_cuts": 3},
        alpha=2,
    ),
    aten("index_copy", f32(4, 6), 1, vec(5, 0, 2), f32(4, 3), options={"min_cuts": 2}),
    aten(
        "index_copy",
        *(f32(2, 3, 7, 4), 2, vec(5), f32(2, 3, 1, 4)),
        options={"min_cuts": 4, "exact": True},
    ),
    aten("index_copy", f32(7), 0, vec(1, 0), f32(2), options={"min_cuts": 1, "exact": True}),
    aten("gather", f32(4, 6), 1, ints(4, 7, low=0, high=5), options={"min_cuts": 2}),
    aten("gather", f32(6, 6), 1, ints(4, 7, low=0, high=5), options={"min_cuts": 1}),
    aten("gather", f32(4, 6, 5), 0, ints(3, 6, 5, low=0, high=3), options={"min_cuts": 3}),
    aten("scatter.src", f32(4, 6), 1, np.tile([5, 0, 2], (4, 1)), f32(4, 3)),
    aten("scatter.value", f32(4, 6), 1, ints(4, 3, low=0, high=5), 1.5),
    aten("scatter.value", f32(4, 6), 1, ints(4, 3, low=0, high=5), 0, options={"min_cuts": 2}),
    aten(
        "scatter_add", f32(4, 6), 1, ints(4, 8, low=0, high=5), f32(4, 8), options={"min_cuts": 3}
    ),
    aten(
        "scatter_add", f32(6, 8), 0, ints(7, 4, low=0, high=5), f32(7, 4), options={"min_cuts": 3}
    ),
    aten("scatter_reduce.two", f32(4, 6), 1, ints(4, 8, low=0, high=5), f32(4, 8), "amax"),
    aten("sort", f32(4, 6, 5), 1, options={"min_cuts": 2}),
    aten("sort.stable", f32(4, 6), stable=True, dim=0, descending=True),
    aten("bucketize.Tensor", f32(4, 6), f32(3), right=True, options={"min_cuts": 2}),
    aten("topk", f32(4, 6, 5), 2, 1, options={"min_cuts": 2}),
    aten("topk", f32(4, 6), 3, options={"min_cuts": 1}, absent=(0,)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


def test_a_mask_as_an_index_has_no_rule() -> None:
    case = aten("index.Tensor", f32(4, 6), [flags(4)])
    assert check_opaque(case) == "an index is a mask"


def test_a_source_that_is_written_in_part_has_no_rule() -> None:
    case = aten("scatter.src", f32(4, 6), 1, ints(3, 2, low=0, high=5), f32(4, 3))
    assert check_opaque(case) == "the source is (4, 3), the index (3, 2)"


@pytest.mark.parametrize("name", ["index_select", "index_copy"])
def test_data_without_dims_has_no_rule(name: str) -> None:
    source = [f32(1)] if name == "index_copy" else []
    case = aten(name, np.array(2, np.float32), 0, np.array([0]), *source)
    assert check_opaque(case) == "the data or the index has no dims"
