"""Shardings of one mesh within a limit that is a guess."""

from __future__ import annotations

from typing import cast

import pytest

from partitioner.search.stages.figures import Sharding
from partitioner.search.stages.mesh_sharding import GUESSES, first_sharding
from partitioner.solver import Infeasible

SHARDING = cast("Sharding", object())


class Tries:
    """Refuses all limits below one, each time short of fewer bytes than are missing."""

    def __init__(self, fits: int) -> None:
        self.fits, self.limits = fits, list[int]()

    def __call__(self, limit: int) -> Sharding:
        self.limits.append(limit)
        if limit < self.fits:
            short = min(40, self.fits - limit)
            raise Infeasible("short", device=1, name="mul", bytes_short=float(short))
        return SHARDING


@pytest.mark.parametrize(
    ("fits", "limits"), [(90, [100]), (130, [100, 130]), (170, [100, 140, 170])]
)
def test_a_guess_is_raised_by_the_bytes_that_are_short(fits: int, limits: list[int]) -> None:
    tries = Tries(fits)
    assert first_sharding(tries, 100, 300, is_guess=True) is SHARDING
    assert tries.limits == limits


def test_few_guesses_are_made_and_a_limit_that_is_none_is_tried_once() -> None:
    tries = Tries(1000)
    with pytest.raises(Infeasible, match=r"on device 1 at 'mul' \(220 bytes held, limit 150"):
        first_sharding(tries, 100, 150, is_guess=True)
    assert tries.limits == [100, 140, 180]
    assert len(tries.limits) == GUESSES
    with pytest.raises(Infeasible, match="short"):
        first_sharding(once := Tries(1000), 100, 150, is_guess=False)
    assert once.limits == [100]
