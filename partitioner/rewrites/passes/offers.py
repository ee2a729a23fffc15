"""Offers to compute again, in the backward pass, what it reads of the forward pass.

The backward pass takes a value either as it was kept or from a clone of the node that made it. The
clone reads the backward pass's own names of its operands, so that chains of clones lead back to
kept values. Views are repeated in any case: they cost nothing. All that only clones read is
optional (`Graph.optional`).

A clone stands before the first reader of its results, and so does all that it reads. Chains would
lead from the last layer to the first, and all of it would be computed where the backward pass
begins. So the forward pass is cut into regions, and what passes from one to another is kept: of the
rest, one region at a time is in memory. The bytes to make small are those of all that crosses, and
of the region with the most saved bytes. Several limits on a region's saved bytes are tried, and for
each the cuts that the fewest bytes cross are found exactly. Where a model repeats blocks (its
layers), each block has one cut, in the same place, where the fewest bytes cross: so equal blocks
stay equal, and one search serves them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import is_stored, is_view, row_of, writes_stored
from partitioner.ir.ops.aten.state import EITHER
from partitioner.ir.pieces.repeats import Stretch, numbered, repetitions
from partitioner.ir.types import TensorType
from partitioner.rewrites.graph_writer import GraphWriter
from partitioner.rewrites.passes.reads import Access, backward_apart, passes_of, plain_access

#: The limits on a region's saved bytes, as fractions 1/n of all saved bytes.
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

Table = npt.NDArray[np.float64]


def with_offers(graph: Graph) -> Graph:
    """The graph whose backward pass has names of its own, and offers.

    The outputs of the graph are kept to the end: they are not offered.
    """
    apart = backward_apart(graph, _offered_access(graph))
    needed: set[str] = set()
    optional = set()
    for node in reversed(passes_of(apart)[1]):
        if node.name not in graph.by_name and not needed.intersection(node.writes):
            optional.add(node.name)
        elif node.op != EITHER:
            needed.update(node.reads)
    read = {value for node in apart.nodes for value in node.reads}
    writer = GraphWriter(source=apart)
    for node in apart.nodes:
        outputs = node.outputs
        if node.name not in graph.by_name:
            outputs = tuple(value if value in read else "" for value in outputs)
        writer.nodes.append(replace(node, outputs=outputs))
    return writer.graph(optional=frozenset(optional))


def _offered_access(graph: Graph) -> dict[str, Access]:
    forward, backward = passes_of(graph)
    access = plain_access(graph)
    computed: dict[str, Node] = {}
    for node in forward:
        for value in node.writes:
            if value in graph.outputs or is_stored(node):
                continue
            if _is_view(node):
                access[value] = Access.REPEATED
            elif access[value] is Access.ALIAS:
                computed[value] = node
    within = _values_within_regions(forward, backward, graph.types, computed)
    for value, node in computed.items():
        if row_of(node) is not None:
            access[value] = Access.OFFERED if value in within else Access.TAKEN
    return access


def _values_within_regions(
    forward: Sequence[Node],
    backward: Sequence[Node],
    types: Mapping[str, TensorType],
    values: Collection[str],
) -> set[str]:
    """The values that the forward pass reads only in the region that makes them."""
    saved = {value for node in backward for value in node.reads}
    last: dict[str, int] = {}
    made: dict[str, int] = {}
    for position, node in reversed(list(enumerate(forward))):
        made.update(dict.fromkeys(node.writes, position))
        end = position
        if _is_view(node):
            end = max([position, *(last.get(value, -1) for value in node.writes)])
            saved.update(node.reads if saved.intersection(node.writes) else ())
        for value in node.reads:
            last[value] = max(last.get(value, -1), end)
    lives = {
        value: Life(
            made[value],
            max(made[value], last.get(value, -1)),
            types[value].nbytes,
            value in saved,
        )
        for value in values
    }
    classes = numbered(
        (
            node.op,
            repr(sorted(node.attrs.items())),
            *(str(types[value]) for value in (*node.reads, *node.writes)),
        )
        for node in forward
    )
    of = regions(tuple(lives.values()), len(forward), tuple(repetitions(classes)))
    return {value for value, life in lives.items() if of[life.first] == of[life.last]}


def _is_view(node: Node) -> bool:
    return is_view(node) and not writes_stored(node)


@dataclass(frozen=True)
class Life:
    """The live range of a value in the forward pass."""

    first: int  #: Position of the node that makes it.
    last: int  #: Position of the last node of the forward pass that reads it or a view of it.
    nbytes: int  #: Its size.
    saved: bool  #: Whether the backward pass reads it.


def regions(lives: Sequence[Life], count: int, repeated: Sequence[Stretch] = ()) -> tuple[int, ...]:
    """The region of each of `count` positions, in order from 0.

    Where blocks repeat, all are cut in the same place if that saves anything.

    >>> regions([Life(0, 1, 8, True), Life(1, 2, 1, True), Life(2, 3, 8, True)], 4)
    (0, 0, 1, 1)
    """
    # [position]: bytes made before the position that it or a later one reads
    change = np.zeros(count + 1)
    for life in lives:
        change[life.first + 1] += life.nbytes
        change[min(count, life.last + 1)] -= life.nbytes
    live = np.cumsum(change)
    required = {cut for stretch in repeated for cut in _block_cuts(lives, live, stretch)}
    # regions end at the required cuts, and beside their blocks at all that few bytes cross
    low = (p for p in range(1, count) if live[p] <= live[p - 1] and live[p] <= live[p + 1])
    cut = [r for r in repeated if any(r.start <= p < r.stop for p in required)]
    free = (p for p in low if not any(r.start <= p < r.stop for r in cut))
    ends = sorted({0, *required, *free, count})
    crossing, saved = _tables(lives, ends)
    total = saved[0, -1]
    passed = np.cumsum([end in required for end in ends])  # no region spans a required cut
    saved[passed[None, :] - np.isin(ends, list(required))[None, :] > passed[:, None]] = np.inf
    best: tuple[float, list[int]] | None = None
    for parts in PARTS:
        cuts = _least_crossed(crossing, saved, total / parts)
        if cuts is not None and (best is None or cuts[0] < best[0]):
            best = cuts
    assert best is not None  # one region is always possible
    of: list[int] = []
    for region, index in enumerate(best[1]):
        of += [region] * (ends[index] - len(of))
    return tuple(of)


def _block_cuts(lives: Sequence[Life], live: Table, stretch: Stretch) -> range:
    """Positions of the cuts of repeated blocks; none if a block saves no more than crosses."""
    whole = (stretch.stop - stretch.start) // stretch.period * stretch.period
    crossing = live[stretch.start : stretch.start + whole].reshape(-1, stretch.period).sum(axis=0)
    cuts = range(stretch.start + int(np.argmin(crossing)), stretch.stop, stretch.period)
    first, second = cuts[1:3]
    saved = sum(
        life.nbytes for life in lives if life.saved and first <= life.first and life.last < second
    )
    return cuts if saved > live[first] else range(0)


def _tables(lives: Sequence[Life], ends: Sequence[int]) -> tuple[Table, Table]:
    """[from, to]: bytes that leave the region between two ends, and other bytes saved in it."""
    size = len(ends)
    crossing, saved = np.zeros((size, size)), np.zeros((size, size))
    for life in lives:
        made = int(np.searchsorted(ends, life.first, side="right"))  # it is before ends[made]
        done = int(np.searchsorted(ends, life.last, side="right"))
        crossing[:made, made:done] += life.nbytes
        if life.saved:
            saved[:made, done:] += life.nbytes
    return crossing, saved


def _least_crossed(crossing: Table, saved: Table, limit: float) -> tuple[float, list[int]] | None:
    """The bytes held, and the ends of regions that save at most `limit` bytes; None without any."""
    size = len(crossing)
    least, before = np.full(size, np.inf), np.zeros(size, int)
    least[0] = 0.0
    for end in range(1, size):
        cost = np.where(saved[:end, end] <= limit, least[:end] + crossing[:end, end], np.inf)
        before[end] = int(np.argmin(cost))
        least[end] = cost[before[end]]
    if not np.isfinite(least[-1]):
        return None
    ends = [size - 1]
    while before[ends[0]] > 0:
        ends.insert(0, int(before[ends[0]]))
    most = max(saved[start, end] for start, end in itertools.pairwise([0, *ends]))
    return float(least[-1] + most), ends
