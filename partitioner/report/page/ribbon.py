"""The overview of a report: what runs on which devices, when, and how it is cut.

Nodes of one module path, one set of devices and one part (forward or backward) are one box.
Consecutive boxes of equal structure are one box that opens into them.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Literal

from partitioner.cost_model.schedule.simulate import simulate
from partitioner.ir.graph import Graph, Node
from partitioner.ir.loops.factors import FactorKind, Term
from partitioner.ir.mesh import COPIES, DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.pieces.folding import Path, is_name, paths
from partitioner.ir.plan import PlacedNode
from partitioner.ir.rule import Rule
from partitioner.report.page.lane_words import LaneWords
from partitioner.report.planned import Lanes, Planned
from partitioner.report.schema import BoxRow, CutRow, Ribbon, SwimLane, ranges

#: Boxes of one part of a lane that are shown at first: heavier ones are opened up to so many.
MOST_BOXES = 9
#: A box with a larger share of its part of the lane is opened however many it opens into: its
#: name would say nothing.
MOSTLY = 0.8
#: The share of a lane's seconds that may lie before it begins in earnest: a mask that every stage
#: computes may run long before. What reads no input, as the transposition of a weight, is none.
FEW = 0.1
#: Neighbours without names that take a smaller share of their part of the lane are joined.
SMALL = 0.5
#: Likewise with names.
TINY = 0.06
#: A box ends where its devices do nothing of its part for a larger share of the whole time.
LONG_GAP = 0.05
#: A kind of cut with a smaller share of a box's seconds is not named.
LEAST_SHARE = 0.05
#: The longest pattern of operator types whose repeats are counted.
LONGEST_PATTERN = 8
#: A longer text of operator types gives way to those of most seconds.
MOST_LETTERS = 60

Part = Literal["forward", "backward", "update"]
PARTS: tuple[Part, ...] = ("forward", "backward", "update")
UPDATE = PARTS.index("update")
#: Words for the parts of a dim, major first; () if nothing tells.
Words = tuple[str, ...]
BATCH, HEADS, COLUMNS, POSITIONS = ("batch",), ("heads",), ("columns",), ("positions",)


@dataclass(frozen=True)
class _Box:
    """Nodes, by number, as one; `path` is the module path that they share."""

    path: Path
    nodes: tuple[int, ...]
    inner: tuple[_Box, ...] = ()
    count: int = 1  #: Of boxes of equal structure that it stands for.
    label: str = ""
    joined: bool = False  #: Neighbours that are only put together for want of room.


def _cutting_axes(mesh: DeviceMesh) -> Iterator[str]:
    return (axis for axis, size in mesh.axes if size > 1 and axis != COPIES)


def ribbon(result: Planned, lanes: Lanes) -> Ribbon:
    """The lanes and boxes of a plan, by its simulated request or first micro-batch."""
    return _Ribbon(result, lanes).rows()


def pattern(ops: Sequence[str], seconds: Sequence[float]) -> str:
    """Operator types as text: "Conv-BN-Relu x 3, Conv-Add" or, of many, those of most seconds."""
    types = [
        op.rsplit("::", 1)[-1]
        .split(".", 1)[0]
        .replace("BatchNormalization", "BN")
        .replace("LayerNormalization", "LayerNorm")
        for op in ops
    ]
    parts: list[str] = []
    at = single = 0  # where those begin that do not repeat
    while at < len(types):
        length, times = 1, 1  # of the repeats from here on that cover most
        for size in range(1, min(LONGEST_PATTERN, (len(types) - at) // 2) + 1):
            count = 1
            while types[at + count * size :][:size] == types[at : at + size]:
                count += 1
            if count > 1 and count * size > length * times:
                length, times = size, count
        if times == 1:
            at += 1
            continue
        parts += ["-".join(types[single:at])] if single < at else []
        parts.append(f"{'-'.join(types[at : at + length])} x {times}")
        at = single = at + length * times
    parts += ["-".join(types[single:])] if single < at else []
    text = ", ".join(parts)
    if len(text) <= MOST_LETTERS:
        return text
    sums: dict[str, float] = defaultdict(float)
    for op, spent_s in zip(types, seconds, strict=True):
        sums[op] += spent_s
    return ", ".join(sorted(sums, key=lambda op: -sums[op])[:3])


@dataclass(frozen=True)
class _Ribbon:
    result: Planned
    lanes: Lanes

    @property
    def graph(self) -> Graph:
        return self.result.graph

    @cached_property
    def groups(self) -> list[int]:
        return [self.result.plan.nodes[node.name].group for node in self.graph.nodes]

    @cached_property
    def spans(self) -> Mapping[int, tuple[float, float]]:
        """First start and last end of each node that takes time, in the first request."""
        tasks = self.result.schedule.tasks
        spans: dict[int, tuple[float, float]] = {}
        for event in simulate(self.result.schedule).events:
            placed = tasks[event.task].placed
            if placed is None or event.request or event.end_s <= event.start_s:
                continue
            node = self.graph.order[placed.node.name]
            start, end = spans.get(node, (event.start_s, event.end_s))
            spans[node] = min(start, event.start_s), max(end, event.end_s)
        return spans

    @cached_property
    def drawn(self) -> Mapping[int, tuple[float, float]]:
        """`spans` with the update behind everything else, which it may run between."""
        updates: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for node, span in self.spans.items():
            if self._part(self.graph.nodes[node]) == UPDATE:
                updates[self.groups[node]].append(span)

        def moved(node: int, at: float) -> float:
            earlier = updates[self.groups[node]]
            return at - sum(min(end, at) - start for start, end in earlier if start < at)

        drawn = {
            node: (moved(node, start), moved(node, end))
            for node, (start, end) in self.spans.items()
            if self._part(self.graph.nodes[node]) != UPDATE
        }
        last = max((end for _, end in drawn.values()), default=0.0)
        at = dict.fromkeys(updates, last)
        for node, (start, end) in sorted(self.spans.items(), key=lambda entry: entry[1]):
            if node not in drawn:
                begin = at[self.groups[node]]
                drawn[node] = begin, begin + end - start
                at[self.groups[node]] += end - start
        return drawn

    @cached_property
    def static(self) -> frozenset[str]:
        static = set(self.graph.constants)
        for node in self.graph.nodes:
            if static.issuperset(node.reads):
                static.update(node.writes)
        return frozenset(static)

    @cached_property
    def loops(self) -> Mapping[str, Mapping[str, Words]]:
        return loop_words(self.graph, self.result.placed, self.static)

    def words(self, node: Node) -> Mapping[str, str]:
        """The word for the cut of each axis of a node's mesh; of a backward node its twin's."""
        placed = self.result.placed[self.graph.order[node.name]]
        words = {axis: self._cut_word(placed, axis) for axis in _cutting_axes(placed.mesh)}
        twin = self.graph.by_name.get(self.graph.twins.get(node.name, ""))
        if twin is None or twin.name in self.graph.backward:
            return words
        before = self.words(twin)
        kept = {
            axis: before.get(axis, word)
            for axis, word in words.items()
            if word != "replicated" and before.get(axis) not in (None, "replicated", "weights")
        }
        return words | kept

    def _cut_word(self, placed: PlacedNode, axis: str) -> str:
        """The part of a node that an axis cuts, in the words of `schema.CutRow`."""
        results = placed.results()
        if not any(axis in at.sharding.axes for _, at in (*placed.operands(), *results)):
            return "replicated"
        if results and all(value in self.static for value, _ in results):
            return "weights"
        rule = placed.rule
        cut = [name for name, layout in placed.layouts.items() if axis in layout.axes]
        loops = [name for name in cut if rule and rule.factors[name].kind != FactorKind.LINEAR]
        if rule is None or not loops:
            return "sums"
        name = min(loops, key=lambda name: rule.factors[name].kind == FactorKind.REDUCE)
        words = self.loops[placed.node.name].get(name)
        if not words:  # nothing tells: dim 0 is the batch
            tensors = [exprs for exprs in (*rule.results, *rule.operands) if exprs]
            first = any(name in term for exprs in tensors for term in exprs[0])
            words = BATCH if first else POSITIONS
        word = words[-1] if words[-1:] == COLUMNS else words[0]
        reduced = rule.factors[name].kind == FactorKind.REDUCE
        return "rows" if reduced and word == "columns" else word

    @cached_property
    def paths(self) -> Sequence[Path]:
        return paths(self.graph, self.groups)

    def rows(self) -> Ribbon:
        lanes, of = self._lanes()
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index in sorted(self.drawn, key=lambda index: self.drawn[index]):
            members[self.groups[index], self._part(self.graph.nodes[index])].append(index)
        rows: list[BoxRow] = []
        long_s = LONG_GAP * max((end for _, end in self.drawn.values()), default=0.0)
        for (group, part), nodes in sorted(members.items()):
            # Parted where their devices do others or wait for long.
            bouts: list[list[int]] = []
            last = -math.inf
            for node in nodes:
                start, end = self.drawn[node]
                if start - last > long_s:
                    bouts.append([])
                bouts[-1].append(node)
                last = max(last, end)
            for bout in bouts:
                level = self._level(bout, 0)
                update = PARTS[part] == "update"
                boxes = [_Box(("update",), tuple(bout), tuple(level))] if update else None
                for box in boxes or self._opened(level):
                    self._add(rows, box, -1, group, of[group], PARTS[part])
        end = max((row["end_s"] for row in rows), default=0.0)
        return Ribbon(lanes=lanes, boxes=rows, end_s=end, training=bool(self.graph.backward))

    def _part(self, node: Node) -> int:
        """The index of a node's part in `PARTS`; the update writes over a weight."""
        if node.name not in self.graph.backward:
            return 0
        over = row_of(node).in_place
        return UPDATE if over is not None and node.inputs[over] in self.static else 1

    def _lanes(self) -> tuple[list[SwimLane], Mapping[int, list[int]]]:
        """The lanes, and those of each used group: its own, or its devices' where groups meet."""
        used = sorted({self.groups[index] for index in self.spans})
        meshes = {group: self.result.plan.groups[group] for group in used}
        devices = {group: tuple(self.lanes.among(mesh.devices)) for group, mesh in meshes.items()}
        sets = list(
            dict.fromkeys(sorted(devices.values(), key=lambda own: self._turn(own, devices)))
        )
        every = [lane for own in sets for lane in own]
        if len(every) > len(set(every)):
            order = sorted(set(every))
            lanes = [
                SwimLane(
                    devices=[lane],
                    stages=[],
                    mesh="",
                    runs=self._runs([group for group in used if lane in devices[group]]),
                )
                for lane in order
            ]
            return lanes, {group: [order.index(at) for at in devices[group]] for group in used}
        rows, plan = [], self.result.plan
        for own in sets:
            groups = [group for group in used if devices[group] == own]
            axes = meshes[groups[0]].axes
            rows.append(
                SwimLane(
                    devices=list(own),
                    stages=sorted({plan.stages[at] for at in groups} if any(plan.stages) else ()),
                    mesh=" ".join(f"{axis}={size}" for axis, size in axes if size > 1),
                    runs=self._runs(groups),
                )
            )
        return rows, {group: [sets.index(devices[group])] for group in used}

    def _runs(self, groups: Collection[int]) -> str:
        """Tell what groups of devices run, forward or, where they run nothing forward, at all."""
        for words in self._words:
            own = frozenset(node for node in words.seconds if self.groups[node] in groups)
            if own:
                return words.text(own)
        return ""

    @cached_property
    def _words(self) -> Sequence[LaneWords]:
        """Words for the nodes that take time, of the forward pass and of all."""
        nodes = self.graph.nodes
        names, types = [node.name for node in nodes], [node.op for node in nodes]
        timed = {index: self._seconds([index]) for index in sorted(self.spans)}
        forward = {at: spent_s for at, spent_s in timed.items() if not self._part(nodes[at])}
        return [LaneWords(names, types, self.paths, seconds) for seconds in (forward, timed)]

    def _turn(
        self, own: tuple[int, ...], devices: Mapping[int, tuple[int, ...]]
    ) -> tuple[int, float, tuple[int, ...]]:
        """Where a lane belongs: by its first stage, when it begins in earnest, its devices."""
        stages = self.result.plan.stages
        first = min(stages[group] for group, lanes in devices.items() if lanes == own)
        nodes = [index for index in self.spans if devices[self.groups[index]] == own]
        fed = [at for at in nodes if not self.static.issuperset(self.graph.nodes[at].writes)]
        nodes = sorted(fed or nodes, key=lambda index: self.spans[index])
        left_s = FEW * self._seconds(nodes)
        for index in nodes:
            left_s -= self._seconds([index])
            if left_s <= 0:
                return first, self.spans[index][0], own
        return first, 0.0, own

    def _level(self, nodes: Sequence[int], depth: int) -> list[_Box]:
        """The boxes of nodes that share `depth` parts of their paths, in order of time."""
        named: dict[str, list[int]] = defaultdict(list)
        for node in nodes:
            if len(self.paths[node]) > depth:
                named[self.paths[node][depth]].append(node)
        spans = {
            key: (self._start(inside), max(self.drawn[node][1] for node in inside))
            for key, inside in named.items()
        }

        def holder(node: int) -> str | None:
            """The module that a node is of, or in whose time alone it lies: sums of gradients."""
            if len(self.paths[node]) > depth:
                return self.paths[node][depth]
            start, end = self.drawn[node]
            around = [key for key, (first, last) in spans.items() if first <= start and end <= last]
            return around[0] if len(around) == 1 else None

        boxes: list[_Box] = []
        named.clear()
        for key, run in groupby(nodes, key=holder):
            if key is None:
                boxes.append(_Box((), tuple(run)))
            else:
                named[key] += run
        for inside in named.values():
            path = self.paths[inside[0]][: depth + 1]
            inner = self._level(inside, depth + 1)
            boxes.append(
                replace(inner[0], path=inner[0].path or path)
                if len(inner) == 1
                else _Box(path, tuple(inside), tuple(inner))
            )
        boxes.sort(key=lambda box: self._start(box.nodes))
        merged: list[_Box] = []
        for _, same in groupby(boxes, key=self._structure):
            alike = tuple(same)
            if len(alike) == 1 or not alike[0].path:
                merged += alike
                continue
            every = tuple(node for box in alike for node in box.nodes)
            label = _ranged([_name(box) for box in alike])
            merged.append(_Box(alike[0].path, every, alike, len(alike), label))
        return merged

    def _structure(self, box: _Box) -> object:
        path = tuple(
            re.sub(r"\d+", "#", part) if is_name(part) else part.split(".")[0] for part in box.path
        )
        return path, tuple(sorted(Counter(self.graph.nodes[n].op for n in box.nodes).items()))

    def _opened(self, boxes: Sequence[_Box]) -> list[_Box]:
        """Boxes with the heaviest opened up to `MOST_BOXES`; more than these are put together."""
        shown = list(boxes)
        while True:
            room = MOST_BOXES - len(shown)
            whole = sum(self._seconds(box.nodes) for box in shown)
            fit = [
                box
                for box in shown
                if box.inner
                and (_name(box) or box.count == 1)
                and (len(box.inner) - 1 <= room or self._seconds(box.nodes) > MOSTLY * whole)
            ]
            heavy = max(fit, key=lambda box: self._seconds(box.nodes), default=None)
            if heavy is None or self._seconds(heavy.nodes) < 0.3 * whole:
                break
            at = shown.index(heavy)
            shown[at : at + 1] = heavy.inner
            shown.sort(key=lambda box: self._start(box.nodes))
        whole = sum(self._seconds(box.nodes) for box in shown)
        at = 0
        while at + 1 < len(shown):
            pair = shown[at : at + 2]
            most = TINY if any(_name(box) for box in pair) else SMALL
            is_small = sum(self._seconds(box.nodes) for box in pair) < most * whole
            if is_small and all(box.count == 1 for box in pair):
                shown[at : at + 2] = [_joined(*pair)]
            else:
                at += 1
        while len(shown) > MOST_BOXES + 3:
            at = min(
                range(len(shown) - 1),
                key=lambda at: self._seconds(shown[at].nodes) + self._seconds(shown[at + 1].nodes),
            )
            shown[at : at + 2] = [_joined(shown[at], shown[at + 1])]
        return shown

    def _add(
        self, rows: list[BoxRow], box: _Box, parent: int, group: int, lanes: list[int], part: Part
    ) -> None:
        by_axis: dict[str, Counter[str]] = {
            axis: Counter() for axis in _cutting_axes(self.result.plan.groups[group])
        }
        for index in box.nodes:
            spent_s = self._seconds([index])
            for axis, word in self.words(self.graph.nodes[index]).items():
                by_axis.setdefault(axis, Counter())[word] += spent_s  # type: ignore[assignment]
        start, end = self._start(box.nodes), max(self.drawn[index][1] for index in box.nodes)
        one = box.inner[0].nodes if box.count > 1 else box.nodes
        rows.append(
            BoxRow(
                label=box.label or _name(box),
                ops=pattern(
                    [self.graph.nodes[index].op for index in one],
                    [self._seconds([index]) for index in one],
                ),
                parent=parent,
                lanes=lanes,
                part=part,
                count=box.count,
                nodes=ranges(sorted(box.nodes)),
                start_s=start,
                end_s=end,
                seconds=self._seconds(box.nodes),
                cuts=[
                    CutRow(
                        axis=axis,
                        words=[
                            word
                            for word, seconds in words.most_common()
                            if seconds >= LEAST_SHARE * sum(words.values())
                        ],
                    )
                    for axis, words in by_axis.items()
                ],
            )
        )
        own = len(rows) - 1
        for inner in box.inner:
            self._add(rows, inner, own, group, lanes, part)

    def _start(self, nodes: Sequence[int]) -> float:
        return min(self.drawn[index][0] for index in nodes)

    def _seconds(self, nodes: Iterable[int]) -> float:
        tasks, names = self.result.node_tasks, self.graph.nodes
        return sum(tasks[names[index].name].longest_s for index in nodes)


