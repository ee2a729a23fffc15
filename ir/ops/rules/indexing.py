"""Elements found by index in a dim of the data.

The dim that is searched is whole, all others are cut. Where the indices cover only the first
places of a dim, the dim is ``d + rest``: a device's part starts with its part of the places that
are covered.
"""

from __future__ import annotations

from collections.abc import Iterable

from partitioner.ir.ops.rules.dims import names
from partitioner.ir.ops.signature import OpaqueError, Signature
from partitioner.ir.rule import Rule


def moved_rows(ins: tuple[int, ...], outs: tuple[int, ...]) -> int:
    """Bytes moved by a gather: the indices, and each row read and written."""
    return sum(ins[1:]) + 2 * outs[0]


def gather_elements(signature: Signature, dim: int, sums: Iterable[int] = ()) -> Rule:
    """``d0 + rest0, v; d0 i -> d0 i``.

    Raises:
        OpaqueError: The data or the indices have no dims.
    """
    data, places, sizes = _covered(signature, dim)
    return signature.rule(
        [data, places], [places], sizes=sizes, whole={"v"}, dropped=sizes, points=places, sums=sums
    )


def scatter_elements(
    signature: Signature, dim: int, *, adds: bool = False, sums: Iterable[int] = ()
) -> Rule:
    """``d0 + rest0, v; d0 i; d0 i -> d0 + rest0, v``.

    Args:
        signature: Of data, indices and, unless a number is written, a source.
        dim: The dim that is searched.
        adds: Each device adds the places it has; otherwise all of them are written by each.
        sums: See `Options`.

    Raises:
        OpaqueError: The data or the indices have no dims, or only a part of the source is written.
    """
    data, places, sizes = _covered(signature, dim)
    source = signature.type(2)
    if source is not None and source.shape != signature.shape(1):
        raise OpaqueError(f"the source is {source.shape}, the index {signature.shape(1)}")
    return signature.rule(
        [data, places, places],
        [data],
        sizes=sizes,
        whole={"v"} if adds else {"v", "i"},
        reduce={"i"},
        addends={0} if adds else (),
        points=places,
        flops=1 if adds else 0,
        sums=sums,
    )


def _covered(signature: Signature, dim: int) -> tuple[list[str], list[str], dict[str, int]]:
    """Dims of the data, dims of the indices, and sizes where these leave out places."""
    shape, index = signature.shape(), signature.shape(1)
    if not shape or not index:
        raise OpaqueError("the data or the index has no dims")
    data, places = names("d", len(shape)), names("d", len(shape))
    data[dim], places[dim] = "v", "i"
    sizes: dict[str, int] = {}
    for other, (size, covered) in enumerate(zip(shape, index, strict=True)):
        if other != dim and size != covered:
            sizes |= {f"d{other}": covered, f"rest{other}": size - covered}
            data[other] = f"d{other} + rest{other}"
    return data, places, sizes
