"""Variants of a compiled module over the same stored values: evaluation, other batch sizes.

A variant is traced anew. If its graph has the same nodes as an earlier program's, it takes over
that program's plan; else a plan is searched in which all stored values stay where they are. So it
is with steps of training whose sizes make another graph: PyTorch traces a sequence of one step with
other views, and a recurrent layer once for each step. Not so in micro-batches: stages share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from partitioner.foundations.files import ResultError
from partitioner.frontends.torch.micro_batches import trace_micro_batch
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import TracedModule, trace_module
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout, share_cut
from partitioner.ir.loops.factors import Dims
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import rule_of, rules_of
from partitioner.ir.plan import NodePlan, PlacedNode, Plan, resolve, resolve_node
from partitioner.ir.rule import Cut, Rule
from partitioner.search.find_plan import find_plan
from partitioner.search.request import Budget, Request
from partitioner.strategies.constraints import Constraints

if TYPE_CHECKING:
    from partitioner.backends.torch.running.rank_module import Share
    from partitioner.backends.torch.running.submodules import Source
    from partitioner.backends.torch.state.whole import Stored, Whole
    from partitioner.cost_model.cluster.topology import Cluster


class _Model(Protocol):
    @property
    def module(self) -> TracedModule: ...


class _Program(Protocol):
    """`ModuleProgram`, as its variants need it."""

    @property
    def model(self) -> _Model: ...

    @property
    def graph(self) -> Graph: ...

    @property
    def cluster(self) -> Cluster: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def stored(self) -> tuple[Stored, ...]: ...

    @property
    def spare(self) -> DeviceMesh: ...

    def over(self, module: TracedModule, plan: Plan) -> Self: ...

    def on_ranks(self, source: Source) -> Whole: ...


AnyProgram = TypeVar("AnyProgram", bound=_Program)


class Variants:
    """Makes variants of a program for a rank, and keeps them: later ones take over their plans.

    Args:
        source: Contents of the constants that are fake.
    """

    def __init__(self, program: _Program, source: Source) -> None:
        self.program = program
        self.source = source
        self.variants: list[_Program] = []

    def __call__(
        self, training: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any], share: Share
    ) -> Whole:
        """A variant as a rank needs it; see `variant`."""
        program = variant(
            self.program, args, kwargs, training=training, share=share, like=self.variants
        )
        self.variants.append(program)
        return program.on_ranks(self.source)


def variant(
    program: AnyProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool,
    share: Share,
    like: Sequence[AnyProgram] = (),
) -> AnyProgram:
    """The program of another call of a compiled module.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        training: Whether the call is a training step. If not, the module is in evaluation mode or,
            if the program is not for training, in the mode that it was compiled in.
        share: Runs the search on one rank and returns its text on all.
        like: Earlier variants whose plans may be taken over.

    Raises:
        PartitionerError: The module cannot be traced with these arguments, or no plan fits them
            with the stored values where they are; in micro-batches, its graph has other nodes than
            the program's.
    """
    compiled = program.model.module
    compiled.check_unchanged(modes=False)
    compiled.signature.check_floats(args, kwargs)
    options = replace(compiled.options, training=training)
    evaluation = _trains(program) and not training
    keep = frozenset(entry.names[0] for entry in program.stored)
    micro = None if evaluation else compiled.micro
    example = Example(args, kwargs)
    with compiled.traced.captured.autocast.region(), _mode(compiled, evaluation=evaluation):
        traced = (
            trace_module(compiled.module, example, options, keep)
            if micro is None
            else trace_micro_batch(compiled.module, example, options, micro.count, keep, fewer=True)
        )
    module = replace(traced, snapshot=compiled.snapshot)
    _check_stored(program, module)
    if training or micro is not None:
        earlier = (program, *(one for one in like if _trains(one) == training))
        forms = ((one, module.of(one.plan.nodes)) for one in earlier)
        alike = next(
            (
                (one, form)
                for one, form in forms
                if one.graph.by_name.keys() == form.graph.by_name.keys()
            ),
            None,
        )
        if alike is None and micro is None:
            plan = Plan.from_json(share(lambda: _searched(program, module).to_json()))
        else:
            of, module = alike or (program, module.of(program.plan.nodes))
            plan, pipeline = of.plan, of.plan.pipeline
            if pipeline is not None and micro is not None:
                count = traced.micro.count if traced.micro else 1
                plan = replace(plan, pipeline=replace(pipeline, micro_batches=count))
            plan = taken_over(plan, of.graph, module.graph)
    else:
        plain = tuple(one for one in like if not _trains(one))
        earlier = plain if _trains(program) else (program, *plain)
        plan = _first_that_fits(earlier, module.graph) or Plan.from_json(
            share(lambda: _searched(program, module).to_json())
        )
    return program.over(module, plan)


def _trains(program: _Program) -> bool:
    return program.model.module.options.training


def _first_that_fits(programs: Iterable[_Program], graph: Graph) -> Plan | None:
    """The plan of the first program whose plan fits a graph, taken over; None if none fits."""
    for program in programs:
        try:
            return taken_over(program.plan, program.graph, graph)
        except ResultError:
            continue
    return None


def taken_over(plan: Plan, graph: Graph, other: Graph) -> Plan:
    """The plan, for another graph with the same nodes and other sizes.

    Raises:
        ResultError: The nodes are not the same, or a cut does not fit the sizes.
    """
    missing = [name for name in graph.by_name if name not in other.by_name]
    added = [name for name in other.by_name if name not in graph.by_name]
    if missing or added:
        which = f"without {missing[0]!r}" if missing else f"with {added[0]!r}"
        raise ResultError(
            f"with a batch of these sizes the module is another graph, {which}: compile it for them"
        )
    moved = replace(plan, graph_digest=other.digest, certificate=None)
    moved = replace(moved, nodes=_resized_nodes(plan, graph, moved, other))
    try:
        resolve(other, moved)
    except IRError as error:
        raise ResultError(
            f"the plan does not fit a batch of these sizes: {error}: compile the module for them, "
            "or leave the batch out"
        ) from None
    return moved


def _resized_nodes(plan: Plan, graph: Graph, moved: Plan, other: Graph) -> dict[str, NodePlan]:
    """The decisions of a plan, whose parts of explicit sizes have those of another graph.

    A cut that follows from that of a neighbour, as stripes of a dim that is two dims before it,
    follows from it again; others are in proportion.
    """
    nodes = dict(plan.nodes)
    left = [name for name, node in nodes.items() if _is_striped(node)]
    known = {name: node for name, node in nodes.items() if not _is_striped(node)}
    old = {placed.node.name: placed for placed in resolve(graph, plan)} if left else {}
    new: dict[str, PlacedNode] = {}
    while left:
        rules, at = rules_of(other), replace(moved, nodes=known)
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
    found: dict[str, DimLayout] = {}
    for value, tensor, dim in _dims_of(placed.node, rules[0]):
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


def _dims_of(node: Node, rule: Rule) -> Iterator[tuple[str, int, int]]:
    """(value, its place among operands and results, dim) of the dims of a node's tensors."""
    for tensor, value in enumerate((*node.inputs, *node.outputs)):
        for dim in range(len(_tensor(rule, tensor)) if value else 0):
            yield value, tensor, dim


