"""The batch of a model: a dim of its inputs, followed through the graph by the factor rules.

A dim of one input is cut in two, and each node takes its operands as they lie, as far as its rule
allows: the cut passes on to results and, against the flow, to the other operands. So the batch may
be any dim of an input, the minor part of a flattened dim, or of some inputs only. Where a rule does
not pass a cut on (rows gathered by an index, edges added up to nodes), the chain ends.
The batch is the dim whose cut leaves most FLOPs as they are, without a communication or a cut
weight: the features of an input meet those of a weight, a sequence meets itself in attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout, LayoutError, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of, rules_of
from partitioner.ir.rule import Rule

_AXIS = "batch"
#: The mesh that cuts a dim in two.
LINE = DeviceMesh.line(2, _AXIS)
#: Sweeps over the graph, forward and back in turn.
_MAX_SWEEPS = 6

Dim = tuple[str, int]  #: A value and the index of a dim of it.


@dataclass(frozen=True)
class Followed:
    """A dim of a model, such as its batch."""

    #: Graph inputs that have it, also caches that the graph keeps, and which of their dims it is.
    inputs: Mapping[str, int]
    #: By name, the nodes that read or make values that have it, and the factors of each that stand
    #: for it; none where no factor does.
    factors: Mapping[str, frozenset[str]]
    values: frozenset[str] = frozenset()  #: All values that have it, as far as it was followed.
    #: Of the nodes, those that do not take it as it lies: they need a communication.
    broken: frozenset[str] = frozenset()

    def size(self, graph: Graph) -> int:
        """Elements of the dim; 0 if no input has it."""
        return next((graph.types[value].shape[dim] for value, dim in self.inputs.items()), 0)


@lru_cache(maxsize=8)
def batch_of(graph: Graph) -> Followed:
    """The batch of a graph; without inputs if none of them has a dim that can be cut.

    Of a graph without a backward pass, caches that it keeps may have it, as those of sequences do.
    """
    rules, seeds, walks = rules_of(graph), list(_candidates(graph)), list[_Walk]()
    fed = graph.inputs if graph.backward else (*graph.inputs, *_caches(graph))
    for seed in seeds:
        if any(seed in walk.inputs.items() for walk in walks):
            continue
        walks.append(_Walk(graph, rules, fed).run([seed]))
        if seed == seeds[0] and not walks[0].broken:
            break  # nothing stands in the way of the usual batch
    return max(walks, key=lambda walk: walk.score).followed if walks else Followed({}, {})


@lru_cache(maxsize=8)
def sequence_of(graph: Graph) -> Followed:
    """The sequence of a graph: of dims beside the batch, the one whose cut leaves most as it is.

    It cuts no matrix of weights, if there is a dim that does not. It meets itself in attention,
    whose keys it leaves to be gathered or passed round; or it is that of the keys, over which
    attention in parts takes a maximum. It may be a dim of caches: those of equal layers have it in
    common. Without inputs if there is none.
    """
    rules, walks, batch = rules_of(graph), list[_Walk](), batch_of(graph)
    fed = (*graph.inputs, *_caches(graph))
    shapes = {name: graph.types[name].shape for name in fed}
    for seed in ((name, dim) for name, shape in shapes.items() for dim in range(len(shape))):
        if shapes[seed[0]][seed[1]] < 2 or seed in batch.inputs.items():
            continue
        if not any(seed in walk.inputs.items() for walk in walks):
            walks.append(_Walk(graph, rules, fed).run([seed]))
    walks = [walk for walk in walks if walk.score[0]]
    if not walks:
        return Followed({}, {})
    best = max(walks, key=lambda walk: (not walk.cuts_weights, walk.is_compared, walk.score))
    places = {(shapes[name], dim) for name, dim in best.inputs.items()}
    alike = (
        walk
        for walk in walks
        if walk.score == best.score
        and {(shapes[name], dim) for name, dim in walk.inputs.items()} == places
    )
    seeds = [seed for walk in alike for seed in walk.inputs.items()]
    return _Walk(graph, rules, fed).run(seeds).followed


def _caches(graph: Graph) -> tuple[str, ...]:
    """Values that a call reads as the one before it has left them, parameters apart."""
    nodes = (node for node in graph.nodes if node.attrs.get("role") == "next")
    return tuple(n.inputs[at] for n in nodes if (at := row_of(n).in_place) is not None)


def follow(
    graph: Graph, seeds: Iterable[Dim], cuts: Mapping[Dim, DimLayout] | None = None
) -> Followed:
    """Follow dims of values, which are one dim of the model, through the graph.

    `cuts` has cuts over `LINE` of some of them; the others are cut evenly.
    """
    return _Walk(graph, rules_of(graph)).run(seeds, cuts or {}).followed


def _candidates(graph: Graph) -> Iterator[Dim]:
    """Dims of inputs: first those of dim 0 of the size that most inputs have there.

    No other is the batch if that is 1: it is one sample.
    """
    shapes = {name: graph.types[name].shape for name in graph.inputs if graph.types[name].rank}
    first = [shape[0] for shape in shapes.values()]
    usual = max(first, key=first.count, default=0)
    if usual == 1:
        return
    yield from ((name, 0) for name, shape in shapes.items() if shape[0] == usual)
    dims = sorted((dim, name) for name, shape in shapes.items() for dim in range(len(shape)))
    order = {name: index for index, name in enumerate(shapes)}
    for dim, name in sorted(dims, key=lambda pair: (pair[0], order[pair[1]])):
        if shapes[name][dim] > 1:
            yield name, dim


@dataclass
class _Walk:
    """Follows one dim: a layout of each value that has it, factors of each node.

    It may be a dim of the values in `fed`, by default the graph's inputs.
    """

    graph: Graph
    rules: Mapping[str, Rule | str]
    fed: tuple[str, ...] | None = None
    layouts: dict[str, Sharding] = field(default_factory=dict)
    factors: dict[str, dict[str, DimLayout]] = field(default_factory=dict)

    def run(self, seeds: Iterable[Dim], cuts: Mapping[Dim, DimLayout] | None = None) -> _Walk:
        for value, dim in seeds:
            whole = [DimLayout.whole(size) for size in self.graph.types[value].shape]
            whole[dim] = (cuts or {}).get((value, dim)) or even(whole[dim].size)
            self._publish(value, Sharding(tuple(whole)))
        for sweep in range(_MAX_SWEEPS):
            order = reversed(self.graph.nodes) if sweep % 2 else self.graph.nodes
            news = [self._visit(node) for node in order]
            if not any(news):
                break
        return self

    @cached_property
    def weights(self) -> frozenset[str]:
        """Values that are kept from step to step, and constants."""
        stored = (node.outputs[0] for node in self.graph.nodes if row_of(node).stored)
        return frozenset((*stored, *self.graph.constants)).difference(self.fed or ())

    @property
    def inputs(self) -> Mapping[str, int]:
        """The dim of each fed value that has it."""
        dims = {}
        for value in self.graph.inputs if self.fed is None else self.fed:
            if value in self.layouts:
                cut = [i for i, at in enumerate(self.layouts[value].dims) if at.axes]
                dims[value] = cut[0]
        return dims

    @property
    def followed(self) -> Followed:
        """The dim, with all nodes that read or make a value that has it."""
        names = {
            node.name: frozenset(self.factors.get(node.name, ()))
            for node in self.graph.nodes
            if any(value in self.layouts for value in (*node.reads, *node.writes))
        }
        broken = (name for name in names if not self._takes(self.graph.by_name[name]))
        return Followed(self.inputs, names, frozenset(self.layouts), frozenset(broken))

    @cached_property
    def broken(self) -> bool:
        """Tell whether a forward node that reads the dim does not take it as it lies."""
        return any(
            not self._takes(node)
            for node in self.graph.nodes
            if node.name not in self.graph.backward
            and any(value in self.layouts for value in node.reads)
        )

    @cached_property
    def cuts_weights(self) -> bool:
        """Tell whether a product reads a weight that is cut: the dim is one of features.

        A weight as it is, or what is computed from weights alone.
        """
        weights = set(self.weights)
        for node in self.graph.nodes:
            if node.reads and weights.issuperset(node.reads):
                weights.update(node.writes)
            rule, cut = self.rules[node.name], self.factors.get(node.name)
            if not cut or not isinstance(rule, Rule) or not rule.is_product:
                continue
            ins, _ = rule.shardings(cut, LINE)
            if any(v in weights and at.axes for v, at in zip(node.inputs, ins, strict=True)):
                return True
        return False

    @property
    def is_compared(self) -> bool:
        """Tell whether a maximum over the dim is taken of parts of it."""
        for name, cut in self.factors.items():
            rule = self.rules[name]
            if isinstance(rule, Rule) and any(rule.factors[n].reduce == "max" for n in cut):
                return True
        return False

    @cached_property
    def score(self) -> tuple[float, int]:
        """FLOPs and number of the nodes of the forward pass that take the dim as it lies."""
        taken = [
            self.rules[node.name]
            for node in self.graph.nodes
            if node.name not in self.graph.backward and self._takes(node)
        ]
        return sum(rule.flops for rule in taken if isinstance(rule, Rule)), len(taken)

    def _takes(self, node: Node) -> bool:
        """Test whether a node takes its operands as they lie, and its results are cut."""
        rule, layouts = self.rules[node.name], self.factors.get(node.name)
        if not isinstance(rule, Rule) or not layouts:
            return False
        ins, _ = rule.shardings(layouts, LINE)
        for value, at in zip(node.inputs, ins, strict=True):
            if at.axes and value in self.weights:
                return False
            if value and at != self.layouts.get(value, at if not at.axes else None):
                return False
        return True

    def _visit(self, node: Node) -> bool:
        """Pass the dim on to the values of a node; whether any was new."""
        rule = self.rules[node.name]
        if not isinstance(rule, Rule) or node.name in self.factors:
            return False
        for cut in self._cuts(node, rule):
            try:
                ins, outs = rule.shardings(cut, LINE)
            except LayoutError:
                continue
            self.factors[node.name] = cut
            for value, at in zip((*node.inputs, *node.outputs), (*ins, *outs), strict=True):
                if value:
                    self._publish(value, at)
            return True
        return False

    def _cuts(self, node: Node, rule: Rule) -> Iterator[dict[str, DimLayout]]:
        """Cuts of a class of factors that an operand or a result leads to."""
        values = (*node.inputs, *node.outputs)
        for value, dims in zip(values, (*rule.operands, *rule.results), strict=True):
            if value not in self.layouts or dims is None:
                continue
            for expr, layout in zip(dims, self.layouts[value].dims, strict=True):
                cut = rule.factor_layouts(expr, layout, LINE) if layout.axes else None
                links = [link for link in rule.links if cut and set(cut) <= set(link)]
                if cut and links:
                    linked = {n: even(rule.factors[n].size) for n in links[0] if n not in cut}
                    yield {**linked, **cut}

    def _publish(self, value: str, at: Sharding) -> None:
        if at.axes and not at.partial and value not in self.layouts:
            self.layouts[value] = at


def even(size: int) -> DimLayout:
    """The cut of a dim in two, as even as can be."""
    return DimLayout.even(size, (_AXIS,), LINE)
