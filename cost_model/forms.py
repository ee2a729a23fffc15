"""Local forms of operators: what decides the seconds of a kernel on a given device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from partitioner.ir.graph import Attr, Graph, Opaque
from partitioner.ir.layout import Placement
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode

#: Shape of a device's part of a placement.
LocalShape: TypeAlias = Callable[[Placement], tuple[int, ...]]


@dataclass(frozen=True)
class Form:
    """An operator on one device.

    Two nodes of one form, whichever model they are of, take equal time on equal devices, but for
    operators whose time depends on contents (NonZero, Loop).

    Attributes:
        op: Key of the op table.
        attrs: Attributes in the form of `_plain`, by name, sorted; of an operator that writes to a
            stored value also "cut": whether the value is stored in parts.
        operands: Element type and local shape of each operand, then each capture; None if absent.
        results: The same of each result.
    """

    op: str
    attrs: tuple[tuple[str, Any], ...]
    operands: tuple[tuple[str, tuple[int, ...]] | None, ...]
    results: tuple[tuple[str, tuple[int, ...]] | None, ...]

    @cached_property
    def key(self) -> str:
        """The form as canonical JSON."""
        data = [self.op, dict(self.attrs), self.operands, self.results]
        return json.dumps(data, sort_keys=True, separators=(",", ":"))


def form_of(graph: Graph, placed: PlacedNode, local_shape: LocalShape) -> Form:
    """The form of a placed node on a device, which has these shapes of its operands and results."""
    node = placed.node

    row = row_of(node)
    attrs = {**node.attrs}
    if row is not None and row.in_place is not None:
        stored = next(at for at in placed.outs if at is not None)
        attrs["cut"] = bool(stored.sharding.axes)

    def part(value: str, at: Placement | None) -> tuple[str, tuple[int, ...]] | None:
        return None if at is None else (graph.types[value].dtype, local_shape(at))

    reads = (*node.inputs, *node.captures)
    return Form(
        node.op,
        tuple((name, _plain(attr)) for name, attr in sorted(attrs.items())),
        tuple(map(part, reads, placed.ins)),
        tuple(map(part, node.outputs, placed.outs)),
    )


def _plain(attr: Attr) -> Any:
    """An attribute as JSON: contents that are long, or that only a backend can read, by digest."""
    if isinstance(attr, Graph):
        return {"graph": attr.digest}
    if isinstance(attr, Opaque):
        return {attr.kind: hashlib.sha256(attr.data).hexdigest()}
    if isinstance(attr, np.ndarray):
        return {attr.dtype.name: [attr.shape, hashlib.sha256(attr.tobytes()).hexdigest()]}
    if isinstance(attr, bytes):
        return {"bytes": attr.hex()}
    return attr
