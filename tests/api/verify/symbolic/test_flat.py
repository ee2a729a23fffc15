"""Tensors of pieces: what collectives and casts make of them."""

import pytest

from partitioner.api.verify.symbolic.collectives import ALL_REDUCE, BYTES_OF, Collective, collect
from partitioner.api.verify.symbolic.flat import Flat, facts_of
from partitioner.api.verify.symbolic.held import Held
from partitioner.api.verify.symbolic.parts import RefusedError, whole
from partitioner.api.verify.symbolic.shares import ALL, times
from partitioner.ir.types import TensorType

TYPES = {"v": TensorType.of("float32", (4,))}


def terms(rank: int) -> Flat:
    """Half of the terms of a sum of 6."""
    share = times(ALL, [(("n", "k", 6), ((3 * rank, 3),))])
    return Flat.of((Held("v", (whole(4),), share, "sum"),), (4,))


def reduced(given: dict[int, Flat]) -> Flat:
    sides = {rank: Collective(ALL_REDUCE, (0, 1), 0, "x", "y", "sum") for rank in given}
    return collect(sides, given)[0]


def test_terms_are_added_as_elements_and_not_as_bytes() -> None:
    given = {rank: terms(rank) for rank in (0, 1)}
    assert facts_of(TYPES, reduced(given)) == (Held("v", (whole(4),)),)
    as_bytes = {rank: flat.coded(f"{BYTES_OF}float32", 4) for rank, flat in given.items()}
    with pytest.raises(RefusedError, match="it reduces bytes of elements"):
        reduced(as_bytes)


def test_elements_of_another_type_are_no_part_of_a_value() -> None:
    flat = Flat.of((Held("v", (whole(4),)),), (4,))
    assert facts_of(TYPES, flat.in_type(TYPES, "float32")) == (Held("v", (whole(4),)),)
    assert facts_of(TYPES, flat.in_type(TYPES, "int32")) == ()
    coded = flat.coded(f"{BYTES_OF}float32", 4)
    assert coded.in_type(TYPES, "uint8") == coded
