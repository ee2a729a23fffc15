"""Collectives of flat tensors, as graphs of PyTorch call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from partitioner.api.verify.symbolic.flat import Flat, Piece, aligned
from partitioner.api.verify.symbolic.held import of_one_value, reduced
from partitioner.api.verify.symbolic.parts import RefusedError

#: Kinds, by name of the operator.
ALL_REDUCE, ALL_GATHER = "all_reduce", "all_gather_into_tensor"
REDUCE_SCATTER, ALL_TO_ALL = "reduce_scatter_tensor", "all_to_all_single"
#: Begins the code of elements that are written as their bytes, which add up to nothing.
BYTES_OF = "bytes of "


@dataclass(frozen=True)
class Collective:
    """A rank's part in a collective."""

    kind: str  #: Name of the operator.
    ranks: tuple[int, ...]  #: Ranks of its group, in order.
    number: int  #: Number of the group's collectives before it, on this rank.
    reads: str  #: Local value that the rank gives.
    writes: str  #: Local value that it gets.
    reduce: str = ""  #: "sum", "max", "min" or "prod"; "" if nothing is reduced.
    #: Elements that it gets of each rank, and those that it gives each; of all-to-all alone.
    splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.kind} {self.number} of ranks {ranks}"


def collect(sides: Mapping[int, Collective], given: Mapping[int, Flat]) -> dict[int, Flat]:
    """Give what each rank gets of what all ranks of a group have given.

    Raises:
        RefusedError: They call different collectives, or reduce what are no terms of one value.
    """
    first = next(iter(sides.values()))
    for side in sides.values():
        if (side.kind, side.reduce) != (first.kind, first.reduce):
            raise RefusedError(f"another rank calls {side.kind} {side.reduce}", is_wrong=True)
    flats = [given[rank] for rank in first.ranks]
    if first.kind == ALL_TO_ALL:
        return _exchanged(sides, flats)
    if len({flat.shape for flat in flats}) > 1:
        raise RefusedError("the ranks give tensors of different sizes", is_wrong=True)
    shape, count = flats[0].shape, len(flats)
    if first.kind == ALL_GATHER:
        pieces = tuple(piece for flat in flats for piece in flat.pieces)
        return dict.fromkeys(first.ranks, Flat((count * shape[0], *shape[1:]), pieces))
    summed = Flat(
        shape, tuple(_reduced(of, first.reduce) for of in zip(*aligned(flats), strict=True))
    )
    if first.kind == ALL_REDUCE:
        return dict.fromkeys(first.ranks, summed)
    if shape[0] % count:
        raise RefusedError(f"{shape[0]} rows are not divided by {count} ranks", is_wrong=True)
    rows = (shape[0] // count, *shape[1:])
    parts = (part.reshaped(rows) for part in summed.in_rows(count))
    return dict(zip(first.ranks, parts, strict=True))


def _reduced(of_ranks: tuple[Piece, ...], how: str) -> Piece:
    """Give what ranks have together of one piece, of which each has terms."""
    first = of_ranks[0]
    if any(
        (p.shape, p.codes, p.width) != (first.shape, first.codes, first.width) for p in of_ranks
    ):
        raise RefusedError("the ranks give parts of different forms", is_wrong=True)
    if any(code.startswith(BYTES_OF) for code in first.codes):
        raise RefusedError("it reduces bytes of elements", is_wrong=True)
    facts = of_one_value(
        {rank: piece.facts for rank, piece in enumerate(of_ranks)},
        lambda held: [reduced([*held.values()], how)],
    )
    return Piece(facts, first.shape, first.codes, first.width)


def _exchanged(sides: Mapping[int, Collective], flats: list[Flat]) -> dict[int, Flat]:
    """Give what each rank gets of an all-to-all."""
    ranks = next(iter(sides.values())).ranks
    got: dict[int, Flat] = {}
    for place, rank in enumerate(ranks):
        taken, pieces = sides[rank].splits[0], list[Piece]()
        for source, (flat, size) in enumerate(zip(flats, taken, strict=True)):
            sent = sides[ranks[source]].splits[1]
            if sent[place] != size or sum(sent) != flat.shape[0]:
                why = f"it takes {size} elements of rank {ranks[source]}, which gives {sent[place]}"
                raise RefusedError(why, is_wrong=True)
            pieces.extend(flat.between([[*pairwise((0, *accumulate(sent)))][place]]))
        got[rank] = Flat((sum(taken),), tuple(pieces))
    return got
