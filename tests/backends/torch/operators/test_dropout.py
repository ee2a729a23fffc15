"""Dropout: the quality of its masks."""

import numpy as np
import pytest
import torch

from partitioner.backends.torch.operators.dropout import BITS, dropout, kept, uniform, whole_of


def mask(
    seed: int, index: int, shape: tuple[int, int] = (1024, 1024), p: float = 0.5
) -> np.ndarray:
    """1 where kept, else -1."""
    keeps = kept(whole_of(shape, torch.device("cpu")), torch.tensor(seed), p, index).numpy()
    return np.where(keeps, 1.0, -1.0)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_share_that_is_kept(p: float) -> None:
    keeps = mask(3, 1, p=p) > 0
    spread = np.sqrt(p * (1 - p) / keeps.shape[0])
    assert abs(keeps.mean() - (1 - p)) < 4 * spread / np.sqrt(keeps.shape[1])
    for dim in (0, 1):
        means = (keeps.mean(dim) - (1 - p)) / spread
        assert np.abs(means).max() < 5
        assert 0.85 < means.std() < 1.15


def test_masks_of_other_seeds_and_nodes_are_independent() -> None:
    masks = [mask(seed, index) for seed in (0, 1, 2, -1, 1 << 40) for index in (0, 1, 2)]
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert abs((first * second).mean()) < 5 / 1024
            assert abs((first[1:] * second[:-1]).mean()) < 5 / 1024


SHIFTS = [(down, right) for down in (0, 1, 2, 64, 512) for right in (0, 1, 3, 64, 512)]


@pytest.mark.parametrize(("down", "right"), SHIFTS[1:])
def test_neighbours_are_independent(down: int, right: int) -> None:
    signs = mask(11, 4)
    moved = np.roll(signs, (down, right), (0, 1))
    assert abs((signs * moved).mean()) < 5 / 1024
    squares = signs * np.roll(signs, down, 0) * np.roll(signs, right, 1)
    squares = squares * np.roll(signs, (down, right), (0, 1))
    if down and right:
        assert abs(squares.mean()) < 5 / 1024


def test_runs_of_one_row_are_as_long_as_chance_makes_them() -> None:
    """The byte patterns of a mask are uniform (chi-square of 255 degrees of freedom)."""
    bits = np.packbits(mask(5, 9) > 0)
    counts = np.bincount(bits, minlength=256)
    expected = bits.size / 256
    assert 170 < ((counts - expected) ** 2 / expected).sum() < 360


def test_the_mask_is_the_documented_function() -> None:
    """The rule in the module's docstring, with Python's own integers."""
    part = torch.arange(3, 6), torch.arange(5)
    keeps = kept(part, torch.tensor(-12), 0.25, 7)
    drawn = uniform(torch.tensor(-12), 7, [6, 5], torch.float64)[3:]
    for i, row in enumerate(range(3, 6)):
        for column in range(5):
            y = documented(row, column, -12, 7)
            assert bool(keeps[i, column]) == (y >= 0.25 * 2**32 - 2**31)
            assert float(drawn[i, column]) == y * 2**-32 + 0.5


def documented(row: int, column: int, seed: int, index: int) -> int:
    def mix(x: int) -> int:
        x %= 1 << 64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % (1 << 64)
        return x ^ (x >> 31)

    def signed(x: int) -> int:
        return (x + (1 << 31)) % (1 << 32) - (1 << 31)

    key = mix(
        mix(row * 0x9E3779B97F4A7C15 + index * 0xD1342543DE82EF95) + mix(seed * 0xAF251AF3B0F025B5)
    )
    place = mix(column * 0xC2B2AE3D27D4EB4F + 1)
    x = signed(signed(place ^ key) * 0x85EBCA6B)
    return signed((x ^ (x >> 15)) * 0x297A2D39 + signed(key >> 32))


def test_value() -> None:
    x = torch.randn(40, 30)
    result, kept_ = torch.ops.partitioner.dropout(x, torch.tensor(4), 0.2, 1)
    torch.testing.assert_close(result, x * kept_ / 0.8)


def test_nothing_is_dropped_at_zero() -> None:
    x = torch.randn(40, 30)
    result, kept_ = dropout(x, torch.tensor(4), 0.0, 1)
    assert kept_.all()
    torch.testing.assert_close(result, x)


def test_a_part_may_be_empty() -> None:
    part = torch.ops.partitioner.dropout_part
    result, kept_ = part(torch.zeros(0, 5), torch.tensor(1), 0.5, 0, [4, 5], [0, 1], [0], [5])
    assert result.shape == kept_.shape == (0, 5)


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_uniform_numbers(dtype: torch.dtype) -> None:
    numbers = uniform(torch.tensor(8), 2, [512, 512], dtype)
    assert numbers.dtype == dtype
    wide = numbers.double()
    assert wide.min() >= 0
    assert wide.max() < 1
    step = 2.0 ** -BITS[dtype]
    assert abs(wide.mean() + step / 2 - 0.5) < 5 / 512 / 12**0.5
    assert abs(wide.var() - 1 / 12) < 0.001
    counts = torch.histc(wide, 64, 0, 1)
    expected = wide.numel() / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120


def test_a_single_number() -> None:
    assert uniform(torch.tensor(8), 2, [], torch.float32).shape == ()
