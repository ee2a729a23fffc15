"""Expert parallelism: the batch is cut as in dp, and weights of experts along their first dim.

Weights of experts are known by what reads them, not by names: stored tensors of three or more dims,
of whose first dim a token meets what was chosen for it at run time. Either a node looks them up by
integers (a layer of experts, a gather by row), or it multiplies each with rows of its own, and some
node chooses among as many. Their biases, of two dims, are looked up by the same integers.

Experts may also be modules of a list. A list is one of experts if none of its members reads what
another one gives, and each is weighed or fed by what a router chose for it: a value of which one
dim has as many elements as the list has members. Members are told apart by the names of their
weights, which differ in one number. What an expert computes is all that depends on its weights and
on no other expert's, in both passes: up to where its results meet those of others, and the
gradients of its weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout
from partitioner.ir.loops.factors import FactorKind, names_of, single
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.nodes.loads import origins
from partitioner.ir.ops import is_stored, row_of, rules_of, writes_stored
from partitioner.ir.rule import Rule
from partitioner.strategies.constraints import ConstraintError, Constraints, Pin
from partitioner.strategies.kinds.data import DataParallel
from partitioner.strategies.kinds.kind import Asked

#: The kind whose tokens are sent to the devices of their experts alone.
DISPATCH = "dispatch"
#: The kind that cuts all but the experts.
DATA = DataParallel("ep", at_rest=False, until_use=False)


def expert_constraints(asked: Asked) -> Constraints:
    """Constraints of data parallelism, with the weights of experts cut along their first dim.

    Experts in lists have places along the axis, neighbours in a list the same one or the next.
    """
    graph, axis, size = asked.graph, asked.axis, asked.size
    values, lists = expert_values(graph), expert_lists(graph)
    if not values and not lists:
        raise ConstraintError(
            "parallel ep: the model has no experts: no stored tensor of three or more dims is "
            "looked up, along its first dim, by what a token chose, and there is no list of "
            "modules that a router weighs"
        )
    counts = [(weight, graph.types[value].shape[0]) for value, weight in values.items()]
    for name, count in (*counts, *((one.path, len(one.members)) for one in lists)):
        if count < size:
            raise ConstraintError(
                f"parallel ep: {name!r} has {count} experts, fewer than {size} devices"
            )
    data = DATA.constraints(asked)
    pins = [pin for pin in data.pins if pin.tensor not in values]
    for value, weight in values.items():
        pins += _pins(graph, value, f"parallel ep: experts {weight!r}", axis, size)
    layers = {node.name for value in values for node in graph.consumers[value]}
    places: dict[str, tuple[str, int]] = {}  # the axis, and the place along it of its devices
    for one in lists:
        sizes = DimLayout.even(len(one.members), (axis,), DeviceMesh.of({axis: size})).sizes()
        owners = (place for place, count in enumerate(sizes) for _ in range(count))
        for place, members in zip(owners, one.members, strict=True):
            places.update(dict.fromkeys(sorted(members), (axis, place)))
    layers.update(places)
    busy = {
        over: {name: factors for name, factors in nodes.items() if name not in layers}
        for over, nodes in data.busy.items()
    }
    return replace(data, pins=tuple(pins), busy=busy, places=places)


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
    """Constrain experts, with tokens cut over the axis in each layer, as the experts are."""
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


@dataclass(frozen=True)
class ExpertList:
    """A list of experts."""

    path: str  #: The list's path, as in the names of weights.
    #: By place in the list, the nodes of each expert, those that store its weights included.
    members: tuple[frozenset[str], ...]


#: Where a value stands in the flow through a list: behind how many meetings of its experts, and the
#: expert that alone it depends on since then; None if it depends on none.
_State = tuple[int, int | None]
#: A weight, or a value of the other pass: it is behind no meeting.
_BEFORE = -1


def expert_lists(graph: Graph) -> tuple[ExpertList, ...]:
    """The lists of experts of a graph, in the order of their weights."""
    found = []
    # the values of the forward pass that depend on inputs and on weights
    fed, weighed = set(graph.inputs), {v for v in graph.types if _is_weight(graph, v)}
    for node in _forward(graph):
        for known in (fed, weighed):
            if known.intersection(node.reads):
                known.update(node.writes)
    both = frozenset(fed & weighed)
    # by path of a list of several members, the number of the member of each of its weights
    lists: dict[str, dict[str, int]] = defaultdict(dict)
    for value in (value for value in graph.types if _is_weight(graph, value)):
        parts = value.split(".")
        for depth, part in enumerate(parts[:-1]):
            if part.isdecimal():
                lists[".".join(parts[:depth])][value] = int(part)
    for path, numbered in lists.items():
        if len(set(numbered.values())) < 2:
            continue
        numbers = {number: place for place, number in enumerate(sorted(set(numbered.values())))}
        owners = {value: numbers[number] for value, number in numbered.items()}
        members = _Members.of(graph, owners, len(numbers))
        if members is not None and members.are_chosen(both):
            found.append(ExpertList(path, members.nodes()))
    return tuple(found)


def _is_weight(graph: Graph, value: str) -> bool:
    if value in graph.constants:
        return graph.constants[value].weight
    node = graph.producers.get(value)
    return node is not None and is_stored(node) and not node.inputs


def _forward(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.name not in graph.backward)


@dataclass(frozen=True)
class _Members:
    """Members of a list that do not read each other's results."""

    graph: Graph
    count: int  #: How many there are.
    states: Mapping[str, _State]  #: By value.
    owner: Mapping[str, int]  #: By node, the member that it is of.

    @classmethod
    def of(cls, graph: Graph, owners: Mapping[str, int], count: int) -> _Members | None:
        """The members with these weights; None if one reads another's results, or none meet."""
        stored: dict[str, _State] = {value: (_BEFORE, place) for value, place in owners.items()}
        states = stored | dict.fromkeys(graph.inputs, (0, None))
        owner: dict[str, int] = {}
        forward = dict(stored)
        meetings = 0
        for node in graph.nodes:
            is_backward = node.name in graph.backward
            known = [(v, states.get(v, (_BEFORE, None))) for v in node.reads]
            # a value of the other pass is as a weight
            read = [(_BEFORE, at[1]) if is_backward and v in forward else at for v, at in known]
            depth = max((depth for depth, _ in read), default=_BEFORE)
            met = {own for at, own in read if own is not None and at in (depth, _BEFORE)}
            alone = (depth, min(met, default=None))
            state: _State = alone if len(met) < 2 else (depth + 1, None)
            twin = owner.get(graph.twins.get(node.name, ""))
            if state[1] is None and state[0] >= 0 and twin is not None:
                state = state[0], twin
            if not node.reads and (place := owners.get(node.outputs[0])) is not None:
                owner[node.name] = place
                continue
            states.update(dict.fromkeys(node.writes, state))
            if not is_backward:
                forward.update(dict.fromkeys(node.writes, state))
                meetings = max(meetings, state[0])
            if state[1] is not None:
                owner[node.name] = state[1]
            elif any(owners.get(v) is not None for v in _through_views(graph, node)):
                return None
        if not meetings:
            return None
        return cls(graph, count, states, dict(_with_what_they_alone_read(graph, owner)))

    def nodes(self) -> tuple[frozenset[str], ...]:
        of: list[set[str]] = [set() for _ in range(self.count)]
        for name, place in self.owner.items():
            of[place].add(name)
        return tuple(map(frozenset, of))

    def are_chosen(self, weighed: frozenset[str]) -> bool:
        """Tell whether a router gives each member, or all of their results together, a weight."""
        # values that depend on no member, and on a value with an element for each of them
        routed: set[str] = set()
        for node in _forward(self.graph):
            for value in node.writes:
                is_plain = self.states[value][1] is None and value in weighed
                has_one = self.count in self.graph.types[value].shape
                if is_plain and (has_one or not routed.isdisjoint(node.reads)):
                    routed.add(value)
        readers: dict[str, set[int]] = defaultdict(set)
        for node in _forward(self.graph):
            if (place := self.owner.get(node.name)) is not None:
                for value in routed.intersection(node.reads):
                    readers[value].add(place)
        own = {place for places in readers.values() if len(places) == 1 for place in places}
        return len(own) == self.count or self._are_weighed_together(routed)

    def _are_weighed_together(self, routed: set[str]) -> bool:
        """Tell whether one value of what all members give is multiplied by weights of all."""
        rules, graph = rules_of(self.graph), self.graph
        stacked: set[str] = set()
        for node in _forward(graph):
            met = {self.states[v][1] for v in node.reads if v in self.states} - {None}
            together = stacked.intersection(node.reads)
            rule = rules[node.name]
            if together and isinstance(rule, Rule):
                others = [v for v in node.inputs if v in routed and v not in together]
                is_sum = len(rule.linear) > 1
                if not is_sum and any(self.count in graph.types[v].shape for v in others):
                    return True
            if len(met) == self.count or (together and len(node.reads) == 1):
                sized = (v for v in node.writes if self.count in graph.types[v].shape)
                stacked.update(sized)
        return False


