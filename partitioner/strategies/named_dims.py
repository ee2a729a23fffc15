"""Dims of a model by name, and the mesh axes that they lie over.

A name stands for dims of tensors; each is followed through the graph by the factor rules
(`strategies.kinds.batch`), and every operator with a loop that is the dim is cut along it. So
`batch = "x.0"` names the batch of all tensors, and `hidden = "*.up.weight.0"` the hidden dim of
every MLP, of its weights, activations and gradients.
A dim of heads and their sizes, or of a fused projection, is cut where its parts are: among the cuts
of the tensor that its neighbours allow, that one is followed which ends at the fewest operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape
from itertools import combinations

from partitioner.ir.errors import did_you_mean
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout
from partitioner.ir.ops import rules_of
from partitioner.ir.rule import Rule
from partitioner.strategies.constraints import Along, ConstraintError, NamedDims
from partitioner.strategies.derive import Rules, strategies
from partitioner.strategies.kinds.batch import LINE, Dim, even, follow


def check_named(named: NamedDims, graph: Graph) -> None:
    """Refuse a name of a dim that no tensor of the graph has, laid out or not.

    Raises:
        ConstraintError: A pattern matches nothing, or only tensors without such a dim.
    """
    for name in named.dims:
        _seeds(named, name, graph)


def in_copies(named: NamedDims, graph: Graph, copies: Callable[[str], Iterable[str]]) -> NamedDims:
    """The same names of the dims of copies that another graph has of values of this one."""
    dims = {
        name: tuple(
            f"{escape(copy)}.{dim}"
            for value, dim in dict.fromkeys(_seeds(named, name, graph))
            for copy in copies(value)
        )
        for name in named.dims
    }
    layout = {name: axes for name, axes in named.layout.items() if dims[name]}
    return replace(named, dims={name: of for name, of in dims.items() if of}, layout=layout)


def bound(named: NamedDims, graph: Graph, mesh: Mapping[str, int]) -> tuple[Along, ...]:
    """The demands on the operators of a graph that a layout of named dims makes.

    `mesh` has the sizes of the axes.
    """
    demands = tuple(
        _demand(named, name, axes, graph) for name, axes in sorted(named.layout.items())
    )
    rules = rules_of(graph)
    for demand in demands:
        parts = math.prod(mesh[axis] for axis in demand.axes)
        for node, factors in demand.factors.items():
            rule = rules[node]
            assert isinstance(rule, Rule)
            size = max(rule.factors[factor].size for factor in factors)
            if size < parts:
                raise ConstraintError(
                    f"{demand.text}: it has {size} elements in {node!r}, fewer than {parts} devices"
                )
    for one, other in combinations(demands, 2):
        _check_together(one, other, graph)
    return demands


def _demand(named: NamedDims, name: str, axes: tuple[str, ...], graph: Graph) -> Along:
    text = f"layout {name} = {list(axes) if len(axes) != 1 else axes[0]!r}"
    where, seeds = named.where, _seeds(named, name, graph)
    chosen: dict[tuple[tuple[int, ...], int], DimLayout] = {}
    layouts: dict[Dim, DimLayout] = {}
    for seeded, at in dict.fromkeys(seeds):
        shape = graph.types[seeded].shape
        cuts = _cuts(graph, seeded, at)
        if chosen.get((shape, at)) not in cuts:
            chosen[shape, at] = min(cuts, key=lambda cut: _cost(graph, (seeded, at), cut))
        layouts[seeded, at] = chosen[shape, at]
    followed = follow(graph, layouts, layouts)
    factors = {node: of_node for node, of_node in followed.factors.items() if of_node}
    if not factors:
        value, dim = seeds[0]
        raise ConstraintError(
            f"{where}{text}: no operator can be cut along dim {dim} of {value!r}, "
            f"which is {graph.types[value]}"
        )
    more = f" and {len(seeds) - 1} more" if len(seeds) > 1 else ""
    said = f"{where}{text} (dim {seeds[0][1]} of {seeds[0][0]!r}{more})"
    ends = (  # operators of the forward pass that read values with the dim and need it whole
        f"{node.name} ({_short(node.op)})"
        for node in graph.nodes
        if node.name not in graph.backward
        and not followed.factors.get(node.name)
        and not followed.values.isdisjoint(node.reads)
    )
    return Along(said, axes, factors, tuple(ends))


def _seeds(named: NamedDims, name: str, graph: Graph) -> list[Dim]:
    return [dim for seed in named.dims[name] for dim in _dims(graph, name, seed, named.where)]


def _cost(graph: Graph, dim: Dim, cut: DimLayout) -> tuple[int, int, int]:
    """The cost of a cut of a dim for the graph around it.

    Operators of the forward pass at which it ends on its way to the results; its segments, of which
    the major part of a compound dim has the fewest; less the operators that it reaches.
    """
    followed = follow(graph, [dim], {dim: cut})
    ends, ahead = 0, {dim[0]}
    for node in graph.nodes:
        if node.name in graph.backward or ahead.isdisjoint(node.reads):
            continue
        has_dim = any(value in ahead and value in followed.values for value in node.reads)
        ends += has_dim and not followed.factors.get(node.name)
        ahead.update(node.writes)
    return ends, len(cut.segments), -len(followed.factors)


def _cuts(graph: Graph, value: str, dim: int) -> list[DimLayout]:
    """Cuts in two of a tensor's dim that the operators beside it have, the even one first."""
    size = graph.types[value].shape[dim]
    cuts = [even(size)] if size > 1 else []
    beside = (*graph.consumers[value], *filter(None, [graph.producers.get(value)]))
    in_two = strategies(graph, Rules.of(graph), LINE)
    for node in beside:
        for placed in in_two[node.name]:
            for other, at in (*placed.operands(), *placed.results()):
                if (
                    other == value
                    and at.sharding.dims[dim].axes
                    and not at.sharding.dims[dim].windows
                ):
                    cuts.append(at.sharding.dims[dim])
    return list(dict.fromkeys(cuts)) or [even(size)]


