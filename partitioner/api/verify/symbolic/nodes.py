"""A local node as a node of the whole model, where the op table allows its operands' parts.

A local node is held against the nodes of the whole model that read what its operands are. Their
rule tells which parts of loops these are of, and the op table what a device with such parts runs in
place of the node: if this is what the rank runs, its results are parts of the node's. A name is
read only to try the likeliest node first.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from partitioner.api.verify.symbolic.flat import Flat, facts_of
from partitioner.api.verify.symbolic.held import Facts, Held, Types, zeros
from partitioner.api.verify.symbolic.loops import Loops, Parts, check_whole
from partitioner.api.verify.symbolic.parts import RefusedError, all_of, count_of, likeliest, whole
from partitioner.api.verify.symbolic.shares import ALL
from partitioner.ir.errors import IRError
from partitioner.ir.exchange import Intervals, Region
from partitioner.ir.graph import Graph, Node
from partitioner.ir.loops.factors import PENDING
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.ops.aten.state import ALIAS, EITHER, KEEP, STATE, UPDATE
from partitioner.ir.ops.table import LocalOp, LocalView, OpView
from partitioner.ir.types import TensorType

#: Most choices of operands that are tried, of values that are several parts of one.
_MOST_CHOICES = 64
#: Most local nodes that stand for one node of the model.
MOST_NODES = 256
#: Gives what a body's results are, in terms of a body of the model, from what its operands are.
Body = Callable[[Graph, Sequence[Held | None]], Sequence[Facts]]


@dataclass(frozen=True)
class LocalNode:
    """A node of a rank program."""

    name: str
    op: str  #: Key of the op table.
    inputs: tuple[str, ...]  #: Local values; "" where absent.
    outputs: tuple[str, ...]
    captures: tuple[str, ...]  #: Outer values that its bodies read.
    origin: str  #: Name of the node that it seems to come from.
    #: Tests whether it has the attributes of a node of the same operator.
    is_like: Callable[[Node], bool]
    #: What its result is by moving elements of values, or by adding terms of a pending sum; None if
    #: it does neither.
    moved: Callable[[Types, Rank], Facts | Flat | None] = lambda *_: None
    drops_results: bool = False  #: Whether results that nothing reads have no name.
    bodies: Mapping[str, Body] = field(default_factory=dict)  #: By attribute of a node.

    @property
    def reads(self) -> tuple[str, ...]:
        """Local values that it reads."""
        return *self.inputs, *self.captures

    @property
    def writes(self) -> tuple[str, ...]:
        """Local values that it makes."""
        return tuple(filter(None, self.outputs))


@dataclass
class Rank:
    """Facts about a rank's values while its program is followed."""

    rank: int
    types: Mapping[str, TensorType]  #: Types that the program states for local values.
    #: Contents of a constant by local name; None of what is no constant, or has no values here.
    contents: Callable[[str], np.ndarray | None]
    #: What tells apart the contents of constants by local name; None if that is not known.
    tokens: Mapping[str, Hashable] | None = None
    facts: dict[str, Facts] = field(default_factory=dict)
    flats: dict[str, Flat] = field(default_factory=dict)  #: Values of several pieces.
    #: Gives the parts that are a part under other names; None if programs name each result.
    others: Callable[[Held], Iterable[Held]] | None = None
    equal_facts: dict[Facts, Facts] = field(default_factory=dict)  #: One object for equal ones.
    #: Parts of several intervals that its values are of.
    cuts: dict[Intervals, None] = field(default_factory=dict)
    #: Whether a value is several parts of one value that are alike: it is not sure then which of
    #: them later nodes mean.
    is_ambiguous: bool = False

    def note(self, value: str, facts: Sequence[Held]) -> None:
        """Add what a local value is."""
        own = tuple(dict.fromkeys(facts))
        if self.others is not None:
            own = tuple(_with_others(own, self.others))
        self.facts[value] = self.equal_facts.setdefault(own, own)
        self.is_ambiguous |= len({held.value for held in own}) < len(own)
        for held in own:
            self.cuts.update(dict.fromkeys(part for part in held.region if len(part) > 1))

    def flat(self, value: str) -> Flat:
        """The elements of a local value in the order of its memory."""
        facts, flat = self.facts.get(value, ()), self.flats.get(value)
        return Flat.of(facts, self.types[value].shape) if facts or flat is None else flat


