"""The layout of a stretch over its blocks: as on devices that never communicate.

The blocks are the coordinates of a mesh. The cut dim of one value is followed through the rules of
the stretch's nodes, both ways, to a loop of each. From the stretch's end back, each node's loop is
cut into what the nodes behind it read: windows that overlap where these have a halo, so that the
overlap is computed again in each block. Nodes that read nothing that is cut run once, before the
blocks; those that read what the blocks combine run once behind them. Where blocks read what blocks
combine, such as the statistics of a norm, a stretch has several *rounds* of blocks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from partitioner.ir.errors import IRError, OptionError
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout, Interval, Sharding
from partitioner.ir.loops.factors import Dims, Factor, FactorKind, single
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import is_stored, row_of, rule_of, writes_stored
from partitioner.ir.pieces.blocks import Chunk, Stretch
from partitioner.ir.plan import PlacedNode, place
from partitioner.ir.rule import Rule

#: Names of the mesh axes of the blocks, one for each chunked dim.
AXES = ("block", "block2", "block3")


class BlockError(OptionError):
    """A stretch that cannot run in these blocks; names the node that stands against it."""


@dataclass(frozen=True)
class StretchLayout:
    """A stretch laid out over its blocks."""

    mesh: DeviceMesh  #: The blocks.
    once: tuple[Node, ...]  #: Nodes that run before the blocks, in order.
    #: Nodes that run behind the blocks, in order: they read what blocks hand on.
    after: tuple[Node, ...]
    placed: tuple[PlacedNode, ...]  #: The nodes that run in each block, in order.
    made: Mapping[str, Sharding]  #: Sharding of each value that the blocks make.
    #: Of those that are read behind the stretch, the parts that the blocks hand on: equal ones
    #: without overlap, or whole ones to be added up.
    handed: Mapping[str, Sharding]


def lay_out(graph: Graph, stretch: Stretch) -> StretchLayout:
    """Lay a stretch out over its blocks; a BlockError says why it cannot run so."""
    first, last = span_of(graph, stretch)
    return _Cutter(graph, graph.nodes[first : last + 1], stretch.chunks).run()


@dataclass(frozen=True)
class Round:
    """Nodes of a stretch whose blocks read nothing that they combine."""

    nodes: tuple[Node, ...]  #: The nodes, in the order of the graph.
    inner: frozenset[str]  #: Values of blocks, each of which has a part of them.
    dims: tuple[Mapping[str, int], ...]  #: The cut dim of values, for each chunk of the stretch.


def rounds_of(graph: Graph, stretch: Stretch) -> tuple[Round, ...]:
    """The rounds of a stretch that is cut; a BlockError says why its dims cannot be followed."""
    first, last = span_of(graph, stretch)
    return _Cutter(graph, graph.nodes[first : last + 1], stretch.chunks).rounds()


def span_of(graph: Graph, stretch: Stretch) -> tuple[int, int]:
    """Positions of a stretch's first and last node; BlockError if there are none in this order."""
    for name in (stretch.first, stretch.last):
        if name not in graph.order:
            raise BlockError(f"blocks: the model has no node {name!r}")
    first, last = graph.order[stretch.first], graph.order[stretch.last]
    if last < first:
        raise BlockError(f"blocks: {stretch.last!r} runs before {stretch.first!r}")
    return first, last


@dataclass(frozen=True)
class _Followed:
    """A chunked dim, followed through the stretch: the dim of each value, the loop of each node."""

    chunk: Chunk
    dims: dict[str, int] = field(default_factory=dict)
    loops: dict[str, str] = field(default_factory=dict)


