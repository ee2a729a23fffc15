"""Stages of several sizes: cuts of least largest load over sizes and ends."""

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import cast

import numpy as np
import pytest

from partitioner.search.stages.figures import Floats, Ints, StageFigures
from partitioner.search.stages.uneven import uneven_cuts


@dataclass(frozen=True)
class Figures:
    """Of nodes of these loads, and messages of one length."""

    loads_s: tuple[float, ...]
    message_s: float = 0.0

    @cached_property
    def positions(self) -> Ints:
        return np.arange(len(self.loads_s) + 1)

    @cached_property
    def load_sums(self) -> Floats:
        parts = np.zeros((4, len(self.loads_s) + 1))
        parts[0, 1:] = np.cumsum(self.loads_s)
        return parts

    @cached_property
    def messages(self) -> Floats:
        return np.full((2, len(self.loads_s) + 1), self.message_s)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("devices", [3, 5])
def test_they_are_those_of_all_cuts_and_sizes(seed: int, devices: int) -> None:
    draw = np.random.default_rng(seed)
    one = draw.uniform(0.1, 1, 7)
    of = {size: Figures(tuple(one / size**0.8), 0.05 * (seed % 3)) for size in (1, 2, 4)}

    def load(ends: tuple[int, ...], sizes: tuple[int, ...]) -> float:
        bounds = (0, *ends)
        return max(
            sum(of[size].loads_s[start:stop])
            + 2 * of[size].message_s * ((start > 0) + (stop < len(one)))
            for start, stop, size in zip(bounds, ends, sizes, strict=False)
        )

    cuts = {
        len(cut.sizes): cut for cut in uneven_cuts(cast("dict[int, StageFigures]", of), devices)
    }
    for count in range(1, devices + 1):
        every = [
            (load((*inner, len(one)), sizes), sizes)
            for inner in combinations(range(1, len(one)), count - 1)
            for sizes in product((1, 2, 4), repeat=count)
            if sum(sizes) == devices
        ]
        if not every:
            assert count not in cuts
            continue
        least, sizes = min(every)
        if count in cuts:
            cut = cuts[count]
            assert cut.load_s == pytest.approx(least) == pytest.approx(load(cut.ends, cut.sizes))
            assert len(cut.groups) == len(one)
            assert sum(cut.sizes) == devices
        else:
            assert any(len(set(s)) == 1 for value, s in every if value == pytest.approx(least)), (
                sizes
            )
    assert cuts
