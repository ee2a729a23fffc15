"""Common factors of two shapes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from partitioner.ir.ops.rules.reshape import Piece, refine

Shape = tuple[int, ...]
Pieces = tuple[Piece, ...]

budget = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """Two shapes of the same elements: prime factors grouped in two ways, in two orders."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), max_size=5))
    return draw(grouped(primes)), draw(grouped(draw(st.permutations(primes))))


@st.composite
def grouped(draw: st.DrawFn, primes: list[int]) -> Shape:
    """Products of consecutive primes; empty groups give dims of 1."""
    marks = sorted(draw(st.lists(st.integers(0, len(primes)), max_size=4)))
    bounds = [0, *marks, len(primes)]
    return tuple(math.prod(primes[a:b]) for a, b in itertools.pairwise(bounds))


def labels(pieces: Pieces, dims: list[int | None], piece: Piece) -> np.ndarray:
    """Each element's index in one piece, for the dims that the pieces lie in, in memory order."""
    mine = [p for dim in sorted({d for d in dims if d is not None}) for p in of(pieces, dims, dim)]
    axis = next(i for i, p in enumerate(mine) if p is piece)
    return np.indices([p.size for p in mine])[axis].ravel()


def of(pieces: Pieces, dims: list[int | None], dim: int) -> list[Piece]:
    return [piece for piece, other in zip(pieces, dims, strict=True) if other == dim]


@budget
@given(reshapes())
def test_pieces_multiply_to_every_dim(shapes: tuple[Shape, Shape]) -> None:
    before, after = shapes
    pieces = refine(before, after)
    olds, news = [p.before for p in pieces], [p.after for p in pieces]
    for shape, dims in ((before, olds), (after, news)):
        for dim, size in enumerate(shape):
            assert math.prod(piece.size for piece in of(pieces, dims, dim)) == size


@budget
@given(reshapes())
@example(((2, 60), (3, 8, 5)))
def test_a_shared_piece_is_the_same_loop_of_both_shapes(shapes: tuple[Shape, Shape]) -> None:
    pieces = refine(*shapes)
    olds, news = [p.before for p in pieces], [p.after for p in pieces]
    for piece in pieces:
        if piece.before is not None and piece.after is not None:
            same = labels(pieces, olds, piece) == labels(pieces, news, piece)
            assert same.all()


@budget
@given(st.data())
def test_shapes_with_a_common_refinement_share_everything(data: st.DataObject) -> None:
    factors = data.draw(st.lists(st.integers(1, 6), max_size=5))
    pieces = refine(data.draw(grouped(factors)), data.draw(grouped(factors)))
    assert all(piece.before is not None and piece.after is not None for piece in pieces)


@pytest.mark.parametrize(
    ("before", "after", "shared"),
    [
        ((6, 4), (8, 3), [2]),
        ((4, 6), (3, 8), [2]),
        ((6, 4), (4, 6), [2, 2]),
        ((2, 60), (3, 8, 5), [4, 5]),
        ((2, 3), (3, 2), []),
        ((0, 4), (4, 0), []),
        ((5, 0), (5, 0, 2), []),
        ((), (1, 1), []),
    ],
)
def test_shapes_that_share_a_part_only(before: Shape, after: Shape, shared: list[int]) -> None:
    pieces = refine(before, after)
    assert [p.size for p in pieces if p.before is not None and p.after is not None] == shared
