"""What nodes of a graph are shown as one: modules by name, repeated blocks, and chunks.

Names tell modules (`paths`). Without names, a run of ranges that are equal node by node
is a repeat: the layers of a transformer, the blocks of a ResNet stage. A range of
the graph's order is convex, so folding it makes no cycle (`blocks`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from partitioner.ir.graph import Graph, Node
from partitioner.ir.pieces.repeats import (
    Floats,
    Ints,
    Stretch,
    crossing,
    numbered,
    repetitions,
    signature,
)

#: What holds a node, from the outermost: a module's name, or a repeat, of which `is_name` is false.
Path = tuple[str, ...]

MIN_BLOCK = 3  #: Shorter blocks are not folded.
MIN_HIDDEN = 8  #: Repeats that hide fewer nodes are not folded.
#: A level with more entries, too many for a screen, is folded into about their root of chunks.
MAX_ENTRIES = 40
MAX_INSIDE = 90  #: The same inside a block, which the reader chose to open.
MAX_NESTED = 400  #: Only ranges of at most this many nodes are searched for repeats inside.


@dataclass(frozen=True)
class Block:
    """The nodes first .. last in graph order, folded."""

    first: int
    last: int  #: Inclusive.
    kind: int = -1  #: Equal for blocks of equal structure; -1 for chunks.
    index: int = 0  #: 0 .. count - 1 among the consecutive repeats.
    count: int = 1  #: Consecutive repeats; 1 for chunks.
    inner: Sequence[Block] = ()

    def __len__(self) -> int:
        return self.last - self.first + 1


def blocks(graph: Graph, groups: Sequence[int]) -> list[Block]:
    """The outermost blocks, with blocks inside; chunks end where the group of nodes changes."""

    def kind(node: Node) -> object:
        return signature(node, graph.types), tuple(v in graph.constants for v in node.inputs)

    kinds = numbered(kind(node) for node in graph.nodes)
    return _Folder(kinds, crossing(graph, lambda _: 1), groups).level(0, len(graph.nodes))


def block_label(block: Block, names: Sequence[str]) -> str:
    """The scope that the names of a repeat's nodes share, or its number; a chunk's end names."""
    names = names[block.first : block.last + 1]
    # What the first and the last name in sorted order share, all share.
    pairs = zip(min(names), max(names), strict=False)
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    common = "".join(letter for letter, _ in shared)
    scope = common[: max(common.rfind("."), common.rfind("/")) + 1].strip("./")
    if block.count > 1 and any(c.isdigit() for c in scope):
        return scope
    return f"block {block.index + 1}" if block.count > 1 else f"{names[0]} ... {names[-1]}"


def paths(graph: Graph, groups: Sequence[int]) -> Sequence[Path]:
    """Module path of each node, backward ones as their twins; without names, repeats around it."""
    twins, modules = graph.twins, graph.modules
    names = [twins.get(node.name, node.name) for node in graph.nodes]
    told = [f"{modules[name]}/operator" if name in modules else name for name in names]
    found = list(map(module_path, told))
    if sum(map(bool, found)) * 2 >= len(found):
        return found
    made: list[Path] = [()] * len(found)

    def enter(level: Iterable[Block], around: Path) -> None:
        for block in level:
            path = (*around, f"\0{block.kind}.{block.first}")
            made[block.first : block.last + 1] = [path] * len(block)
            enter(block.inner, path)

    enter(blocks(graph, groups), ())
    return made


def module_path(name: str) -> Path:
    """The module of a node's name, without the operator; "blocks/0/q/addmm": (blocks.0, q)."""
    parts = [part for part in re.split(r"[/.]", name) if part][:-1]
    path: list[str] = []
    for part in parts:
        if path and part.isdigit():
            path[-1] += f".{part}"
        else:
            path.append(part)
    return tuple(path)


def is_name(part: str) -> bool:
    """Tell a module's name in a path from a repeat, whose operators say what it is."""
    return part[0] != "\0"


def repeats(kinds: Ints, crossing: Floats) -> list[Stretch]:
    """The repeats of a sequence of kinds, in order; of those that overlap, the ones that hide most.

    A block begins where fewest values cross the point before a node.
    """
    stretches = repetitions(
        kinds,
        lambda part: range(MIN_BLOCK, len(part) // 2 + 1),
        fewest=2,
        shown=1,
        hidden=MIN_HIDDEN,
        crossing=crossing,
    )
    return sorted(stretches, key=lambda stretch: stretch.start)


@dataclass(frozen=True)
class _Folder:
    kinds: Ints
    crossing: Floats
    groups: Sequence[int]
    numbers: dict[tuple[int, ...], int] = field(default_factory=dict)  # of blocks, by their kinds

    def level(self, first: int, stop: int, most: int = MAX_ENTRIES) -> list[Block]:
        """The blocks of the nodes first .. stop - 1, so that these have at most `most` entries."""
        inside: list[Block] = []
        for stretch in repeats(self.kinds[first:stop], self.crossing[first:stop]):
            starts = range(first + stretch.start, first + stretch.stop, stretch.period)
            key = tuple(self.kinds[starts[0] : starts[0] + stretch.period].tolist())
            number = self.numbers.setdefault(key, len(self.numbers))
            for index, start in enumerate(starts):
                end = start + stretch.period
                if stretch.period <= MAX_NESTED:
                    inner = self.level(start, end, MAX_INSIDE)
                else:
                    inner = self._chunks(start, end, [])
                inside.append(Block(start, end - 1, number, index, stretch.count, inner))
        if len(_entries(first, stop, inside)) > most:
            folded: list[Block] = []  # the nodes between the repeats, too
            at = first
            for block in [*inside, Block(stop, stop)]:
                if inside and block.first - at >= MIN_HIDDEN:
                    folded += self._chunks(at, block.first, [])
                folded.append(block)
                at = block.last + 1
            inside = folded[:-1]
        if len(_entries(first, stop, inside)) > most:
            inside = self._chunks(first, stop, inside)
        return inside

    def _chunks(self, first: int, stop: int, inside: Sequence[Block]) -> list[Block]:
        """A crowded level, folded into ranges of about equal numbers of entries."""
        starts = _entries(first, stop, inside)
        size = math.ceil(len(starts) / min(math.sqrt(len(starts)), MAX_ENTRIES / 2))
        chunks: list[Block] = []
        position = 0
        while position < len(starts):
            # After about `size` entries: where the group changes, if it does nearby.
            least, most = position + max(2, size // 2), min(len(starts), position + size * 3 // 2)
            target, groups = min(len(starts), position + size), self.groups
            near = sorted(range(least, most), key=lambda at: abs(at - target))
            changes = (at for at in near if groups[starts[at - 1]] != groups[starts[at]])
            end = next(changes, target)
            after = starts[end] if end < len(starts) else stop
            within = [b for b in inside if starts[position] <= b.first and b.last < after]
            if end - position > MAX_INSIDE:
                within = self._chunks(starts[position], after, within)
            if end - position > 1:
                chunks.append(Block(starts[position], after - 1, inner=within))
            else:
                chunks += within
            position = end
        return chunks


def _entries(first: int, stop: int, inside: Sequence[Block]) -> list[int]:
    """First node of each entry of a level; entries are its blocks and the nodes outside them."""
    lasts = {block.first: block.last for block in inside}
    starts = []
    at = first
    while at < stop:
        starts.append(at)
        at = lasts.get(at, at) + 1
    return starts
