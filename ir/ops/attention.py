"""Attention and rotary embeddings: batch, key-value heads, query groups and query rows are cut.

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


def _rule(
    view: OpView, parts: Parts, operands: list[list[str] | None], results: list[list[str]]
) -> Rule:
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
    return _rule(view, parts, operands, [form("result"), *present])


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


def multi_head(view: OpView) -> Rule:
    """MultiHeadAttention of separate 3-D queries, keys and values.

    Operands: query, key, value, bias, key padding mask, scores' bias, past key, past value.

    Raises:
        OpaqueError: Packed or cached operands, or more operands than these.
    """
    if any(view.type(i) is None or len(view.shape(i)) != 3 for i in range(3)):
        raise OpaqueError("query, key and value are not three 3-D operands")
    if [name for name in view.node.inputs[8:] if name]:
        raise OpaqueError("a cache that is updated in place")
    query, key, value = (view.shape(index) for index in range(3))
    heads, past = view.int_attr("num_heads", 0), view.type(6)
    total = key[1] + (past.shape[2] if past is not None else 0)
    inner, ordered = (query[1], query[2] // heads), bool(view.int_attr("unidirectional", 0))
    parts = Parts(heads_of(heads, heads), inner, key[1], total, value[2] // heads, ordered)
    scores = view.type(5)
    operands: list[list[str] | None] = [
        *(parts.packed("query"), parts.packed("key"), parts.packed("value")),
        *([_joined(parts)], _padding(view), parts.mask(scores.shape if scores else None)),
        *(parts.split("past_key"), parts.split("past_value")),
    ]
    present = [parts.split(name) for name in ("present_key", "present_value", "scores")]
    return _rule(view, parts, operands, [parts.packed("result"), *present])


def _joined(parts: Parts) -> str:
    """Queries, keys and values, or their biases, one after the other in a dim."""
    d, v, heads = parts.query[1], parts.values, parts.heads
    return f"{heads.query(d)} + {heads.key(d)} + {heads.value(v)}"


def _padding(view: OpView) -> list[str] | None:
    held = view.type(4)
    if held is None:
        return None
    if held.rank == 1 and held.shape[0] != view.shape(0)[0]:
        raise OpaqueError("key_padding_mask holds cumulated lengths")
    return [["b"], ["b", "m"], ["b", "q", "m"]][held.rank - 1]


def group_query(view: OpView) -> Rule:
    """GroupQueryAttention (always causal): separate or packed query, key and value.

    Operands: query, key, value, past key, past value, last places, longest length, cos, sin,
    places, scores' bias.

    Raises:
        OpaqueError: Quantised caches, sinks, or local attributes without a test.
    """
    if any(view.node.inputs[11:]):
        raise OpaqueError("head_sink or quantised caches")
    heads = heads_of(view.int_attr("num_heads", 0), view.int_attr("kv_num_heads", 0))
    query, packed = view.shape(0), view.type(1) is None
    count = heads.kv * heads.group
    channels = query[2] // (count + 2 * heads.kv if packed else count)
    total = view.out_shape(1)[2]
    parts = Parts(heads, (query[1], channels), query[1], total, channels, ordered=True)
    first = ["b", "q", _joined(parts)] if packed else parts.packed("query")
    cache = {"k": "q"}  # keys come with their queries
    key, value = ([cache.get(name, name) for name in parts.packed(n)] for n in ("key", "value"))
    operands: list[list[str] | None] = [
        *(first, key, value, _past(view, parts, "d"), _past(view, parts, "v"), ["b"], None),
        *(None, None, ["b", "q"] if _shape_or(view, 9)[:1] == query[:1] else None),
        parts.mask(_shape_or(view, 10) or None),
    ]
    present = [parts.split(name) for name in ("present_key", "present_value", "scores")]
    return _rule(view, parts, operands, [parts.packed("result"), *present])


def _past(view: OpView, parts: Parts, channels: str) -> list[str]:
    """A cache may have room for more places than it holds: its length is a factor of its own."""
    room = _shape_or(view, 3)[2:3] == (parts.total,)
    return ["b", parts.heads.key(), "t" if room else "p", channels]


def _shape_or(view: OpView, index: int) -> Shape:
    held = view.type(index)
    return held.shape if held is not None else ()


def rotary(view: OpView) -> Rule:
    """RotaryEmbedding: ``b heads place d`` or ``b place (heads d)``; channels are whole.

    Operands: x, cos, sin, places; the caches are by place if places are given.
    """
    places = view.type(3)
    cache = ["p", "e"] if places is not None else ["b", "s", "e"]
    return _rotary(view, view.int_attr("num_heads", 0), [cache, cache, ["b", "s"]])


def microsoft_rotary(view: OpView) -> Rule:
    """The same in com.microsoft: x, places (or the first one), cos, sin."""
    if view.int_attr("is_packed_batching", 0):
        raise OpaqueError("is_packed_batching is set")
    shape, places = view.shape(0), view.shape(1)
    heads = view.int_attr("num_heads", 0)
    if len(shape) == 3 and not heads:
        heads = shape[2] // (2 * view.shape(2)[1])
    offset = len(places) == 1
    cache = ["p", "e"]
    operands = [["1"] if offset else ["b", "s"], cache, cache]
    return _rotary(view, heads, operands, ordered=offset)


def _rotary(view: OpView, heads: int, operands: list[list[str]], *, ordered: bool = False) -> Rule:
    shape = view.shape(0)
    x = ["b", "h", "s", "d"]
    sizes: dict[str, int] = {}
    if len(shape) == 3:
        heads_of(heads, heads)
        sizes = {"h": heads, "d": shape[2] // heads}
        x = ["b", "s", compound(**sizes)]
    whole = {"d", "e", "p"} | ({"s"} if ordered else set())
    return Rule.of(
        view.present([x, *operands]),
        [x],
        view.shapes,
        view.out_shapes,
        sizes=sizes,
        whole=whole,
        points=[name for name in ("b", "h", "s", "d") if name in " ".join(x)],
        flops=3,
    )


ROWS: Mapping[str, OpRow] = {
    "Attention": OpRow(attention, local_heads),
    "RotaryEmbedding": OpRow(rotary, local_heads),
    "com.microsoft::GroupQueryAttention": OpRow(group_query, local_heads),
    "com.microsoft::MultiHeadAttention": OpRow(multi_head, local_heads),
    "com.microsoft::RotaryEmbedding": OpRow(microsoft_rotary, local_heads),
}