def _dims(graph: Graph, name: str, seed: str, where: str) -> Iterator[Dim]:
    pattern, _, number = seed.rpartition(".")
    index, values = int(number), _values(graph, pattern)
    if not values:
        known = [*graph.types, *graph.by_name, *{_short(node.op) for node in graph.nodes}]
        hint = did_you_mean(pattern, known)
        raise ConstraintError(
            f"{where}dim {name}: {pattern!r} matches no tensor, node, module or operator{hint}"
        )
    fitting = [v for v in values if -graph.types[v].rank <= index < graph.types[v].rank]
    if not fitting:
        raise ConstraintError(
            f"{where}dim {name}: {seed!r} matches {values[0]!r}, which is "
            f"{graph.types[values[0]]} and has no dim {index}"
        )
    yield from ((value, index % graph.types[value].rank) for value in fitting)


def _values(graph: Graph, pattern: str) -> list[str]:
    """The tensors that a pattern names.

    Tensors of such names (parameters by their names in the state_dict) or, if there are none, what
    such nodes make; then what leaves such modules; then what such operators make.
    """
    named = [value for value in graph.types if value and fnmatchcase(value, pattern)]
    if named:
        return named
    nodes = [node for node in graph.nodes if fnmatchcase(node.name, pattern)]
    path = f"/{pattern.replace('.', '/')}/*"
    inside = [node for node in graph.nodes if fnmatchcase(node.name, path)]
    if not nodes and inside:
        return list(_leaving(graph, inside))
    nodes = nodes or [node for node in graph.nodes if pattern in (node.op, _short(node.op))]
    return [value for node in nodes for value in node.writes[:1]]


def _leaving(graph: Graph, inside: Sequence[Node]) -> Iterator[str]:
    """Values that nodes of the forward pass make and others of it read, or that are results."""
    names = {node.name for node in inside}
    for node in inside:
        if node.name in graph.backward:
            continue
        for value in node.writes:
            readers = (reader.name for reader in graph.consumers[value])
            others = (name for name in readers if name not in graph.backward)
            if value in graph.outputs or any(name not in names for name in others):
                yield value


def _short(op: str) -> str:
    return op.rpartition("::")[2]


def _check_together(one: Along, other: Along, graph: Graph) -> None:
    for node in graph.nodes:
        shared = one.factors.get(node.name, frozenset()) & other.factors.get(node.name, frozenset())
        if shared and one.axes != other.axes:
            raise ConstraintError(
                f"{one.text} and {other.text}: both are one dim of {node.name!r} ({node.op})"
            )
        both = node.name in one.factors and node.name in other.factors
        if both and not shared and (axes := set(one.axes) & set(other.axes)):
            raise ConstraintError(
                f"{one.text} and {other.text}: {node.name!r} ({node.op}) has both dims, and they "
                f"cannot both lie over axis {min(axes)!r}"
            )
