"""A plan taken over for calls of other sizes, whose graph has the same nodes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from partitioner.foundations.files import ResultError
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Graph
from partitioner.ir.layout import DimLayout, share_cut
from partitioner.ir.loops.factors import Dims
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import rule_of, rules_of
from partitioner.ir.plan import NodePlan, PlacedNode, Plan, resolve, resolve_node
from partitioner.ir.rule import Cut, Rule

#: Of calls of a module and of an ONNX model in other sizes, and of the last micro-batch: what they
#: are, and what helps.
SIZES = "inputs of these sizes", "compile the model for them"
OTHER = "a batch of these sizes", "compile the module for them, or leave the batch out"
LAST = "the last micro-batch, which is smaller", "give micro_batches that divide the batch"


def taken_over(plan: Plan, graph: Graph, other: Graph, of: tuple[str, str] = OTHER) -> Plan:
    """The plan, for a graph of the same nodes and other sizes; a ResultError if it does not fit."""
    (batch, advice) = of
    missing = [name for name in graph.by_name if name not in other.by_name]
    added = [name for name in other.by_name if name not in graph.by_name]
    if missing or added:
        which = f"without {missing[0]!r}" if missing else f"with {added[0]!r}"
        raise ResultError(f"with {batch}, the model is another graph, {which}: {advice}")
    moved = replace(plan, graph_digest=other.digest, certificate=None)
    moved = replace(moved, nodes=_resized_nodes(plan, graph, moved, other))
    try:
        resolve(other, moved)
    except IRError as error:
        raise ResultError(f"the plan does not fit {batch}: {error}: {advice}") from None
    return moved


def _resized_nodes(plan: Plan, graph: Graph, moved: Plan, other: Graph) -> dict[str, NodePlan]:
    """The decisions of a plan, whose parts of explicit sizes have those of another graph.

    A cut that follows from that of a neighbour, as stripes of a dim that is two dims before it,
    follows from it again; others are in proportion. A factor that has fewer elements than the cut
    has parts is not cut.
    """
    rules = rules_of(other)
    nodes = {
        name: NodePlan(node.group, _possible(node, rules[name], plan.groups[node.group]))
        for name, node in plan.nodes.items()
    }
    left = [name for name, node in nodes.items() if _is_striped(node)]
    known = {name: node for name, node in nodes.items() if not _is_striped(node)}
    old = {placed.node.name: placed for placed in resolve(graph, plan)} if left else {}
    new: dict[str, PlacedNode] = {}
    while left:
        at = replace(moved, nodes=known)
        for name in known.keys() - new.keys():
            with suppress(IRError):  # told with all others
                new[name] = resolve_node(other, at, other.by_name[name], rules[name])
        found = {name: cuts for name in left if (cuts := _followed(name, old, new, graph, other))}
        if not found:
            break
        known = {name: NodePlan(nodes[name].group, cuts) for name, cuts in found.items()}
        nodes |= known
        left = [name for name in left if name not in found]
    for name in left:
        resized = {f: _resized(c, f, graph, other, name) for f, c in nodes[name].cuts.items()}
        nodes[name] = NodePlan(nodes[name].group, resized)
    return nodes


def _possible(node: NodePlan, rule: Rule | str, mesh: DeviceMesh) -> dict[str, Cut]:
    factors = rule.factors if isinstance(rule, Rule) else {}
    sizes = {name: factors[name].size if name in factors else 1 for name in node.cuts}
    return {name: cut for name, cut in node.cuts.items() if sizes[name] >= mesh.size(cut.axes)}


def _is_striped(node: NodePlan) -> bool:
    return any(cut.segments is not None for cut in node.cuts.values())


def _followed(
    name: str,
    old: Mapping[str, PlacedNode],
    new: Mapping[str, PlacedNode],
    graph: Graph,
    other: Graph,
) -> dict[str, Cut]:
    """The cuts of a node in another graph, where each follows from a neighbour's; else none."""
    placed, mesh = old[name], old[name].mesh
    both = rule_of(graph, placed.node), rule_of(other, other.by_name[name])
    rules = [rule for rule in both if isinstance(rule, Rule)]
    values = enumerate((*placed.node.inputs, *placed.node.outputs))
    dims = [
        (value, tensor, dim)
        for tensor, value in values
        for dim in range(len(_tensor(rules[0], tensor)) if value else 0)
    ]
    found: dict[str, DimLayout] = {}
    for value, tensor, dim in dims:
        touching = [*graph.consumers[value]]
        touching += [graph.producers[value]] if value in graph.producers else []
        for near in (one.name for one in touching if one.name in new):
            if old[near].mesh != mesh:
                continue
            made = [
                rule.factor_layouts(expr, layout, mesh, rule.window(tensor, expr))
                for rule, layouts in zip(rules, (old[near], new[near]), strict=True)
                if (layout := _layout_of(layouts, value, dim)) is not None
                for expr in [_tensor(rule, tensor)[dim]]
            ]
            if len(made) == 2 and made[0] and made[1]:
                alike = (f for f, at in made[0].items() if placed.layouts.get(f) == at)
                found.update({f: made[1][f] for f in alike if f in made[1] and f not in found})
    cuts = old[name].layouts
    striped = {f for f, layout in cuts.items() if Cut.of(layout, mesh).segments is not None}
    if not striped <= found.keys():
        return {}
    return {f: Cut.of(found[f] if f in striped else at, mesh) for f, at in cuts.items()}


def _tensor(rule: Rule, tensor: int) -> Dims:
    return (*rule.operands, *rule.results)[tensor] or ()


def _layout_of(placed: PlacedNode, value: str, dim: int) -> DimLayout | None:
    ends = (*placed.results(), *placed.operands())
    return next((at.sharding.dims[dim] for name, at in ends if name == value), None)


def _resized(cut: Cut, factor: str, graph: Graph, other: Graph, name: str) -> Cut:
    """The cut with part sizes in proportion to the new size, or one piece near it for each part."""
    if cut.segments is None:
        return cut
    old, new = _size(graph, name, factor), _size(other, name, factor)
    if any(part * new % old for parts in cut.segments for part in parts):
        shares = [sum(pieces) for pieces in zip(*cut.segments, strict=True)]
        if not all(shares):
            return cut  # `resolve` refuses it, with its sizes
        return Cut(cut.axes, (share_cut(new, shares),))
    return Cut(cut.axes, tuple(tuple(part * new // old for part in p) for p in cut.segments))


def _size(graph: Graph, name: str, factor: str) -> int:
    rule = rule_of(graph, graph.by_name[name])
    assert isinstance(rule, Rule)
    return rule.factors[factor].size
