"""Tensors that hold parts of values one after the other: messages, and operands of collectives.

A `Flat` tells what the elements of a local tensor are in the order of its memory, whatever its
shape: pieces, each of which is all of a box of a part. Where the pieces of one value fill the shape
of a tensor, the tensor is a part of that value again (`facts_of`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from partitioner.api.verify.symbolic.held import Facts, Held, Types, of_one_value, placed
from partitioner.api.verify.symbolic.parts import RefusedError, taken
from partitioner.ir.exchange import Region
from partitioner.ir.layout import Interval

Box = tuple[Interval, ...]  #: Start and length of a box in each dim.
#: Most pieces of a tensor.
MOST_PIECES = 16_384


@dataclass(frozen=True)
class Piece:
    """All elements of a box of a part, in their order."""

    facts: Facts  #: What they are; none if that is not known.
    shape: tuple[int, ...]  #: Elements of the box in each dim.
    #: Ways in which each element is written, the last one first: ``"bytes"``, ``"int32"``.
    codes: tuple[str, ...] = ()
    width: int = 1  #: Elements of the tensor that each element takes.

    @property
    def size(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape) * self.width

    def box(self, box: Box) -> Piece:
        """A box of this one."""
        facts = tuple(
            replace(
                held,
                region=tuple(taken(part, (at,)) for part, at in zip(held.region, box, strict=True)),
            )
            for held in self.facts
        )
        return replace(self, facts=facts, shape=tuple(length for _, length in box))


@dataclass(frozen=True)
class Flat:
    """The elements of a local tensor in the order of its memory."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, facts: Facts, shape: tuple[int, ...]) -> Flat:
        """A tensor that is a part of a value."""
        return cls(shape, tuple(p for p in (Piece(facts, shape),) if p.size))

    def reshaped(self, shape: Sequence[int]) -> Flat:
        """The same elements in another shape, of which one size may be -1."""
        total, given = math.prod(self.shape), math.prod(n for n in shape if n != -1)
        return Flat(tuple(total // max(given, 1) if n == -1 else n for n in shape), self.pieces)

    def sliced(self, dim: int, start: int, stop: int) -> Flat:
        """The elements from `start` to `stop` of a dim."""
        size, inner = self.shape[dim], math.prod(self.shape[dim + 1 :])
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        if len(self.pieces) == 1 and self.pieces[0].shape == self.shape:
            box = tuple((0, n) for n in self.shape)
            piece = self.pieces[0].box((*box[:dim], (start, stop - start), *box[dim + 1 :]))
            return Flat(shape, (piece,) if piece.size else ())
        outer = math.prod(self.shape[:dim])
        ranges = ((row * size + start, row * size + stop) for row in range(outer))
        return Flat(shape, tuple(self.between((a * inner, b * inner) for a, b in ranges)))

    def between(self, ranges: Iterable[tuple[int, int]]) -> Iterator[Piece]:
        """The pieces of ascending ranges of elements."""
        at = index = count = 0
        for start, stop in ranges:
            while start < stop:
                while index < len(self.pieces) and at + self.pieces[index].size <= start:
                    at, index = at + self.pieces[index].size, index + 1
                if index == len(self.pieces):
                    raise RefusedError("it reads elements that there are not", is_wrong=True)
                piece = self.pieces[index]
                end = min(stop, at + piece.size)
                for part in _cut(piece, start - at, end - at):
                    count += 1
                    yield part
                if count > MOST_PIECES:
                    raise RefusedError(f"it is of more than {MOST_PIECES} pieces")
                start = end

    def in_rows(self, count: int) -> list[Flat]:
        """Split into as many equal parts of its elements, one after the other."""
        size = math.prod(self.shape) // max(count, 1)
        rows = ((index * size, (index + 1) * size) for index in range(count))
        return [Flat((size,), tuple(self.between([row]))) for row in rows]

    def in_type(self, types: Types, dtype: str) -> Flat:
        """The elements that have not become other ones in this type."""
        pieces = (
            piece
            if piece.codes
            else replace(
                piece, facts=tuple(h for h in piece.facts if types[h.value].dtype == dtype)
            )
            for piece in self.pieces
        )
        return replace(self, pieces=tuple(pieces))

    def coded(self, code: str, width: int = 1) -> Flat:
        """The same elements written in another way; each takes so many of the new ones."""
        pieces = (
            replace(piece, codes=(code, *piece.codes), width=piece.width * width)
            for piece in self.pieces
        )
        return replace(self, pieces=tuple(pieces))

    def decoded(self, code: str, width: int = 1) -> Flat | None:
        """The elements before they were written so; None if some were not."""
        if any(p.codes[:1] != (code,) or p.width % width for p in self.pieces):
            return None
        pieces = (replace(p, codes=p.codes[1:], width=p.width // width) for p in self.pieces)
        return replace(self, pieces=tuple(pieces))


def _cut(piece: Piece, start: int, stop: int) -> Iterator[Piece]:
    """The boxes that a range of a piece's elements is made of."""
    if start % piece.width or stop % piece.width:
        raise RefusedError("it cuts an element in two", is_wrong=True)
    for box in _boxes(piece.shape, start // piece.width, stop // piece.width):
        yield piece.box(box)


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Boxes of a tensor of this shape that are a range of its elements, in order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner, rest = math.prod(shape[1:]), tuple((0, n) for n in shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # within a row
        row = start // inner
        for box in _boxes(shape[1:], start - row * inner, stop - row * inner):
            yield (row, 1), *box
        return
    for box in _boxes(shape[1:], start - (first - 1) * inner, inner):
        yield (first - 1, 1), *box
    if first < last:
        yield (first, last - first), *rest
    for box in _boxes(shape[1:], 0, stop - last * inner):
        yield (last, 1), *box


def concatenated(types: Types, flats: Sequence[Flat], dim: int) -> Flat:
    """Tensors joined along a dim."""
    flats = [flat for flat in flats if flat.shape != (0,)]
    if not flats:
        return Flat((0,), ())
    first, size = flats[0].shape, sum(flat.shape[dim] for flat in flats)
    shape = (*first[:dim], size, *first[dim + 1 :])
    if any(f.shape[:dim] + f.shape[dim + 1 :] != first[:dim] + first[dim + 1 :] for f in flats):
        raise RefusedError("it joins tensors of other shapes")
    outer = math.prod(first[:dim])
    if outer == 1:
        return Flat(shape, tuple(piece for flat in flats for piece in flat.pieces))
    if all(len(flat.pieces) == 1 and flat.pieces[0].shape == flat.shape for flat in flats):
        places, at = list[tuple[Region, Facts]](), 0
        for flat in flats:
            box: Region = tuple(((0, n),) for n in flat.shape)
            box = (*box[:dim], ((at, flat.shape[dim]),), *box[dim + 1 :])
            places.append((box, flat.pieces[0].facts))
            at += flat.shape[dim]
        codes = {(flat.pieces[0].codes, flat.pieces[0].width) for flat in flats}
        if facts := known(types, places, shape) if codes == {((), 1)} else ():
            return Flat.of(facts, shape)
    rows = [flat.in_rows(outer) for flat in flats]
    pieces = tuple(piece for row in zip(*rows, strict=True) for one in row for piece in one.pieces)
    return Flat(shape, pieces)


def known(types: Types, places: Sequence[tuple[Region, Facts]], shape: tuple[int, ...]) -> Facts:
    """Give what a tensor is to whose places parts are written.

    It is nothing that is known if that is no part of a value.
    """

    def whole(held: Mapping[int, Held]) -> list[Held]:
        return [placed(types, {at: held[i] for i, (at, _) in enumerate(places)}, shape)]

    with suppress(RefusedError):
        return of_one_value({i: facts for i, (_, facts) in enumerate(places)}, whole)
    return ()


def facts_of(types: Types, flat: Flat) -> Facts:
    """The parts of values that a tensor is, if its pieces fill its shape."""
    places, at = list[tuple[Region, Facts]](), 0
    if not flat.pieces or any(p.codes or len(p.shape) != len(flat.shape) for p in flat.pieces):
        return ()
    if len(flat.pieces) == 1:
        return flat.pieces[0].facts if flat.pieces[0].shape == flat.shape else ()
    for piece in flat.pieces:
        boxes = [*_boxes(flat.shape, at, at + piece.size)]
        if len(boxes) != 1 or tuple(length for _, length in boxes[0]) != piece.shape:
            return ()
        places.append((tuple((interval,) for interval in boxes[0]), piece.facts))
        at += piece.size
    return known(types, places, flat.shape)


def aligned(flats: Sequence[Flat]) -> list[tuple[Piece, ...]]:
    """Pieces of tensors of as many elements, cut at the same places."""
    places = sorted({at for flat in flats for at in _ends(flat)})
    return [tuple(flat.between(pairwise(places))) for flat in flats]


def _ends(flat: Flat) -> Iterator[int]:
    at = 0
    yield at
    for piece in flat.pieces:
        at += piece.size
        yield at
