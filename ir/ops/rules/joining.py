"""Parts of a dim put together and taken apart: Concat, Split, Slice, Pad.

The joined dim is a sum of factors, one a part. The parts are cut over the same axes, each with
its own layout, and a device's piece of the whole is its pieces of the parts one after the other:
so the local op is the same op with local sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from partitioner.ir.ops.signature import Options, Signature, joined, names, replaced
from partitioner.ir.ops.table import LocalOp, LocalView, OpView
from partitioner.ir.rule import Rule

Run = tuple[int, int, int]  #: Sizes of three parts of a dim: before a slice, the slice, after it.


def concat(signature: Signature, dim: int, sums: Iterable[int] = ()) -> Rule:
    """``d0 a0, d0 a1 -> d0 a0 + a1``; an empty vector may stand for a tensor of any rank.

    An element that is joined to more, as a token to a cache, is whole on each device, and one of
    them puts it into its part: ``d0 a0, d0 e1 -> d0 a0 + a1``.
    """
    rank = len(signature.out_shape)
    dims, parts = names("d", rank), names("a", len(signature.types))
    shapes = {name: signature.shape(i) for i, name in enumerate(parts)}
    sizes = {name: shape[dim] if len(shape) == rank else 0 for name, shape in shapes.items()}
    single = {
        n: n.replace("a", "e") for n, size in sizes.items() if 1 == size < max(sizes.values())
    }
    return signature.rule(
        [
            replaced(dims, dim, single.get(n, n)) if len(s) == rank else [n]
            for n, s in shapes.items()
        ],
        [replaced(dims, dim, joined(sizes))],
        sizes=dict.fromkeys(single, 1),
        whole=[*(name for name, size in sizes.items() if size == 0), *single.values()],
        sums=sums,
    )


def local_concat(view: OpView, local: LocalView) -> LocalOp:
    """The node without those elements that other devices put into their parts."""
    node = view.node
    others = {
        i for i in range(len(node.inputs)) if f"e{i}" in local.sizes and not local.sizes[f"a{i}"]
    }
    inputs = tuple(value for i, value in enumerate(node.inputs) if i not in others)
    attrs = {**node.attrs, "tensors": len(inputs)} if "tensors" in node.attrs else node.attrs
    return LocalOp((replace(node, inputs=inputs, attrs=attrs),))


def split(signature: Signature, dim: int, sizes: Sequence[int], sums: Iterable[int] = ()) -> Rule:
    """``d0 a0 + a1 -> d0 a0, d0 a1``."""
    dims = names("d", signature.rank())
    parts = dict(zip(names("a", len(signature.out_types)), sizes, strict=True))
    return signature.rule(
        [replaced(dims, dim, joined(parts))],
        [replaced(dims, dim, part) for part in parts],
        sizes=parts,
        whole=[name for name, size in parts.items() if size == 0],
        dropped=parts,
        sums=sums,
    )


def run_of(size: int, start: int | None, end: int | None, step: int) -> Run | None:
    """The parts of a dim around a slice; None if the slice has steps or is empty."""
    first, last, _ = slice(start, end).indices(size)
    return (first, last - first, size - last) if step == 1 and first < last else None


def slices(
    rank: int, runs: Mapping[int, Run | None], *, numbered: bool, sums: Sequence[int] = ()
) -> tuple[list[str], list[str], Options]:
    """Dims of a tensor and of a slice of it, and the rule's options for them.

    A run of a dim (`runs`, by sliced dim) is ``d`` of ``pre + d + post``; a dim that is sliced
    otherwise (None) is whole. Names of factors end with the dim if `numbered`; otherwise only one
    dim may be sliced.
    """
    around, taken = names("d", rank), names("d", rank)
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    for dim, run in runs.items():
        number = str(dim) if numbered else ""
        if run is None:
            around[dim], taken[dim] = f"x{number}", f"y{number}"
            whole |= {around[dim], taken[dim]}
        else:
            taken[dim] = f"d{dim}" if numbered else "run"
            parts = dict(zip((f"pre{number}", taken[dim], f"post{number}"), run, strict=True))
            around[dim] = joined(parts)
            sizes |= parts
    return around, taken, {"sizes": sizes, "whole": whole, "dropped": sizes, "sums": sums}
