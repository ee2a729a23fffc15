"""Other programs over the stored values of a compiled module: evaluation, other batch sizes.

A variant is traced anew. If its graph has the nodes of a program that is there, that program's
plan is taken over; else a plan is searched in which all stored values stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from partitioner.files import ResultError
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import TracedModule, trace_module
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import rule_of
from partitioner.ir.plan import NodePlan, Plan, resolve
from partitioner.ir.rule import Cut, Rule
from partitioner.search.find_plan import find_plan
from partitioner.search.request import Budget, Request
from partitioner.strategies.constraints import Constraints

if TYPE_CHECKING:
    from partitioner.backends.torch.rank_module import Share, Source
    from partitioner.backends.torch.rank_passes import Whole
    from partitioner.compiled.module import ModuleProgram


class Variants:
    """Makes variants of a program for a rank, and keeps them: later ones take over their plans.

    Args:
        program: What was compiled.
        source: Contents of the constants that are fake.
    """

    def __init__(self, program: ModuleProgram, source: Source) -> None:
        self.program = program
        self.source = source
        self.made: list[ModuleProgram] = []

    def __call__(
        self, training: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any], share: Share
    ) -> Whole:
        """A variant as a rank needs it; see `variant`."""
        like = [one for one in self.made if not one.training]
        made = variant(self.program, args, kwargs, training=training, share=share, like=like)
        self.made.append(made)
        return made.on_ranks(self.source)


def variant(
    program: ModuleProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool,
    share: Share,
    like: Sequence[ModuleProgram] = (),
) -> ModuleProgram:
    """The program of another call.

    Args:
        program: What was compiled.
        args: Arguments of the call.
        kwargs: Likewise.
        training: Whether the call is a training step; else the module is in evaluation mode or, if
            the program is not for training, as it was compiled.
        share: Runs the search on one rank and gives its text on all.
        like: Earlier variants whose plans may do.

    Raises:
        PartitionerError: The module cannot be traced with these arguments; in training, its graph
            has other nodes than the program's, or the plan's cuts do not fit it.
    """
    compiled = program.model.module
    compiled.check_unchanged(modes=False)
    options = ModuleOptions(training, compiled.options.optimizer)
    evaluation = program.training and not training
    keep = frozenset(entry.names[0] for entry in program.stored)
    with program.traced.captured.autocast.region(), _mode(compiled, evaluation=evaluation):
        traced = trace_module(compiled.module, Example(args, kwargs), options, keep)
    module = replace(traced, snapshot=compiled.snapshot)
    _check_stored(program, module)
    if training:
        module = module.of(program.plan.nodes)
        plan = taken_over(program.plan, program.graph, module.graph)
    else:
        known = () if program.training else (program,)
        plan = _known((*known, *like), module.graph) or Plan.from_json(
            share(lambda: _searched(program, module).to_json())
        )
    return program.over(module, plan)


def _known(programs: Iterable[ModuleProgram], graph: Graph) -> Plan | None:
    """The plan of the first of these that fits."""
    for one in programs:
        try:
            return taken_over(one.plan, one.graph, graph)
        except ResultError:
            continue
    return None


def taken_over(plan: Plan, graph: Graph, other: Graph) -> Plan:
    """The plan for a graph with the same nodes, whose tensors have other sizes.

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
    nodes = {
        name: NodePlan(
            decision.group,
            {
                factor: _resized(cut, factor, graph, other, name)
                for factor, cut in decision.cuts.items()
            },
        )
        for name, decision in plan.nodes.items()
    }
    moved = replace(plan, graph_digest=other.digest, nodes=nodes, certificate=None)
    try:
        resolve(other, moved)
    except IRError as error:
        raise ResultError(
            f"the plan does not fit a batch of these sizes: {error}: compile the module for them, "
            "or leave the batch out"
        ) from None
    return moved


def _resized(cut: Cut, factor: str, graph: Graph, other: Graph, name: str) -> Cut:
    """The cut with its explicit part sizes in proportion to the factor's new size."""
    if cut.segments is None:
        return cut
    old, new = _size(graph, name, factor), _size(other, name, factor)
    if any(part * new % old for parts in cut.segments for part in parts):
        return cut  # it is refused with its sizes
    return Cut(cut.axes, tuple(tuple(part * new // old for part in p) for p in cut.segments))


def _size(graph: Graph, name: str, factor: str) -> int:
    rule = rule_of(graph, graph.by_name[name])
    assert isinstance(rule, Rule)
    return rule.factors[factor].size


def _searched(program: ModuleProgram, module: TracedModule) -> Plan:
    """The best plan whose stored values lie as the program's."""
    graph, base = module.graph, program.plan
    makers = {value: node.name for node in program.graph.nodes for value in node.outputs}
    here = {value: node.name for node in graph.nodes for value in node.outputs}
    pinned = {}
    for name, value in module.traced.stored.items():
        if name in program.traced.stored:
            pinned[here[value]] = base.nodes[makers[program.traced.stored[name]]]
        elif program.spare in base.groups:
            pinned[here[value]] = NodePlan(base.groups.index(program.spare), {})
        else:
            raise ResultError(
                f"evaluation reads {name}, which a training step does not, and which lies on all "
                "devices; the plan computes nothing there: use it in training, or compile for it"
            )
    kept = Plan(graph.digest, base.cluster, base.groups, pinned)
    strategy, mesh = _space(base, len(program.cluster))
    request = Request(strategy=strategy, mesh=mesh, constraints=Constraints(plan=kept))
    return find_plan(graph, program.cluster, request, Budget.of(request)).plan


def _space(plan: Plan, devices: int) -> tuple[str, Mapping[str, int] | None]:
    """Strategy and mesh whose device groups are those of a plan."""
    most = max(plan.groups, key=DeviceMesh.size)
    if devices == 1 or most.size() == devices:
        return "intra", dict(most.axes) or None
    return ("inter" if most.size() == 1 else "auto"), None


def _check_stored(program: ModuleProgram, module: TracedModule) -> None:
    """Refuse weights of other sizes."""
    for name, value in module.traced.stored.items():
        if name not in program.traced.stored:
            continue  # nothing computes with it there
        new, old = module.graph.types[value], program.graph.types[program.traced.stored[name]]
        if new != old:
            raise ResultError(f"{name} is {new} with these arguments, {old} in the program")


@contextmanager
def _mode(compiled: TracedModule, *, evaluation: bool) -> Iterator[None]:
    """Puts the module in evaluation mode, or as it was compiled; and back."""
    modules = dict(compiled.module.named_modules())
    before = {name: module.training for name, module in modules.items()}
    try:
        for name, module in modules.items():
            module.training = compiled.snapshot.modes.get(name, True) and not evaluation
        yield
    finally:
        for name, module in modules.items():
            module.training = before[name]
