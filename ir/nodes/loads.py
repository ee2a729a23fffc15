"""Loads of the experts of a graph: the share of the choices that each is known to get.

They are a fact about the data that a model runs on, as the speed of a device is one about the
cluster: plans are priced by them, and no result depends on them. So they are no part of a graph's
digest. All nodes of a layer have them: in the backward pass, and where it is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from partitioner.ir.errors import IRError, did_you_mean
from partitioner.ir.graph import LOADS, Graph
from partitioner.ir.loops.factors import single
from partitioner.ir.ops import rules_of
from partitioner.ir.rule import Rule

#: By pattern of weights, nodes or modules, a number for each expert.
Loads = tuple[tuple[str, tuple[float, ...]], ...]


class LoadsError(IRError):
    """Loads that no layer of experts can have."""


def with_loads(graph: Graph, loads: Loads) -> Graph:
    """The graph whose layers of experts have these loads; of several that match, the last."""
    found: dict[str, tuple[float, ...]] = {}
    layers = _layers(graph) if loads else {}
    for pattern, numbers in loads:
        matching = [
            name
            for name, names in layers.items()
            if any(fnmatchcase(one, pattern) for one in names)
        ]
        if not matching:
            known = sorted({one for names in layers.values() for one in names})
            what = "" if layers else ": the model has none that is one operator"
            raise LoadsError(
                f"loads {pattern!r}: no layer of experts has a weight, node or module of that "
                f"name{what or did_you_mean(pattern, known)}"
            )
        for name in matching:
            found[name] = _shares(pattern, numbers, graph, name)
    if not found:
        return graph
    nodes = [
        replace(node, attrs={**node.attrs, LOADS: found[node.name]}) if node.name in found else node
        for node in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))


def origins(graph: Graph, value: str) -> Iterator[str]:
    """A value, and those whose first dim it has, through views and casts."""
    rules = rules_of(graph)
    yield value
    while (node := graph.producers.get(value)) is not None and len(node.reads) == 1:
        rule = rules[node.name]
        if not isinstance(rule, Rule) or rule.flops_per_point or not rule.operands[0]:
            return
        (before, *_), result = rule.operands[0], rule.results[node.outputs.index(value)]
        if not result or before != result[0] or not single(before):
            return
        value = node.reads[0]
        yield value


def _layers(graph: Graph) -> Mapping[str, frozenset[str]]:
    """The names of each layer of experts, by node; nodes that read the same weights are of one."""
    weights: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        rule = rules_of(graph)[node.name]
        if isinstance(rule, Rule) and rule.dispatch is not None:
            weights[node.name] = tuple(
                [*origins(graph, value)][-1]
                for value, dims in zip(node.inputs, rule.operands, strict=True)
                if value and dims and single(dims[0]) == rule.dispatch.owners
            )
    names: dict[tuple[str, ...], set[str]] = {}
    for name, read in weights.items():
        own = names.setdefault(read, set(read))
        own.update((name, *_modules(name), *_modules(f"/{graph.modules.get(name, '')}/")))
    return {name: frozenset(names[read]) for name, read in weights.items()}


def _modules(name: str) -> Iterator[str]:
    """The paths of modules that a node is in, by its name: "/layers/0/experts/bmm"."""
    parts = name.split("/")[1:-1]
    yield from (".".join(parts[:size]) for size in range(1, len(parts) + 1))


def _shares(pattern: str, numbers: Sequence[float], graph: Graph, name: str) -> tuple[float, ...]:
    """Numbers as shares of their sum; LoadsError if too few, too many or too large."""
    rule = rules_of(graph)[name]
    assert isinstance(rule, Rule)
    assert rule.dispatch is not None
    count, chosen = rule.factors[rule.dispatch.owners].size, rule.dispatch.chosen
    if len(numbers) != count:
        raise LoadsError(
            f"loads {pattern!r}: {len(numbers)} numbers for a layer of {count} experts "
            f"({name!r}): give one for each"
        )
    largest = max(numbers)
    scaled = [number / largest for number in numbers]  # a sum of large numbers may overflow
    total = math.fsum(scaled)
    if chosen > total * (1 + 1e-6):
        raise LoadsError(
            f"loads {pattern!r}: expert {numbers.index(largest)} of {name!r} has "
            f"{1 / total:.3g} of the choices; a token chooses {chosen} different "
            f"experts, so that each has at most 1/{chosen} of them"
        )
    return tuple(number / total for number in scaled)
