"""An abstract interpreter of rank programs: it proves that all ranks compute the whole model.

It knows nothing of plans, of the search, and of how programs are made. Ranks are followed in
lock-step. For each value of each rank it carries which part of which value of the whole model it
is, whole or as a share of a pending reduction; in the end, the ranks must deliver the outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from partitioner.api.verify.symbolic.classes import ApartError, follow_together
from partitioner.api.verify.symbolic.collectives import Collective, collect
from partitioner.api.verify.symbolic.communications import communicate
from partitioner.api.verify.symbolic.equal_values import Content, by_content, content, merged
from partitioner.api.verify.symbolic.flat import Flat, facts_of
from partitioner.api.verify.symbolic.held import Facts, Held, zeros
from partitioner.api.verify.symbolic.micro_batches import ADDED_UP, check_together
from partitioner.api.verify.symbolic.nodes import MOST_NODES, LocalNode, Rank, WholeModel, follow
from partitioner.api.verify.symbolic.parts import (
    RefusedError,
    all_of,
    count_of,
    covers,
    region_of,
    region_text,
    same_region,
)
from partitioner.api.verify.symbolic.program import Arrival, Departure, Program, Side
from partitioner.api.verify.symbolic.proof import Proof, Refusal
from partitioner.api.verify.symbolic.sent_rows import Sending, send
from partitioner.api.verify.symbolic.shares import ALL
from partitioner.backends.regions import cut
from partitioner.foundations.no_gc import no_collection
from partitioner.ir.errors import PartitionerError
from partitioner.ir.exchange import Region, intersect, nested
from partitioner.ir.graph import SMALL_CONSTANT, Graph
from partitioner.ir.ops.aten.state import ALIAS, KEEP, REST, UPDATE
from partitioner.ir.program import Output, Part

_Class = tuple[int, ...]  #: Ranks that run the same steps, or deliver one result together.
#: The parts of each output that are delivered, by output and the ranks that it must be whole on.
_Delivered = dict[tuple[_Class, str], list[Region]]
_Waiting = Arrival | Sending | Collective | Side  #: What a rank waits for others at.


@no_collection()
def prove(graph: Graph, programs: Sequence[Program]) -> Proof:
    """Follow the programs of all ranks, and compare what they deliver with the model's outputs."""
    check, ranks = _Check(*merged(graph), programs), len(programs)
    try:
        check.run()
    except _StoppedError as stopped:
        return Proof(ranks, stopped.refusal)
    return Proof(ranks, None, len(check.unread))


def follow_body(program: Program, graph: Graph, operands: Sequence[Held | None]) -> Sequence[Facts]:
    """Give what the results of a body are, in terms of the body of a node of the model.

    Args:
        program: The body.
        graph: The body of the model's node.
        operands: What the operands are that its inputs stand for.

    Raises:
        RefusedError: The body is not the model's on these parts.
    """
    count = len(program.inputs), len(program.outputs)
    if count != (len(graph.inputs), len(graph.outputs)) or len(operands) != count[0]:
        raise RefusedError("it has other inputs and results")
    fed = dict[str, Part]()
    for name, value, held in zip(program.inputs, graph.inputs, operands, strict=True):
        if held is not None and held.share != ALL:
            raise RefusedError(f"it reads {held}", is_wrong=True)
        fed |= {} if held is None else {name: Part(value, held.region)}
    own = replace(program, inputs=fed)
    check = _Check(*merged(graph), [own])
    try:
        rank = check.alone()
    except _StoppedError as stopped:
        refusal = stopped.refusal
        why = ": ".join(filter(None, (refusal.step, refusal.why)))
        raise RefusedError(why, is_wrong=refusal.is_wrong) from None
    return [
        tuple(h for h in rank.facts.get(out.value, ()) if h.value == value and h.share == ALL)
        for out, value in zip(program.outputs, graph.outputs, strict=True)
    ]


