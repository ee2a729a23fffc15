"""Seconds of sessions of ONNX Runtime: of a whole model in one, and of the border between two.

A session ends before a communication, and another begins behind it: a border, which takes its time
beside the communication. Processes run a chain of products in one session and in a session for each
product, in turns. A border takes what the latter take longer, divided by their borders.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from partitioner.api.profiling.measure import Timing
from partitioner.api.verify.first_difference import uncut_programs
from partitioner.backends.launch import run_job
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.backends.onnx.measuring import timing
from partitioner.backends.onnx.running.simulator import Simulator
from partitioner.backends.onnx.sessions.segments import SessionConfig
from partitioner.backends.onnx.sessions.whole import whole_runs
from partitioner.cost_model.profiles.database import (
    BORDER,
    Profile,
    whole_entry,
    whole_key,
    write_entries,
)
from partitioner.cost_model.profiles.entries import LinkEntry
from partitioner.foundations import units
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import Traced
from partitioner.ir.graph import Graph, Node
from partitioner.ir.program import Compute, Programs
from partitioner.ir.types import TensorType
from partitioner.search.request import Say

#: Runs, and fewest of them: the verdict on a plan hangs on this one entry.
_REPEATS, _LEAST_REPEATS = 30, 3
#: Products of the chain, and the rows and columns of their operands: a product of them takes long
#: enough, and reads enough, to drive the code that starts a session out of the nearest caches.
_PRODUCTS, _ROWS, _SIDE = 16, 32, 1024
#: Timed turns, and those before them.
_TURNS, _FIRST_TURNS = 15, 3
_OPSET = 17
_TAKES_S = 5.0  #: Seconds of the measurement, about.


def whole_seconds(traced: Traced, known: Profile, end_s: float, say: Say) -> float | None:
    """Seconds of a request of an ONNX model in one session, which are added to the profile.

    Known ones are not measured again; None if the fewest runs would not be over at `end_s`.
    """
    entry = known.wholes.get(whole_key(traced.graph.digest))
    if entry is not None and entry.backend == timing.NAME:
        return entry.seconds
    if time.perf_counter() >= end_s:
        return None
    say("running the whole model in one process")
    inputs = random_inputs(traced.graph, seed=0)
    run = whole_runs(traced.whole, traced.folder, inputs, known.threads)
    runs: list[float] = []
    while len(runs) < _REPEATS:
        begin_s = time.perf_counter()
        if begin_s + max(runs, default=0.0) > end_s:
            break
        run()
        runs.append(time.perf_counter() - begin_s)
    if len(runs) < _LEAST_REPEATS:
        return None
    took = Timing.of(runs)
    entry = whole_entry(traced.graph.digest, *took, timing.NAME, units.now())
    write_entries(known.file, known.device, known.threads, [entry])
    return took.seconds


def border_seconds(known: Profile, end_s: float, say: Say) -> float | None:
    """Seconds of a border while all processes compute, which are added to the profile.

    Known ones are not measured again; None if a measurement would not be over at `end_s`.
    """
    if known.border is not None and known.border.backend == timing.NAME:
        return known.border.seconds
    if time.perf_counter() + _TAKES_S > end_s:
        return None
    say("measuring the border between two sessions")
    with tempfile.TemporaryDirectory(prefix="partitioner-borders-") as name:
        folder = Path(name)
        run_job(folder, known.processes, {"runner": __name__})
        took = Timing.of(json.loads((folder / "borders.json").read_text()))
    took = took._replace(seconds=max(0.0, took.seconds))
    entry = LinkEntry(BORDER, known.processes, 0, *took, timing.NAME, units.now())
    write_entries(known.file, known.device, known.threads, [entry])
    return entry.seconds


def run_files(rank: int, folder: Path, job: Mapping[str, Any]) -> None:
    """Run a rank of a job of `partitioner.backends.worker`."""
    row, matrix = (TensorType.of("float32", (size, _SIDE)) for size in (_ROWS, _SIDE))
    values = [f"value {index}" for index in range(_PRODUCTS + 1)]
    matrices = [f"matrix {index}" for index in range(_PRODUCTS)]
    nodes = tuple(
        Node(f"product {index}", "MatMul", (values[index], matrices[index]), (values[index + 1],))
        for index in range(_PRODUCTS)
    )
    types = {**dict.fromkeys(values, row), **dict.fromkeys(matrices, matrix)}
    graph = Graph("chain", (values[0], *matrices), (values[-1],), nodes, types, {}, {"": _OPSET})
    inputs = random_inputs(graph, seed=0)
    whole = uncut_programs(graph)
    config = SessionConfig(optimization="all", threads=job["threads"])
    one, many = (
        Simulator(emit_models(programs, graph), configs={0: config})
        for programs in (whole, in_phases(whole, range(1, _PRODUCTS)))
    )

    def seconds_of(chain: Simulator) -> float:
        dist.barrier()
        begin_s = time.perf_counter()
        chain.run([inputs])
        return time.perf_counter() - begin_s

    turns = [(seconds_of(one), seconds_of(many)) for _ in range(_FIRST_TURNS + _TURNS)]
    if rank == 0:
        borders = [(many_s - one_s) / (_PRODUCTS - 1) for one_s, many_s in turns[_FIRST_TURNS:]]
        (folder / "borders.json").write_text(json.dumps(borders))


def in_phases(programs: Programs, bounds: Sequence[int]) -> Programs:
    """The one rank's program in phases, a session each; all but the first begin at `bounds`."""
    (program,) = programs.ranks
    steps = [
        replace(step, phase=sum(index >= bound for bound in bounds))
        for index, step in enumerate(program.steps)
        if isinstance(step, Compute)
    ]
    return replace(programs, ranks=(replace(program, steps=tuple(steps)),))