def _joined(first: _Box, second: _Box) -> _Box:
    """Two neighbours as one box that opens into them, or into what either joins already."""
    inner = [part for box in (first, second) for part in (box.inner if box.joined else (box,))]
    names = [name for box in inner if (name := box.label or _name(box))]
    label = ", ".join(dict.fromkeys(names))
    return _Box((), (*first.nodes, *second.nodes), tuple(inner), 1, label, joined=True)


def _name(box: _Box) -> str:
    return ".".join(part for part in box.path if is_name(part))


def _ranged(names: Sequence[str]) -> str:
    """blocks.0, blocks.1, blocks.2: "blocks.0-2"; names that differ elsewhere: first and last."""
    numbers = [re.findall(r"\d+", name) for name in names]
    shape = {re.sub(r"\d+", "#", name) for name in names}
    if len(shape) > 1 or not numbers[0]:
        return "" if not names[0] else f"{names[0]} to {names[-1]}"
    columns = [sorted(set(map(int, column))) for column in zip(*numbers, strict=True)]
    texts = iter(
        str(c[0]) if len(c) == 1 else f"{c[0]}{'-' if c[-1] - c[0] < len(c) else ' to '}{c[-1]}"
        for c in columns
    )
    return re.sub("#", lambda _: next(texts), shape.pop())


