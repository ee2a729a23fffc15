"""Proof that a partitioned model computes what the whole model does.

All ranks run in this process over simulated communications and are compared with ONNX Runtime on
the user's own model. If an output differs, the first value of the graph that differs is searched
for (`partitioner.api.verify.first_difference`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from partitioner.api.verify.compare import (
    TOLERANCE,
    Difference,
    Verification,
    VerificationError,
    check_memory,
    compare,
    worst,
)
from partitioner.api.verify.first_difference import (
    Run,
    Side,
    first_difference,
    tolerances,
    uncut_programs,
)
from partitioner.backends.errors import BackendError
from partitioner.backends.optimization import DEFAULT, Optimization
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import Traced
from partitioner.frontends.onnx.reading.checks import nested_graphs
from partitioner.ir.graph import Constant, Graph, Node, Opaque
from partitioner.ir.ops.onnx.factories import RANDOM
from partitioner.ir.program import Programs
from partitioner.rewrites.micro_batch_graph import MicroBatch

if TYPE_CHECKING:
    import onnx

#: Ranks may differ from the model by so many times what it differs from itself, at most and in the
#: mean: they add up in yet another order. Of integers so many times as many elements may differ, by
#: no more than the model's.
TIMES = 5.0
#: The limit of that allowance, as a share of a tensor's largest magnitude or of its elements: less
#: than the error if one of two ranks' parts were missing.
MOST = 0.25
#: Runs with moved numbers. Rare elements lie so near a step that one move takes them over it.
MOVES = 4
#: Constants of more bytes than this in all are not moved: each run holds a copy.
MOST_MOVED_BYTES = 2**28

Arrays = Mapping[str, np.ndarray]


def verify(
    traced: Traced,
    programs: Programs,
    directory: Path,
    seed: int = 0,
    part: MicroBatch | None = None,
    optimization: Optimization = DEFAULT,
    given: Mapping[str, np.ndarray] | None = None,
) -> Verification:
    """Compare all ranks with the whole model, on given inputs or valid ones drawn from a seed.

    Both run at one level of ONNX Runtime's optimizations. A cut between two nodes may prevent their
    fusion (BatchNormalization into Conv) on one side, and change the last bits. An output that
    differs by more than its element type explains is compared with what the whole model differs
    from itself by. If the programs run in micro-batches, `part` is their part of a request.
    Of whole copies, each serves a request and is compared.
    """
    from partitioner.backends.onnx.files.emit import emit_models
    from partitioner.backends.onnx.running.simulator import Simulator
    from partitioner.backends.onnx.sessions.whole import run_whole
    from partitioner.backends.regions import cut

    check_seeds(traced.graph)
    check_memory(traced.graph)
    inputs = random_inputs(traced.graph, seed) if given is None else given
    whole = run_whole(traced.whole, traced.folder, inputs, optimization=optimization)
    copies = 0 if programs.copies is None else len(programs.copies.devices)
    requests = [inputs] * (copies or 1)
    ranks = Simulator(directory, optimization=optimization).run(requests)
    allowed = tolerances(traced.graph, TOLERANCE)
    named = {ours: traced.graph.output_names.get(ours, ours) for ours in traced.graph.outputs}
    outputs = tuple(
        worst(
            compare(named[ours], one.outputs[named[ours]], result, least=allowed.get(ours, 0.0))
            for one in ranks
        )
        for ours, result in zip(traced.graph.outputs, whole.values(), strict=True)
    )
    said = seed if given is None else None
    if not all(output.equal for output in outputs):
        own = _own_differences(traced, inputs, whole, optimization)
        outputs = tuple(
            _within_rounding(output, own.get(name), result.size)
            for output, (name, result) in zip(outputs, whole.items(), strict=True)
        )
    if all(output.equal for output in outputs):
        return Verification(
            len(programs.ranks), said, outputs, optimization=optimization, copies=copies
        )
    graph = traced.graph if part is None else part.graph
    alone, regions = uncut_programs(graph), {} if part is None else part.parts.regions
    models, first = emit_models(alone, graph), None
    for index in range(1 if part is None else part.parts.count):  # micro-batches
        own_part = {
            name: cut(array, regions[name][index]) if name in regions else array
            for name, array in inputs.items()
        }
        ours = _run(directory, requests, optimization, None if part is None else index)
        one = _run(models, [own_part], optimization)
        first = first_difference(graph, Side(programs, ours), Side(alone, one))
        if first is not None:
            break
    return Verification(
        len(programs.ranks), said, outputs, first, optimization=optimization, copies=copies
    )


def check_seeds(graph: Graph) -> None:
    """Refuse, as a VerificationError, a model that draws other random numbers in each run."""
    for node in graph.nodes:
        for op in _unseeded(node):
            raise VerificationError(
                f"{node.name!r} ({op}) draws random numbers without a seed: the ranks and the "
                "whole model draw others, and nothing can be compared; give the node a seed"
            )


def _unseeded(node: Node) -> Iterator[str]:
    """The operators of a node, and of its bodies, that draw numbers without a seed."""
    from onnx import GraphProto

    if node.op in RANDOM and "seed" not in node.attrs:
        yield node.op
    for attribute in node.attrs.values():
        if isinstance(attribute, Opaque) and attribute.kind == "GraphProto":
            body = GraphProto.FromString(attribute.data)
            for graph in (body, *nested_graphs(body.node)):
                for inner in graph.node:
                    is_seeded = any(each.name == "seed" for each in inner.attribute)
                    is_off = inner.op_type == "Dropout" and len(inner.input) < 3
                    is_random = inner.op_type in RANDOM and not inner.domain
                    if is_random and not is_seeded and not is_off:
                        yield f"{node.op} with {inner.op_type}"


def _run(
    source: Path | Sequence[onnx.ModelProto],
    requests: Sequence[Arrays],
    optimization: Optimization,
    micro_batch: int | None = None,
) -> Run:
    """Runs ranks that keep values, which are those of a micro-batch if its number is given."""
    from partitioner.backends.onnx.running.simulator import Simulator

    def run(keep: Mapping[int, Collection[str]]) -> Mapping[int, Mapping[str, np.ndarray]]:
        served = Simulator(source, keep=keep, optimization=optimization).run(requests)
        values = {rank: kept for one in served for rank, kept in one.values.items()}
        if micro_batch is None:
            return values
        return {
            rank: {name: array[micro_batch] for name, array in kept.items()}
            for rank, kept in values.items()
        }

    return run


def _within_rounding(difference: Difference, own: Difference | None, size: int) -> Difference:
    """A difference with the tolerance that the model's own, if known, gives so many elements."""
    if difference.equal or own is None or not own.error > 0:
        return difference
    allowed = min(TIMES * own.error, MOST * (size if difference.counts else 1))
    is_like = difference.step <= own.step and difference.mean <= TIMES * own.mean
    if not (is_like and difference.error <= allowed):
        return difference
    return replace(difference, tolerance=allowed, rounding=own.error)


