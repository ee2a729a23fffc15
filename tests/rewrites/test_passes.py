"""Regions of the forward pass: cuts where few bytes cross, the same in all repeated blocks."""

from collections.abc import Sequence

from partitioner.ir.pieces.repeats import Stretch
from partitioner.rewrites.passes import Life, regions


def chain(count: int) -> list[Life]:
    """Values that the next node reads; every third is small."""
    return [Life(at, at + 1, 1 if at % 3 == 2 else 9, saved=True) for at in range(count)]


def cuts(of: Sequence[int]) -> list[int]:
    """Positions where a region begins."""
    return [at for at in range(1, len(of)) if of[at] != of[at - 1]]


def test_regions_are_cut_where_few_bytes_cross() -> None:
    positions = cuts(regions(chain(11), 12))
    assert positions
    assert all(at % 3 == 0 for at in positions)


def test_without_values_there_is_one_region() -> None:
    assert regions([], 3) == (0, 0, 0)


def test_repeated_blocks_are_cut_in_the_same_place() -> None:
    # a large value, beside which blocks are small
    lives = [*chain(28), Life(28, 29, 60, saved=True)]
    assert len(set(regions(lives, 30))) < 9
    positions = cuts(regions(lives, 30, (Stretch(3, 27, 3),)))
    assert [at for at in positions if 3 <= at < 27] == list(range(3, 27, 3))


def test_blocks_that_save_nothing_are_not_cut() -> None:
    lives = [Life(at, at + 1, 1, saved=True) for at in range(29)]
    assert regions(lives, 30, (Stretch(0, 30, 1),)) == regions(lives, 30)
