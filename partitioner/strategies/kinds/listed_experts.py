"""Experts that are modules of a list, each with weights of its own: what a device of one computes.

A list is one of experts if none of its members reads what another one gives, and each is weighed or
fed by what a router chose for it: a value of which one dim has as many elements as the list has
members. Members are told apart by the names of their weights, which differ in one number.

What an expert computes is all that depends on its weights and on no other expert's, in both passes:
up to where its results meet those of others, and the gradients of its weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import is_stored, row_of, rules_of
from partitioner.ir.rule import Rule


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
    weighed = _weighed(graph)
    for path, numbered in _lists(graph).items():
        numbers = {number: place for place, number in enumerate(sorted(set(numbered.values())))}
        owners = {value: numbers[number] for value, number in numbered.items()}
        members = _Members.of(graph, owners, len(numbers))
        if members is not None and members.are_chosen(weighed):
            found.append(ExpertList(path, members.nodes()))
    return tuple(found)


def _lists(graph: Graph) -> Mapping[str, Mapping[str, int]]:
    """By path of a list of several members, the number of the member of each of its weights."""
    stored = [value for value in graph.types if _is_stored(graph, value)]
    lists: dict[str, dict[str, int]] = defaultdict(dict)
    for value in stored:
        parts = value.split(".")
        for place, part in enumerate(parts[:-1]):
            if part.isdecimal():
                lists[".".join(parts[:place])][value] = int(part)
    return {path: values for path, values in lists.items() if len(set(values.values())) > 1}


def _is_stored(graph: Graph, value: str) -> bool:
    if value in graph.constants:
        return graph.constants[value].weight
    node = graph.producers.get(value)
    return node is not None and is_stored(node) and not node.inputs


def _weighed(graph: Graph) -> frozenset[str]:
    """The values of the forward pass that depend on inputs and on weights."""
    fed, weighed = set(graph.inputs), {v for v in graph.types if _is_stored(graph, v)}
    for node in _forward(graph):
        for known in (fed, weighed):
            if known.intersection(node.reads):
                known.update(node.writes)
    return frozenset(fed & weighed)


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
            known = ((v, states.get(v, (_BEFORE, None))) for v in node.reads)
            state = _joined(  # a value of the other pass is as a weight
                [(_BEFORE, at[1]) if is_backward and v in forward else at for v, at in known]
            )
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

    def are_chosen(self, weighed: frozenset[str]) -> bool:
        """Tell whether a router gives each member, or all of their results together, a weight."""
        routed = self._routed(weighed)
        readers: dict[str, set[int]] = defaultdict(set)
        for node in _forward(self.graph):
            if (place := self.owner.get(node.name)) is not None:
                for value in routed.intersection(node.reads):
                    readers[value].add(place)
        own = {place for places in readers.values() if len(places) == 1 for place in places}
        return len(own) == self.count or self._are_weighed_together(routed)

    def _routed(self, weighed: frozenset[str]) -> set[str]:
        """Values that depend on no member, and on a value with an element for each of them."""
        routed: set[str] = set()
        for node in _forward(self.graph):
            for value in node.writes:
                is_plain = self.states[value][1] is None and value in weighed
                has_one = self.count in self.graph.types[value].shape
                if is_plain and (has_one or not routed.isdisjoint(node.reads)):
                    routed.add(value)
        return routed

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
        row = row_of(node)
        stays = row is not None and (row.stored or row.in_place is not None)
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