def loop_words(
    graph: Graph, placed: Collection[PlacedNode], static: Collection[str]
) -> Mapping[str, Mapping[str, Words]]:
    """Words for what the loops of operators run over, by node and factor; `placed` in data order.

    The factor rule of an operator says which dims of its operands and results are one loop, so the
    word for a loop follows a value from the graph's inputs through all operators. Words begin at
    inputs (dim 0 is the batch, further dims of indices are positions) and at weights (`static`:
    what depends on no input), whose own loops are columns. A dim that a reshape takes apart is told
    by its parts: of columns, the major one is heads.
    """
    dims: dict[str, list[Words]] = {}
    for name in graph.inputs:
        kind = graph.types[name]
        rest = () if kind.dtype.startswith(("float", "bfloat")) else POSITIONS
        dims[name] = [rest if at else BATCH for at in range(len(kind.shape))]
    loops = {}
    for node in placed:
        words: dict[str, Words] = {}
        if node.rule is not None:
            words = _of_factors(node.rule, node.node.inputs, dims, static)
            for value, exprs in zip(node.node.outputs, node.rule.results, strict=True):
                if value and value not in static and exprs is not None:
                    # Of terms that lie one after the other, the first tells.
                    dims[value] = [
                        tuple(word for name in expr[0] for word in words.get(name, ()))
                        for expr in exprs
                    ]
        loops[node.node.name] = words
    return loops


def _of_factors(
    rule: Rule,
    inputs: Collection[str],
    dims: Mapping[str, list[Words]],
    static: Collection[str],
) -> dict[str, Words]:
    words: dict[str, Words] = {}
    of_weights: dict[str, None] = {}
    for value, exprs in zip(inputs, rule.operands, strict=True):
        for at, expr in enumerate(exprs or ()):
            if value in static:
                of_weights |= dict.fromkeys(name for term in expr for name in term)
                continue
            told = dims.get(value, [])
            for term in expr:
                for name, word in _apart(term, told[at] if at < len(told) else ()):
                    words[name] = words.get(name) or word
    for name in of_weights:
        if not words.get(name):
            words[name] = COLUMNS
    return words


def _apart(term: Term, told: Words) -> list[tuple[str, Words]]:
    """The words of the factors of a dim, major first."""
    if len(term) < 2:
        return [(name, told) for name in term]
    if len(told) == len(term):
        return [(name, (word,)) for name, word in zip(term, told, strict=True)]
    if told[-1:] == COLUMNS:
        return [(name, COLUMNS if at else HEADS) for at, name in enumerate(term)]
    return [(name, told[-1:] if at else told[:1]) for at, name in enumerate(term)]
