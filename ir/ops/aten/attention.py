"""Attention and its gradients as single nodes, with a mask that broadcasts to the scores.

Batch, key-value heads, query groups and query rows are cut (rows not under a causal mask, whose
places count). Gradients of keys and values sum over groups and rows, that of queries does not:
in the backward node these two are whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partitioner.ir.ops.aten.sums import sums
from partitioner.ir.ops.attention import SCORE, Heads, heads_of
from partitioner.ir.ops.table import OpRow, OpView, Shape
from partitioner.ir.rule import Rule

_FORWARD = ("query", "key", "value", "mask")
_BACKWARD = ("out", *_FORWARD, "out", "logsumexp")  #: The first is the gradient.


@dataclass(frozen=True)
class _Attention:
    """An attention node: its heads, and the shapes of the first four operands."""

    heads: Heads
    query: Shape
    key: Shape
    value: Shape
    mask: Shape | None
    causal: bool

    @classmethod
    def of(cls, view: OpView, first: int = 0) -> _Attention:
        """From a node whose query is operand `first`."""
        query, key, value = (view.shape(first + index) for index in range(3))
        held = view.type(first + 3)
        mask = held.shape if held is not None else None
        heads = heads_of(query[1], key[1])
        return cls(heads, query, key, value, mask, bool(view.attr("is_causal", 0)))

    def dims(self, name: str) -> list[str] | None:
        """Dims of an operand or result."""
        own, shared = self.heads.query(), self.heads.key()
        found = {
            "query": ["b", own, "q", "d"],
            "key": ["b", shared, "k", "d"],
            "value": ["b", shared, "k", "v"],
            "out": ["b", own, "q", "v"],
            "logsumexp": ["b", own, "q"],
        }
        if name != "mask":
            return found[name]
        if self.mask is None:
            return None
        full = ["b", own, "q", "k"][4 - len(self.mask) :]
        return ["1" if size == 1 else dim for dim, size in zip(full, self.mask, strict=True)]

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that no dim may give alone."""
        return {"h": self.heads.kv, "r": self.heads.group}

    def products(self, scores: int, values: int) -> float:
        """FLOPs a query row: so many products along d and along v, and the softmax, a key."""
        return self.key[2] * (2.0 * (scores * self.query[3] + values * self.value[3]) + SCORE)

    @property
    def whole(self) -> set[str]:
        """Softmax and dot products need all keys and channels."""
        return {"d", "k", "v"} | ({"q"} if self.causal else set())

    @property
    def points(self) -> list[str]:
        """Loops over query rows."""
        return ["b", *(name for name, size in self.sizes.items() if size > 1), "q"]


def attention(view: OpView) -> Rule:
    """``b (h r) q d, b h k d, b h k v -> b (h r) q v, b (h r) q``."""
    own = _Attention.of(view)
    results = [
        own.dims(name) if value else None
        for name, value in zip(("out", "logsumexp"), view.node.outputs, strict=True)
    ]
    return Rule.of(
        [own.dims(name) for name in _FORWARD],
        results,
        view.shapes,
        view.out_shapes,
        sizes=own.sizes,
        whole=own.whole,
        points=own.points,
        flops=own.products(1, 1),
    )


def attention_backward(view: OpView) -> Rule:
    """Gradients of query, key and value: linear in the result's gradient."""
    own = _Attention.of(view, 1)
    results = [
        own.dims(name) if value else None
        for name, value in zip(("query", "key", "value"), view.node.outputs, strict=True)
    ]
    return Rule.of(
        [own.dims(name) for name in _BACKWARD],
        results,
        view.shapes,
        view.out_shapes,
        sizes=own.sizes,
        whole=own.whole | {"q", "r"},
        linear=sums(view, 0),
        points=own.points,
        flops=own.products(3, 2),
    )


def mask_backward(view: OpView) -> Rule:
    """The gradient of a learned bias sums over the dims along which it broadcasts."""
    own = _Attention.of(view, 1)
    return Rule.of(
        [own.dims(name) for name in _BACKWARD],
        [own.dims("mask")],
        view.shapes,
        view.out_shapes,
        sizes=own.sizes,
        reduce=dict.fromkeys("bhrq", "sum"),
        whole=own.whole,
        linear=sums(view, 0),
        points=own.points,
        flops=own.products(1, 1),
    )


ROWS: Mapping[str, OpRow] = {
    "partitioner::attention": OpRow(attention),
    "partitioner::attention_backward": OpRow(attention_backward),
    "partitioner::attention_mask_backward": OpRow(mask_backward),
}
