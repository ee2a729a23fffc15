"""A program of one rank that is ready to be run over and over: for measurements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prepared:
    """A program, which was run once."""

    run: Callable[[], object]  #: Runs it, and returns its results.
    #: Gives, once all runs are over, the seconds of each run of `run` that its kernels took, oldest
    #: first, and lets go of what it holds; None if the seconds of the calls count.
    own_seconds: Callable[[], Sequence[float]] | None = None
    copies: int = 1  #: Number of equal operators that a run computes.
    #: Called before each timed run: brings into the caches what lies there in a model.
    warm: Callable[[], object] = lambda: None
    #: All inputs by name, arrays or tensors of PyTorch; those that the program reads lie where it
    #: reads them.
    operands: Mapping[str, Any] = field(default_factory=dict)
    #: Gives a program of at most so many operators equal to the one of this, which share the inputs
    #: of these names and have copies of all else that they read, or share all (None); and whether
    #: the results of all of them are returned, not of the last alone. No function if the seconds of
    #: short runs are exact, or the program has several already.
    several: Callable[[int, Collection[str] | None, bool], Prepared] | None = None
