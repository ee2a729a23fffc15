"""Element types, dims and tensor types."""

import numpy as np
import pytest

from partitioner.ir.errors import IRError
from partitioner.ir.types import DTYPE_BITS, Dim, TensorType, numpy_dtype


def test_sizes_and_bytes() -> None:
    kind = TensorType.of("float16", (2, 3, 5))
    assert (kind.shape, kind.rank, kind.numel, kind.nbytes) == ((2, 3, 5), 3, 30, 60)
    assert str(kind) == "float16[2,3,5]"


def test_a_scalar_has_one_element() -> None:
    kind = TensorType.of("int64", ())
    assert (kind.rank, kind.numel, kind.nbytes) == (0, 1, 8)


def test_four_bit_elements_are_packed_in_pairs() -> None:
    assert TensorType.of("int4", (3, 3)).nbytes == 5


def test_a_local_shape_keeps_the_symbols_of_sizes_that_stay() -> None:
    kind = TensorType("float32", (Dim(8, "batch"), Dim(6, "seq")))
    assert kind.with_shape((4, 6)).dims == (Dim(4), Dim(6, "seq"))
    assert kind.with_shape((48,)).dims == (Dim(48),)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_element_type_has_a_numpy_type_that_holds_it(dtype: str) -> None:
    assert numpy_dtype(dtype).itemsize == max(DTYPE_BITS[dtype] // 8, 1)


def test_numpy_types_of_small_floats_are_their_own() -> None:
    assert numpy_dtype("bfloat16") != np.dtype("float16")
    assert np.array([1.5], numpy_dtype("bfloat16")).view("uint16")[0] == 0x3FC0


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(IRError, match="dim size is -1; it must be at least 0"):
        Dim(-1)


def test_an_unknown_element_type_is_refused() -> None:
    with pytest.raises(IRError, match="element type 'float' is not one of bool, int4"):
        TensorType.of("float", (2,))
