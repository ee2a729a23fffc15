"""The passes of a step: their order, their names of what they read, offers to compute again.

Where it is offered, the backward pass takes a value either as it was kept or from a clone of the
node that made it. The clone reads the backward pass's own names of its operands, so that chains of
clones lead back to kept values. Views are repeated in any case: they cost nothing. All that only
clones read is optional (`Graph.optional`).

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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import UNKNOWN, is_stored, is_view, row_of, writes_stored
from partitioner.ir.ops.aten.state import ALIAS, EITHER, KEEP, REST, STATE, UPDATE
from partitioner.ir.pieces.repeats import Stretch, held, numbered, repetitions, signature
from partitioner.ir.types import TensorType
from partitioner.rewrites.graph_writer import GraphWriter, reading

#: Uses of stored values between the point where one may be sent for and its own first use. Two,
#: since the one between a pair of matmuls is often a small one (a norm's weight).
AHEAD = 2
#: The limits on a region's saved bytes, as fractions 1/n of all saved bytes.
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

Table = npt.NDArray[np.float64]


class Access(Enum):
    """The ways in which the backward pass reads a value of the forward pass."""

    ALIAS = auto()  #: Through an alias.
    REPEATED = auto()  #: From a repetition of the node that makes it.
    TAKEN = auto()  #: Through a node that takes either of several operands, here of one.
    OFFERED = auto()  #: Through a node that takes either the value or a clone of it.


def stored_values(nodes: Sequence[Node]) -> frozenset[str]:
    """Stored values, their aliases, and views and casts of them."""
    stored: set[str] = set()
    for node in nodes:
        gives_same = is_view(node) or node.op == "aten::_to_copy"
        same = gives_same and bool(node.reads) and stored.issuperset(node.reads)
        if is_stored(node) or same:
            stored.update(node.writes)
    return frozenset(stored)


def plain_access(graph: Graph) -> dict[str, Access]:
    """The access that keeps all values: views and casts of stored ones are repeated."""
    forward, _ = passes_of(graph)
    stored = stored_values(forward)
    return {
        value: Access.REPEATED if value in stored and not is_stored(node) else Access.ALIAS
        for node in forward
        for value in node.writes
    }


def backward_apart(graph: Graph, access: Mapping[str, Access]) -> Graph:
    """The graph whose backward pass has names of its own of what the forward pass makes.

    A node that gives a value such a name stands before the first reader of the value.
    """
    forward, backward = passes_of(graph)
    made = {value: node for node in forward for value in node.writes}
    writer = GraphWriter(source=graph, mark="_", nodes=forward)
    names = _BackwardNames(made, access, writer)
    for node in backward:
        stays = node.inputs[1:] if node.op in (UPDATE, KEEP) else ()
        for value in node.reads:
            if value in made and value not in stays:
                names.rename(value)
        writer.nodes.append(reading(node, names.renamed, stays))
    writer.backward.update({node.name for node in writer.nodes} - graph.by_name.keys())
    return writer.graph()


@dataclass(frozen=True)
class _BackwardNames:
    """Gives values of the forward pass names in the backward pass."""

    made: Mapping[str, Node]  #: The node of the forward pass that makes each value.
    access: Mapping[str, Access]
    writer: GraphWriter
    #: The backward pass's name of each value.
    renamed: dict[str, str] = field(default_factory=dict)
    #: The value of the clone of a node by the value of the node.
    clones: dict[str, str] = field(default_factory=dict)

    def rename(self, value: str) -> None:
        """Rename a value, after the values that its repeated or cloned node reads."""
        waiting = [value]
        while waiting:
            value = waiting[-1]
            missing: list[str] = []
            if self.access[value] in (Access.REPEATED, Access.OFFERED):
                reads = self.made[value].reads
                missing = [read for read in reads if read in self.made and read not in self.renamed]
            if value not in self.renamed and missing:
                waiting += missing
            else:
                waiting.pop()
                if value not in self.renamed:
                    self._write_access(value)

    def _write_access(self, value: str) -> None:
        node, access, writer = self.made[value], self.access[value], self.writer
        if access is Access.REPEATED:
            writer.nodes.append(writer.again(node, self.renamed, "backward"))
            return
        inputs: tuple[str, ...] = (value,)
        name, op = f"{node.name}/taken", EITHER
        if access is Access.ALIAS:
            path = path_of(value) if node.op == STATE else node.name
            name, op = f"{path}/backward", ALIAS
        elif access is Access.OFFERED:
            if value not in self.clones:
                copy = writer.again(node, dict(self.renamed))
                pairs = zip(node.outputs, copy.outputs, strict=True)
                self.clones.update((old, new) for old, new in pairs if old)
                writer.nodes.append(copy)
            inputs = (value, self.clones[value])
        self.renamed[value] = writer.copied(value, "backward")
        writer.add(name, op, inputs, made=(self.renamed[value],))


def forward_aliases(graph: Graph) -> Graph:
    """The graph with an alias for the forward pass of each stored value that both passes read.

    It stands before its first reader.
    """
    forward, backward = passes_of(graph)
    again = {value for node in backward for value in node.reads}.intersection(shared_states(graph))
    writer, aliases = GraphWriter(source=graph, mark="_"), dict[str, str]()
    for node in forward:
        if node.op == UPDATE:
            writer.nodes.append(node)
            continue
        for value in node.reads:
            if value in again and value not in aliases:
                aliases[value] = writer.copied(value, "forward")
                writer.add(f"{path_of(value)}/forward", ALIAS, (value,), made=(aliases[value],))
        writer.nodes.append(reading(node, aliases))
    writer.nodes += backward
    return writer.graph()


def path_of(value: str) -> str:
    """The name of the node of a stored value."""
    return "/" + value.replace(".", "/")


def passes_of(graph: Graph) -> tuple[list[Node], list[Node]]:
    """The nodes of the forward pass and those of the backward pass."""
    forward = [node for node in graph.nodes if node.name not in graph.backward]
    return forward, [node for node in graph.nodes if node.name in graph.backward]


def shared_states(graph: Graph) -> list[str]:
    """Stored values that both passes read where they are stored."""
    states = (node for node in graph.nodes if node.op == STATE)
    return [node.outputs[0] for node in states if not node.attrs.get("apart")]


def early_updates(nodes: Sequence[Node]) -> Iterator[Node]:
    """The nodes, each update right behind the node that makes its new value."""
    made = {value for node in nodes for value in node.writes}
    updates: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op in (UPDATE, KEEP) and node.inputs[0] in made:
            updates.setdefault(node.inputs[0], []).append(node)
    moved = {node.name for group in updates.values() for node in group}
    for node in nodes:
        waiting = [] if node.name in moved else [node]
        while waiting:
            node = waiting.pop(0)
            yield node
            waiting += [update for value in node.writes for update in updates.get(value, ())]


def fetched_early(graph: Graph) -> Graph:
    """The graph with stored values and aliases `AHEAD` uses of such values before their own.

    So a plan may gather a value while others are computed with; it takes memory from there on.
    """
    forward, backward = passes_of(graph)
    nodes = (*_fetched_early(forward, ()), *_fetched_early(backward, shared_states(graph)))
    return replace(graph, nodes=nodes)


def _fetched_early(nodes: Sequence[Node], stored: Iterable[str]) -> Iterator[Node]:
    """The nodes of a pass; `stored` are the values that the other pass declares."""
    names = {*stored, *(node.outputs[0] for node in nodes if node.op == STATE)}
    early: dict[str, Node] = {}
    for node in nodes:
        alias = node.op in (ALIAS, REST) and node.inputs[0] in names
        if node.op == STATE or alias:
            names.add(node.outputs[0])
            early[node.outputs[0]] = node
    rest = [node for node in nodes if node.outputs[0] not in early]
    read = _first_reads(rest, early.values(), through_views=False)
    used = _first_reads(rest, early.values(), through_views=True)
    first_use = {value: used.get(value, read.get(value, 0)) for value in early}
    uses = sorted(set(first_use.values()))
    fetch = {use: uses[max(0, index - AHEAD)] for index, use in enumerate(uses)}
    placed: dict[int, list[Node]] = {}
    for value in sorted(early, key=first_use.__getitem__):
        place = min(fetch[first_use[value]], read.get(value, 0))
        placed.setdefault(place, []).append(early[value])
    for index, node in enumerate(rest):
        yield from placed.get(index, ())
        yield node


def _first_reads(
    nodes: Sequence[Node], aliases: Iterable[Node], *, through_views: bool
) -> dict[str, int]:
    """Position of the first node that reads a value or an alias of it.

    Through views, a view is no reader, and its readers read what it is a view of.
    """
    first: dict[str, int] = {}
    renaming = list(aliases)
    for index, node in enumerate(nodes):
        if through_views and is_view(node):
            renaming.append(node)
            continue
        for value in node.reads:
            first.setdefault(value, index)
    for node in reversed(renaming):
        reads = [first[value] for value in (*node.inputs[:1], *node.writes) if value in first]
        if reads and node.inputs:
            first[node.inputs[0]] = min(reads)
    return first


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
        if row_of(node) is not UNKNOWN:
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
        value: Life(made[value], last.get(value, made[value]), types[value].nbytes, value in saved)
        for value in values
    }
    classes = numbered(signature(node, types) for node in forward)
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
    live = held(((life.first, life.last, life.nbytes) for life in lives), count)
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