def _tensor(rule: Rule, tensor: int) -> Dims:
    return (*rule.operands, *rule.results)[tensor] or ()


def _layout_of(placed: PlacedNode, value: str, dim: int) -> DimLayout | None:
    ends = (*placed.results(), *placed.operands())
    return next((at.sharding.dims[dim] for name, at in ends if name == value), None)


def _resized(cut: Cut, factor: str, graph: Graph, other: Graph, name: str) -> Cut:
    """The cut with its explicit part sizes in proportion to the factor's new size.

    Where that is no whole number of elements, each part is one piece, as near to that as can be.
    """
    if cut.segments is None:
        return cut
    old, new = _size(graph, name, factor), _size(other, name, factor)
    if any(part * new % old for parts in cut.segments for part in parts):
        shares = [sum(pieces) for pieces in zip(*cut.segments, strict=True)]
        if new < len(shares) or not all(shares):
            return cut  # `resolve` refuses it, with its sizes
        return Cut(cut.axes, (share_cut(new, shares),))
    return Cut(cut.axes, tuple(tuple(part * new // old for part in p) for p in cut.segments))


def _size(graph: Graph, name: str, factor: str) -> int:
    rule = rule_of(graph, graph.by_name[name])
    assert isinstance(rule, Rule)
    return rule.factors[factor].size


def _searched(program: _Program, module: TracedModule) -> Plan:
    """The best plan that keeps the stored values where the program has them."""
    graph, base = module.graph, _without_pipeline(program.plan)
    stored, pinned = program.model.module.traced.stored, {}
    for name, value in module.traced.stored.items():
        node = graph.producers[value].name
        if name in stored:
            producer = program.graph.producers[stored[name]]
            pinned[node] = base.nodes[producer.name]
        elif program.spare in base.groups:
            pinned[node] = NodePlan(base.groups.index(program.spare), {})
        else:
            raise ResultError(
                f"this call reads {name}, which a step of the program does not, and which lies on "
                "all devices; the plan computes nothing there: use it in training or compile for it"
            )
    for name, value in module.traced.rests.items():
        if name in program.model.module.traced.rests:
            producer = program.graph.producers[program.model.module.traced.rests[name]]
            pinned[graph.producers[value].name] = base.nodes[producer.name]
    kept = Plan(graph.digest, base.cluster, base.groups, pinned)
    most = max(base.groups, key=DeviceMesh.size)  # the space has the plan's device groups
    strategy, mesh = "inter" if most.size() == 1 else "auto", dict[str, int]()
    if len(program.cluster) in (1, most.size()):
        strategy, mesh = "intra", dict(most.axes)
    request = Request(strategy=strategy, mesh=mesh or None, constraints=Constraints(plan=kept))
    return find_plan(graph, program.cluster, request, Budget.of(request)).plan


def _without_pipeline(plan: Plan) -> Plan:
    """The plan's groups and nodes, for whole batches: stages on the same devices are one group."""
    if plan.pipeline is None:
        return plan
    groups = tuple(dict.fromkeys(plan.groups))
    nodes = {
        name: replace(node, group=groups.index(plan.groups[node.group]))
        for name, node in plan.nodes.items()
    }
    return replace(plan, groups=groups, nodes=nodes, pipeline=None)


def _check_stored(program: _Program, module: TracedModule) -> None:
    """Refuse weights of other sizes."""
    stored = program.model.module.traced.stored
    for name, value in module.traced.stored.items():
        if name not in stored:
            continue  # no node of the program reads it
        new, old = module.graph.types[value], program.graph.types[stored[name]]
        if new != old:
            raise ResultError(f"{name} is {new} with these arguments, {old} in the program")


@contextmanager
def _mode(compiled: TracedModule, *, evaluation: bool) -> Iterator[None]:
    """Put the module in evaluation mode, or in the mode it was compiled in; and back at the end."""
    modules = dict(compiled.module.named_modules())
    before = {name: module.training for name, module in modules.items()}
    try:
        for name, module in modules.items():
            module.training = compiled.snapshot.modes.get(name, True) and not evaluation
        yield
    finally:
        for name, module in modules.items():
            module.training = before[name]
