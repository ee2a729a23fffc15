"""Attention and its gradients as single nodes, with a mask that broadcasts to the scores.

Batch, key-value heads, query groups and query rows are cut. Under a causal mask a device that has
some of the rows runs the operator of a part, which knows their positions. Gradients of keys and
values are sums over groups and rows: each device that has some of them has a part of the sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

from partitioner.ir.layout import Interval, owned
from partitioner.ir.loops.windows import Parts
from partitioner.ir.ops.local import other_node, same_node
from partitioner.ir.ops.rules.attention import Attention, group_of
from partitioner.ir.ops.signature import Dims, pattern
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule


def _attention_of(view: OpView, first: int, *, masked: str = "k") -> tuple[Attention, list[Dims]]:
    """The attention whose query is operand `first`, and the dims of query, key, value and mask."""
    query, key, value = (view.shape(first + index) for index in range(3))
    node = Attention(
        kv=key[1],
        group=group_of(query[1], key[1]),
        queries=query[2],
        channels=query[3],
        keys=key[2],
        total=key[2],
        values=value[3],
        ordered=False,
        masked=masked,
        causal=bool(view.attr("is_causal", 0)),
    )
    mask = node.mask(view.type(first + 3))
    return node, [node.split["query"], node.split["key"], node.split["value"], mask]


def _attention(view: OpView) -> Rule:
    node, operands = _attention_of(view, 0)
    return node.rule(view, operands, [node.split["result"], node.split["logsumexp"]])


def _backward(view: OpView, *, of_mask: bool = False) -> Rule:
    """Gradients of query, key and value, or of a mask, which sums over dims it broadcasts along."""
    node, inputs = _attention_of(view, 1)
    result = node.split["result"]
    operands = [result, *inputs, result, node.split["logsumexp"]]
    if of_mask:
        return node.rule(view, operands, [inputs[3]], reduce="b h r q", sums=[0])
    return node.rule(view, operands, inputs[:3], products=(3, 2), summed="q r", sums=[0])


def _local_rows(view: OpView, local: LocalView, first: int) -> LocalOp:
    """Causal attention of some rows, in whose operands the query is operand `first`."""
    rows = local.regions[first][2]
    if not view.attr("is_causal", 0) or rows == ((0, view.shape(first)[2]),):
        return LocalOp((view.node,))
    attrs = {name: value for name, value in view.node.attrs.items() if name != "is_causal"}
    columns = 0, view.shape(first + 1)[2]
    op = "partitioner::attention_part" + ("_backward" if first else "")
    return other_node(view, op, **attrs, rows=tuple(itertools.chain(*rows)), columns=columns)


def _pieces(view: OpView) -> Sequence[Sequence[Interval]]:
    """The intervals of the sequence of each part of a ring (`rewrites.ring`)."""
    ends, counts = view.ints("intervals") or (), view.ints("counts") or ()
    intervals = iter(zip(ends[::2], ends[1::2], strict=True))
    return [[*itertools.islice(intervals, count)] for count in counts]


def _step(view: OpView, first: int) -> Rule:
    """A step of a ring: part i of the rows, factor w, meets the keys of part i + step.

    The query is operand `first`; gradients have the result's gradient before it, and the result and
    its log-sum-exp behind.
    """
    pieces, step = _pieces(view), view.int_attr("step", 0)
    count = len(pieces)
    sizes = [sum(size for _, size in part) for part in pieces]
    owners = [part for part, intervals in enumerate(pieces) for _ in intervals]
    ordered = sorted(
        (interval, part) for part, interval in zip(owners, itertools.chain(*pieces), strict=True)
    )
    rows = Parts(owned([size for (_, size), _ in ordered], [part for _, part in ordered], count))
    turned = [sizes[(i + step) % count] for i in range(count)]
    keys = rows if step == 0 else Parts(owned(turned, range(count), count))
    node, operands = _attention_of(view, first, masked="m")
    results: list[Dims] = [node.split["result"], node.split["logsumexp"]]
    if first:
        operands, results = [results[0], *operands, *results], operands[:3]
    windows = {
        (index, "w"): rows if "q" in dims else keys
        for index, dims in enumerate((*operands, *results))
        if dims is not None and ("q" in dims or "k" in dims)
    }
    return view.rule(
        [_by_part(dims) for dims in operands],
        [_by_part(dims) for dims in results],
        sizes={**node.heads, "w": count, "d": node.channels, "v": node.values},
        windows=windows,
        whole="d v m",
        summed="r" if first else "",
        sums=[0] if first else [],
        points=[*node.points[:-1], "w"],
        flops=node.flops((3, 2) if first else (1, 1)) * node.queries / count**2,
    )


def _by_part(dims: Dims) -> Dims:
    """Dims of a tensor, its rows or keys as parts of a ring."""
    if isinstance(dims, str):
        return dims.replace(" q", " w").replace(" k", " w")
    return dims and ["w" if name == "q" else name for name in dims]


def _local_step(view: OpView, local: LocalView, first: int) -> LocalOp:
    """The step of one part; of a cut of other factors alone, the node as it is."""
    pieces = _pieces(view)
    if local.sizes["w"] != 1:
        return LocalOp((view.node,))
    part = [*map(tuple, pieces)].index(tuple(local.regions[first][2]))
    keys = pieces[(part + view.int_attr("step", 0)) % len(pieces)]
    counts, intervals = (len(pieces[part]), len(keys)), tuple(itertools.chain(*pieces[part], *keys))
    return same_node(view, intervals=intervals, counts=counts, step=-1)


def _turn(view: OpView) -> Rule:
    """Each part of the result is one part of the operand: ``b h w d -> b h w d``."""
    count = view.int_attr("parts", 1)
    held, made = (
        Parts(tuple(sizes[i : i + count] for i in range(0, len(sizes), count)))
        for sizes in (view.ints("held") or (), view.ints("made") or ())
    )
    windows = {(0, "w"): held, (1, "w"): made}
    return view.rule("b h w d", "b h w d", sizes={"w": count}, windows=windows)


ROWS: Mapping[str, OpRow] = {
    "partitioner::attention": OpRow(
        _attention, partial(_local_rows, first=0), attention=True, where=True
    ),
    "partitioner::attention_backward": OpRow(
        _backward, partial(_local_rows, first=1), attention=True, where=True
    ),
    "partitioner::attention_join": OpRow(
        pattern("b h q v, b h q, b h q v, b h q -> b h q v, b h q", flops=3)
    ),
    "partitioner::attention_step": OpRow(
        partial(_step, first=0), partial(_local_step, first=0), attention=True, where=True
    ),
    "partitioner::attention_step_backward": OpRow(
        partial(_step, first=1), partial(_local_step, first=1), attention=True, where=True
    ),
    # Keys and values that are on their way while the step before runs.
    "partitioner::turn": OpRow(
        _turn,
        lambda view, local: (  # where a device has a part, the part itself
            other_node(view, "partitioner::alias") if local.sizes["w"] == 1 else same_node(view)
        ),
        moved=lambda *_: 0,
        ahead=True,
    ),
    "partitioner::attention_mask_backward": OpRow(partial(_backward, of_mask=True), attention=True),
}