def _with_others(facts: Sequence[Held], others: Callable[[Held], Iterable[Held]]) -> list[Held]:
    found = dict.fromkeys(facts)
    left = deque(facts)
    while left:
        for other in others(left.popleft()):
            if other not in found:
                found[other] = None
                left.append(other)
    return [*found]


@dataclass(frozen=True)
class WholeModel:
    """The whole model, and its nodes by what they read."""

    graph: Graph
    #: How the programs of ranks name operators, where that is not the name in the op table.
    spelled: Mapping[str, str] = field(default_factory=dict)
    #: Operators whose results are the same value as an operand, which programs do not name.
    unnamed: frozenset[str] = frozenset()
    #: The nodes that local nodes of a name and operator were on another rank: tried first.
    found: dict[tuple[str, str], Sequence[Node]] = field(default_factory=dict)
    #: What ranks made that run one local node on operands of equal facts.
    made: dict[Hashable, Sequence[tuple[str, Facts]]] = field(default_factory=dict)

    @cached_property
    def _unnamed_readers(self) -> Mapping[str, Sequence[Node]]:
        """The nodes whose result may be the same value on a rank, by the operands it is."""
        found: dict[str, list[Node]] = {}
        for node in self.graph.nodes:
            if node.op in self.unnamed or (self.unnamed and row_of(node).ahead):
                for value in filter(None, node.inputs if node.op == EITHER else node.inputs[:1]):
                    found.setdefault(value, []).append(node)
        return found

    def others(self, held: Held) -> Iterator[Held]:
        """Give the parts that a part is under other names: of an alias, of what was passed on."""
        for node in self._unnamed_readers.get(held.value, ()):
            if node.op in self.unnamed:
                yield replace(held, value=node.outputs[0])
            elif passed := self._passed_on(node, held):
                yield passed

    def _passed_on(self, node: Node, held: Held) -> Held | None:
        """The part of a node's result that a part of its operand is on a device with one part."""
        rule, row = rule_of(self.graph, node), row_of(node)
        if isinstance(rule, str) or row.localize is None or held.share != ALL:
            return None
        loops = Loops(rule, [held], [None], needs_place=False)
        with suppress(RefusedError):
            for parts in loops.parts():
                region = loops.result_region(0, parts)
                sizes = {name: count_of(part) for name, part in parts.items()}
                shapes = tuple(tuple(map(count_of, of)) for of in (held.region, region))
                view = LocalView(sizes, shapes[:1], shapes[1:], (), ())
                local = row.localize(OpView(node, self.graph), view)
                if [one.op for one in local.nodes] == [ALIAS]:
                    return Held(node.outputs[0], region)
        return None

    def named(self, op: str) -> str:
        """The name of an operator in the programs of ranks."""
        return self.spelled.get(op, op)

    @cached_property
    def readers(self) -> Mapping[tuple[str, str], tuple[Node, ...]]:
        """The nodes of an operator that read a value; under "" those that read constants only."""
        found: dict[tuple[str, str], list[Node]] = {}
        for node in self.graph.nodes:
            computed = [value for value in node.reads if value not in self.graph.constants]
            for value in computed or ("", *node.reads):
                found.setdefault((value, self.named(node.op)), []).append(node)
        return {key: tuple(nodes) for key, nodes in found.items()}

    def candidates(self, rank: Rank, node: LocalNode) -> Iterator[Sequence[Node]]:
        """The nodes that a local node may be: those found before, of its operator, others."""
        if node.op == STATE:  # stored values of a form are alike: which one it is, is claimed
            return
        yield self.found.get((node.name, node.op), ())
        graph, names = self.graph, (*node.inputs, *node.captures)
        values = [held.value for name in names for held in rank.facts.get(name, ())]
        computed = [value for value in values if value not in graph.constants]
        likely = [graph.by_name[n] for n in (node.origin, node.name) if n in graph.by_name]
        reads = (self.readers.get((value, node.op), ()) for value in computed or (*values, ""))
        found = {one.name: one for one in (*likely, *itertools.chain.from_iterable(reads))}
        known = [{held.value for held in rank.facts.get(name, ())} for name in names]
        needed = [values for values in known if values.isdisjoint(graph.constants)]
        reading = {n for n, one in found.items() if _reads_of_each(one, needed)}
        yield [one for name, one in found.items() if name in reading]
        yield [one for name, one in found.items() if name not in reading]
        others = (one for value in dict.fromkeys(computed) for one in graph.consumers[value])
        yield [*{one.name: one for one in others if one.name not in found}.values()]


