"""Attention: batch, key-value heads, query groups and query rows are cut.

Query heads are the compound ``(h r)``: r query heads share each of h key-value heads. Cutting r
keeps keys and values whole; cutting h cuts them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from partitioner.ir.ops.rules.elementwise import TRANSCENDENTAL
from partitioner.ir.ops.signature import Dims, OpaqueError, Signature, broadcast, compound
from partitioner.ir.rule import Names, Rule
from partitioner.ir.types import TensorType

#: FLOPs of a score beside its dot products: scale, mask, maximum, exp, sum, division.
SCORE = TRANSCENDENTAL + 5


def group_of(query_heads: int, kv_heads: int) -> int:
    """Query heads a key-value head; OpaqueError if they do not divide."""
    if query_heads < 1 or kv_heads < 1 or query_heads % kv_heads:
        raise OpaqueError(f"{query_heads} query heads over {kv_heads} key-value heads")
    return query_heads // kv_heads


@dataclass(frozen=True)
class Attention:
    """Sizes of an attention node."""

    kv: int  #: Key-value heads, factor h.
    group: int  #: Query heads a key-value head, factor r.
    queries: int  #: Query rows, factor q.
    channels: int  #: Of a query head, factor d.
    keys: int  #: Keys of this call, factor k.
    total: int  #: Keys with the past ones, factor t; those are factor p.
    values: int  #: Channels of a value head, factor v.
    ordered: bool  #: Positions of the queries matter, and the kernel knows none: queries are whole.
    masked: str = "m"  #: Name of the keys' dim in masks.
    #: The kernel leaves out keys that come after a query: of as many keys as queries, a query meets
    #: half.
    causal: bool = False

    @property
    def rises(self) -> bool:
        """Tell whether a query meets one key more than the one before it."""
        return self.causal and self.total == self.queries

    @property
    def met(self) -> float:
        """Keys that a query meets, on average."""
        return (self.total + 1) / 2 if self.rises else self.total

    def flops(self, products: tuple[int, int] = (1, 1)) -> float:
        """FLOPs of a query row: a softmax, and so many `products` along keys and along values."""
        along_keys, along_values = products
        return self.met * (2.0 * (along_keys * self.channels + along_values * self.values) + SCORE)

    @property
    def points(self) -> list[str]:
        """The loops of query rows."""
        return ["b", *(name for name, size in self.heads.items() if size > 1), "q"]

    @property
    def heads(self) -> Mapping[str, int]:
        """Sizes of the factors of query heads."""
        return {"h": self.kv, "r": self.group}

    @cached_property
    def split(self) -> Mapping[str, str]:
        """Dims of operands and results ``b heads position channel``."""
        query, key = compound(**self.heads), compound(h=self.kv)
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
        """Dims of operands and results ``b position (heads channel)``."""
        return {
            "query": f"b q {compound(**self.heads, d=self.channels)}",
            "key": f"b k {compound(h=self.kv, d=self.channels)}",
            "value": f"b k {compound(h=self.kv, v=self.values)}",
            "result": f"b q {compound(**self.heads, v=self.values)}",
        }

    @property
    def joined(self) -> str:
        """The dim of packed queries, keys and values, or of their biases."""
        return " + ".join(self.packed[name][4:] for name in ("query", "key", "value"))

    def mask(self, mask: TensorType | None) -> list[str] | None:
        """Dims of a mask that broadcasts to (batch, heads, queries, keys)."""
        dims = ["b", compound(**self.heads), "q", self.masked]
        return None if mask is None else broadcast(mask.shape, dims)

    def rule(
        self,
        signature: Signature,
        operands: Sequence[Dims],
        results: Sequence[Dims],
        *,
        products: tuple[int, int] = (1, 1),
        whole: Iterable[str] = (),
        reduce: Names = (),
        summed: Names = (),
        sums: Iterable[int] = (),
    ) -> Rule:
        """Rule of a node; keys and channels are whole for softmax; `products` as of `flops`."""
        return signature.rule(
            operands,
            results,
            sizes={
                **self.heads,
                "q": self.queries,
                "d": self.channels,
                "k": self.keys,
                "t": self.total,
                "p": self.total - self.keys,
                "v": self.values,
            },
            whole={*"dkptvm", *("q" if self.ordered else ""), *whole},
            reduce=reduce,
            summed=summed,
            rising="q" if self.rises else "",
            points=self.points,
            flops=self.flops(products),
            sums=sums,
        )