def _with_what_they_alone_read(graph: Graph, owner: Mapping[str, int]) -> dict[str, int]:
    """By node the member that it is of, also if it depends on none and serves one alone.

    So a device is sent what a router gives once, and takes from it what its experts need. It is
    sent nothing that is larger than what a member gives, such as the results of all of them.
    """
    owners, outputs = dict(owner), set(graph.outputs)
    given = {
        value
        for node in graph.nodes
        if node.name not in owner
        for value in node.reads
        if value in graph.producers and graph.producers[value].name in owner
    }
    most = max((graph.types[value].nbytes for value in given), default=0)
    for node in reversed(graph.nodes):
        stays = is_stored(node) or writes_stored(node)
        if node.name in owners or stays or not outputs.isdisjoint(node.writes):
            continue
        readers = {owners.get(reader.name) for v in node.writes for reader in graph.consumers[v]}
        others = {owners.get(graph.producers[v].name) for v in node.reads if v in graph.producers}
        if max((graph.types[value].nbytes for value in node.reads), default=0) > most:
            continue
        if len(readers) == 1 and others <= {None, *readers}:
            (place,) = readers
            if place is not None:
                owners[node.name] = place
    return owners


def _through_views(graph: Graph, node: Node) -> Iterator[str]:
    """The values that a node reads, and those that they are names of."""
    for value in node.reads:
        yield value
        while (maker := graph.producers.get(value)) is not None and maker.inputs:
            row = row_of(maker)
            if not (row.view or row.again):
                break
            value = maker.inputs[0]
            yield value
