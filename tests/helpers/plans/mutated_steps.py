"""Rank programs with one local step, input, constant or output wrong, on one rank or on all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from helpers.plans.mutated_programs import Mutant, beside, reading
from partitioner.ir.exchange import Region
from partitioner.ir.graph import Attr, Node
from partitioner.ir.layout import Placement
from partitioner.ir.ops.aten.state import STATE
from partitioner.ir.program import Compute, Output, Part, Programs, RankProgram

#: Values of one type that a node reads in the place of another, at most.
MOST_OTHERS = 2


def local_mutants(programs: Programs) -> Iterator[Mutant]:
    """Every mutation of what ranks do by themselves."""
    for program in programs.ranks:
        yield from _of_parts(programs, program)
        yield from _of_outputs(programs, program)
    for step in _steps(programs):
        yield from _of_node(programs, step)
    yield from _of_homes(programs)


def _steps(programs: Programs) -> list[Compute]:
    """Each step once, which ranks may share."""
    steps = {id(step): step for of in programs.ranks for step in of.steps}
    return [step for step in steps.values() if isinstance(step, Compute)]


def _with_rank(programs: Programs, changed: RankProgram) -> Programs:
    ranks = (changed if of.rank == changed.rank else of for of in programs.ranks)
    return replace(programs, ranks=tuple(ranks))


def _of_parts(programs: Programs, program: RankProgram) -> Iterator[Mutant]:
    """Inputs and constants that are cut from another place, or not left out on this rank."""
    for kind, field in (("input", "inputs"), ("constant", "constants")):
        parts: Mapping[str, Part] = getattr(program, field)
        for name, part in parts.items():
            for other in _other_parts(programs, program, field, name, part):
                changed = replace(program, **{field: {**parts, name: other}})
                make = partial(_with_rank, programs, changed)
                yield Mutant(kind, f"{name} on {program.rank}", make)


def _other_parts(
    programs: Programs, program: RankProgram, field: str, name: str, part: Part
) -> Iterator[Part]:
    type_ = program.types[name]
    if part.zero:
        yield Part(part.whole, part.region)
    elif part.region is not None and (at := beside(part.region, _whole(programs, part))):
        yield replace(part, region=at)
    alike = (
        other
        for of in programs.ranks
        for key, other in getattr(of, field).items()
        if of.types[key] == type_ and other != part and not other.zero
    )
    yield from itertools.islice(alike, 1)


def _whole(programs: Programs, part: Part) -> tuple[int, ...]:
    """The shape of a whole input; of a constant as far as the parts of all ranks reach."""
    if part.whole in programs.inputs:
        return programs.inputs[part.whole].shape
    regions = [
        one.region
        for of in programs.ranks
        for one in of.constants.values()
        if one.whole == part.whole and one.region is not None
    ]
    return tuple(
        max(start + length for region in regions for start, length in region[dim])
        for dim in range(len(part.region or ()))
    )


def _of_outputs(programs: Programs, program: RankProgram) -> Iterator[Mutant]:
    """Outputs that are delivered to another place, or in the place of another; updates, too."""
    outputs = program.outputs

    def mutant(what: str, changed: tuple[Output, ...]) -> Mutant:
        make = partial(_with_rank, programs, replace(program, outputs=changed))
        return Mutant("output", what, make)

    def delivering(index: int, out: Output) -> Mutant:
        changed = (*outputs[:index], out, *outputs[index + 1 :])
        what = f"{outputs[index].whole} on {program.rank}"
        return mutant(what, changed)

    for index, out in enumerate(outputs):
        shape = programs.outputs[out.whole].shape
        if out.region is not None and (at := beside(out.region, shape)):
            yield delivering(index, replace(out, region=at))
        others: dict[Region | None, None] = {
            theirs.region: None
            for of in programs.ranks
            for theirs in of.outputs
            if theirs.whole == out.whole and theirs.region != out.region
        }
        for region in itertools.islice(others, 1):
            yield delivering(index, replace(out, region=region))
        own = program.types[out.value]
        alike = (
            one.value
            for one in outputs
            if one.value != out.value and program.types[one.value] == own
        )
        for value in itertools.islice(alike, 1):
            yield delivering(index, replace(out, value=value))
        left = (*outputs[:index], *outputs[index + 1 :])
        what = f"{out.whole} on {program.rank} left out"
        yield mutant(what, left)


def _of_node(programs: Programs, step: Compute) -> Iterator[Mutant]:
    """A node that reads another value or two exchanged, has another attribute, or is dropped."""
    node = step.node
    having = [of for of in programs.ranks if any(one is step for one in of.steps)]
    program = having[-1]
    ways = {"everywhere": having, "on one rank": having[-1:]}
    if len(having) == 1:
        del ways["on one rank"]

    def changed(kind: str, where: str, new: Node | None) -> Mutant:
        numbers = frozenset(of.rank for of in ways[where])
        return Mutant(kind, f"{node.name} {where}", partial(_with, programs, numbers, step, new))

    for where in ways:
        for new in _reading_others(program, step):
            yield changed("operand", where, new)
        for new in _exchanged(node):
            yield changed("exchanged", where, new)
        for new in _attributes(node):
            yield changed("attribute", where, new)
        if _can_be_dropped(program, node):
            yield changed("node dropped", where, None)
        if node.op == STATE:
            for new in _other_states(program, node):
                yield changed("state", where, new)


def _with(programs: Programs, ranks: frozenset[int], step: Compute, new: Node | None) -> Programs:
    """The programs with another node in a step of some ranks; None drops it."""
    changed = (_with_step(of, step, new) if of.rank in ranks else of for of in programs.ranks)
    return replace(programs, ranks=tuple(changed))


def _with_step(program: RankProgram, step: Compute, new: Node | None) -> RankProgram:
    node = step.node
    if new is not None:
        steps = (replace(step, node=new) if one is step else one for one in program.steps)
        return replace(program, steps=tuple(steps))
    left = tuple(one for one in program.steps if one is not step)
    return reading(replace(program, steps=left), node.outputs[0], node.inputs[0])


def _can_be_dropped(program: RankProgram, node: Node) -> bool:
    if len(node.outputs) != 1 or not node.inputs or not node.inputs[0]:
        return False
    return program.types[node.inputs[0]] == program.types[node.outputs[0]]


def _reading_others(program: RankProgram, step: Compute) -> Iterator[Node]:
    """The node with an operand that was made before, of the same type, nearest ones first."""
    node, known = step.node, [*program.inputs, *program.constants, *program.literals]
    for one in program.steps:
        if one is step:
            break
        known += one.touched[1] if isinstance(one, Compute) else one.touched(program.rank)[1]
    for index, name in enumerate(node.inputs):
        type_ = program.types.get(name)
        others = (other for other in reversed(known) if program.types[other] == type_)
        for other in itertools.islice((o for o in others if o not in node.inputs), MOST_OTHERS):
            yield replace(node, inputs=(*node.inputs[:index], other, *node.inputs[index + 1 :]))


def _exchanged(node: Node) -> Iterator[Node]:
    for i, j in itertools.combinations(range(len(node.inputs)), 2):
        if node.inputs[i] and node.inputs[j] and node.inputs[i] != node.inputs[j]:
            inputs = list(node.inputs)
            inputs[i], inputs[j] = inputs[j], inputs[i]
            yield replace(node, inputs=tuple(inputs))
            return


def _attributes(node: Node) -> Iterator[Node]:
    for key, value in node.attrs.items():
        for other in _other_attributes(value):
            yield replace(node, attrs={**node.attrs, key: other})


def _other_attributes(value: Attr) -> Iterator[Attr]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif isinstance(value, tuple) and value and all(type(one) is int for one in value):
        if value[::-1] != value:
            yield value[::-1]
        yield (*value[:-1], value[-1] + 1)  # type: ignore[operator]


def _other_states(program: RankProgram, node: Node) -> Iterator[Node]:
    """A stored value that is read under the name of another one of the same form."""
    own = program.types[node.outputs[0]]
    others = (
        step.node
        for step in program.steps
        if isinstance(step, Compute) and step.node.op == STATE and step.node.name != node.name
    )
    alike = (other for other in others if program.types[other.outputs[0]] == own)
    for other in itertools.islice(alike, 1):
        yield replace(node, name=other.name)


def _of_homes(programs: Programs) -> Iterator[Mutant]:
    """Stored values whose parts lie on the ranks in another order."""
    states = {step.node.outputs[0] for step in _steps(programs) if step.node.op == STATE}
    for value, home in programs.homes.items():
        if home.name not in states:
            continue
        placement: Placement = home.placement
        mesh = placement.mesh
        if len(mesh.devices) < 2 or not placement.sharding.axes:
            continue
        turned = replace(mesh, devices=(*mesh.devices[1:], mesh.devices[0]))
        home = replace(home, placement=replace(placement, mesh=turned))
        homes = {**programs.homes, value: home}
        yield Mutant("stored", value, partial(replace, programs, homes=homes))


def literal_mutants(programs: Programs) -> Iterator[Mutant]:
    """Small constants that ranks have of their own, with one element changed."""
    for program in programs.ranks:
        for name, array in program.literals.items():
            given = np.asarray(array)
            if not given.size or given.dtype == bool:
                continue
            other = given.copy()
            other.reshape(-1)[-1] += 1
            changed = replace(program, literals={**program.literals, name: other})
            make = partial(_with_rank, programs, changed)
            yield Mutant("literal", f"{name} on {program.rank}", make)
