"""Reshapes, and dims that are added, dropped, moved, repeated or resized."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partitioner.ir.errors import IRError
from partitioner.ir.loops.windows import Window
from partitioner.ir.ops.signature import Shape, Signature, broadcast, names
from partitioner.ir.rule import Rule

Sized = tuple[tuple[int, int], ...]  #: (dim, what is left of its size), major first.


@dataclass(frozen=True, slots=True)
class Piece:
    """A factor of two shapes of the same elements."""

    #: Dim of the old shape that it is a factor of; None if it crosses dims there.
    before: int | None
    #: Dim of the new shape that it is a factor of; None if it crosses dims there.
    after: int | None
    size: int  #: Size of the factor.


def refine(before: Shape, after: Shape) -> tuple[Piece, ...]:
    """Factors of two shapes of the same elements, major first in each dim.

    Consecutive dims with equal products share common factors from either end; what is left
    between the ends has no common dim boundary and gives pieces of one shape only.

    >>> [(p.before, p.after, p.size) for p in refine((6, 1, 64), (2, 192))]
    [(0, 0, 2), (0, 1, 3), (2, 1, 64)]
    >>> [(p.before, p.after, p.size) for p in refine((6, 4), (8, 3))]
    [(0, 0, 2), (0, None, 3), (1, None, 4), (None, 0, 4), (None, 1, 3)]
    """
    return tuple(itertools.chain(*(_common(*group) for group in _groups(before, after))))


def _groups(before: Shape, after: Shape) -> Iterator[tuple[Sized, Sized]]:
    """The shortest runs of dims with equal products, without dims of size 1."""
    if 0 in before:
        yield tuple(enumerate(before)), tuple(enumerate(after))
        return
    right = iter([(dim, size) for dim, size in enumerate(after) if size != 1])
    run: Sized = ()
    other: Sized = ()
    for dim, size in enumerate(before):
        run = (*run, (dim, size)) if size != 1 else run
        while _product(other) < _product(run):
            other = (*other, next(right))
        if run and _product(run) == _product(other):
            yield run, other
            run, other = (), ()


def _product(dims: Sized) -> int:
    return math.prod(size for _, size in dims)


def _common(before: Sized, after: Sized) -> Iterator[Piece]:
    major, before, after = _peel(before, after, 0)
    minor, before, after = _peel(before, after, -1)
    yield from major
    yield from (Piece(dim, None, size) for dim, size in before)
    yield from (Piece(None, dim, size) for dim, size in after)
    yield from reversed(minor)


def _peel(before: Sized, after: Sized, end: int) -> tuple[list[Piece], Sized, Sized]:
    """Takes common factors off one end while there are any; empty tensors have none."""
    pieces: list[Piece] = []
    empty = _product(before) == 0
    while before and not empty and (size := math.gcd(before[end][1], after[end][1])) > 1:
        pieces.append(Piece(before[end][0], after[end][0], size))
        before, after = _divided(before, end, size), _divided(after, end, size)
    return pieces, before, after


def _divided(dims: Sized, end: int, size: int) -> Sized:
    dim, left = dims[end]
    rest = dims[1:] if end == 0 else dims[:-1]
    if left == size:
        return rest
    divided = ((dim, left // size),)
    return (*divided, *rest) if end == 0 else (*rest, *divided)


def reshape(signature: Signature, sums: Iterable[int] = ()) -> Rule:
    """Factors of a dim of both shapes pass; those that cross dims of either are whole."""
    before, after = signature.shape(), signature.out_shape
    if math.prod(before) != math.prod(after):
        raise IRError(
            f"shape {before} has {math.prod(before)} elements, {after} has {math.prod(after)}"
        )
    pieces = {f"f{i}": piece for i, piece in enumerate(refine(before, after))}
    old = ([n for n, p in pieces.items() if p.before == dim] for dim in range(len(before)))
    new = ([n for n, p in pieces.items() if p.after == dim] for dim in range(len(after)))
    return signature.rule(
        [[product(terms) for terms in old]],
        [[product(terms) for terms in new]],
        sizes={name: piece.size for name, piece in pieces.items()},
        whole=[n for n, p in pieces.items() if p.before is None or p.after is None],
        sums=sums,
    )


def product(names: Sequence[str]) -> str:
    """The dim that is the product of factors: ``"(d0 d1)"``, or ``"(1)"`` of none."""
    return f"({' '.join(names or ['1'])})"


def squeeze(signature: Signature, lost: Collection[int], sums: Iterable[int] = ()) -> Rule:
    """``d0 1 d2 -> d0 d2``."""
    dims = ["1" if i in lost else f"d{i}" for i in range(signature.rank())]
    kept = [name for i, name in enumerate(dims) if i not in lost]
    return signature.rule([dims], [kept], sums=sums)


def unsqueeze(signature: Signature, added: Collection[int], sums: Iterable[int] = ()) -> Rule:
    """``d0 d1 -> d0 1 d1``."""
    dims = names("d", signature.rank())
    left = iter(dims)
    result = ["1" if i in added else next(left) for i in range(len(signature.out_shape))]
    return signature.rule([dims], [result], sums=sums)


def permute(signature: Signature, order: Iterable[int], sums: Iterable[int] = ()) -> Rule:
    """``d0 d1 d2 -> d2 d0 d1`` for the order 2, 0, 1."""
    dims = names("d", signature.rank())
    return signature.rule([dims], [[dims[dim] for dim in order]], sums=sums)


def expand(signature: Signature, sums: Iterable[int] = ()) -> Rule:
    """``1 b1 -> b0 b1``: broadcast, as elementwise ops do."""
    out = names("b", len(signature.out_shape))
    dims, result = broadcast(signature.shape(), out), broadcast(signature.out_shape, out)
    return signature.rule([dims], [result], sums=sums)


def repeat(signature: Signature, counts: Mapping[int, int], sums: Iterable[int] = ()) -> Rule:
    """``d1 d2 -> r0 (r1 d1) d2`` for counts of dims 0 and 1 of the result."""
    rank = len(signature.out_shape)
    lead = rank - signature.rank()
    dims = [f"d{i}" for i in range(lead, rank)]
    repeated = [f"(r{i} d{i})" if i in counts else f"d{i}" for i in range(lead, rank)]
    sizes = {f"r{i}": count for i, count in counts.items()}
    return signature.rule([dims], [[*names("r", lead), *repeated]], sizes=sizes, sums=sums)


def changed_dims(signature: Signature) -> set[int]:
    """Dims whose size differs between operand 0 and the result."""
    sizes = zip(signature.shape(), signature.out_shape, strict=True)
    return {dim for dim, (before, after) in enumerate(sizes) if before != after}


def resize(
    signature: Signature,
    changed: Collection[int],
    slid: Mapping[int, Window] | None = None,
    flops: float = 0.0,
) -> Rule:
    """Changed dims are whole but for those that windows slide over; `flops` a result element."""
    windows = {(0, f"d{i}"): window for i, window in (slid or {}).items()}
    kept = [i not in changed or (0, f"d{i}") in windows for i in range(signature.rank())]
    before = [f"d{i}" if keeps else f"x{i}" for i, keeps in enumerate(kept)]
    after = [f"d{i}" if keeps else f"y{i}" for i, keeps in enumerate(kept)]
    whole = {*before, *after}.difference(f"d{i}" for i in range(signature.rank()))
    return signature.rule(
        [before], [after], whole=whole, windows=windows, points=after, flops=flops
    )
