"""Expert parallelism: the batch is cut as in dp, and weights of experts along their first dim.

Weights of experts are known by what reads them, not by names: stored tensors of three or more dims,
of whose first dim a token meets what was chosen for it at run time. Either a node looks them up by
integers (a layer of experts, a gather by row), or it multiplies each with rows of its own, and some
node chooses among as many. Their biases, of two dims, are looked up by the same integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout
from partitioner.ir.loops.factors import FactorKind, names_of, single
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.nodes.loads import origins
from partitioner.ir.ops import is_stored, rules_of
from partitioner.ir.rule import Rule
from partitioner.strategies.constraints import ConstraintError, Constraints, Pin
from partitioner.strategies.kinds.data import DataParallel
from partitioner.strategies.kinds.kind import Asked
from partitioner.strategies.kinds.listed_experts import ExpertList, expert_lists

#: The kind whose tokens are sent to the devices of their experts alone.
DISPATCH = "dispatch"
#: The kind that cuts all but the experts.
DATA = DataParallel("ep", at_rest=False, until_use=False)


def expert_constraints(asked: Asked) -> Constraints:
    """Constraints of data parallelism, with the weights of experts cut along their first dim.

    Experts in lists have places along the axis, neighbours in a list the same one or the next.

    Raises:
        ConstraintError: The model has no experts, or fewer than the axis has devices; or its batch
            cannot be cut.
    """
    graph, axis, size = asked.graph, asked.axis, asked.size
    values, lists = expert_values(graph), expert_lists(graph)
    if not values and not lists:
        raise ConstraintError(
            "parallel ep: the model has no experts: no stored tensor of three or more dims is "
            "looked up, along its first dim, by what a token chose, and there is no list of "
            "modules that a router weighs"
        )
    for value, weight in values.items():
        if graph.types[value].shape[0] < size:
            raise ConstraintError(
                f"parallel ep: {weight!r} has {graph.types[value].shape[0]} experts, "
                f"fewer than {size} devices"
            )
    for one in lists:
        if len(one.members) < size:
            raise ConstraintError(
                f"parallel ep: {one.path!r} has {len(one.members)} experts, "
                f"fewer than {size} devices"
            )
    data = DATA.constraints(asked)
    pins = [pin for pin in data.pins if pin.tensor not in values]
    for value, weight in values.items():
        pins += _pins(graph, value, f"parallel ep: experts {weight!r}", axis, size)
    layers = {node.name for value in values for node in graph.consumers[value]}
    places = dict(_places(asked, lists))
    layers.update(places)
    busy = {
        over: {name: factors for name, factors in nodes.items() if name not in layers}
        for over, nodes in data.busy.items()
    }
    return replace(data, pins=tuple(pins), busy=busy, places=places)


def _places(asked: Asked, lists: Iterable[ExpertList]) -> Iterator[tuple[str, tuple[str, int]]]:
    """By node of an expert in a list, the axis, and the place along it of its devices."""
    for one in lists:
        mesh = DeviceMesh.of({asked.axis: asked.size})
        sizes = DimLayout.even(len(one.members), (asked.axis,), mesh).sizes()
        owners = (place for place, size in enumerate(sizes) for _ in range(size))
        for place, nodes in zip(owners, one.members, strict=True):
            yield from dict.fromkeys(sorted(nodes), (asked.axis, place)).items()


def _pins(graph: Graph, value: str, text: str, axis: str, size: int) -> Iterator[Pin]:
    """Pins of weights of experts: cut along their first dim where they are used, and stored so.

    What is stored is cut as `torch.chunk` does. If that gives some device fewer experts than an
    even cut, as of 6 experts on 5 devices, another dim is cut there, or any as the search likes.
    """
    mesh = DeviceMesh.of({axis: size})
    fits = [
        length >= size and DimLayout.even(length, (axis,), mesh).is_chunked
        for length in graph.types[value].shape
    ]
    if fits[0] or value not in graph.producers or not _is_stored(graph, value):
        yield Pin(text, tensor=value, axis=axis, dim=0)
        return
    yield Pin(text, tensor=value, axis=axis, dim=0, side="read")
    if any(fits):
        yield Pin(text, tensor=value, axis=axis, cut=True, side="made")


def dispatch_constraints(asked: Asked) -> Constraints:
    """Constrain experts, with tokens cut over the axis in each layer, as the experts are.

    Raises:
        ConstraintError: No layer of experts is one node that sends tokens, or as of experts.
    """
    constraints, rules = expert_constraints(asked), rules_of(asked.graph)
    rows = {
        name: frozenset({rule.dispatch.rows})
        for name, rule in rules.items()
        if isinstance(rule, Rule) and rule.dispatch is not None
    }
    if not rows:
        raise ConstraintError(
            f"parallel {DISPATCH}: no layer of experts is one node that can send tokens: give ep"
        )
    busy = {over: {**nodes, **rows} for over, nodes in constraints.busy.items()}
    return replace(constraints, busy={asked.axis: rows, **busy})


def expert_values(graph: Graph) -> Mapping[str, str]:
    """Weights of experts, and views and casts of them, each with the name of the weight."""
    rules = rules_of(graph)
    choices = frozenset(_choices(graph, rules))
    found: list[tuple[list[str], frozenset[str]]] = []
    for node in graph.nodes:
        rule = rules[node.name]
        if not isinstance(rule, Rule):
            continue
        for index, value in enumerate(node.inputs):
            if value and graph.types[value].rank and _chosen(graph, node, rule, index, choices):
                chain = list(origins(graph, value))
                if _is_stored(graph, chain[-1]):
                    numbers = (v for v in node.reads if "int" in graph.types[v].dtype)
                    found.append((chain, frozenset(numbers)))
    ids_of = {n for chain, ids in found if graph.types[chain[-1]].rank >= 3 for n in ids}
    values: dict[str, str] = {}
    for chain, ids in found:
        rank = graph.types[chain[-1]].rank
        if rank >= 3 or (rank == 2 and ids & ids_of):
            values.update(dict.fromkeys(chain, chain[-1]))
    return values


def _chosen(graph: Graph, node: Node, rule: Rule, index: int, choices: frozenset[int]) -> bool:
    """Test whether tokens meet what was chosen for them of an operand's first dim."""
    dims = rule.operands[index]
    if not dims or not (name := single(dims[0])):
        return False
    factor = rule.factors[name]
    others = [
        (graph.types[value], names_of([other]))
        for at, (value, other) in enumerate(zip(node.inputs, rule.operands, strict=True))
        if value and other and at != index and at not in rule.addends  # a bias is no rows
    ]
    if factor.reduce and factor.kind is not FactorKind.LINEAR:
        return any("int" in type_.dtype and name not in names for type_, names in others)
    batched = factor.kind is FactorKind.PASS and rule.is_product
    return batched and factor.size in choices and any(name in names for _, names in others)


def _choices(graph: Graph, rules: Mapping[str, Rule | str]) -> Iterator[int]:
    """Sizes of dims of numbers among which a node chooses: it gives integers."""
    for node in graph.nodes:
        rule = rules[node.name]
        if not isinstance(rule, Rule) or not any(
            "int" in graph.types[v].dtype for v in node.writes
        ):
            continue
        for value, dims in zip(node.inputs, rule.operands, strict=True):
            if value and dims and "float" in graph.types[value].dtype:
                factors = (rule.factors[name] for name in names_of([dims]))
                yield from (at.size for at in factors if at.kind is FactorKind.WHOLE)


def _is_stored(graph: Graph, value: str) -> bool:
    if value in graph.constants:
        return True
    node = graph.producers.get(value)
    return node is not None and is_stored(node)