class _StoppedError(Exception):
    """The first step that is refused."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


@dataclass(frozen=True)
class _Check:
    """The programs of all ranks beside the whole model."""

    graph: Graph
    merged: Mapping[str, str]  #: Values of the model by equal ones that stand for them.
    programs: Sequence[Program]
    equal_facts: dict[Facts, Facts] = field(default_factory=dict)  #: As of `Rank`.
    unread: list[str] = field(default_factory=list)  #: Local constants that were not compared.
    apart: set[_Class] = field(default_factory=set)  #: Classes that are not followed together.

    @cached_property
    def model(self) -> WholeModel:
        first = self.programs[0]
        return WholeModel(self.graph, first.spelled, first.unnamed)

    @cached_property
    def by_content(self) -> Mapping[Content, Sequence[str]]:
        """The model's small constants by what they hold."""
        return by_content(self.graph, (n for n in self.graph.constants if n not in self.merged))

    def run(self) -> None:
        """Follow all ranks, once for each micro-batch of a request; _StoppedError if one fails.

        Of a step whose phases run in micro-batches, one is followed for all.
        """
        self._check_runs()
        constants = [self._constants(program) for program in self.programs]
        batch, delivered = self.programs[0].batch, _Delivered()
        for part in range(1 if batch is None else batch.count):
            ranks = [
                self._started(*pair, part) for pair in zip(self.programs, constants, strict=True)
            ]
            self._follow(ranks)
            for rank in ranks:
                self._deliver(rank, part, delivered)
                self._check_updates(rank)
        for value in self.graph.outputs:
            for together in dict.fromkeys(self._together(value)):
                if not covers(delivered.get((together, value), []), self.graph.types[value].shape):
                    who = "the rank does" if len(together) == 1 else "the ranks do"
                    why = f"{who} not deliver each element of it once"
                    refusal = Refusal(together[0], f"output {value!r}", why, is_wrong=True)
                    raise _StoppedError(refusal)

    def _together(self, value: str) -> Sequence[_Class]:
        """The ranks that an output must be whole on together with each rank."""
        return self._alone if value in self._shown else self._copies

    @cached_property
    def _alone(self) -> Sequence[_Class]:
        """Each rank, as each returns a module's results; else those that deliver together."""
        if not self.programs[0].delivers_all:
            return self._copies
        served = {rank for ranks in self._copies for rank in ranks}
        return [(rank if rank in served else min(served),) for rank in range(len(self.programs))]

    @cached_property
    def _copies(self) -> Sequence[_Class]:
        """The ranks of the whole copy that each rank belongs to: all of them without copies.

        A rank of no copy has nothing to deliver: it counts with the first one.
        """
        copies, every = self.programs[0].copies, tuple(range(len(self.programs)))
        first, *others = (every,) if copies is None else copies.devices
        of = {rank: ranks for ranks in (first, *others) for rank in ranks}
        return [of.get(rank, first) for rank in every]

    @cached_property
    def _shown(self) -> frozenset[str]:
        """The outputs that a call returns: no gradients, and no contents of stored values."""
        makers, backward = self.graph.producers, self.graph.backward
        return frozenset(
            value
            for value in self.graph.outputs
            if value not in makers
            or (makers[value].name not in backward and makers[value].op not in (UPDATE, KEEP))
        )

    def alone(self) -> Rank:
        """Follow the only rank to its end; _StoppedError if a step of it is refused."""
        (program,) = self.programs
        rank = self._started(program, self._constants(program), 0)
        self._follow([rank])
        return rank

    def _check_runs(self) -> None:
        """Refuse orders in which a micro-batch lacks a phase, and parts that are not the batch."""
        runs = [program.runs for program in self.programs if program.runs is not None]
        if not runs:
            return
        names, rows = self.graph.output_names, runs[0].rows
        types = {names.get(value, value): type_ for value, type_ in self.graph.types.items()}
        apart = {
            names.get(value, value)
            for value in self.graph.outputs
            if value not in self._totals and self.graph.producers[value].op != UPDATE
        }
        odd = next((rank for rank, of in enumerate(runs) if of.rows != rows), None)
        if odd is not None or len(runs) < len(self.programs):
            why = "other ranks have other micro-batches"
            raise _StoppedError(Refusal(odd or 0, "", why, is_wrong=True))
        for rank, of in enumerate(runs):
            try:
                of.check()
                rows.check(types, of.own, apart)
            except RefusedError as error:
                step = "the micro-batches"
                raise _StoppedError(Refusal(rank, step, str(error), error.is_wrong)) from None
        if endless := check_together(runs):
            rank, why = endless
            raise _StoppedError(Refusal(rank, "the micro-batches", why, is_wrong=True))

    @cached_property
    def _totals(self) -> frozenset[str]:
        """The outputs that are sums over the micro-batches of a step."""
        runs, nodes = self.programs[0].runs, self.graph.producers
        if runs is None or runs.rows.count == 1:
            return frozenset()
        of_nodes = (value for value in self.graph.outputs if value in nodes)
        return frozenset(value for value in of_nodes if nodes[value].name in self.graph.backward)

    @cached_property
    def _updates(self) -> Mapping[str, str]:
        """The output that each stored value is updated with: its gradient, or its next value."""
        makers, found = self.graph.producers, dict[str, str]()
        for value in self.graph.outputs:
            node = makers.get(value)
            if node is None or node.op not in (UPDATE, KEEP):
                continue
            stored = node.inputs[1]
            while stored in makers and makers[stored].op in (ALIAS, REST):
                stored = makers[stored].inputs[0]
            found[stored] = self.graph.output_names.get(value, value)
        return found

    def _check_updates(self, rank: Rank) -> None:
        """Refuse a stored part of which its rank does not get the whole gradient, or next value.

        Optimizers compute each element by itself: then the step on the part is the part of the step
        on the whole.
        """
        program = self.programs[rank.rank]
        for name in program.stored:
            for held in rank.facts.get(name, ()):
                output = self._updates.get(held.value)
                got = [out for out in program.outputs if out.whole == output]
                self._check_written(rank, name, got)
                if output is None or any(self._has(out, held.region) for out in got):
                    continue
                why = f"the rank has {held} and gets no such part of {output!r} to update it with"
                raise _StoppedError(Refusal(rank.rank, f"stored {name!r}", why, is_wrong=True))

    def _check_written(self, rank: Rank, stored: str, got: Sequence[Output]) -> None:
        """Refuse a micro-batch that reads a stored value before the one before has written it."""
        runs, values = self.programs[rank.rank].runs, self.graph.output_names
        totals = {values.get(value, value) for value in self._totals}
        for out in got if runs is not None else ():
            try:
                if out.whole not in totals and runs is not None:
                    runs.check_written(stored, out.value)
            except RefusedError as error:
                raise self._refused([rank], rank.rank, "", error) from None

    def _has(self, out: Output, region: Region) -> bool:
        """Test whether a part of an output has all of a region."""
        if out.region is None:
            return True
        parts = zip(region, out.region, strict=True)
        return all(
            intersect(tuple(sorted(part)), has) == tuple(sorted(part)) for part, has in parts
        )

    def _constants(self, program: Program) -> dict[str, Facts]:
        """Facts about the constants of a rank; claims of the program are compared."""
        rank, claims = program.rank, program.claims
        for domain, version in self.graph.opsets.items():
            if program.opsets.get(domain, version) != version:
                why = f"operator set {program.opsets[domain]}, the model has {version}"
                raise _StoppedError(Refusal(rank, "", why, is_wrong=False))
        if claims is None:
            why = "the file does not say what its constants are: partition the model again"
            raise _StoppedError(Refusal(rank, "", why, is_wrong=False))
        found: dict[str, Facts] = {}
        for name in program.constants:
            claim, shape = self._renamed(claims.get(name)), program.types[name].shape
            facts: list[Held] = []
            if claim is not None and (claim.zero or claim.whole in self.graph.constants):
                facts = self._claimed(program, name, claim.whole, claim.region, is_zero=claim.zero)
            array = program.contents(name) if program.types[name].numel <= SMALL_CONSTANT else None
            if array is not None:
                facts += [Held(n, all_of(shape)) for n in self.by_content.get(content(array), ())]
            found[name] = tuple(dict.fromkeys(facts))
        return found

    def _renamed(self, claim: Part | None) -> Part | None:
        if claim is None or claim.whole not in self.merged:
            return claim
        return replace(claim, whole=self.merged[claim.whole])

    def _claimed(
        self, program: Program, name: str, whole: str, region: Region | None, *, is_zero: bool
    ) -> list[Held]:
        """Compare a constant with its claim; zeros of an unknown value are no part of one."""
        type_, array = self.graph.types.get(whole), program.contents(name)
        shape, step = program.types[name].shape, f"constant {name!r}"
        if array is None and not program.cuts_constants:
            self.unread.append(name)
        if is_zero:
            if array is not None and not program.cuts_constants and np.any(array):
                raise _StoppedError(Refusal(program.rank, step, "it is not 0", is_wrong=True))
            if type_ is None or len(type_.shape) != len(shape):
                return []
            return [zeros(whole, shape, type_.shape)]
        assert type_ is not None
        held = Held(whole, region_of(region, type_.shape))
        is_it = program.types[name] == type_.with_shape(tuple(map(count_of, held.region)))
        if is_it and array is not None:
            is_it = self._holds(name, array, whole, region)
        if not is_it:
            why = f"it is not {held}"
            raise _StoppedError(Refusal(program.rank, step, why, is_wrong=True))
        return [held]

    def _holds(self, name: str, array: np.ndarray, whole: str, region: Region | None) -> bool:
        """Test whether a constant has the model's elements; noted as unread where these are not."""
        try:
            part = cut(self.graph.constants[whole].load(), region)
        except (PartitionerError, OSError):  # their file is not here
            self.unread.append(name)
            return True
        return _same(array, part)

    def _started(self, program: Program, constants: Mapping[str, Facts], part: int) -> Rank:
        """Facts about a rank before its first step."""
        rank = Rank(program.rank, program.types, program.contents, program.tokens)
        rank.others = self.model.others if self.model.unnamed else None
        rank.equal_facts = self.equal_facts
        for name, facts in constants.items():
            rank.note(name, facts)
        for name, fed in program.inputs.items():
            held = Held(fed.whole, self._of_request(program, fed.whole, fed.region, part))
            shape = tuple(map(count_of, held.region))
            if shape != program.types[name].shape:
                why = f"it is {program.types[name]}, which is not the size of {held}"
                raise _StoppedError(Refusal(program.rank, f"input {name!r}", why, is_wrong=True))
            rank.note(name, [held])
        return rank

    def _of_request(self, program: Program, whole: str, region: Region | None, part: int) -> Region:
        """The part of a request that is a part of a micro-batch's input or output."""
        names = {name: value for value, name in self.graph.output_names.items()}
        shape, batch = self.graph.types[names.get(whole, whole)].shape, program.batch
        parts = (None,) if batch is None else batch.regions.get(whole, (None,))
        outer = parts[part % len(parts)]
        both = region if outer is None or region is None else nested(outer, region)
        return region_of(both if region is not None else outer, shape)

    def _follow(self, ranks: Sequence[Rank]) -> None:
        """Follow all ranks to their ends, from one communication to the next."""
        at = [0] * len(ranks)
        sent: dict[str, Flat] = {}
        waiting: dict[object, dict[int, _Waiting]] = {}
        due, held = deque(range(len(ranks))), dict[_Class, set[int]]()
        while due or held:
            if not due:  # they wait for each other: from here on they are followed apart
                apart, arrived = held.popitem()
                self.apart.add(apart)
                due.extend(sorted(arrived))
            rank = due.popleft()
            going = self._joined(ranks, at, rank, held)
            if rank not in going:
                continue
            due.extend(other for other in going if other != rank)
            for name in self._advance(ranks, at, rank, sent):
                due.extend(waiting.pop(name, ()))
            if at[rank] == len(self.programs[rank].steps):
                continue
            step = self.programs[rank].steps[at[rank]]
            assert not isinstance(step, LocalNode | Departure)
            if isinstance(step, Arrival) and step.name in sent:
                due.append(rank)
                continue
            sides = waiting.setdefault(_meeting(step), {})
            sides[rank] = step
            if isinstance(step, Arrival) or len(sides) < len(_members(step)):
                continue
            self._meet(ranks, sides)
            due.extend(sorted(sides))
            for other in waiting.pop(_meeting(step)):
                at[other] += 1
        stuck = min(
            ((rank, side) for of in waiting.values() for rank, side in of.items()),
            default=None,
            key=lambda one: one[0],
        )
        if stuck is not None:
            missing = [r for r in _members(stuck[1]) if r not in waiting[_meeting(stuck[1])]]
            who = f"rank {missing[0]} has no part in it" if missing else "nobody sends it"
            raise _StoppedError(Refusal(stuck[0], _text(stuck[1]), who, is_wrong=True))

    @cached_property
    def classes(self) -> Sequence[_Class]:
        """The ranks that each rank may be followed with, itself among them."""
        members: dict[object, list[int]] = {}
        for rank, program in enumerate(self.programs):
            form = program.form
            members.setdefault(rank if form is None else form, []).append(rank)
        of = {rank: tuple(ranks) for ranks in members.values() for rank in ranks}
        return [of[rank] for rank in range(len(self.programs))]

    def _joined(
        self, ranks: Sequence[Rank], at: list[int], rank: int, held: dict[_Class, set[int]]
    ) -> _Class:
        """Follow a class up to its next communication; none while others of it are not there."""
        members, steps = self.classes[rank], self.programs[rank].steps
        is_local = at[rank] < len(steps) and isinstance(steps[at[rank]], LocalNode)
        if len(members) == 1 or not is_local or members in self.apart:
            return (rank,)
        held.setdefault(members, set()).add(rank)
        if len(held[members]) < len(members):
            return ()
        del held[members]
        if len({at[member] for member in members}) == 1:
            with suppress(ApartError, RefusedError, TypeError):  # each by itself, then
                end = follow_together(
                    self.model,
                    [ranks[member] for member in members],
                    [self.programs[member] for member in members],
                    at[rank],
                )
                for member in members:
                    at[member] = end
        return members

    def _meet(self, ranks: Sequence[Rank], sides: Mapping[int, _Waiting]) -> None:
        """Note what the ranks of a communication get."""
        first = min(sides)
        try:
            for rank, got in self._got(ranks, sides).items():
                for name, facts in got.items():
                    ranks[rank].note(name, facts)
        except RefusedError as error:
            rank = first if error.rank is None else error.rank
            raise self._refused(ranks, rank, _text(sides[rank]), error) from None

    def _got(
        self, ranks: Sequence[Rank], sides: Mapping[int, _Waiting]
    ) -> Mapping[int, Mapping[str, Sequence[Held]]]:
        """Give what the ranks of a communication get, by local name."""
        types, sided = self.graph.types, dict[int, Side]()
        flat, sending = dict[int, Collective](), dict[int, Sending]()
        for rank, side in sides.items():
            if isinstance(side, Collective):
                flat[rank] = side
            elif isinstance(side, Sending):
                sending[rank] = side
            elif not isinstance(side, Arrival):
                sided[rank] = side
        if sending and flat:
            why = f"rank {min(flat)} calls {flat[min(flat)]}"
            raise RefusedError(why, is_wrong=True)
        if sending:
            return send(self.model, ranks, sending)
        if flat:
            given = {rank: ranks[rank].flat(side.reads) for rank, side in flat.items()}
            collected = collect(flat, given)
            for rank, got in collected.items():
                ranks[rank].flats[flat[rank].writes] = got
            return {
                rank: {flat[rank].writes: facts_of(types, got)} for rank, got in collected.items()
            }
        reading = ((rank, side.reads[0]) for rank, side in sided.items() if side.reads)
        sources = {rank: ranks[rank].facts.get(name, ()) for rank, name in reading}
        made = communicate(types, sided, sources)
        return {rank: {side.comm.target: made[rank]} for rank, side in sided.items() if side.writes}

    def _advance(
        self, ranks: Sequence[Rank], at: list[int], rank: int, sent: dict[str, Flat]
    ) -> list[str]:
        """Follow a rank's nodes up to its next communication; returns messages that left."""
        steps, left, of = self.programs[rank].steps, list[str](), ranks[rank]
        while at[rank] < len(steps):
            step = steps[at[rank]]
            if isinstance(step, Departure):
                sent[step.name] = of.flat(step.reads)
                left.append(step.name)
                at[rank] += 1
                continue
            if isinstance(step, Arrival) and step.name in sent:
                of.flats[step.writes] = sent[step.name]
                of.note(step.writes, facts_of(self.graph.types, sent[step.name]))
                at[rank] += 1
                continue
            if not isinstance(step, LocalNode):
                return left
            end = min(self.programs[rank].ends[at[rank]], at[rank] + MOST_NODES)
            try:
                at[rank] += follow(self.model, of, steps[at[rank] : end])  # type: ignore[arg-type]
            except RefusedError as error:
                what = f"node {step.name!r} ({step.op})"
                raise self._refused(ranks, rank, what, error) from None
        return left

    def _refused(
        self, ranks: Sequence[Rank], rank: int, step: str, error: RefusedError
    ) -> _StoppedError:
        is_wrong = error.is_wrong and not any(one.is_ambiguous for one in ranks)
        return _StoppedError(Refusal(rank, step, str(error), is_wrong))

    def _deliver(self, rank: Rank, part: int, delivered: _Delivered) -> None:
        """Note the parts of outputs that a rank delivers, each of which must be that part."""
        program, names = self.programs[rank.rank], self.graph.output_names
        values = {names.get(v, v): v for v in self.graph.outputs}
        for out in program.outputs:
            value, region = (
                values[out.whole],
                self._of_request(program, out.whole, out.region, part),
            )
            facts = rank.facts.get(out.value, ())
            if not any(
                held.value == value
                and held.share == (ADDED_UP if value in self._totals else ALL)
                and same_region(held.region, region) is not None
                for held in facts
            ):
                what = facts[0] if facts else "an unknown value"
                why = f"it delivers {what} as {value!r}{region_text(region)}"
                error = RefusedError(why, is_wrong=bool(facts))
                raise self._refused([rank], rank.rank, f"output {out.whole!r}", error)
            regions = delivered.setdefault((self._together(value)[rank.rank], value), [])
            is_again = part > 0 and program.batch and out.whole not in program.batch.regions
            several = program.delivers_all or out.whole in program.fed
            if not is_again and not (several and region in regions):
                regions.append(region)


def _meeting(side: _Waiting) -> object:
    """Give what the sides of one communication have in common."""
    if isinstance(side, Arrival):
        return side.name
    if isinstance(side, Sending | Collective):
        return side.ranks, side.number
    return side.comm.seq


def _members(side: _Waiting) -> tuple[int, ...]:
    if isinstance(side, Arrival):
        return ()
    return side.ranks if isinstance(side, Sending | Collective) else side.comm.ranks


def _text(side: _Waiting) -> str:
    if isinstance(side, Sending | Collective | Arrival):
        return str(side)
    why = f" for {side.comm.why}" if side.comm.why else ""
    return f"{side.comm.kind.spelled} {side.comm.seq}{why}"


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (one, other))
    return bool(np.array_equal(a, b))
