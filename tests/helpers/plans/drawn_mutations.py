"""Rank programs of plans drawn at random: their proofs, and those of their mutations.

Programs as they are must never be found wrong, and mutants of those that are proven be refused or
have equal results.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

import partitioner
from helpers.drawn import drawn_training
from helpers.drawn.drawn_graphs import MESHES, drawn_graph
from helpers.drawn.drawn_modules import Drawn, batch, drawn_stages
from helpers.plans.mutation_table import Count, ModuleRunner, OnnxRunner, Runner, tried_programs
from helpers.plans.staged import on_trace, staged_plan, traced
from helpers.plans.whole_plans import candidates, lowered, random_plan
from partitioner.api.compiled.module import ModuleProgram
from partitioner.frontends.model import open_model
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.errors import PartitionerError
from partitioner.ir.mesh import DeviceMesh

#: Plans of each ONNX graph, and of each module in stages.
PLANS = 2
#: Schedules, and the device of each stage.
STAGED = (
    ("gpipe", (0, 1)),
    ("gpipe", (0, 1, 0)),
    ("1f1b", (0, 1)),
    ("1f1b", (0, 1, 2)),
    ("interleaved", (0, 1, 0, 1)),
    ("zb1", (0, 1)),
    ("zbv", (0, 1, 1, 0)),
)


def _graphs(seed: int) -> Iterator[tuple[str, Runner]]:
    """An ONNX graph whose nodes are each cut at random."""
    model, feeds = drawn_graph(seed)
    traced = load_onnx(model)
    axes, draws = random.Random(seed).choice(MESHES), np.random.default_rng(seed)
    mesh = DeviceMesh.of(axes)
    offered = candidates(traced.graph, [mesh])
    for _ in range(PLANS):
        plan, _ = random_plan(traced.graph, offered, draws)
        programs = lowered(traced.graph, plan, mesh.size())
        yield f"on {mesh}", OnnxRunner(traced.graph, programs, feeds)


def _training(seed: int) -> Iterator[tuple[str, Runner]]:
    """A module of all families of `torch.nn` in training, by a kind of parallelism."""
    case = drawn_training.drawn(seed)
    yield str(case), ModuleRunner(case.compiled())


def _layouts(seed: int) -> Iterator[tuple[str, Runner]]:
    """A module with tied and shared weights, in which some dims of values are cut as drawn."""
    draw = random.Random(seed)
    module, whole = Drawn(draw).double(), batch(draw, draw.randint(2, 6))
    training, mesh = draw.random() < 0.7, draw.choice(MESHES)
    types = open_model(module, whole, training=training).graph.types
    least = DeviceMesh.of(mesh).size()
    long = [f"{v}.{dim}" for v in types for dim, n in enumerate(types[v].shape) if n >= least]
    dims = {f"d{i}": draw.choice(long) for i in range(1 + (draw.random() < 0.3))}
    layout = {name: draw.choice([*([axis] for axis in mesh), list(mesh)]) for name in dims}
    program = partitioner.compile(
        module,
        whole,
        devices=least,
        mesh=mesh,
        training=training,
        constraints={"dims": dims, "layout": layout},
        cluster="ideal",
        time_limit_s=3,
    )
    assert isinstance(program, ModuleProgram)
    yield f"{dims} over {layout} of {mesh}, training {training}", ModuleRunner(program)


def _stages(seed: int) -> Iterator[tuple[str, Runner]]:
    """The same in stages that are drawn, in training."""
    draw = random.Random(seed)
    module, count = Drawn(draw).double(), draw.randint(1, 4)
    size = count * draw.randint(1, 3)  # all ranks run the programs of one micro-batch
    whole = batch(draw, size)
    trace = traced(module, whole, count)
    for schedule, lanes in draw.sample(STAGED, PLANS):
        stages = partial(drawn_stages, draw, stages=len(lanes))
        devices = [(lane,) for lane in lanes]
        try:
            plan = staged_plan(trace.graph, devices, schedule, count, stages)
            program = on_trace(trace, plan)
        except PartitionerError:  # buffers join stages; counts do not fit
            continue
        yield f"{schedule} on {lanes} in {count} of {size}", ModuleRunner(program)


#: Kinds of plans that are drawn.
KINDS: Mapping[str, Callable[[int], Iterator[tuple[str, Runner]]]] = {
    "graphs": _graphs,
    "training": _training,
    "layouts": _layouts,
    "stages": _stages,
}


@dataclass
class Ends:
    """What became of drawn plans and of their mutants."""

    verdicts: Counter[str] = field(default_factory=Counter)  #: Of plans; "refused" has no plan.
    by_kind: dict[str, Count] = field(default_factory=dict)  #: Mutants of those that are proven.
    wrong: list[str] = field(default_factory=list)  #: Plans that are found wrong.
    unproven: list[str] = field(default_factory=list)  #: Plans that are not proven, and why.

    @property
    def survived(self) -> list[str]:
        """Mutants with other results that are proven."""
        return [line for count in self.by_kind.values() for line in count.survived]


def tried_drawn(kind: str, seed: int, ends: Ends, most: int | None = None) -> None:
    """Prove the plans of a seed and mutants of them, and add what became of them."""
    plans = KINDS[kind](seed)
    while True:
        try:
            named = next(plans, None)
        except PartitionerError:
            ends.verdicts["refused"] += 1
            return
        if named is None:
            return
        what, runner = named
        name, proof = f"{kind} {seed} {what}", runner.prove(runner.programs)
        ends.verdicts[proof.verdict] += 1
        if proof:
            for of, count in tried_programs(name, runner, most, first=seed).items():
                ends.by_kind.setdefault(of, Count()).add(count)
        else:
            lines = ends.wrong if proof.exit_code == 1 else ends.unproven
            lines.append(f"{name}: {proof.line}")
