"""Mutations of the rank programs of plans of all kinds: which are refused, and which should be."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

import partitioner
from helpers.plans.mutated_programs import Mutant, mutants
from helpers.plans.mutated_runs import run_mutants, step_as_ordered
from helpers.plans.mutated_steps import literal_mutants, local_mutants
from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.module import ModuleProgram
from partitioner.api.verify.module import random_arguments
from partitioner.api.verify.symbolic.ir_programs import prove_programs
from partitioner.api.verify.symbolic.onnx_files import read_programs
from partitioner.api.verify.symbolic.proof import Proof
from partitioner.api.verify.symbolic.prove import prove
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.backends.onnx.running.simulator import run_lockstep
from partitioner.frontends.inputs import random_inputs
from partitioner.ir.errors import PartitionerError
from partitioner.ir.program import Programs

#: Relative difference of results that are equal.
EQUAL = 1e-4
#: Largest magnitude that is zero, beside the largest of all results.
NOTHING = 1e-7

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A plan whose rank programs are mutated."""

    name: str
    build: Callable[[], tuple[Any, Any]]  #: A model, and its example inputs if it is a module.
    options: Mapping[str, Any]  #: Those of `compile`.

    def compiled(self) -> Compiled:
        """The plan."""
        model, example = self.build()
        return partitioner.compile(model, example, **{"time_limit_s": 10, **self.options})


class _Runner(Protocol):
    def prove(self, programs: Programs) -> Proof:
        """Prove programs of the plan's graph."""

    def run(self, programs: Programs) -> Arrays:
        """All results of the programs, by name and rank where each rank has its own."""


@dataclass(frozen=True)
class _OnnxRunner:
    compiled: Compiled

    def prove(self, programs: Programs) -> Proof:
        graph = self.compiled.graph
        return prove(graph, read_programs(emit_models(programs, graph)))

    def run(self, programs: Programs) -> Arrays:
        graph = self.compiled.graph
        return run_lockstep(
            emit_models(programs, graph), random_inputs(graph, 3), optimization="disable"
        )


@dataclass(frozen=True)
class _ModuleRunner:
    compiled: ModuleProgram

    def prove(self, programs: Programs) -> Proof:
        return prove_programs(self.compiled.graph, programs, self.compiled.model.rows)

    @cached_property
    def _given(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        module = self.compiled.model.module
        args, kwargs = random_arguments(module, 3)
        return module.signature.feed(args, kwargs, 3), module.stored_values()

    def run(self, programs: Programs) -> Arrays:
        other = self.compiled.ranks.all_ranks.of(programs, self.compiled.graph, None)
        outputs = {of.rank: {out.value for out in of.outputs} for of in programs.ranks}
        step = other.step(*self._given, outputs)
        kept = {f"{n} on {rank}": x for rank, of in step.kept.items() for n, x in of.items()}
        copies = {f"{n} of copy {i}": x for i, of in enumerate(step.copies) for n, x in of.items()}
        ordered = step_as_ordered(other, *self._given)
        tensors = {**step.results, **step.gradients, **copies, **kept, **ordered}
        return {name: tensor.detach().double().numpy() for name, tensor in tensors.items()}


def all_mutants(programs: Programs) -> Iterator[Mutant]:
    """Mutations of communications, of what ranks do by themselves, and of the order of runs."""
    kinds = mutants, local_mutants, literal_mutants, run_mutants
    return itertools.chain.from_iterable(make(programs) for make in kinds)


@dataclass
class Count:
    """The mutants of a kind: how many there are, and what became of them."""

    mutants: int = 0
    refused: int = 0
    equal: int = 0  #: Accepted, and the results are equal.
    survived: list[str] = field(default_factory=list)  #: Accepted, and a result is another one.

    def add(self, other: Count) -> None:
        """Add those of another count."""
        self.mutants += other.mutants
        self.refused += other.refused
        self.equal += other.equal
        self.survived += other.survived

    def __str__(self) -> str:
        return f"{self.mutants} | {self.refused} | {self.equal} | {len(self.survived)}"


def tried(case: Case, most: int | None = None, only: str = "") -> Mapping[str, Count]:
    """Mutate a case's programs; count by kind, of each at most so many, evenly drawn."""
    compiled = case.compiled()
    runner: _Runner = (
        _ModuleRunner(compiled) if isinstance(compiled, ModuleProgram) else _OnnxRunner(compiled)
    )
    proof = runner.prove(compiled.programs)
    assert proof, f"{case.name}: {proof}"
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in all_mutants(compiled.programs):
        by_kind.setdefault(mutant.kind, []).append(mutant)
    counts = {}
    right: Arrays | None = None
    for kind, of in by_kind.items():
        if only and kind != only:
            continue
        step = max(1, -(-len(of) // most)) if most else 1
        count = counts[kind] = Count()
        for mutant in of[::step]:
            count.mutants += 1
            if not _is_accepted(runner, mutant.programs):
                count.refused += 1
                continue
            right = runner.run(compiled.programs) if right is None else right
            if _are_equal(runner, mutant.programs, right):
                count.equal += 1
            else:
                count.survived.append(f"{case.name}: {mutant.kind}: {mutant.what}")
    return counts


def _is_accepted(runner: _Runner, programs: Programs) -> bool:
    try:
        return bool(runner.prove(programs))
    except PartitionerError:  # the programs contradict each other
        return False


def _are_equal(runner: _Runner, programs: Programs, right: Arrays) -> bool:
    try:
        with torch.random.fork_rng(devices=[]):
            found = runner.run(programs)
    except Exception:  # noqa: BLE001 - whatever stops the ranks, they have no results
        return False
    floor = NOTHING * max((np.abs(x).max() for x in right.values() if x.size), default=0.0)
    return all(_is_like(found.get(name), array, floor) for name, array in right.items())


def _is_like(one: np.ndarray | None, other: np.ndarray, floor: float) -> bool:
    if one is None or one.shape != other.shape:
        return False
    if not one.size:
        return True
    most = EQUAL * np.abs(other).max() + floor
    return bool(np.all(np.abs(one - other) <= most))
