"""Communications between ranks that hold parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partitioner.api.verify.symbolic.held import Facts, Held, of_one_value, reduced
from partitioner.api.verify.symbolic.nodes import WholeModel
from partitioner.api.verify.symbolic.parts import (
    RefusedError,
    covers,
    joined,
    plain,
    taken,
)
from partitioner.api.verify.symbolic.program import Side
from partitioner.ir.exchange import Region
from partitioner.ir.program import REDUCING, CommKind


def communicate(
    model: WholeModel, sides: Mapping[int, Side], sources: Mapping[int, Facts]
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
    return {
        rank: _arrived(model, rank, side, sources)
        for rank, side in sides.items()
        if side.target is not None
    }


def _all_reduced(sides: Mapping[int, Side], sources: Mapping[int, Facts]) -> dict[int, Facts]:
    how = next(iter(sides.values())).comm.reduce
    made = of_one_value(sources, lambda held: [reduced([held[rank] for rank in sides], how)])
    return dict.fromkeys(sides, made)


def _arrived(model: WholeModel, rank: int, side: Side, sources: Mapping[int, Facts]) -> Facts:
    """Facts about the value that a rank writes."""
    type_ = side.target
    arriving = [t for t in side.comm.transfers if t.target == rank and t.numel]
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
        return [_placed(model, parts, type_.shape)]

    return of_one_value({t.source: sources.get(t.source, ()) for t in arriving}, made)


def _placed(model: WholeModel, parts: Mapping[Region, Held], shape: tuple[int, ...]) -> Held:
    """Join parts that are written to these places of a local tensor."""
    first, *others = parts.values()
    for other in others:
        if (other.share, other.how) != (first.share, first.how):
            raise RefusedError(f"it joins {first} and {other}", is_wrong=True)
    whole = model.graph.types[first.value].shape
    if len(whole) != len(shape) or not covers([*parts], shape):
        raise RefusedError("what arrives does not fill it exactly", is_wrong=True)
    region = tuple(
        joined(((held.region[dim], at[dim]) for at, held in parts.items()), size, whole[dim])
        for dim, size in enumerate(shape)
    )
    return replace(first, region=region)