@dataclass
class _Cutter:
    graph: Graph
    nodes: tuple[Node, ...]
    chunks: tuple[Chunk, ...]
    need: dict[tuple[str, str], tuple[Interval, ...]] = field(default_factory=dict)  # axis, value

    def __post_init__(self) -> None:
        if len(self.chunks) > len(AXES) or any(chunk.parts < 2 for chunk in self.chunks):
            counts = " x ".join(str(chunk.parts) for chunk in self.chunks)
            raise BlockError(
                f"blocks: {counts} of {self.chunks[0].value!r}: 1 to {len(AXES)} dims are cut, "
                "each into 2 parts or more"
            )

    def rounds(self) -> tuple[Round, ...]:
        """The nodes by the number of times that blocks must have combined what they read."""
        number: dict[str, int] = {}  # of the round that makes a value
        combined: set[str] = set()  # values that are whole behind that round, and not before
        nodes: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            read = [value for value in node.reads if value in number]
            is_cut = self._is_in_blocks(node)
            at = max((number[v] + (is_cut and v in combined) for v in read), default=0)
            nodes[at].append(node)
            if is_cut or read:
                number.update(dict.fromkeys(node.writes, at))
            if (is_cut and self._combining(node)) or (read and not is_cut):
                combined.update(node.writes)
        dims = tuple(followed.dims for followed in self.followed.values())
        inner = frozenset(value for of in dims for value in of) - combined
        return tuple(
            Round(tuple(run), inner.intersection(v for node in run for v in node.writes), dims)
            for _, run in sorted(nodes.items())
        )

    def run(self) -> StretchLayout:
        in_blocks = [node for node in self.nodes if self._is_in_blocks(node)]
        names = {node.name for node in in_blocks}
        once, after, late = list[Node](), list[Node](), set[str]()  # before and behind the blocks
        for node in self.nodes:
            is_late = not late.isdisjoint(node.reads)
            if node.name in names and is_late:
                raise _refusal(node, "reads what the blocks combine")
            if node.name not in names:
                is_after = is_late or not self.cut.isdisjoint(node.reads)
                (after if is_after else once).append(node)
                late.update(node.writes if is_after else ())
        handed = dict(pair for node in in_blocks for pair in self._handed(node, names))
        placed = [at for node in reversed(in_blocks) if (at := self._place(node)) is not None]
        placed.reverse()
        made = {value: at.sharding for p in placed for value, at in p.results()}
        return StretchLayout(self.mesh, tuple(once), tuple(after), tuple(placed), made, handed)

    @cached_property
    def mesh(self) -> DeviceMesh:
        sizes = [chunk.parts for chunk in self.chunks]
        return DeviceMesh(tuple(zip(AXES, sizes, strict=False)), tuple(range(math.prod(sizes))))

    @cached_property
    def _stores(self) -> frozenset[str]:
        """The nodes that hold a value from step to step, or write to one: that is done once."""
        written = ((node, row_of(node).in_place) for node in self.graph.nodes)
        held = [node.inputs[slot] for node, slot in written if slot is not None]
        makers = self.graph.producers
        names = {makers[value].name for value in held if value in makers}
        stores = (node.name for node in self.nodes if is_stored(node) or writes_stored(node))
        return frozenset(names.union(stores))

    @cached_property
    def made_inside(self) -> Mapping[str, Node]:
        """The node of the stretch that makes each value, but for stored ones, which are whole."""
        inside = (node for node in self.nodes if node.name not in self._stores)
        return {value: node for node in inside for value in node.writes}

    @cached_property
    def followed(self) -> Mapping[str, _Followed]:
        return dict(zip(self.mesh.names, map(self._follow, self.chunks), strict=True))

    @cached_property
    def cut(self) -> frozenset[str]:
        in_blocks = filter(self._is_in_blocks, self.nodes)
        return frozenset(value for node in in_blocks for value in node.writes)

    def _is_in_blocks(self, node: Node) -> bool:
        return any(node.name in followed.loops for followed in self.followed.values())

    def _combining(self, node: Node) -> tuple[tuple[str, str], ...]:
        """The axes over which a node of the blocks combines their results, and how."""
        rule, followed = self._rule(node), self.followed.items()
        loops = {axis: of.loops[node.name] for axis, of in followed if node.name in of.loops}
        factors = [(axis, rule.factors[loop]) for axis, loop in loops.items()]
        return tuple((axis, one.reduce) for axis, one in factors if one.kind is FactorKind.REDUCE)

    def _rule(self, node: Node) -> Rule:
        rule = rule_of(self.graph, node)
        if not isinstance(rule, Rule):
            raise _refusal(node, f"has no loops: {rule}")
        if row_of(node).either:
            raise _refusal(node, "takes either of two values")
        return rule

    def _follow(self, chunk: Chunk) -> _Followed:
        """The dim of each value and the loop of each node that a chunked dim goes along with."""
        start = self.made_inside.get(chunk.value)
        if start is None or chunk.dim >= self.graph.types[chunk.value].rank:
            raise BlockError(f"blocks: dim {chunk.dim} of {chunk.value!r} is none of the stretch's")
        followed = _Followed(chunk, {chunk.value: chunk.dim})
        readers: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for value in () if node.name in self._stores else node.reads:
                readers[value].append(node)
        todo = [chunk.value]
        while todo:
            value = todo.pop()
            for node in (self.made_inside[value], *readers[value]):
                todo += self._follow_through(node, value, followed)
        return followed

    def _follow_through(self, node: Node, value: str, followed: _Followed) -> list[str]:
        """Cut the loop of a node that a cut value runs along; returns the values newly cut."""
        loop = self._loop_along(node, value, followed)
        if node.name in followed.loops:
            return []
        followed.loops[node.name] = loop
        new: dict[str, None] = {}
        for name, dims in _tensors(node, self._rule(node)):
            for dim, expr in enumerate(dims or ()):
                if name not in self.made_inside or not any(loop in term for term in expr):
                    continue
                if expr != ((loop,),) or followed.dims.setdefault(name, dim) != dim:
                    raise _refusal(node, f"has dim {dim} of {name!r} beside others in one loop")
                new[name] = None
        return list(new)

    def _loop_along(self, node: Node, value: str, followed: _Followed) -> str:
        """The loop of a node that runs along the cut dim of a value that it reads or makes."""
        if value in node.captures:
            raise _refusal(node, f"reads {value!r} inside its subgraph")
        rule, dim = self._rule(node), followed.dims[value]
        found = [dims for name, dims in _tensors(node, rule) if name == value]
        loops = {single(dims[dim]) if dims is not None else "" for dims in found}
        if node.name in followed.loops:
            loops.add(followed.loops[node.name])
        loop = min(loops)
        if len(loops) > 1 or not loop or rule.factors[loop].kind is FactorKind.WHOLE:
            raise _refusal(node, f"needs dim {dim} of {value!r} as a whole")
        return loop

    def _handed(self, node: Node, names: set[str]) -> Iterable[tuple[str, Sharding]]:
        """The results of a node that are read behind the stretch, as blocks hand them on."""
        summed = self._combining(node)
        for value in node.writes:
            readers = self.graph.consumers[value]
            inside = [reader for reader in readers if reader.name in names]
            if summed and (inside or any(op != "sum" for _, op in summed)):
                raise _refusal(node, "combines the blocks")
            if len(inside) == len(readers) and value not in self.graph.outputs:
                continue
            dims = [DimLayout.whole(size) for size in self.graph.types[value].shape]
            for axis, followed in self.followed.items():
                if value in followed.dims:
                    dim = followed.dims[value]
                    dims[dim] = DimLayout.even(dims[dim].size, (axis,), self.mesh)
                    if 0 in dims[dim].sizes():
                        raise _refusal(node, f"makes too few elements in dim {dim} of {value!r}")
                    self._need(axis, value, _intervals(dims[dim]))
                elif not any(axis == one for one, _ in summed):
                    raise _refusal(node, f"makes {value!r} whole in every block")
            yield value, Sharding(tuple(dims), summed)

    def _need(self, axis: str, value: str, intervals: Sequence[Interval]) -> None:
        """Note the elements of a value that each block reads."""
        known = self.need.get((axis, value))
        hull = tuple(map(_hull, known, intervals)) if known else tuple(intervals)
        self.need[axis, value] = hull

    def _place(self, node: Node) -> PlacedNode | None:
        """The node cut into what is read of it; None if nothing is."""
        rule = self._rule(node)
        layouts = {}
        for axis, followed in self.followed.items():
            if node.name not in followed.loops:
                raise _refusal(node, f"has no loop for dim {followed.chunk.dim}")
            loop = followed.loops[node.name]
            if loop in layouts:
                raise _refusal(node, "has one loop for two dims")
            layout = self._layout(axis, node, rule.factors[loop])
            if layout is None:
                return None
            layouts[loop] = layout
        try:
            placed = place(self.graph, node, self.mesh, layouts, rule)
        except IRError as error:
            raise _refusal(node, str(error)) from None
        for value, at in placed.operands():
            if value in self.cut and at.sharding.partial:
                raise _refusal(node, f"adds {value!r} to what the blocks combine")
            for axis, followed in self.followed.items():
                if value in self.cut and value in followed.dims:
                    self._need(axis, value, _intervals(at.sharding.dims[followed.dims[value]]))
        return placed

    def _layout(self, axis: str, node: Node, factor: Factor) -> DimLayout | None:
        """The cut of a node's loop into what is read of its results; None if nothing is."""
        if factor.kind is FactorKind.REDUCE:
            layout = DimLayout.even(factor.size, (axis,), self.mesh)
        else:
            needs = [self.need[axis, v] for v in node.writes if (axis, v) in self.need]
            if not needs:
                return None
            hulls = [_hull(*intervals) for intervals in zip(*needs, strict=True)]
            layout = DimLayout.windowed(factor.size, (axis,), _filled(hulls, factor.size))
        if not layout.axes or 0 in layout.sizes():
            raise _refusal(node, "runs whole in every block, or not in all of them")
        return layout


