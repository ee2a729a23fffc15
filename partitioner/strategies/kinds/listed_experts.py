"""Experts that are modules of a list, each with weights of its own: what a device of one computes.

A list is one of experts if none of its members reads what another one gives, and each is weighed or
fed by what one router chose for it: a value of which one dim has as many elements as the list has
members, and which depends on none of them. Members are told apart by the names of their weights,
which differ in one number or, if the modules have parameters of the same names, in one name.

What an expert computes is all that depends on its weights and on no other expert's, in both passes:
up to where its results meet those of others, and the gradients of its weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import row_of, rules_of
from partitioner.ir.rule import Rule


@dataclass(frozen=True)
class ExpertList:
    """A list of experts.

    Attributes:
        path: The list's path, as in the names of weights; where members are attributes, what their
            names have in common.
        members: By place in the list, the nodes of each expert, those that store its weights
            included.
    """

    path: str
    members: tuple[frozenset[str], ...]


#: Where a value stands in the flow through a list: behind how many meetings of its experts, and the
#: expert that alone it depends on since then; None if it depends on none.
_State = tuple[int, int | None]
#: What tells a member of a list apart: numbers, and a name. Members are in this order.
_Name = tuple[int, int, str]
#: A weight, or a value of the other pass: it is behind no meeting.
_BEFORE = -1


def expert_lists(graph: Graph) -> tuple[ExpertList, ...]:
    """The lists of experts of a graph, in the order of their weights."""
    found: dict[str, ExpertList] = {}
    flow = _Flow.of(graph)
    sizes = {size for value in flow.weighed for size in graph.types[value].shape}
    for path, named in _lists(graph):
        numbers = {name: place for place, name in enumerate(sorted(set(named.values())))}
        if len(numbers) not in sizes or path in found:
            continue
        owners = {value: numbers[name] for value, name in named.items()}
        members = _Members.of(graph, owners, len(numbers))
        if members is not None and members.are_chosen(flow):
            found[path] = ExpertList(path, members.nodes())
    return tuple(_flat(found))


def _flat(found: Mapping[str, ExpertList]) -> Iterator[ExpertList]:
    """Lists none of which lies in another: experts of all lists in a list are those of the outer.

    Otherwise what an inner list's expert computes would have two places.
    """
    for path, one in found.items():
        if any(path.startswith(f"{outer}.") for outer in found):
            continue
        inner = [two for name, two in found.items() if name.startswith(f"{path}.")]
        inner = [two for two in inner if not any(t.path.startswith(f"{two.path}.") for t in inner)]
        experts = [nodes for two in inner for nodes in two.members]
        lacking = [nodes for nodes in one.members if not any(nodes & other for other in experts)]
        yield ExpertList(path, (*experts, *lacking))


def _lists(graph: Graph) -> Iterator[tuple[str, Mapping[str, _Name]]]:
    """Each path of several modules beside each other, with what tells apart whose a weight is.

    First all of lists in a list, then those whose names differ in a number, then those that have
    parameters of the same names.
    """
    nested: dict[str, dict[str, _Name]] = defaultdict(dict)
    numbered: dict[str, dict[str, _Name]] = defaultdict(dict)
    modules: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for value in (value for value in graph.types if _is_stored(graph, value)):
        parts = tuple(value.split("."))
        for place, part in enumerate(parts[:-1]):
            stem, number = _stem(part)
            if number:
                path = ".".join([*parts[:place], stem] if stem else parts[:place])
                numbered[path][value] = int(number), 0, ""
                if not stem and parts[place + 1].isdecimal():
                    nested[path][value] = int(number), int(parts[place + 1]), ""
            modules[parts[: place + 1]][".".join(parts[place + 1 :])] = value
    alike: dict[tuple[tuple[str, ...], frozenset[str]], list[tuple[str, ...]]] = defaultdict(list)
    for module, values in modules.items():
        alike[module[:-1], frozenset(values)].append(module)
    for lists in (nested, numbered):
        yield from ((path, of) for path, of in lists.items() if len(set(of.values())) > 1)
    known = {frozenset(of) for of in numbered.values()}
    for (parent, _), paths in alike.items():
        named = {
            value: (int(_stem(path[-1])[1] or place), 0, path[-1])
            for place, path in enumerate(paths)
            for value in modules[path].values()
        }
        if len(paths) > 1 and frozenset(named) not in known:
            yield ".".join(parent) or ", ".join(path[-1] for path in paths), named


def _stem(name: str) -> tuple[str, str]:
    """The part of a name before its number, and the number, empty if there is none."""
    stem = name.rstrip("0123456789")
    return stem, name[len(stem) :]


def _is_stored(graph: Graph, value: str) -> bool:
    if value in graph.constants:
        return graph.constants[value].weight
    node = graph.producers.get(value)
    row = row_of(node) if node is not None else None
    return row is not None and row.stored and not (node and node.inputs)


@dataclass(frozen=True)
class _Flow:
    """The values of the forward pass that depend on inputs and on weights, and which read which."""

    graph: Graph
    weighed: frozenset[str]

    @classmethod
    def of(cls, graph: Graph) -> _Flow:
        """That of a graph."""
        fed, weighed = set(graph.inputs), {v for v in graph.types if _is_stored(graph, v)}
        for node in _forward(graph):
            for known in (fed, weighed):
                if known.intersection(node.reads):
                    known.update(node.writes)
        return cls(graph, frozenset(fed & weighed))


def _forward(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.name not in graph.backward)


@dataclass(frozen=True)
class _Members:
    """Members of a list that do not read each other's results.

    Attributes:
        graph: The graph.
        count: How many there are.
        states: By value.
        owner: By node, the member that it is of.
    """

    graph: Graph
    count: int
    states: Mapping[str, _State]
    owner: Mapping[str, int]

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
            read = {v: _of_pass(v, states, forward, is_backward) for v in node.reads}
            state = _joined([*read.values()])
            if not is_backward and _adds_penalty(graph, read, stored):
                state = state[0] + 1, None
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
        """The nodes of each member."""
        of: list[set[str]] = [set() for _ in range(self.count)]
        for name, place in self.owner.items():
            of[place].add(name)
        return tuple(map(frozenset, of))

    def are_chosen(self, flow: _Flow) -> bool:
        """Tell whether a router gives each member, or all of their results together, a weight."""
        routed = self._routed(flow)
        readers: dict[str, set[int]] = defaultdict(set)
        met: list[tuple[str, set[int]]] = []
        for node in _forward(self.graph):
            values, place = [v for v in node.reads if v in routed], self.owner.get(node.name)
            if place is not None:
                for value in values:
                    readers[value].add(place)
            elif values:
                depends = {self.states[v][1] for v in node.reads if v in self.states}
                met += [(value, {p for p in depends if p is not None}) for value in values]
        chosen_of: dict[int, set[str]] = defaultdict(set)
        for value, places in readers.items():
            if len(places) == 1:
                chosen_of[next(iter(places))] |= routed[value]
        for value, places in met:  # as in `where(chosen, expert(x), of those before)`
            left = places.difference(chosen_of)
            if len(left) == 1 and value not in readers:
                chosen_of[next(iter(left))] |= routed[value]
        is_own = len(chosen_of) == self.count and set.intersection(*chosen_of.values())
        return bool(is_own) or self._are_weighed_together(routed.keys())

    def _routed(self, flow: _Flow) -> Mapping[str, frozenset[str]]:
        """Values that depend on no member, each with those that a router gave of which it was made.

        A router gives an element for each member. What a product makes of it is another value.
        """
        rules = rules_of(flow.graph)
        routed: dict[str, frozenset[str]] = {}
        for node in _forward(flow.graph):
            rule = rules[node.name]
            is_product = isinstance(rule, Rule) and rule.is_product
            reads = () if is_product else node.reads
            origins = frozenset[str]().union(*(routed.get(value, ()) for value in reads))
            for value in node.writes:
                if self.states[value] != (0, None) or value not in flow.weighed:
                    continue
                if origins:
                    routed[value] = origins
                elif self.count in flow.graph.types[value].shape:
                    routed[value] = frozenset({value})
        return routed

    def _are_weighed_together(self, routed: Collection[str]) -> bool:
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
        row = row_of(node)
        is_stored = row is not None and (row.stored or row.in_place is not None)
        if node.name in owners or is_stored or not outputs.isdisjoint(node.writes):
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


def _of_pass(
    value: str, states: Mapping[str, _State], forward: Mapping[str, _State], is_backward: bool
) -> _State:
    """The state of a value for a node of a pass: one of the other pass is as a weight."""
    state = states.get(value, (_BEFORE, None))
    return (_BEFORE, state[1]) if is_backward and value in forward else state


def _adds_penalty(graph: Graph, read: Mapping[str, _State], stored: Collection[str]) -> bool:
    """Tell whether a number that is computed of a member's weights alone meets what inputs give.

    The members' penalties, such as sums of squares, are added up one by one: no member has the sum.
    """
    return any(at >= 0 and place is None for at, place in read.values()) and any(
        at == _BEFORE
        and place is not None
        and value not in stored
        and math.prod(graph.types[value].shape) == 1
        for value, (at, place) in read.items()
    )


def _joined(states: Sequence[_State]) -> _State:
    """The state of what is computed of values of these states."""
    depth = max((depth for depth, _ in states), default=_BEFORE)
    met = {place for at, place in states if place is not None and at in (depth, _BEFORE)}
    if len(met) > 1:
        return depth + 1, None
    return depth, next(iter(met), None)


def _through_views(graph: Graph, node: Node) -> Iterator[str]:
    """The values that a node reads, and those that they are names of."""
    for value in node.reads:
        yield value
        while (maker := graph.producers.get(value)) is not None and maker.inputs:
            row = row_of(maker)
            if row is None or not (row.view or row.again):
                break
            value = maker.inputs[0]
            yield value
