"""Results of the solver: a solution with its certificate or a refusal; bounds by their methods."""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import copy
from dataclasses import KW_ONLY, InitVar, dataclass, field
from itertools import groupby
from typing import Literal

from partitioner.foundations import units
from partitioner.ir.errors import PartitionerError

Status = Literal["optimal", "feasible", "infeasible", "time_limit"]

#: How refusals begin: proven ones, and others.
NONE_FITS, NONE_FOUND = "no plan fits", "no plan was found that fits"
#: The clause of a refusal that the clock may have caused.
LONGER = "; the time limit stopped the search: with a longer one a plan may be found"


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

    @property
    def unproven(self) -> Infeasible:
        """The same verdict where other plans were not searched, or not all of them."""
        said = str(self)
        is_said = said.startswith(f"{NONE_FITS}: ")
        other = self.saying(NONE_FOUND + said.removeprefix(NONE_FITS) if is_said else said)
        other.proven = False
        return other

    def proving(self, proof: str) -> Infeasible:
        """The same verdict on a search that proved nothing, with a proof that no plan fits."""
        text = str(self).replace(LONGER, "").removeprefix(f"{NONE_FOUND}: ")
        other = self.saying(f"{NONE_FITS}: {proof}; {text}")
        other.proven = True
        return other

    def saying(self, message: str, relaxations: tuple[str, ...] = ()) -> Infeasible:
        """The verdict in other words, with these changes that would make the request feasible."""
        other = copy(self)
        other.args, other.relaxations = (message,), relaxations or self.relaxations
        return other


def short_of_memory(
    held_bytes: float,
    limit_bytes: float,
    device: int,
    name: str | None = None,
    *,
    where: str = "",
    inside: str = "",
    more: str = "",
    proven: bool = False,
    least: bool = False,
) -> Infeasible:
    """The refusal for lack of memory.

    Args:
        held_bytes: Bytes that the device holds at its peak, at the node `name`.
        where: The device in words, by default its number.
        inside: What holds them at the node, in words.
        more: What follows in the message.
        proven: Whether no plan fits.
        least: Whether no plan is short of fewer bytes.
    """
    short, held = math.ceil(held_bytes - limit_bytes), math.ceil(held_bytes)
    limit = int(limit_bytes)
    verdict = NONE_FITS if proven else NONE_FOUND
    of = "" if least else "in the nearest one found "
    at = (where or f"on device {device}") + (f" at {name!r}" if name else "") + inside
    return Infeasible(
        f"{verdict}: {of}{_bytes(short)} {'is' if short == 1 else 'are'} short {at} "
        f"({_bytes(held)} held, limit {limit}: {units.size(held, 5)} against "
        f"{units.size(limit, 5)}){more}",
        device=device,
        name=name,
        bytes_short=held_bytes - limit_bytes,
        proven=proven,
    )


def _bytes(count: int) -> str:
    return f"{count} byte" if count == 1 else f"{count} bytes"


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
