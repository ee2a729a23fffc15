"""Graphs of ranks as they are written to files, with one call, argument or result wrong."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from partitioner.backends.torch.graphs.phases import RankPhases

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
_GROUPED = {
    c10d.all_reduce.default: "reduction",
    c10d.all_reduce_.default: "reduction",
    c10d.reduce_scatter_tensor.default: "reduction",
}
_GATHERS = (c10d.all_gather_into_tensor.default, c10d.all_to_all_single.default)
_COPIES = (aten.copy_.default,)
#: Changes a node of a copied graph, and tells whether it did.
Change = Callable[[fx.GraphModule, fx.Node], bool]


@dataclass(frozen=True)
class GraphMutant:
    """A fault of a graph of a rank; the phases are made when they are asked for."""

    kind: str
    what: str
    phases: Sequence[RankPhases]
    rank: int
    phase: int
    place: int  #: Of the node in its graph.
    change: Change

    def make(self) -> list[RankPhases] | None:
        """The phases of all ranks; None if this node has no such fault."""
        of = self.phases[self.rank]
        graph = of.graphs[self.phase]
        module = copy.deepcopy(graph.module)
        if not self.change(module, list(module.graph.nodes)[self.place]):
            return None
        module.recompile()
        graphs = {**of.graphs, self.phase: replace(graph, module=module)}
        changed = replace(of, graphs=graphs)
        return [changed if one.rank == self.rank else one for one in self.phases]


def graph_mutants(phases: Sequence[RankPhases]) -> Iterator[GraphMutant]:
    """Every fault of every node of the graphs of all ranks."""
    for of, (kind, change) in itertools.product(phases, _CHANGES.items()):
        for phase, graph in of.graphs.items():
            for place, node in enumerate(graph.module.graph.nodes):
                if _PLACES[kind] not in f"{node.op} {node.target}":
                    continue
                what = f"{node.name} of {of.name(phase)} of rank {of.rank}"
                yield GraphMutant(kind, what, phases, of.rank, phase, place, change)


def _reduction(_: fx.GraphModule, node: fx.Node) -> bool:
    if node.target not in _GROUPED:
        return False
    operand, how, *rest = node.args
    node.args = (operand, "max" if how == "sum" else "sum", *rest)
    return True


def _dropped(_: fx.GraphModule, node: fx.Node) -> bool:
    """A collective whose result has the type of its operand gives the operand."""
    if node.op != "call_function" or "_c10d_functional" not in str(node.target):
        return False
    wait = [user for user in node.users if user.target is c10d.wait_tensor.default]
    operand = node.all_input_nodes[0] if node.all_input_nodes else None
    if operand is None or not wait or node.target in _GATHERS:
        return False
    wait[0].replace_all_uses_with(operand)
    return True


def _sliced(_: fx.GraphModule, node: fx.Node) -> bool:
    """A slice that begins one element beside its place."""
    if node.target is not aten.slice.Tensor or len(node.args) < 4:
        return False
    operand, dim, start, end, *rest = node.args
    if not (isinstance(dim, int) and isinstance(start, int) and isinstance(end, int)):
        return False
    assert isinstance(operand, fx.Node)
    size = operand.meta["val"].shape[dim] if "val" in operand.meta else end
    by = 1 if end < size else -1
    if start + by < 0:
        return False
    node.args = (operand, dim, start + by, end + by, *rest)
    return True


def _joined(_: fx.GraphModule, node: fx.Node) -> bool:
    """Two joined tensors exchanged."""
    if node.target is not aten.cat.default:
        return False
    tensors, *rest = node.args
    assert isinstance(tensors, list | tuple)
    if len(tensors) < 2 or tensors[0] is tensors[1]:
        return False
    node.args = ([tensors[1], tensors[0], *tensors[2:]], *rest)
    return True


def _copied(module: fx.GraphModule, node: fx.Node) -> bool:
    """What is copied to one place copied to the next one, and the other way round."""
    others = [one for one in module.graph.nodes if one.target in _COPIES]
    if node not in others[:-1]:
        return False
    other = others[others.index(node) + 1]
    (here, mine, *_), (there, theirs, *_) = node.args, other.args
    if mine is theirs:
        return False
    order = {one: place for place, one in enumerate(module.graph.nodes)}
    assert isinstance(theirs, fx.Node)
    if order[theirs] > order[node]:
        return False
    node.args, other.args = (here, theirs), (there, mine)
    return True


def _argument(module: fx.GraphModule, node: fx.Node) -> bool:
    """An argument that is read in the place of the next one."""
    arguments = [one for one in module.graph.nodes if one.op == "placeholder"]
    if node not in arguments[:-1]:
        return False
    other = arguments[arguments.index(node) + 1]
    mine, theirs = dict(node.users), dict(other.users)
    for user in {**mine, **theirs}:
        swapped = {node: other, other: node}
        user.args = fx.map_arg(user.args, lambda one, of=swapped: of.get(one, one))
    return bool(mine or theirs)


def _result(_: fx.GraphModule, node: fx.Node) -> bool:
    """The first two results exchanged."""
    if node.op != "output":
        return False
    (results,) = node.args
    assert isinstance(results, list | tuple)
    if len(results) < 2 or results[0] is results[1]:
        return False
    node.args = ((results[1], results[0], *results[2:]),)
    return True


def _unwaited(module: fx.GraphModule, node: fx.Node) -> bool:
    """What a collective gives, read before it has come."""
    if node.target is not c10d.wait_tensor.default or not node.users:
        return False
    node.replace_all_uses_with(node.all_input_nodes[0])
    module.graph.erase_node(node)
    return True


def _overwritten(module: fx.GraphModule, node: fx.Node) -> bool:
    """The first operand of a node written to the memory of its result, which is read later."""
    if not node.users:
        return False
    with module.graph.inserting_after(node):
        view = module.graph.call_function(aten.alias.default, (node,))
    with module.graph.inserting_after(view):
        module.graph.call_function(aten.copy_.default, (view, node.args[0]))
    return True


_CHANGES: dict[str, Change] = {
    "reduction": _reduction,
    "dropped": _dropped,
    "slice": _sliced,
    "join": _joined,
    "copy": _copied,
    "argument": _argument,
    "result": _result,
    "not waited for": _unwaited,
    "overwritten": _overwritten,
}

#: Words of the nodes that may have each fault.
_PLACES = {
    "reduction": "_c10d_functional",
    "dropped": "_c10d_functional",
    "slice": "aten.slice",
    "join": "aten.cat",
    "copy": "aten.copy_",
    "argument": "placeholder",
    "result": "output",
    "not waited for": "wait_tensor",
    "overwritten": "aten.add",
}
