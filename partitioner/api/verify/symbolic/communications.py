"""Communications between ranks that hold parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from partitioner.api.verify.symbolic.held import (
    Facts,
    Held,
    Types,
    of_one_value,
    placed,
    reduced,
)
from partitioner.api.verify.symbolic.parts import (
    RefusedError,
    plain,
    taken,
)
from partitioner.api.verify.symbolic.program import Side
from partitioner.ir.exchange import Region, Transfer
from partitioner.ir.program import REDUCING, CommKind


def communicate(
    types: Types, sides: Mapping[int, Side], sources: Mapping[int, Facts]
) -> dict[int, Facts]:
    """Facts about each written value; `sources` has those about the values read, by rank.

    Raises:
        RefusedError: A rank gets what is no part of one value.
    """
    comm = next(iter(sides.values())).comm
    if comm.part:
        raise RefusedError("its transfers are not listed")
    kind = comm.kind
    if kind is CommKind.ALL_REDUCE:
        return _all_reduced(sides, sources)
    made: dict[object, Facts] = {}  # ranks of equal arrivals get the same
    results: dict[int, Facts] = {}
    for rank, side in sides.items():
        if side.target is None:
            continue
        arriving = side.comm.arriving.get(rank, ())
        key = (side.target, tuple((t.source, t.read, t.write) for t in arriving))
        if key not in made:
            made[key] = _arrived(types, side, arriving, sources)
        results[rank] = made[key]
    return results


def _all_reduced(sides: Mapping[int, Side], sources: Mapping[int, Facts]) -> dict[int, Facts]:
    how = next(iter(sides.values())).comm.reduce
    made = of_one_value(sources, lambda held: [reduced([held[rank] for rank in sides], how)])
    return dict.fromkeys(sides, made)


def _arrived(
    types: Types, side: Side, arriving: Sequence[Transfer], sources: Mapping[int, Facts]
) -> Facts:
    """Facts about the value that a rank writes, to which these transfers go."""
    type_ = side.target
    if not arriving or type_ is None:
        raise RefusedError("nothing arrives", is_wrong=type_ is not None and type_.numel > 0)
    how = side.comm.reduce if side.comm.kind in REDUCING else ""

    def made(held: Mapping[int, Held]) -> list[Held]:
        pieces: dict[Region, list[Held]] = {}
        for t in arriving:
            of = held[t.source]
            region = tuple(taken(part, plain(r)) for part, r in zip(of.region, t.read, strict=True))
            pieces.setdefault(tuple(map(plain, t.write)), []).append(replace(of, region=region))
        if not how and any(len(several) > 1 for several in pieces.values()):
            raise RefusedError("two pieces are written to one place", is_wrong=True)
        parts = {at: reduced(some, how) if how else some[0] for at, some in pieces.items()}
        return [placed(types, parts, type_.shape)]

    in_place = sorted(arriving, key=lambda t: t.write)
    return of_one_value({t.source: sources.get(t.source, ()) for t in in_place}, made)
