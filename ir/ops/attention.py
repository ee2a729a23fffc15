"""Attention: batch, key-value heads, query groups and query rows are cut.

Query heads are the compound ``(h r)``: r query heads share each of h key-value heads. Cutting r
keeps keys and values whole; cutting h cuts them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partitioner.ir.graph import Attr
from partitioner.ir.ops.elementwise import TRANSCENDENTAL
from partitioner.ir.ops.spatial import compound
from partitioner.ir.ops.table import (
    LocalOp,
    LocalView,
    OpaqueError,
    OpRow,
    OpView,
    Shape,
    same_node,
)
from partitioner.ir.rule import Rule

#: FLOPs of a score beside its dot products: scale, mask, maximum, exp, sum, division.
SCORE = TRANSCENDENTAL + 5


@dataclass(frozen=True)
class Heads:
    """Heads of an attention node.

    Attributes:
        kv: Key-value heads, factor h.
        group: Query heads a key-value head, factor r.
    """

    kv: int
    group: int

    def query(self, d: int = 1) -> str:
        """Dim of query heads, or of heads and their channels: ``(h r)``, ``(h r d)``."""
        return compound(h=self.kv, r=self.group, d=d)

    def result(self, v: int) -> str:
        """The same for results, whose channels are the values': ``(h r v)``."""
        return compound(h=self.kv, r=self.group, v=v)

    def key(self, d: int = 1) -> str:
        """Dim of key-value heads, or of heads and their channels: ``h``, ``(h d)``."""
        return compound(h=self.kv, d=d)

    def value(self, v: int) -> str:
        """The same for values: ``(h v)``."""
        return compound(h=self.kv, v=v)


def heads_of(query: int, kv: int) -> Heads:
    """Heads from their counts.

    Raises:
        OpaqueError: They do not divide.
    """
    if query < 1 or kv < 1 or query % kv:
        raise OpaqueError(f"{query} query heads over {kv} key-value heads")
    return Heads(kv, query // kv)


@dataclass(frozen=True)
class Parts:
    """Dims and sizes that all attention ops build their rules from."""

    heads: Heads
    query: Shape  #: (queries, channels a head)
    keys: int  #: Keys of this call.
    total: int  #: With the past ones.
    values: int  #: Channels of a value head.
    ordered: bool  #: Places of the queries matter (causal masks): they are whole.

    @property
    def sizes(self) -> dict[str, int]:
        """Factor sizes."""
        return {
            "h": self.heads.kv,
            "r": self.heads.group,
            "q": self.query[0],
            "d": self.query[1],
            "k": self.keys,
            "t": self.total,
            "p": self.total - self.keys,
            "v": self.values,
        }

    @property
    def whole(self) -> set[str]:
        """Factors that are not cut: softmax and dot products need all keys and channels."""
        return {"d", "k", "p", "t", "v", "m"} | ({"q"} if self.ordered else set())

    @property
    def points(self) -> list[str]:
        """Loops that FLOPs count (of size over 1)."""
        named = {"h": self.heads.kv, "r": self.heads.group}
        return ["b", *(name for name, size in named.items() if size > 1), "q"]

    @property
    def flops(self) -> float:
        """FLOPs a query row and head."""
        return self.total * (2.0 * (self.query[1] + self.values) + SCORE)

    def packed(self, name: str) -> list[str]:
        """Dims of a 3-D operand or result."""
        d, v = self.query[1], self.values
        return {
            "query": ["b", "q", self.heads.query(d)],
            "key": ["b", "k", self.heads.key(d)],
            "value": ["b", "k", self.heads.value(v)],
            "result": ["b", "q", self.heads.result(v)],
        }[name]

    def split(self, name: str) -> list[str]:
        """Dims of a 4-D operand or result."""
        query, shared = self.heads.query(), self.heads.key()
        return {
            "query": ["b", query, "q", "d"],
            "key": ["b", shared, "k", "d"],
            "value": ["b", shared, "k", "v"],
            "past_key": ["b", shared, "p", "d"],
            "past_value": ["b", shared, "p", "v"],
            "present_key": ["b", shared, "t", "d"],
            "present_value": ["b", shared, "t", "v"],
            "result": ["b", query, "q", "v"],
            "scores": ["b", query, "q", "t"],
        }[name]

    def mask(self, shape: Shape | None) -> list[str] | None:
        """Dims of a mask that broadcasts to (batch, heads, queries, keys)."""
        if shape is None:
            return None
        names = ["b", self.heads.query(), "q", "m"][4 - len(shape) :]
        return ["1" if size == 1 else name for name, size in zip(names, shape, strict=True)]


def rule_of_parts(
    view: OpView, parts: Parts, operands: list[list[str] | None], results: list[list[str]]
) -> Rule:
    """The rule of an attention node from the dims of its operands and results."""
    found = zip(results, view.node.outputs, strict=False)
    return Rule.of(
        view.present(operands),
        [dims if name else None for dims, name in found],
        view.shapes,
        view.out_shapes,
        sizes=parts.sizes,
        whole=parts.whole,
        points=parts.points,
        flops=parts.flops,
    )


def attention(view: OpView) -> Rule:
    """ONNX Attention: 4-D ``b heads place channel`` or 3-D ``b place (heads channel)``."""
    query, key, value = (view.shape(index) for index in range(3))
    if len(query) == 4:
        parts = _parts(view, query[1], key[1], (query[2], query[3]), key[2], value[3])
    else:
        kv = view.int_attr("kv_num_heads", 0)
        heads = heads_of(view.int_attr("q_num_heads", 0), kv)
        inner = (query[1], query[2] // (heads.kv * heads.group))
        parts = _parts(view, heads.kv * heads.group, kv, inner, key[1], value[2] // kv)
    form = parts.split if len(query) == 4 else parts.packed
    mask = view.type(3)
    operands: list[list[str] | None] = [
        *(form("query"), form("key"), form("value"), parts.mask(mask.shape if mask else None)),
        *(parts.split("past_key"), parts.split("past_value"), ["b"]),
    ]
    present = [parts.split(name) for name in ("present_key", "present_value", "scores")]
    return rule_of_parts(view, parts, operands, [form("result"), *present])


def _parts(view: OpView, query: int, kv: int, inner: Shape, keys: int, values: int) -> Parts:
    past = view.type(4)
    total = keys + (past.shape[2] if past is not None else 0)
    causal = bool(view.int_attr("is_causal", 0))
    return Parts(heads_of(query, kv), inner, keys, total, values, causal)


def local_heads(view: OpView, local: LocalView) -> LocalOp:
    """Attributes that count heads count the device's own."""
    kv, group = local.sizes.get("h", 1), local.sizes.get("r", 1)
    own: dict[str, Attr] = {
        "q_num_heads": kv * group,
        "kv_num_heads": kv,
        "num_heads": kv * group,
    }
    kept = {name: count for name, count in own.items() if view.int_attr(name, 0)}
    return same_node(view, **kept)


ROWS: Mapping[str, OpRow] = {"Attention": OpRow(attention, local_heads)}
