"""The graph of a micro-batch in proportion to two that were traced: no tracer is asked.

Two traces of a model with batches of other sizes differ in sizes, and in numbers that follow from
them. What is in proportion to the batch in both of them is taken to be so in a third one, too. That
is a guess that a trace must confirm before anything runs: some sizes grow otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import starmap
from typing import Any, TypeVar

import numpy as np

from partitioner.ir.graph import Attr, Graph, Node
from partitioner.ir.types import Dim, TensorType

_T = TypeVar("_T", Graph, tuple[Any, ...])


def in_proportion(whole: _T, part: _T, count: int, wanted: int) -> _T | None:
    """The graph of one of `wanted` micro-batches; None if it does not follow from the others.

    Args:
        whole: The graph of the whole batch, or a tuple of what else differs in sizes.
        part: That of one of `count` micro-batches.
        count: At least 2.
        wanted: The number of micro-batches of the graph that is made.
    """
    try:
        made: _T = _Proportion(count, wanted).attr(whole, part)
    except _Unlike:
        return None
    return made


class _Unlike(Exception):  # noqa: N818 - a verdict
    """Two values are neither the same nor in proportion to the batch."""


class _Proportion:
    def __init__(self, count: int, wanted: int) -> None:
        self.count, self.wanted = count, wanted

    def graph(self, whole: Graph, part: Graph) -> Graph:
        """The graph between two, which have the same nodes."""
        same = ("inputs", "outputs", "opsets", "backward", "optional", "blocks", "bounded")
        is_alike = whole.constants == part.constants and whole.types.keys() == part.types.keys()
        if not is_alike or any(getattr(whole, name) != getattr(part, name) for name in same):
            raise _Unlike
        nodes = tuple(starmap(self._node, _pairs(whole.nodes, part.nodes)))
        types = {name: self._type(type_, part.types[name]) for name, type_ in whole.types.items()}
        return replace(part, nodes=nodes, types=types)

    def _node(self, whole: Node, part: Node) -> Node:
        is_alike = whole.attrs.keys() == part.attrs.keys()
        if not is_alike or replace(whole, attrs={}) != replace(part, attrs={}):
            raise _Unlike
        attrs = {key: self.attr(value, part.attrs[key]) for key, value in whole.attrs.items()}
        return replace(part, attrs=attrs)

    def _type(self, whole: TensorType, part: TensorType) -> TensorType:
        if whole.dtype != part.dtype:
            raise _Unlike
        dims = (
            other if one == other else Dim(self._number(one.size, other.size), other.symbol)
            for one, other in _pairs(whole.dims, part.dims)
        )
        return TensorType(part.dtype, tuple(dims))

    def attr(self, whole: Attr, part: Attr) -> Any:
        """A value between two, or a graph."""
        if type(whole) is not type(part):
            raise _Unlike
        if isinstance(whole, np.ndarray):
            if not np.array_equal(whole, np.asarray(part)):
                raise _Unlike
            return part
        if isinstance(whole, Graph) and isinstance(part, Graph):
            return part if whole.digest == part.digest else self.graph(whole, part)
        if whole == part:
            return part
        if isinstance(whole, tuple) and isinstance(part, tuple):
            return tuple(starmap(self.attr, _pairs(whole, part)))
        if isinstance(whole, int | float) and isinstance(part, int | float):
            return self._number(whole, part)
        raise _Unlike

    def _number(self, whole: float, part: float) -> Any:
        if isinstance(whole, int):
            if whole != part * self.count or whole % self.wanted:
                raise _Unlike
            return whole // self.wanted
        if np.isclose(whole, part * self.count, rtol=1e-12):
            return whole / self.wanted
        if np.isclose(whole * self.count, part, rtol=1e-12):  # as the weight of a mean
            return whole * self.wanted
        raise _Unlike


def _pairs(whole: Sequence[Any], part: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    if len(whole) != len(part):
        raise _Unlike
    return zip(whole, part, strict=True)
