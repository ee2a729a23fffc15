"""Results of the solver: a solution with its certificate or a refusal; bounds by their methods."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import KW_ONLY, InitVar, dataclass, field
from itertools import groupby
from typing import Literal

from partitioner.ir.errors import PartitionerError

Status = Literal["optimal", "feasible", "infeasible", "time_limit"]


@dataclass(frozen=True)
class Solution:
    """A plan and its certificate."""

    chosen: tuple[int, ...]  #: One choice index a node.
    cost: float  #: Value of the objective: seconds, or bytes for "memory".
    bound: float  #: No plan has a lower value.
    status: Status  #: `optimal` within the gap asked for, `feasible`, or `time_limit`.
    order: tuple[int, ...] | None  #: The order in which the nodes run, for the latency objective.
    solver: str  #: The methods that found the plan and that proved the bound.


def relative_gap(cost: float, bound: float) -> float:
    """(cost - bound) / cost, 0 where both are 0."""
    return max(0.0, cost - bound) / cost if cost > 0 else 0.0


@dataclass(eq=False, repr=False)
class Infeasible(PartitionerError):  # noqa: N818 - a verdict, like the status
    """No plan fits."""

    exit_code = 3
    message: InitVar[str]
    _: KW_ONLY
    device: int | None = None  #: Short of bytes; None if forbidden pairs alone rule all out.
    name: str | None = None  #: Of the node at which it is.
    bytes_short: float = 0.0  #: Its peak less its limit in the nearest plan known.
    proven: bool = True  #: Whether it is certain that none fits; otherwise none was found in time.
    #: The plan that is short of `bytes_short`, one choice index a node.
    closest: tuple[int, ...] | None = None
    #: Changes that make the request feasible, in words; each was tried.
    relaxations: tuple[str, ...] = ()

    def __post_init__(self, message: str) -> None:
        super().__init__(message)

    def saying(self, message: str, relaxations: tuple[str, ...] = ()) -> Infeasible:
        """The verdict in other words, with these changes that would make the request feasible."""
        other = copy(self)
        other.args, other.relaxations = (message,), relaxations or self.relaxations
        return other


@dataclass
class Bounds:
    """The highest bound of each method; a MILP solver proves too much now and then."""

    by_method: dict[str, float] = field(default_factory=dict)

    def add(self, bound: float, method: str) -> None:
        """Keep a method's bound if it is its highest."""
        self.by_method[method] = max(bound, self.by_method.get(method, 0.0))

    def without_those_above(self, cost: float) -> tuple[float, str]:
        """Drop the bounds above the cost of a plan; return the highest that is left."""
        self.by_method = {m: bound for m, bound in self.by_method.items() if bound <= cost}
        method = max(self.by_method, key=self.by_method.__getitem__, default="none")
        return self.by_method.get(method, 0.0), method


def returns(groups: Iterable[frozenset[int]]) -> int:
    """The number of times that a device is used again after other operators' devices alone were.

    >>> returns(map(frozenset, [{0}, {1}, {1}, {0}, {0, 1}]))
    2
    """
    seen = last = frozenset[int]()
    count = 0
    for group, _ in groupby(groups):
        count += len((group - last) & seen)
        seen, last = seen | group, group
    return count