def _reads_of_each(node: Node, values: Iterable[set[str]]) -> bool:
    return all(not one or not one.isdisjoint(node.reads) for one in values)


def follow(model: WholeModel, rank: Rank, nodes: Sequence[LocalNode]) -> int:
    """Note what the first local node's results are, with those that belong to it; their number.

    Raises:
        RefusedError: It is no node of the model on these parts.
    """
    node, refused = nodes[0], list[RefusedError]()
    key = _memo_key(rank, nodes)
    if key in model.made:
        for value, own in model.made[key]:
            rank.note(value, own)
        return 1
    found = _moved(model, rank, node)
    tried = (
        [*_matches(model, rank, nodes, some, refused)] for some in model.candidates(rank, node)
    )
    matches = next(filter(None, tried), [])
    if not matches and not found:
        raise unfollowed(rank, node, refused)
    model.found[node.name, node.op] = [candidate for candidate, _, _ in matches]
    several = [one for one in matches if one[1] > 1]
    for _, _, made in several or matches:
        for value, facts in made.items():
            found.setdefault(value, []).extend(facts)
    if several:
        for value in several[0][2]:
            rank.note(value, found[value])
        return several[0][1]
    for value in node.writes:
        rank.note(value, found.get(value, ()))
    if key is not None:
        model.made[key] = [(value, tuple(found.get(value, ()))) for value in node.writes]
    return 1


def _memo_key(rank: Rank, nodes: Sequence[LocalNode]) -> Hashable | None:
    """Key of a local node on its operands; None where other ranks have it as another object."""
    node = nodes[0]
    if rank.tokens is None:
        return None
    run = itertools.takewhile(lambda one: one.origin == node.origin, nodes)
    return (
        tuple(map(id, run)),
        tuple(id(rank.facts.get(name)) for name in node.reads),
        tuple(rank.tokens.get(name) for name in node.reads),
        tuple(rank.types.get(name) for name in node.writes),
    )


def _moved(model: WholeModel, rank: Rank, node: LocalNode) -> dict[str, list[Held]]:
    """Give what a local node makes by moving elements, whichever node of the model it is."""
    moved, types = node.moved(model.graph.types, rank), model.graph.types
    if not moved:
        return {}
    name = node.outputs[0]
    if isinstance(moved, Flat):
        moved = moved.in_type(types, rank.types[name].dtype)
        rank.flats[name] = moved
        return {name: [*facts_of(types, moved)]}
    return {name: [*moved]}


def _matches(
    model: WholeModel,
    rank: Rank,
    nodes: Sequence[LocalNode],
    candidates: Iterable[Node],
    refused: list[RefusedError],
) -> Iterator[tuple[Node, int, dict[str, list[Held]]]]:
    """Give what local nodes make as each candidate that they are.

    A node of several is alone.
    """
    for candidate in candidates:
        try:
            count, made = Match(model, rank, nodes, candidate).results()
        except RefusedError as error:
            refused.append(error)
            continue
        yield candidate, count, made
        if count > 1:
            return


