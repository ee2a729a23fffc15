"""Elements of one dim, found by an index tensor of the data's rank.

The indexed dim is whole unless a device can write to a part of it, all others are cut. Where the
index covers only the first positions of another dim, this is ``d + rest``: a device's part starts
with its part of what is covered.
"""

from __future__ import annotations

from collections.abc import Iterable

from partitioner.ir.ops.signature import OpaqueError, Signature, names
from partitioner.ir.rule import Rule


def moved_rows(ins: tuple[int, ...], outs: tuple[int, ...]) -> int:
    """Bytes moved by a gather: indices, and the elements of the result, read and written."""
    return sum(ins[1:]) + 2 * outs[0]


def gather_elements(signature: Signature, dim: int, sums: Iterable[int] = ()) -> Rule:
    """``d0 + rest0, v; d0 i -> d0 i``; OpaqueError if the data or the index has no dims."""
    data, index, sizes = _covered(signature, dim)
    return signature.rule(
        [data, index], [index], sizes=sizes, whole="v", dropped=sizes, points=index, sums=sums
    )


def scatter_elements(
    signature: Signature,
    dim: int,
    *,
    adds: bool = False,
    cuts_written: bool = False,
    sums: Iterable[int] = (),
) -> Rule:
    """``d0 + rest0, v; d0 i; d0 i -> d0 + rest0, v``: data, index, source if no number is written.

    Elements are added up if so told (`adds`), each device's to a partial result; otherwise each
    device writes all of them or, if it `cuts_written`, what lies in its part of the indexed dim.
    """
    data, index, sizes = _covered(signature, dim)
    source = signature.type(2)
    if source is not None and source.shape != signature.shape(1):
        raise OpaqueError(f"the source is {source.shape}, the index {signature.shape(1)}")
    return signature.rule(
        [data, index, index],
        [data],
        sizes=sizes,
        whole="i" if cuts_written else "v" if adds else "v i",
        reduce="i",
        addends={0} if adds else (),
        points=index,
        flops=1 if adds else 0,
        sums=sums,
    )


def _covered(signature: Signature, dim: int) -> tuple[list[str], list[str], dict[str, int]]:
    """Dims of the data, dims of the index, and sizes where the index covers a part of a dim."""
    shape, index_shape = signature.shape(), signature.shape(1)
    if not shape or not index_shape:
        raise OpaqueError("the data or the index has no dims")
    data, index = names("d", len(shape)), names("d", len(shape))
    data[dim], index[dim] = "v", "i"
    sizes: dict[str, int] = {}
    for other, (size, covered) in enumerate(zip(shape, index_shape, strict=True)):
        if other != dim and size != covered:
            sizes |= {f"d{other}": covered, f"rest{other}": size - covered}
            data[other] = f"d{other} + rest{other}"
    return data, index, sizes
