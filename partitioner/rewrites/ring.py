"""Ring attention: attention over a sequence in parts, whose keys and values pass round.

Attention of W parts of the sequence becomes W steps. In step s the rows of part i meet the keys and
values of part i + s (mod W), which `partitioner::turn` brings: its result holds the parts of its
operand, turned by one. The results of the steps are joined by their log-sum-exp. In the backward
pass keys and values pass round again, and each step's gradients of keys and values turn back to
where their part lies, where they are added up.

If each device has a part, a turn is one message to a neighbour, which travels while the step before
runs, and no device holds more than two parts of the keys and values. Under a causal mask part i is
chunk i from either end of the sequence, so that each step is the same work for all parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from partitioner.ir.graph import Attr, Graph, Node
from partitioner.ir.layout import DimLayout, Interval, Segments, even_cut, folded_cut, owned
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops.aten.state import ALIAS
from partitioner.ir.types import TensorType
from partitioner.rewrites.graph_writer import GraphWriter, replaced

ATTENTION, BACKWARD = "partitioner::attention", "partitioner::attention_backward"
STEP, JOIN = "partitioner::attention_step", "partitioner::attention_join"
TURN = "partitioner::turn"
#: Parts of a sequence at most.
MOST_PARTS = 32


def ring(graph: Graph, parts: int) -> Graph:
    """The graph with ring attention of so many parts wherever it is possible.

    That is attention of as many rows as keys, at least two to a part. A mask of numbers or flags is
    whole along the keys. Without any attention the graph is returned as it is.
    """
    counts = {}
    for node in graph.nodes if 2 <= parts <= MOST_PARTS else ():
        if node.op in (ATTENTION, BACKWARD):
            first = int(node.op == BACKWARD)
            rows, keys = (graph.types[node.inputs[first + i]].shape[2] for i in range(2))
            if rows == keys >= 2 * parts:
                counts[node.name] = parts
    return _replaced(graph, counts)


def ring_of(graph: Graph, names: Container[str]) -> Graph:
    """The graph with ring attention where there are nodes of these names of it."""
    counts = {}
    for node in graph.nodes:
        if node.op in (ATTENTION, BACKWARD) and node.name not in names:
            counts[node.name] = next(
                (w for w in range(2, MOST_PARTS + 1) if f"{node.name}/ring{w}/step0" in names), 0
            )
    return _replaced(graph, {name: parts for name, parts in counts.items() if parts})


def _replaced(graph: Graph, counts: Mapping[str, int]) -> Graph:
    def write(writer: GraphWriter, node: Node) -> None:
        _Ring(writer, node, counts[node.name]).write()

    return replaced(graph, dict.fromkeys(counts, write))


@dataclass(frozen=True)
class _Ring:
    """Attention, or its gradients, in a ring of so many parts."""

    writer: GraphWriter
    node: Node
    parts: int

    @property
    def base(self) -> str:
        return f"{self.node.name}/ring{self.parts}"

    @cached_property
    def segments(self) -> Segments:
        size = self.writer.types[self.node.inputs[int(self.node.op == BACKWARD)]].shape[2]
        is_causal = self.node.attrs.get("is_causal", False)
        return folded_cut(size, self.parts) if is_causal else (even_cut(size, self.parts),)

    @cached_property
    def pieces(self) -> Sequence[Sequence[Interval]]:
        layout, mesh = DimLayout.cut(("part",), self.segments), DeviceMesh.line(self.parts, "part")
        return [layout.pieces(mesh, {"part": part}) for part in range(self.parts)]

    @cached_property
    def sizes(self) -> Sequence[int]:
        return [sum(size for _, size in part) for part in self.pieces]

    def turned(self, steps: int) -> Sequence[int]:
        """The parts in the order in which a tensor that was turned so often holds them."""
        return [(i + steps) % self.parts for i in range(self.parts)]

    def turn(self, steps: int) -> dict[str, Attr]:
        """Attributes of the turn of keys or values that were turned by one step less."""
        count = self.parts
        if steps == 1:  # from where they lie
            runs = sorted((run, part) for part, some in enumerate(self.pieces) for run in some)
            owners = [(part - 1) % count for _, part in runs]
            held = owned([size for (_, size), _ in runs], owners, count)
            order = list(itertools.chain(*(self.pieces[part] for part in self.turned(1))))
        else:
            before = [self.sizes[part] for part in self.turned(steps - 1)]
            held = owned(before, [(i - 1) % count for i in range(count)], count)
            order = [(before[0], sum(before[1:])), (0, before[0])]
        made = owned([self.sizes[part] for part in self.turned(steps)], range(count), count)
        return self._turn(held, made, order)

    def back(self, steps: int) -> dict[str, Attr]:
        """Attributes of the turn of gradients back to where their part lies."""
        count, parts = self.parts, self.turned(steps)
        sizes = [self.sizes[part] for part in parts]
        held = owned(sizes, parts, count)
        starts = dict(zip(parts, itertools.accumulate(sizes, initial=0), strict=False))
        order: list[tuple[int, Interval]] = []
        for part, intervals in enumerate(self.pieces):
            at = starts[part]
            for start, size in intervals:
                order.append((start, (at, size)))
                at += size
        return self._turn(held, self.segments, [interval for _, interval in sorted(order)])

    def _turn(self, held: Segments, made: Segments, order: Sequence[Interval]) -> dict[str, Attr]:
        return {
            "intervals": tuple(itertools.chain(*order)),
            "held": tuple(itertools.chain(*held)),
            "made": tuple(itertools.chain(*made)),
            "parts": self.parts,
        }

    def write(self) -> None:
        if self.node.op == BACKWARD:
            self._backward()
            return
        query, key, value, mask = self.node.inputs
        types = [self._type_of_result(i) for i in range(2)]
        before: tuple[str, ...] = ()
        for step, pair in enumerate(self._rounds(key, value)):
            results = self._step(STEP, (query, *pair, mask), types, step)
            if before:
                last = step == self.parts - 1
                name, made = f"{self.base}/join{step}", self.node.outputs if last else ()
                operands = (*before, *results)
                results = self.writer.add(name, JOIN, operands, types, made, {"last": last})
            before = results

    def _backward(self) -> None:
        grad, query, key, value, mask, out, logsumexp = self.node.inputs
        types = [self.writer.types[name] for name in (query, key, value)]
        totals: tuple[str, ...] = ()
        for step, pair in enumerate(self._rounds(key, value)):
            operands = (grad, query, *pair, mask, out, logsumexp)
            made = self._step(f"{STEP}_backward", operands, types, step)
            if step:
                back = self.back(step)
                made = (made[0], *(self._as(f"{one}/back", TURN, one, back) for one in made[1:]))
            totals = self._sums(totals, made, step) if totals else made

    def _sums(self, totals: Sequence[str], made: Sequence[str], step: int) -> tuple[str, ...]:
        last, sums = step == self.parts - 1, list[str]()
        for index, pair in enumerate(zip(totals, made, strict=True)):
            given = self.node.outputs[index] if last else ""
            types = [self.writer.types[pair[0]]]
            name = f"{self.base}/sum{step}/{index}"
            sums += self.writer.add(name, "aten::add.Tensor", pair, types, [given] if given else ())
        return tuple(sums)

    def _rounds(self, key: str, value: str) -> Iterator[tuple[str, str]]:
        """Keys and values of each step. Those of the next step are on their way during a step."""
        yield key, value
        pair = enumerate((key, value))  # sent under another name
        key, value = (self._as(f"{self.base}/own{i}", ALIAS, one, {}) for i, one in pair)
        for step in range(1, self.parts):
            attrs, pair = self.turn(step), enumerate((key, value))
            name = f"{self.base}/turn{step}"
            key, value = (self._as(f"{name}/{i}", TURN, one, attrs) for i, one in pair)
            yield key, value

    def _as(self, name: str, op: str, value: str, attrs: Mapping[str, Attr]) -> str:
        """Write a node whose result has the type of its operand."""
        (made,) = self.writer.add(name, op, (value,), [self.writer.types[value]], attrs=attrs)
        return made

    def _step(
        self, op: str, operands: Sequence[str], types: Sequence[TensorType], step: int
    ) -> tuple[str, ...]:
        attrs: dict[str, Attr] = {
            **self.node.attrs,
            "intervals": tuple(itertools.chain(*itertools.chain(*self.pieces))),
            "counts": tuple(map(len, self.pieces)),
            "step": step,
        }
        return self.writer.add(f"{self.base}/step{step}", op, operands, types, attrs=attrs)

    def _type_of_result(self, index: int) -> TensorType:
        """The type of the attention's result or of its log-sum-exp, read or not."""
        node, of = self.node, self.writer.types
        if node.outputs[index]:
            return of[node.outputs[index]]
        query, value = of[node.inputs[0]], of[node.inputs[2]]
        if index == 0:
            return query.with_shape((*query.shape[:3], value.shape[3]))
        wide = "float64" if query.dtype == "float64" else "float32"
        return TensorType.of(wide, query.shape[:3])
