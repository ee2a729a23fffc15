"""Results that are an input of the next call, such as the caches of a decoder.

`partitioner::feed` gives its first operand, a result of the call. The second one is the input that
the result becomes: the node lies where that does, so that no element leaves its device between two
calls. They are of one size, or the result is longer in one dim, as where a call adds its tokens
behind those before them; the next call takes the last ones then, and the dim is not cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.signature import names
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule

FEED = "partitioner::feed"


def _feed(view: OpView) -> Rule:
    result, held = view.shape(0), view.shape(1)
    dims = names("d", len(result))
    others = [f"h{n}" if result[n] != held[n] else dim for n, dim in enumerate(dims)]
    grown = {name for pair in zip(dims, others, strict=True) if len({*pair}) > 1 for name in pair}
    return view.rule([dims, others], [dims], whole=grown)


ROWS: Mapping[str, OpRow] = {FEED: OpRow(_feed, view=True, in_place=1)}