def _tensors(node: Node, rule: Rule) -> Iterator[tuple[str, Dims | None]]:
    yield from zip(node.inputs, rule.operands, strict=True)
    yield from zip(node.outputs, rule.results, strict=True)


def _refusal(node: Node, why: str) -> BlockError:
    return BlockError(f"blocks: {node.name!r} ({node.op}) {why}")


def _intervals(layout: DimLayout) -> tuple[Interval, ...]:
    """The interval that each block has of a dim."""
    if layout.windows:
        return layout.windows
    if len(layout.segments) > 1 or not layout.axes:
        raise BlockError(f"blocks: a dim in pieces, {layout}")
    (cuts,) = layout.segments
    return tuple((sum(cuts[:index]), size) for index, size in enumerate(cuts))


def _hull(*intervals: Interval) -> Interval:
    start = min(first for first, _ in intervals)
    return start, max(first + length for first, length in intervals) - start


def _filled(intervals: Sequence[Interval], size: int) -> list[Interval]:
    """The intervals, longer where elements between them, or at the ends, are in none."""
    filled, end = [], 0
    for index, (start, length) in enumerate(intervals):
        first = min(start, end)
        last = size if index == len(intervals) - 1 else start + length
        filled.append((first, last - first))
        end = max(end, last)
    return filled