def unfollowed(rank: Rank, node: LocalNode, refused: Sequence[RefusedError]) -> RefusedError:
    """The likeliest reason why a local node is no node of the model."""
    if refused:
        return max(refused, key=lambda error: error.closeness)
    reads = ", ".join(str(rank.facts[n][0]) for n in node.inputs if rank.facts.get(n))
    return RefusedError(f"no {node.op} of the model reads {reads or 'what it reads'}")


@dataclass(frozen=True)
class Match:
    """A local node, with those after it, held against a node of the model."""

    model: WholeModel
    rank: Rank
    nodes: Sequence[LocalNode]
    node: Node

    @property
    def graph(self) -> Graph:
        """The whole model."""
        return self.model.graph

    @property
    def with_any_attributes(self) -> Match:
        """The same of local nodes whose attributes are not compared."""
        return replace(self, nodes=[replace(node, is_like=lambda _: True) for node in self.nodes])

    @cached_property
    def _same(self) -> tuple[LocalNode, ...]:
        """The local nodes from the first on that seem to come from one node."""
        origin = self.nodes[0].origin
        return tuple(itertools.takewhile(lambda node: node.origin == origin, self.nodes))

    @cached_property
    def _values(self) -> tuple[str, ...]:
        return *self.node.inputs, *self.node.captures

    def results(self) -> tuple[int, dict[str, list[Held]]]:
        """The number of local nodes that the node is, and what they make."""
        count, found, refused = 0, dict[str, list[Held]](), list[RefusedError]()
        for reads in self.operands():
            try:
                count, made = self._of_operands(reads)
            except RefusedError as error:
                refused.append(error)
                continue
            for name, held in made.items():
                found.setdefault(name, []).extend(held)
        if not count:
            raise likeliest(refused)
        return count, found

    def _of_operands(self, reads: Sequence[Held | None]) -> tuple[int, dict[str, list[Held]]]:
        rule = rule_of(self.graph, self.node)
        if self.node.op in (UPDATE, KEEP) and not isinstance(rule, str):  # it is its operand
            rule = replace(rule, linear=frozenset({0}))
        graphs = {name: of for name, of in self.node.attrs.items() if isinstance(of, Graph)}
        if graphs or self.nodes[0].bodies:
            return 1, self._of_bodies(graphs, reads)
        if isinstance(rule, str) or self.node.captures:
            return self._as_whole(reads)
        row, slots = row_of(self.node), range(len(self.node.outputs))
        stated = [None if row.localize is None else self.stated(slot) for slot in slots]
        loops = Loops(rule, reads, stated, row.where, self.rank.cuts)
        count, found = 0, dict[str, list[Held]]()
        for parts in loops.parts():
            for local in self._forms(loops, parts):
                made = self.made(
                    self.expected(local, reads), partial(loops.result, self.node, parts=parts)
                )
                if made:
                    count = len(local.nodes)
                    for name, held in made.items():
                        found.setdefault(name, []).append(held)
                    break
        if not count:
            raise self.other_form()
        return count, found

    def _as_whole(self, reads: Sequence[Held | None]) -> tuple[int, dict[str, list[Held]]]:
        for held in filter(None, reads):
            check_whole(held, self.graph.types[held.value].shape)
        results = self.expected(LocalOp((self.node,)), reads)
        if results is None:
            raise self.other_form()
        return 1, {name: [self._whole_of(value)] for value, name in results.items()}

    def _of_bodies(
        self, graphs: Mapping[str, Graph], reads: Sequence[Held | None]
    ) -> dict[str, list[Held]]:
        """Give what the results are, if each body gives the same parts of those of the model's.

        What no body takes, as the predicate that chooses one, is the same on all ranks.
        """
        bodies, names = self.nodes[0].bodies, self.expected(LocalOp((self.node,)), reads)
        if not names or self.node.captures or bodies.keys() != graphs.keys():
            raise self.other_form()
        regions: list[set[Region]] = []
        for key, graph in graphs.items():
            count = len(reads) - len(graph.inputs)
            for held in filter(None, reads[:count]):
                check_whole(held, self.graph.types[held.value].shape)
            try:
                given = bodies[key](graph, reads[count:])
            except RefusedError as error:
                why = f"its body {key!r}: {error}"
                raise RefusedError(why, is_wrong=error.is_wrong, closeness=4) from None
            of_body = [{held.region for held in facts} for facts in given]
            regions = [one & other for one, other in zip(regions or of_body, of_body, strict=True)]
        if not all(regions[self.node.outputs.index(value)] for value in names):
            why = "its bodies do not give the same part of a result"
            raise RefusedError(why, is_wrong=True, closeness=4)
        pairs = zip(self.node.outputs, regions, strict=True)
        results = {slot: Held(v, min(of)) for slot, (v, of) in enumerate(pairs) if of}
        made = self.made(names, lambda slot: results[slot])
        if made is None:
            raise self.other_form()
        return {name: [held] for name, held in made.items()}

    def operands(self) -> Iterator[Sequence[Held | None]]:
        """Find the value read as each operand; a constant may be replaced by a local one.

        There are several choices where values are several parts of one that are alike.
        """
        first, count = self.nodes[0], len(self.node.inputs)
        slots = [*first.inputs[:count], *[""] * (count - len(first.inputs)), *first.captures]
        others = [name for node in self._same for name in (*node.inputs, *node.captures)]
        pairs = itertools.zip_longest(slots, self._values, fillvalue="")
        reads = [self._operand(slot, value, others) if value else (None,) for slot, value in pairs]
        yield from itertools.islice(itertools.product(*reads), _MOST_CHOICES)

    def _operand(self, slot: str, value: str, others: Sequence[str]) -> Sequence[Held | None]:
        """Find a value among those that are read; None if another rank puts it into its part."""
        for name in dict.fromkeys((slot, *others)):
            found = [held for held in self.rank.facts.get(name, ()) if held.value == value]
            if found:
                return found
        held = self._zeros(slot, value)
        if held is None and value in self.graph.constants:
            held = self._whole_of(value)
        if held is None and len(self.nodes[0].inputs) >= len(self.node.inputs):
            raise self._other_operand(self.rank.facts.get(slot, ()), value)
        return (held,)

    def _zeros(self, name: str, value: str) -> Held | None:
        """A constant of zeros as a part of a value: no term of it, anywhere."""
        array, shape = self.rank.contents(name) if name else None, self.graph.types[value].shape
        if array is None or array.ndim != len(shape) or np.any(array):
            return None
        held = zeros(value, array.shape, shape)
        self.rank.note(name, (*self.rank.facts.get(name, ()), held))
        return held

    def _whole_of(self, value: str) -> Held:
        return Held(value, all_of(self.graph.types[value].shape))

    def _other_operand(self, facts: Facts, value: str) -> RefusedError:
        read = facts[0] if facts else "an unknown value"
        why = f"it reads {read}, where {self.node.name!r} reads {value!r}"
        return RefusedError(why, is_wrong=bool(facts), closeness=1)

    def other_form(self) -> RefusedError:
        """The reason why the local nodes are not what runs in place of the node."""
        for slot, value in zip(self.nodes[0].inputs, self.node.inputs, strict=False):
            facts = self.rank.facts.get(slot, ()) if value else ()
            if facts and all(held.value != value for held in facts):
                return self._other_operand(facts, value)
        why = f"it is not what the op table gives for {self.node.name!r} on these parts"
        return RefusedError(why, closeness=3)

    def stated(self, slot: int) -> tuple[int, ...] | None:
        """The shape that the rank's program states for a result, if the node makes one."""
        names = [node.outputs[slot] for node in self._same if slot < len(node.outputs)]
        type_ = self.rank.types.get(names[-1]) if names and self.node.outputs[slot] else None
        if type_ is not None and len(type_.shape) != len(
            self.graph.types[self.node.outputs[slot]].shape
        ):
            raise self.other_form()
        return None if type_ is None else type_.shape

    def _forms(self, loops: Loops, parts: Parts) -> Iterator[LocalOp]:
        """The nodes that the op table lets a device with these parts run in place of the node."""
        row, rule, factors = row_of(self.node), loops.rule, loops.rule.factors
        cut = {name for name, part in parts.items() if part != whole(factors[name].size)}
        cut = (cut | loops.slid_in_part()) - {PENDING}
        if row.localize is None or not cut:
            yield LocalOp((self.node,))
        if row.localize is None:
            return
        slots = enumerate(self.node.outputs)
        outs = tuple(loops.result_region(i, parts) if value else () for i, value in slots)
        regions = loops.operand_regions(parts)
        shapes, out_shapes = (
            tuple(tuple(map(count_of, region)) for region in side) for side in (regions, outs)
        )
        sizes = {name: count_of(part) for name, part in parts.items()}
        sizes |= {PENDING: factors[PENDING].size} if PENDING in factors else {}
        slides = any(name in cut for _, name in rule.windows)
        # A device may have all of a dim that is cut: it runs what devices do that have a part.
        ways = (True,) if row.where or slides else (False, True) if rule.windows else (False,)
        for where in ways:
            places = (regions, outs) if where else ((), ())
            view = LocalView(sizes, shapes, out_shapes, *places)
            try:
                yield row.localize(OpView(self.node, self.graph), view)
            except (IRError, AssertionError, ArithmeticError, LookupError, ValueError):
                continue  # these parts have no local form

    def made(
        self, names: Mapping[str, str] | None, result: Callable[[int], Held]
    ) -> dict[str, Held] | None:
        """Facts about the local results of these names; None if the program states other types."""
        made = {}
        for value, name in (names or {}).items():
            made[name] = held = result(self.node.outputs.index(value))
            stated = self.rank.types.get(name)
            shape = tuple(map(count_of, held.region))
            if stated is not None and stated != self.graph.types[value].with_shape(shape):
                return None
        return made

    def expected(self, local: LocalOp, reads: Sequence[Held | None]) -> dict[str, str] | None:
        """Local names of the results by value, if the rank runs these nodes; else None."""
        if len(local.nodes) > len(self.nodes):
            return None
        made: dict[str, str] = {}  # local names of temporaries and of results
        for here, node in zip(self.nodes, local.nodes, strict=False):
            if here.op != self.model.named(node.op) or not here.is_like(node):
                return None
            wanted = (*_trimmed(node.inputs), *node.captures)
            found = (*_trimmed(here.inputs), *here.captures)
            pairs = enumerate(itertools.zip_longest(wanted, found, fillvalue=""))
            if not all(self._reads(local, reads, made, slot, *pair) for slot, pair in pairs):
                return None
            for value, name in itertools.zip_longest(node.outputs, here.outputs, fillvalue=""):
                if bool(value) != bool(name) and not here.drops_results:
                    return None
                made[value] = name
        return {value: made[value] for value in self.node.writes if made.get(value)}

    def _reads(
        self,
        local: LocalOp,
        reads: Sequence[Held | None],
        made: Mapping[str, str],
        slot: int,
        value: str,
        name: str,
    ) -> bool:
        """Test whether a local value is what a node of the op table's form reads."""
        if not value or not name:
            return value == name
        if value in made:
            return made[value] == name
        if value in local.constants:
            return _equal(self.rank.contents(name), local.constants[value])
        wanted = {held for of, held in zip(self._values, reads, strict=True) if of == value}
        if len(wanted) > 1 and slot < len(reads) and self._values[slot] == value:
            wanted = {reads[slot]}
        return len(wanted) == 1 and not wanted.isdisjoint(self.rank.facts.get(name, ()))


def _trimmed(names: Sequence[str]) -> Sequence[str]:
    while names and not names[-1]:
        names = names[:-1]
    return names


def _equal(one: np.ndarray | None, other: np.ndarray) -> bool:
    if one is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.tobytes() == np.ascontiguousarray(other).tobytes()
