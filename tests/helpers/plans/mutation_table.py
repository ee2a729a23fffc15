"""Mutations of the rank programs of plans of all kinds: which are refused, and which should be."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import partitioner
from helpers.plans.mutated_graphs import GraphMutant, graph_mutants
from helpers.plans.mutated_programs import Mutant, mutants
from helpers.plans.mutated_runs import run_mutants, step_as_ordered
from helpers.plans.mutated_steps import literal_mutants, local_mutants
from partitioner.api.compiled.base import Compiled, origin
from partitioner.api.compiled.module import ModuleProgram
from partitioner.api.verify.module import random_arguments
from partitioner.api.verify.symbolic.ir_programs import prove_programs
from partitioner.api.verify.symbolic.module_files import prove_files
from partitioner.api.verify.symbolic.onnx_files import read_programs
from partitioner.api.verify.symbolic.proof import Proof
from partitioner.api.verify.symbolic.prove import prove
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.backends.onnx.running.simulator import run_lockstep
from partitioner.backends.torch.files.rank_files import write_phases
from partitioner.backends.torch.graphs.micro_batches import WHOLE_BATCH
from partitioner.backends.torch.graphs.phases import RankPhases
from partitioner.frontends.inputs import random_inputs
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
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


class Runner(Protocol):
    """The programs of a plan, and what becomes of others of its graph."""

    @property
    def programs(self) -> Programs:
        """The programs as they are."""

    def mutants(self, programs: Programs) -> Iterator[Mutant]:
        """Every mutation of the programs that it can run."""

    def prove(self, programs: Programs) -> Proof:
        """Prove programs of the plan's graph."""

    def run(self, programs: Programs) -> Arrays:
        """All results of the programs, by name and rank where each rank has its own."""


@dataclass(frozen=True)
class OnnxRunner:
    """The programs of a plan of an ONNX model."""

    graph: Graph
    programs: Programs
    feeds: Arrays | None = None  #: Inputs by name; random ones if there are none.

    def mutants(self, programs: Programs) -> Iterator[Mutant]:
        kinds = mutants, local_mutants, literal_mutants
        return itertools.chain.from_iterable(make(programs) for make in kinds)

    def prove(self, programs: Programs) -> Proof:
        """Prove the messages of all ranks."""
        return prove(self.graph, read_programs(emit_models(programs, self.graph)))

    def run(self, programs: Programs) -> Arrays:
        """The outputs."""
        feeds = random_inputs(self.graph, 3) if self.feeds is None else self.feeds
        return run_lockstep(emit_models(programs, self.graph), feeds, optimization="disable")


