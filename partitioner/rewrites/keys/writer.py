"""Writes softmax and attention as nodes that reduce over keys, in the operators of a dialect."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from partitioner.ir.graph import Attr, Constant, Node
from partitioner.ir.types import TensorType, numpy_dtype
from partitioner.rewrites.graph_writer import GraphWriter

#: Element types that sums of exponentials are taken in; others are cast to the first.
WIDE = ("float32", "float64")


def wide(dtype: str) -> str:
    """The element type in which a softmax of scores of this type is computed."""
    return dtype if dtype in WIDE else WIDE[0]


class Ops(NamedTuple):
    """Operators of a dialect."""

    product: str
    difference: str
    exponential: str
    quotient: str


@dataclass
class Writer(ABC):
    """Writes the nodes that stand in the place of one node, with their types and constants.

    Scores are ``... query key``: queries and keys are the last two dims.
    """

    ops: ClassVar[Ops]
    writer: GraphWriter
    node: Node
    written: Iterator[int] = field(default_factory=itertools.count)
    constants: Iterator[int] = field(default_factory=itertools.count)

    @abstractmethod
    def write(self) -> None:
        """Write the nodes."""

    @abstractmethod
    def scaled(self, x: str, factor: float) -> str:
        """``x * factor``."""

    @abstractmethod
    def reshaped(self, x: str, shape: Sequence[int], made: str = "") -> str:
        """The elements in another shape."""

    @abstractmethod
    def permuted(self, x: str, order: Sequence[int]) -> str:
        """The dims in another order."""

    @abstractmethod
    def hidden(self, scores: str, mask: str) -> str:
        """Scores plus a mask of numbers, or minus infinity where a mask of flags is false."""

    @abstractmethod
    def at_least(self, x: str, number: float) -> str:
        """The larger of each element and a number."""

    @abstractmethod
    def largest(self, x: str) -> str:
        """The maximum over the last dim, which becomes 1."""

    @abstractmethod
    def total(self, x: str) -> str:
        """The sum over the last dim, which becomes 1."""

    @abstractmethod
    def cast(self, x: str, dtype: str, made: str = "") -> str:
        """The elements in another type; the value itself if it has that type and needs no name."""

    def product(self, a: str, b: str) -> str:
        """The product of matrices."""
        return self.add(self.ops.product, [a, b], self.multiplied(a, b))

    def difference(self, a: str, b: str) -> str:
        """``a - b``."""
        return self.add(self.ops.difference, [a, b], self.joined(a, b))

    def exponential(self, x: str) -> str:
        """``exp(x)``."""
        return self.add(self.ops.exponential, [x], self.type(x))

    def quotient(self, a: str, b: str, made: str = "") -> str:
        """``a / b``."""
        return self.add(self.ops.quotient, [a, b], self.joined(a, b), made)

    def softmax(self, scores: str, made: str, *, may_hide: bool) -> None:
        """Write the softmax of scores over their last dim as a value.

        Args:
            scores: The scores.
            made: The result, which may be of a wider type.
            may_hide: Rows that see no key have zeros as their softmax; they have NaN otherwise.
        """
        dtype, computed = self.type(made).dtype, wide(self.type(scores).dtype)
        same = dtype == computed
        weights, sums = self._weights(self.cast(scores, computed), may_hide=may_hide)
        sums = self.at_least(sums, 1.0) if may_hide else sums
        result = self.quotient(weights, sums, made if same else "")
        if not same:
            self.cast(result, dtype, made)

    def attention(
        self, query: str, key: str, value: str, mask: str, *, scale: float, made: str
    ) -> None:
        """Write attention of operands ``batch heads position channel`` as a value.

        Each head of keys and values serves a group of consecutive heads of queries, which are its
        rows: so the heads of the cache are not copied. Rows that see no key give zeros.

        Args:
            query: The queries.
            key: All keys.
            value: All values.
            mask: Broadcasts to (batch, heads, queries, keys); "" for none.
            scale: Factor of the scores.
            made: The result, of the type of the queries.
        """
        batch, heads, rows, _ = self.type(query).shape
        dtype, kv = self.type(query).dtype, self.type(key).shape[1]
        query, key, value = (self.cast(x, wide(dtype)) for x in (query, key, value))
        by_head, by_kv = (batch, heads, rows), (batch, kv, heads // kv * rows)
        query = self._of_rows(self.scaled(query, scale), by_kv)
        scores = self.product(query, self.permuted(key, (0, 1, 3, 2)))
        if mask:
            scores = self.hidden(self._of_rows(scores, by_head), mask)
        weights, sums = self._weights(scores, may_hide=bool(mask))
        result = self.product(self._of_rows(weights, by_kv), value)
        # behind the product, so that both are there before either is reduced and read
        sums = self.at_least(sums, 1.0) if mask else sums
        result, sums = self._of_rows(result, by_head), self._of_rows(sums, by_head)
        if dtype == wide(dtype):
            self.quotient(result, sums, made)
        else:
            self.cast(self.quotient(result, sums), dtype, made)

    def _weights(self, scores: str, *, may_hide: bool) -> tuple[str, str]:
        """Exponentials of the scores less their largest, and their sums.

        The largest score of a row that sees a key adds 1 to the sum: a sum below 1 is of a row that
        sees none.
        """
        largest = self.largest(scores)
        if may_hide:
            lowest = np.finfo(numpy_dtype(self.type(scores).dtype)).min
            largest = self.at_least(largest, float(lowest))
        weights = self.exponential(self.difference(scores, largest))
        return weights, self.total(weights)

    def _of_rows(self, x: str, rows: Sequence[int]) -> str:
        """The tensor with these dims before its last."""
        shape = self.type(x).shape
        return x if shape[:-1] == tuple(rows) else self.reshaped(x, (*rows, shape[-1]))

    def type(self, value: str) -> TensorType:
        """The type of a value of the graph, or of one that was written."""
        return self.writer.types[value]

    def add(
        self,
        op: str,
        reads: Sequence[str],
        result: TensorType,
        made: str = "",
        **attrs: Attr,
    ) -> str:
        """Write a node; returns its result, a new value unless `made` names one."""
        name = f"{self.node.name}/keys/{next(self.written)}"
        (value,) = self.writer.add(name, op, reads, [result], [made] if made else (), attrs)
        return value

    def constant(self, array: np.ndarray) -> str:
        """A new constant."""
        name = f"{self.node.name}/keys/constant{next(self.constants)}"
        return self.writer.constant(name, Constant.of(array))

    def reduced(self, x: str) -> TensorType:
        """The type of a reduction over the last dim."""
        return self.type(x).with_shape((*self.type(x).shape[:-1], 1))

    def joined(self, a: str, b: str) -> TensorType:
        """The type of an elementwise operation on two tensors, of the first one's elements."""
        return self.type(a).with_shape(np.broadcast_shapes(self.type(a).shape, self.type(b).shape))

    def multiplied(self, a: str, b: str) -> TensorType:
        """The type of a product of matrices."""
        return self.type(a).with_shape((*self.type(a).shape[:-1], self.type(b).shape[-1]))
