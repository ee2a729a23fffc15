"""Factors, which are the loops of an op, and dims of tensors in terms of them.

A dim is a factor, a compound ``(h d)`` of factors, major first, a sum ``a + b`` of such terms one
after the other, or ``1``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from partitioner.ir.errors import IRError
from partitioner.ir.layout import Interval

Term = tuple[str, ...]  #: Product of factors, major first; () is 1.
DimExpr = tuple[Term, ...]  #: Sum of terms, one after the other.
Dims = tuple[DimExpr, ...]


class FactorKind(StrEnum):
    """The effect of cutting a factor."""

    #: In the results, which are cut with it; or dropped, as the elements that a Slice leaves out.
    PASS = "pass"  # noqa: S105
    REDUCE = "reduce"  #: Only in operands: cutting it leaves partial results.
    WHOLE = "whole"  #: Not cut: each device needs the whole dim.
    LINEAR = "linear"  #: No loop: cutting it passes pending sums of the operands to the results.


LOOPS = {FactorKind.PASS, FactorKind.REDUCE}  #: Loops that may be cut.
CUTTABLE = {*LOOPS, FactorKind.LINEAR}

#: Name and size of the factor of a linear op; any number of parts up to the size can be cut.
PENDING, PENDING_SIZE = "+", 1 << 20


@dataclass(frozen=True, slots=True)
class Factor:
    """A loop of an op."""

    name: str
    size: int
    kind: FactorKind
    #: Reduction that joins the parts of results that lack the factor: of a REDUCE factor, all.
    reduce: str = ""


@lru_cache(maxsize=4096)
def parse_dim(text: str) -> DimExpr:
    """``"(h d)" -> (("h","d"),)``, ``"a + b" -> (("a",),("b",))``, ``"1" -> ((),)``."""
    terms = []
    for term in text.strip().split("+"):
        names = tuple(term.strip().strip("()").split())
        terms.append(() if names == ("1",) else names)
    return tuple(terms)


def dim_text(expr: DimExpr) -> str:
    """Inverse of `parse_dim`."""
    terms = [f"({' '.join(term)})" if len(term) > 1 else "".join(term) or "1" for term in expr]
    return " + ".join(terms)


def names_of(tensors: Iterable[Dims | None]) -> dict[str, None]:
    """Factors of the tensors, in order."""
    exprs = (expr for dims in tensors for expr in dims or ())
    return dict.fromkeys(name for expr in exprs for term in expr for name in term)


def single(expr: DimExpr) -> str:
    """The factor that a dim is; "" of a compound or a sum."""
    return expr[0][0] if len(expr) == 1 and len(expr[0]) == 1 else ""


def listed(
    side: str | Sequence[str | Sequence[str] | None], shapes: Sequence[Sequence[int] | None]
) -> list[list[str] | None]:
    """Dims of each tensor of a side; None where it is absent, or outside the loops: ``"_"``."""
    tensors = side.split(",") if isinstance(side, str) else side
    dims_of: list[list[str] | None] = []
    for dims, shape in zip((*tensors, *[None] * len(shapes)), shapes, strict=False):
        if shape is None or dims is None:
            dims_of.append(None)
        elif isinstance(dims, str):
            dims_of.append(None if dims.strip() == "_" else re.findall(r"\([^)]*\)|\S+", dims))
        else:
            dims_of.append(list(dims))
    return dims_of


def runs_of(
    tensors: Iterable[Sequence[str] | None], shapes: Iterable[Sequence[int] | None]
) -> dict[str, list[str]]:
    """Give the dims that each ``s..`` stands for: as many as the tensor has beside the others.

    They are called ``s0 s1``.
    """
    runs: dict[str, list[str]] = {}
    for dims, shape in zip(tensors, shapes, strict=True):
        for name in dims or ():
            if name.endswith(".."):
                width = len(shape or ()) - len(dims or ()) + 1
                runs[name] = [f"{name[:-2]}{i}" for i in range(width)]
    return runs


def solve_sizes(
    tensors: tuple[Dims | None, ...],
    shapes: tuple[tuple[int, ...], ...],
    known: dict[str, int],
) -> dict[str, int]:
    """The known sizes, and those of factors that are a dim alone; IRError if one has two."""
    for dims, shape in zip(tensors, shapes, strict=True):
        for expr, size in zip(dims or (), shape, strict=False):
            if len(expr) == 1 and len(expr[0]) == 1:
                name = expr[0][0]
                if known.setdefault(name, size) != size:
                    raise IRError(
                        f"factor {name!r} is {known[name]} in one dim and {size} in another"
                    )
    return known


@dataclass(frozen=True)
class Dispatch:
    """The loops of a rule that one axis may cut both, and what is sent then.

    A node of rows and of owners, as a layer of tokens and of experts, may have both cut over the
    same axis. Then each device has its rows, and meets those of all devices of the axis that chose
    what it owns: they are sent to it, and its results for them are sent back. How many a device
    gets is known only at run time; what is expected follows from the loads of the owners, or from
    equal ones.
    """

    rows: str  #: Factor of the rows, each of which lies on one device of the axis.
    owners: str  #: Factor of what rows choose; each device computes for its part of it.
    chosen: int  #: How many of them a row chooses.
    there_bytes: float  #: Bytes of a row on its way to a device that owns some of its choices.
    back_bytes: float  #: Bytes of its results on their way back.
    #: Operands, and results counted behind them, that each device has for the rows of all devices
    #: of the axis: pending sums over the owners.
    inside: frozenset[int] = frozenset()
    #: By owner, its share of the choices; () if all are chosen equally often.
    loads: tuple[float, ...] = ()

    def load(self, owned: Iterable[Interval], count: int) -> float:
        """Share of the choices that a device is expected to get that owns these of `count`.

        >>> Dispatch("t", "e", 1, 0, 0, loads=(0.5, 0.125, 0.25, 0.125)).load([(0, 1), (3, 1)], 4)
        0.625
        """
        if not self.loads:
            return sum(length for _, length in owned) / count
        return math.fsum(x for start, length in owned for x in self.loads[start : start + length])

    def share(self, owned: Iterable[Interval], count: int) -> float:
        """Share of the rows that a device is expected to be sent that owns these of `count`.

        Each row chooses `chosen` different ones. What a device owns counts as so many equally
        likely ones as have its load; no fewer rows come than choose its most loaded one.

        >>> Dispatch("t", "e", 1, 0, 0).share([(2, 2)], 8)
        0.25
        """
        pieces, chosen = tuple(owned), min(self.chosen, count)
        if not self.loads:
            others = count - sum(length for _, length in pieces)
            return 1 - math.comb(others, chosen) / math.comb(count, chosen)
        like = self.load(pieces, count) * count
        none = math.prod(max(0.0, count - like - i) / (count - i) for i in range(chosen))
        most = max(x for start, length in pieces for x in self.loads[start : start + length])
        return min(1.0, max(1 - none, most * chosen))
