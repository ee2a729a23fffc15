"""The rounding of a whole ONNX model, measured: how its outputs change where nothing else does.

A tolerance that follows from the element type alone is too small where a model magnifies rounding:
behind a difference of large numbers, in a Sigmoid far from zero, or where a number is rounded to
a step of a quantization. So the whole model is compared with itself: at another level of ONNX
Runtime's optimizations, which computes in other orders, and with inputs and weights that are moved
by a unit in the last place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from partitioner.api.verify.compare import Difference, compare
from partitioner.api.verify.first_difference import uncut_programs
from partitioner.backends.errors import BackendError
from partitioner.backends.optimization import Optimization
from partitioner.frontends.onnx.load import Traced
from partitioner.ir.graph import Constant, Graph

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


def within_rounding(difference: Difference, own: Difference | None, size: int) -> Difference:
    """A difference with the tolerance that the model's own difference gives the tensor.

    Args:
        difference: Of the ranks.
        own: Of the whole model from itself; None if it is not known.
        size: Elements of the tensor.
    """
    if difference.equal or own is None or not own.error > 0:
        return difference
    allowed = min(TIMES * own.error, MOST * (size if difference.counts else 1))
    is_like = difference.step <= own.step and difference.mean <= TIMES * own.mean
    if not (is_like and difference.error <= allowed):
        return difference
    return replace(difference, tolerance=allowed, rounding=own.error)


def own_differences(
    traced: Traced, inputs: Arrays, whole: Arrays, optimization: Optimization
) -> Mapping[str, Difference]:
    """The largest difference of each output of the whole model from itself, by name.

    Args:
        inputs: Its inputs.
        whole: Its outputs.
        optimization: The level that they were computed at.
    """
    own: dict[str, Difference] = {}
    pairs = itertools.chain(
        _at_another_level(traced, inputs, whole, optimization),
        _moved(traced, inputs, whole, optimization),
    )
    for name, other, expected in pairs:
        found, known = compare(name, other, expected), own.get(name)
        if not math.isfinite(found.error):
            continue
        if known is not None:
            worst = max(found, known, key=lambda difference: difference.error)
            step, mean = max(found.step, known.step), max(found.mean, known.mean)
            found = replace(worst, step=step, mean=mean)
        own[name] = found
    return own


def _at_another_level(
    traced: Traced, inputs: Arrays, whole: Arrays, optimization: Optimization
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Outputs at the level farthest from one; none if ONNX Runtime fails at that level."""
    from partitioner.backends.onnx.sessions.whole import run_whole

    other: Optimization = "disable" if optimization == "all" else "all"
    try:
        others = run_whole(traced.whole, traced.folder, inputs, optimization=other)
    except BackendError:
        return
    yield from ((name, others[name], whole[name]) for name in whole)


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
