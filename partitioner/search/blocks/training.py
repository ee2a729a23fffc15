"""The cheapest way to train a graph within the memory of one device, some of it in blocks.

The forward pass is cut into *parts*, which follow each other, each with its part of the backward
pass. A part runs as it is, or both its passes run in blocks, and the backward pass computes inner
values again, as do rounds of blocks that read what earlier ones combine
(`rewrites.block_recompute`). What a part needs is what it alone holds, and what the parts before
it keep: these have run when it begins, and their backward passes follow its own. So the cheapest
path over the parts is found by going along the forward pass once, with the bytes that are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.memory.lifetimes import with_headroom
from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import row_of
from partitioner.ir.pieces.blocks import Blocks, Chunk, Stretch
from partitioner.rewrites.block_recompute import computing_again
from partitioner.rewrites.stretch_layout import BlockError, lay_out, span_of
from partitioner.search.blocks.paths import Path, Step, cheapest
from partitioner.search.blocks.runs import Option, Runs
from partitioner.search.blocks.shared import Shared
from partitioner.search.request import Budget
from partitioner.solver.work import Work

#: Most parts of the forward pass: they begin where least lives.
MOST_PARTS = 6
#: Numbers of parts of a dim that are tried, and of each of two dims.
PARTS, SQUARE_PARTS = (2, 3, 4, 6, 8, 12, 16, 32), (2, 3, 4, 6)
#: Shares of the memory that a path may fill by the bytes of its parts. These count whole tensors to
#: their last use anywhere, so that they may be too many; the referee decides.
MARGINS = (1.3, 1.15, 1.0, 0.9, 0.8, 0.7, 0.6)
#: Pricing parts may take one of so many equal shares of the seconds: two thirds. The rest is for
#: evaluating paths over them.
PRICING_SHARES = 1.5
#: More blocks are not tried if they hold more than this share of what fewer hold.
LESS = 0.97
#: More blocks are not tried if they hold less than this share of the memory.
ENOUGH = 0.4


@dataclass(frozen=True)
class _Part:
    """A part of the forward pass with its backward pass."""

    start: int  #: Position of its first node.
    stop: int  #: Position behind its last node of the forward pass.
    stretches: tuple[Stretch, ...]  #: Its stretches in blocks; none if it runs as it is.
    held_bytes: int  #: Most bytes of its own tensors, without head-room.
    kept_bytes: int  #: Of those that are held behind its forward pass.
    seconds: float  #: Of both passes.


def training_blocks(
    graph: Graph,
    cluster: Cluster,
    budget: Budget,
    shared: Shared | None = None,
    flying: float = 1.0,
) -> tuple[tuple[Blocks, ...], int, bool]:
    """Look for parts in blocks that bring a training graph within the memory of one device.

    Args:
        shared: How such devices share the graph; None if the one runs it alone.
        flying: How often the device holds what a part keeps for its backward pass: other devices
            may hold some of it.

    Returns:
        Those that the cost model expects to fit, the cheapest first, and last those that hold
        least, or little where the clock has ended their search; the number of parts in blocks that
        were priced, and whether all were in time.
    """
    parts = Parts(graph, cluster, shared)
    pricing = budget.work.of_the_clock(PRICING_SHARES)
    priced: list[_Part] = []
    borders = parts.borders
    lengths = sorted(range(1, len(borders)), key=lambda n: min(n, len(borders) - n))
    for length in lengths:
        for start, stop in zip(borders, borders[length:], strict=False):
            priced += parts.in_blocks(start, stop, pricing)
    plain = [parts.as_it_is(*of) for of in itertools.pairwise(borders)]
    steps: dict[int, list[Step[_Part]]] = {}
    for part in (*plain, *priced):
        kept = int(flying * part.kept_bytes)
        step = Step(part.stop, part.seconds, part.held_bytes, kept, part)
        steps.setdefault(part.start, []).append(step)

    def path(room: float) -> Path[_Part] | None:
        return cheapest(steps, borders[0], borders[-1:], room).get(borders[-1])

    fitting = filter(None, (path(margin * parts.room) for margin in MARGINS))
    found = sorted(fitting, key=lambda path: path.seconds)
    low, least = 0, path(math.inf)  # becomes the path that holds least
    while least is not None and low < (most := _most_bytes(least)) and not budget.work.late:
        middle = (low + most) // 2
        low, least = (low, less) if (less := path(middle)) is not None else (middle + 1, least)
    found += [least] if least is not None else []
    candidates: dict[Blocks, None] = {}
    for one in found:  # the stretches of the backward pass in its order
        cut = [part.stretches for part in one.runs if part.stretches]
        backward = (stretch for stretches in reversed(cut) for stretch in stretches[1:])
        candidates[Blocks((*(stretches[0] for stretches in cut), *backward))] = None
    return tuple(filter(None, candidates)), len(priced), not pricing.stopped


def _most_bytes(path: Path[_Part]) -> int:
    kept = itertools.accumulate((part.kept_bytes for part in path.runs), initial=0)
    held = (part.held_bytes for part in path.runs)
    return max(map(sum, zip(kept, held, strict=False)), default=0)


def _counts(counts: Sequence[int], least: float, size: int) -> Sequence[int]:
    """The numbers of parts of a dim to try: no fewer than so many, or the most that it has."""
    some = [count for count in counts if count <= size]
    return [count for count in some if count >= least] or some[-1:]


@dataclass
class Parts:
    """The parts of a training graph on the first device of a cluster.

    If devices share the graph, bytes and seconds are those of all devices: what is held beside
    stored values is cut as the largest tensor is, so a device has room for its share alone.
    """

    graph: Graph
    cluster: Cluster
    shared: Shared | None = None
    _known: dict[tuple[str, ...], Runs] = field(default_factory=dict)

    @cached_property
    def runs(self) -> Runs:
        """The runs of the graph as it is."""
        return Runs(self.graph, self.cluster)

    @property
    def turn(self) -> int:
        """Position of the first node of the backward pass."""
        return self.runs.turn

    @cached_property
    def room(self) -> float:
        """Bytes of tensors that parts may hold, without head-room."""
        resident = sum(self.runs.whole.residents.values())
        room = self.cluster.devices[0].memory_bytes - resident
        apart = float(self.runs.lives.nbytes[self.runs.apart].sum())
        room_of_one = room * 100 / with_headroom(100) - apart
        largest = self.largest(0, len(self.graph.nodes))
        if self.shared is None or largest is None:
            return room_of_one
        return self.shared.ratio(self.graph, largest) * room_of_one

    @cached_property
    def borders(self) -> Sequence[int]:
        """Positions at which parts may begin, and that behind the forward pass; ascending."""
        computing = [at for at in range(1, self.turn) if not self._is_stored(self.graph.nodes[at])]
        count = len(computing)
        some = [
            computing[i * count // MOST_PARTS : (i + 1) * count // MOST_PARTS]
            for i in range(MOST_PARTS)
        ]
        inner = {min(at, key=lambda p: self.runs.across(p, 0)) for at in some if at}
        return sorted({0, *inner, self.turn})

    def _is_stored(self, node: Node) -> bool:
        """Tell whether a node computes nothing: it stores a value, or gives it another name."""
        row = row_of(node)
        return row.stored or row.again or row.in_place is not None

    @cached_property
    def _behind(self) -> Sequence[int]:
        """By position of the forward pass: where all that is made from there on was last read."""
        ends = [self.turn] * (self.turn + 1)
        for at, node in enumerate(self.graph.nodes[: self.turn]):
            for value in node.writes:
                ends[at] = max(ends[at], 1 + self._last_read(value))
        for at in reversed(range(self.turn)):
            ends[at] = max(ends[at], ends[at + 1])
        return ends

    def _last_read(self, value: str) -> int:
        """Position of the last node that reads a value, or an alias of it in another pass."""
        last = -1
        row = row_of(self.graph.producers[value])
        if row.stored:
            return last
        for reader in self.graph.consumers[value]:
            row, at = row_of(reader), self.graph.order[reader.name]
            if row.again:
                last = max(last, *(self._last_read(name) for name in reader.writes))
            elif row.in_place is None:
                last = max(last, at)
        return last

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The backward pass of a part: the positions of its first node, and behind its last."""
        return self._behind[stop], self._behind[start] if start else len(self.graph.nodes)

    def as_it_is(self, start: int, stop: int) -> _Part:
        """A part that is not cut."""
        spans = ((start, stop), self.span(start, stop))
        return _Part(
            start,
            stop,
            (),
            self.runs.most(spans, start),
            self.runs.across(stop, start),
            sum(sum(self.runs.seconds[first:last]) for first, last in spans),
        )

    def in_blocks(self, start: int, stop: int, work: Work) -> Iterator[_Part]:
        """A part in blocks: along its longest dim that can be cut, two of them, and the batch.

        Those that the clock of the work leaves time for, and no dim that lies over devices.
        """
        held = self.as_it_is(start, stop).held_bytes
        first, last = self.span(start, stop)
        spans = [(start, stop), (first, last)][: 2 if first < last else 1]
        seeds = [seed for span in spans if (seed := self.largest(*span)) is not None]
        if held < ENOUGH * self.room or len(seeds) < len(spans):
            return
        # A part of a tensor is no smaller than its share.
        least = held / (MARGINS[0] * self.room) if self.room > 0 else math.inf
        sizes = [min(of) for of in zip(*(self.graph.types[s].shape for s in seeds), strict=False)]
        over_devices = set[int]()
        if self.shared is not None:
            over_devices.update(dim for v in seeds for dim in self.shared.cuts(self.graph, v))
        dims = [dim for dim in range(len(sizes)) if dim not in over_devices]
        fitting: list[int] = []
        few = math.inf
        for dim in sorted(dims, key=lambda dim: (-sizes[dim], dim)):
            if fitting and (dim > 0 or sizes[dim] == 1):
                continue
            counts = _counts(PARTS, least, sizes[dim])
            tried = list(self._along(spans, seeds, (dim,), counts, work))
            yield from tried
            fitting += [dim] if tried else []
            few = min([few, *(part.held_bytes for part in tried)])
        is_few = not fitting or few < ENOUGH * self.room
        for dim in () if is_few else dims:
            pair = tuple(sorted((fitting[0], dim)))
            most = min(sizes[one] for one in pair)
            if dim not in fitting and most > 1:
                counts = _counts(SQUARE_PARTS, math.sqrt(least), most)
                tried = list(self._along(spans, seeds, pair, counts, work))
                yield from tried
                if tried:
                    return

    def stretches(
        self,
        spans: Sequence[tuple[int, int]],
        seeds: Sequence[str],
        dims: Sequence[int],
        count: int,
    ) -> tuple[Stretch, ...]:
        """The passes of a part, each cut into so many parts along each of some dims of a value."""
        return tuple(
            Stretch(
                self.graph.nodes[start].name,
                self.graph.nodes[stop - 1].name,
                tuple(Chunk(seed, dim, count) for dim in dims),
            )
            for (start, stop), seed in zip(spans, seeds, strict=True)
        )

    def _along(
        self,
        spans: Sequence[tuple[int, int]],
        seeds: Sequence[str],
        dims: tuple[int, ...],
        counts: Sequence[int],
        work: Work,
    ) -> Iterator[_Part]:
        before = math.inf
        copied: tuple[Runs, Blocks] | None = None
        for count in counts:
            if work.late:
                return
            stretches = self.stretches(spans, seeds, dims, count)
            try:
                if copied is None:  # the graph with what stretches compute again
                    graph, blocks = computing_again(self.graph, Blocks(stretches))
                    names = tuple(node.name for node in graph.nodes)
                    if names not in self._known:  # whichever dims are cut, it is often the same
                        self._known[names] = Runs(graph, self.cluster)
                    copied = self._known[names], blocks
                part = self._priced(copied, spans[0], stretches, count)
            except BlockError:
                return
            yield part
            if part.held_bytes > LESS * before or part.held_bytes < ENOUGH * self.room:
                return
            before = part.held_bytes

    def _priced(
        self,
        copied: tuple[Runs, Blocks],
        span: tuple[int, int],
        stretches: tuple[Stretch, ...],
        count: int,
    ) -> _Part:
        """A part whose rounds are cut into so many parts along each dim."""
        runs, known = copied
        lives, apart, (start, stop) = runs.lives, runs.apart, span
        held, seconds, behind = 0, 0.0, start
        for stretch in known.stretches:
            stretch = replace(
                stretch, chunks=tuple(replace(c, parts=count) for c in stretch.chunks)
            )
            first, last = span_of(runs.graph, stretch)
            if stretch.last not in runs.graph.backward:
                behind = last + 1
            option = Option(first, last + 1, stretch.chunks, 0, 0, 0, 0.0)
            there = (lives.first <= last) & (lives.last >= first)
            there &= apart | (lives.first < min(start, first))
            others = int(lives.nbytes[there].sum())
            most = others + int(MARGINS[0] * max(self.room, 0))
            priced = runs.priced(option, lay_out(runs.graph, stretch), most)
            held = max(held, priced.activation_bytes - others)
            seconds += priced.seconds
        return _Part(start, stop, stretches, held, runs.across(behind, start), seconds)

    def largest(self, start: int, stop: int) -> str | None:
        """The largest value that a run makes; None if it makes none of two elements."""
        best, most = None, 1
        for node in self.graph.nodes[start:stop]:
            for value in () if self._is_stored(node) else node.writes:
                if (numel := self.graph.types[value].numel) > most:
                    best, most = value, numel
        return best