@dataclass(frozen=True)
class ModuleRunner:
    """The programs of a plan of a module."""

    compiled: ModuleProgram

    @property
    def programs(self) -> Programs:
        """The programs as they are."""
        return self.compiled.programs

    def mutants(self, programs: Programs) -> Iterator[Mutant]:
        kinds = mutants, local_mutants, literal_mutants, run_mutants
        return itertools.chain.from_iterable(make(programs) for make in kinds)

    def prove(self, programs: Programs) -> Proof:
        return prove_programs(self.compiled.graph, programs, self.compiled.model.rows)

    @cached_property
    def given(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Inputs of a step, and stored values."""
        module = self.compiled.model.module
        args, kwargs = random_arguments(module, 3)
        return module.signature.feed(args, kwargs, 3), module.stored_values()

    def run(self, programs: Programs) -> Arrays:
        other = self.compiled.ranks.all_ranks.of(programs, self.compiled.graph, None)
        outputs = {of.rank: {out.value for out in of.outputs} for of in programs.ranks}
        step = other.step(*self.given, outputs)
        kept = {f"{n} on {rank}": x for rank, of in step.kept.items() for n, x in of.items()}
        copies = {f"{n} of copy {i}": x for i, of in enumerate(step.copies) for n, x in of.items()}
        ordered = step_as_ordered(other, *self.given)
        tensors = {**step.results, **step.gradients, **copies, **kept, **ordered}
        return _arrays(tensors)


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
    runner = (
        ModuleRunner(compiled)
        if isinstance(compiled, ModuleProgram)
        else OnnxRunner(compiled.graph, compiled.programs)
    )
    proof = runner.prove(compiled.programs)
    assert proof, f"{case.name}: {proof}"
    return tried_programs(case.name, runner, most, only)


def tried_programs(
    name: str, runner: Runner, most: int | None = None, only: str = "", first: int = 0
) -> Mapping[str, Count]:
    """Mutate programs that are proven; else as `tried`, from the `first` mutant of a kind on."""
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in runner.mutants(runner.programs):
        by_kind.setdefault(mutant.kind, []).append(mutant)
    counts = {}
    right: Arrays | None = None
    for kind, of in by_kind.items():
        if only and kind != only:
            continue
        step = max(1, -(-len(of) // most)) if most else 1
        count = counts[kind] = Count()
        for mutant in of[first % step :: step]:
            count.mutants += 1
            if not _is_accepted(runner, mutant.programs):
                count.refused += 1
                continue
            right = runner.run(runner.programs) if right is None else right
            if _are_equal(runner, mutant.programs, right):
                count.equal += 1
            else:
                count.survived.append(f"{name}: {mutant.kind}: {mutant.what}")
    return counts


def tried_graphs(case: Case, most: int | None = None) -> Mapping[str, Count]:
    """Mutate the graphs that a module's rank files have; else as `tried`.

    Each mutant is written to files, which are proven; what is accepted runs as written.
    """
    compiled = case.compiled()
    assert isinstance(compiled, ModuleProgram)
    all_ranks, runner = compiled.ranks.all_ranks, ModuleRunner(compiled)
    right = step_as_ordered(all_ranks, *runner.given)
    phases = [of_rank[0] for of_rank in all_ranks.phases]
    by_kind: dict[str, list[GraphMutant]] = {}
    for mutant in graph_mutants(phases):
        if mutant.make() is not None:
            by_kind.setdefault(mutant.kind, []).append(mutant)
    counts = {}
    with tempfile.TemporaryDirectory() as name:
        compiled.ranks.write(Path(name))
        for kind, of in by_kind.items():
            count = counts[kind] = Count()
            for mutant in of[:: max(1, -(-len(of) // most)) if most else 1]:
                made = mutant.make()
                assert made is not None
                count.mutants += 1
                accepted = _proven_as_written(compiled, made[mutant.rank], Path(name))
                _write(compiled, phases[mutant.rank], Path(name))
                if not accepted:
                    count.refused += 1
                    continue
                other = all_ranks.with_phases([[one] * all_ranks.micro.count for one in made])
                with suppress(Exception):  # whatever stops the ranks, they have no results
                    found = step_as_ordered(other, *runner.given)
                    if _all_like(_arrays(found), _arrays(right)):
                        count.equal += 1
                        continue
                count.survived.append(f"{case.name}: {kind}: {mutant.what}")
    return counts


def _proven_as_written(compiled: ModuleProgram, phases: RankPhases, folder: Path) -> bool:
    """Prove files of which those of a rank are replaced, if its graphs can be written."""
    try:
        _write(compiled, phases, folder)
    except RuntimeError:  # an operator refuses the shapes
        return False
    try:
        return bool(prove_files(folder, compiled.graph))
    except PartitionerError:
        return False


def _write(compiled: ModuleProgram, phases: RankPhases, folder: Path) -> None:
    micro = compiled.model.module.micro or WHOLE_BATCH
    mark = origin(compiled.plan, compiled.graph)
    write_phases(folder, compiled.programs, phases, mark, micro)


def _arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: tensor.detach().double().numpy() for name, tensor in tensors.items()}


def _is_accepted(runner: Runner, programs: Programs) -> bool:
    try:
        return bool(runner.prove(programs))
    except PartitionerError:  # the programs contradict each other
        return False


def _are_equal(runner: Runner, programs: Programs, right: Arrays) -> bool:
    try:
        with torch.random.fork_rng(devices=[]):
            found = runner.run(programs)
    except Exception:  # noqa: BLE001 - whatever stops the ranks, they have no results
        return False
    return _all_like(found, right)


def _all_like(found: Arrays, right: Arrays) -> bool:
    floor = NOTHING * max(map(_largest, right.values()), default=0.0)
    return all(_is_like(found.get(name), array, floor) for name, array in right.items())


def _largest(array: np.ndarray) -> float:
    """Largest finite magnitude."""
    return float(np.abs(array, where=np.isfinite(array), out=np.zeros(array.shape)).max(initial=0))


def _is_like(one: np.ndarray | None, other: np.ndarray, floor: float) -> bool:
    if one is None or one.shape != other.shape:
        return False
    most = EQUAL * _largest(other) + floor
    return np.allclose(one.astype(float), other.astype(float), rtol=0, atol=most, equal_nan=True)