def _own_differences(
    traced: Traced, inputs: Arrays, whole: Arrays, optimization: Optimization
) -> Mapping[str, Difference]:
    """The largest difference of each output of the whole model from itself, by name.

    A tolerance that follows from the element type alone is too small where a model magnifies
    rounding: behind a difference of large numbers, in a Sigmoid far from zero, or where a number is
    rounded to a step of a quantization. So the whole model is compared with itself: at another
    level of ONNX Runtime's optimizations, which computes in other orders, and with inputs and
    weights that are moved by a unit in the last place.
    """
    from partitioner.backends.onnx.sessions.whole import run_whole

    own: dict[str, Difference] = {}
    other_level: Optimization = "disable" if optimization == "all" else "all"
    others: Arrays = {}
    with suppress(BackendError):  # ONNX Runtime may fail at that level
        others = run_whole(traced.whole, traced.folder, inputs, optimization=other_level)
    at_other_level = ((name, array, whole[name]) for name, array in others.items())
    moved = _moved(traced, inputs, whole, optimization)
    for name, other, expected in itertools.chain(at_other_level, moved):
        found, known = compare(name, other, expected), own.get(name)
        if not math.isfinite(found.error):
            continue
        if known is not None:
            worst = max(found, known, key=lambda difference: difference.error)
            step, mean = max(found.step, known.step), max(found.mean, known.mean)
            found = replace(worst, step=step, mean=mean)
        own[name] = found
    return own


def _moved(
    traced: Traced, inputs: Arrays, whole: Arrays, optimization: Optimization
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Outputs of the graph with moved numbers, and with the numbers as they are."""
    from partitioner.backends.onnx.files.emit import emit_models
    from partitioner.backends.onnx.running.simulator import run_lockstep

    graph = traced.graph
    alone = uncut_programs(graph)

    def run(graph: Graph, inputs: Arrays) -> list[np.ndarray]:
        outputs = run_lockstep(emit_models(alone, graph), inputs, optimization=optimization)
        return [outputs[graph.output_names.get(name, name)] for name in graph.outputs]

    expected = run(graph, inputs)
    for seed in range(MOVES):
        rng = np.random.default_rng(seed)
        moved = {name: _shifted(array, rng) for name, array in inputs.items()}
        try:
            others = run(_with_moved_constants(graph, rng), moved)
        except BackendError:  # a constant was no number to compute with, but a setting
            others = run(graph, moved)
        yield from zip(whole, others, expected, strict=True)


def _with_moved_constants(graph: Graph, rng: np.random.Generator) -> Graph:
    """The graph with its constants moved, but those of whole numbers: these are exact settings."""
    total = sum(constant.type.nbytes for constant in graph.constants.values())
    if total > MOST_MOVED_BYTES:
        return graph
    moved = dict(graph.constants)
    for name, constant in graph.constants.items():
        if "float" in constant.type.dtype and not constant.type.dtype.startswith("float8"):
            array = constant.load()
            if not np.array_equal(array, np.round(array)):
                moved[name] = Constant.of(_shifted(array, rng))
    return replace(graph, constants=moved)


def _shifted(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Floats a unit before or after; zeros and what is not finite as they are."""
    if "float" not in array.dtype.name or array.dtype.itemsize == 1:
        return array
    ends = np.where(rng.random(array.shape) < 0.5, np.inf, -np.inf).astype(array.dtype)
    return np.where(np.isfinite(array) & (array != 0), np.nextafter(array, ends), array)
