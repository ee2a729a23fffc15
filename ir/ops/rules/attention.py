"""Attention: batch, key-value heads, query groups and query rows are cut.

Query heads are the compound ``(h r)``: r query heads share each of h key-value heads. Cutting r
keeps keys and values whole; cutting h cuts them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from partitioner.ir.ops.rules.dims import broadcast, compound
from partitioner.ir.ops.rules.elementwise import TRANSCENDENTAL
from partitioner.ir.ops.signature import Dims, Names, OpaqueError, Signature
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType

#: FLOPs of a score beside its dot products: scale, mask, maximum, exp, sum, division.
SCORE = TRANSCENDENTAL + 5


def group_of(query_heads: int, kv_heads: int) -> int:
    """Query heads a key-value head.

    Raises:
        OpaqueError: They do not divide.
    """
    if query_heads < 1 or kv_heads < 1 or query_heads % kv_heads:
        raise OpaqueError(f"{query_heads} query heads over {kv_heads} key-value heads")
    return query_heads // kv_heads


@dataclass(frozen=True)
class Attention:
    """Sizes of an attention node.

    Attributes:
        kv: Key-value heads, factor h.
        group: Query heads a key-value head, factor r.
        queries: Query rows, factor q.
        channels: Of a query head, factor d.
        keys: Keys of this call, factor k.
        total: Keys with the past ones, factor t; those are factor p.
        values: Channels of a value head, factor v.
        ordered: Places of the queries matter (causal masks): they are whole.
        masked: Name of the dim of the keys in masks.
    """

    kv: int
    group: int
    queries: int
    channels: int
    keys: int
    total: int
    values: int
    ordered: bool
    masked: str = "m"

    @cached_property
    def split(self) -> Mapping[str, str]:
        """Dims of operands and results ``b heads place channel``."""
        query, key = compound(h=self.kv, r=self.group), compound(h=self.kv)
        return {
            "query": f"b {query} q d",
            "key": f"b {key} k d",
            "value": f"b {key} k v",
            "past_key": f"b {key} p d",
            "past_value": f"b {key} p v",
            "present_key": f"b {key} t d",
            "present_value": f"b {key} t v",
            "result": f"b {query} q v",
            "scores": f"b {query} q t",
            "logsumexp": f"b {query} q",
        }

    @cached_property
    def packed(self) -> Mapping[str, str]:
        """Dims of operands and results ``b place (heads channels)``."""
        heads, d, v = {"h": self.kv, "r": self.group}, self.channels, self.values
        return {
            "query": f"b q {compound(**heads, d=d)}",
            "key": f"b k {compound(h=self.kv, d=d)}",
            "value": f"b k {compound(h=self.kv, v=v)}",
            "result": f"b q {compound(**heads, v=v)}",
        }

    @property
    def joined(self) -> str:
        """The dim of queries, keys and values, or of their biases, one after the other."""
        heads, d, v = {"h": self.kv, "r": self.group}, self.channels, self.values
        return f"{compound(**heads, d=d)} + {compound(h=self.kv, d=d)} + {compound(h=self.kv, v=v)}"

    def mask(self, kind: TensorType | None) -> list[str] | None:
        """Dims of a mask that broadcasts to (batch, heads, queries, keys)."""
        dims = ["b", compound(h=self.kv, r=self.group), "q", self.masked]
        return None if kind is None else broadcast(kind.shape, dims)

    def rule(
        self,
        signature: Signature,
        operands: Sequence[Dims],
        results: Sequence[Dims],
        *,
        products: tuple[int, int] = (1, 1),
        whole: Iterable[str] = (),
        reduce: Names = (),
        sums: Iterable[int] = (),
    ) -> Rule:
        """Rule of a node.

        Args:
            signature: Of the node.
            operands: Dims of its operands.
            results: Dims of its results.
            products: Products along the channels of keys and of values, a query row and key.
            whole: Factors that are not cut, beside keys and channels: softmax and dot products
                need these.
            reduce: Factors that are summed.
            sums: See `Options`.
        """
        heads = {"h": self.kv, "r": self.group}
        along_keys, along_values = products
        return signature.rule(
            operands,
            results,
            sizes={
                **heads,
                "q": self.queries,
                "d": self.channels,
                "k": self.keys,
                "t": self.total,
                "p": self.total - self.keys,
                "v": self.values,
            },
            whole={*"dkptvm", *("q" if self.ordered else ""), *whole},
            reduce=reduce,
            points=["b", *(name for name, size in heads.items() if size > 1), "q"],
            flops=self.total
            * (2.0 * (along_keys * self.channels + along_values * self.values) + SCORE),
            sums=sums,
        )
