"""Proof that a partitioned model computes what the whole model does.

All ranks run in this process over simulated communications and are compared with ONNX Runtime on
the user's own model. If an output differs, the first value of the graph that differs is searched
for (`partitioner.api.verify.first_difference`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from partitioner.api.verify.compare import (
    TOLERANCE,
    FirstDifference,
    Verification,
    VerificationError,
    check_memory,
    compare,
)
from partitioner.api.verify.first_difference import (
    Run,
    Side,
    first_difference,
    tolerances,
    uncut_programs,
)
from partitioner.api.verify.rounding import own_differences, within_rounding
from partitioner.backends.optimization import DEFAULT, Optimization
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import Traced
from partitioner.frontends.onnx.reading.checks import nested_graphs
from partitioner.frontends.onnx.rewriting.fold import draws
from partitioner.ir.graph import Node, Opaque
from partitioner.ir.program import Programs
from partitioner.rewrites.micro_batch_graph import MicroBatch

if TYPE_CHECKING:
    import onnx


def verify(
    traced: Traced,
    programs: Programs,
    directory: Path,
    seed: int = 0,
    part: MicroBatch | None = None,
    optimization: Optimization = DEFAULT,
    given: Mapping[str, np.ndarray] | None = None,
) -> Verification:
    """Compare all ranks with the whole model.

    Both run at one level of ONNX Runtime's optimizations. A cut between two nodes may prevent their
    fusion (BatchNormalization into Conv) on one side, and change the last bits. An output that
    differs by more than its element type explains is compared with what the whole model differs
    from itself by (`partitioner.api.verify.rounding`).

    Args:
        programs: The ranks' programs, which name their values.
        seed: Seed of the random inputs, which are valid (indices within their tables).
        part: The part of a request that the programs run, if it is in micro-batches.
        given: Whole inputs by name, in place of random ones.

    Raises:
        VerificationError: Both sides together would not fit this machine's free memory, or the
            model draws random numbers without a seed.
        BackendError: A rank fails.
    """
    from partitioner.backends.onnx.files.emit import emit_models
    from partitioner.backends.onnx.running.simulator import run_lockstep
    from partitioner.backends.onnx.sessions.whole import run_whole

    _check_draws(traced)
    check_memory(traced.graph)
    inputs = random_inputs(traced.graph, seed) if given is None else given
    whole = run_whole(traced.whole, traced.folder, inputs, optimization=optimization)
    ranks = run_lockstep(directory, inputs, optimization=optimization)
    allowed = tolerances(traced.graph, TOLERANCE)
    named = {ours: traced.graph.output_names.get(ours, ours) for ours in traced.graph.outputs}
    outputs = tuple(
        compare(named[ours], ranks[named[ours]], result, least=allowed.get(ours, 0.0))
        for ours, result in zip(traced.graph.outputs, whole.values(), strict=True)
    )
    said = seed if given is None else None
    if not all(output.equal for output in outputs):
        own = own_differences(traced, inputs, whole, optimization)
        outputs = tuple(
            within_rounding(output, own.get(name), result.size)
            for output, (name, result) in zip(outputs, whole.items(), strict=True)
        )
    if all(output.equal for output in outputs):
        return Verification(len(programs.ranks), said, outputs, optimization=optimization)
    if part is None:
        alone = uncut_programs(traced.graph)
        one = _run(emit_models(alone, traced.graph), inputs, optimization)
        ours = _run(directory, inputs, optimization)
        first = first_difference(traced.graph, Side(programs, ours), Side(alone, one))
    else:
        first = _first_of_parts(part, programs, directory, inputs, optimization)
    return Verification(len(programs.ranks), said, outputs, first, optimization=optimization)


def _check_draws(traced: Traced) -> None:
    """Refuse a model whose results are others at each run.

    Raises:
        VerificationError: Names the first node that draws numbers without a seed.
    """
    for node in traced.graph.nodes:
        op = next(_unseeded(node), "")
        if op:
            raise VerificationError(
                f"{node.name!r} ({op}) draws random numbers without a seed: the ranks and the "
                "whole model draw others, and nothing can be compared; give the node a seed"
            )


def _unseeded(node: Node) -> Iterator[str]:
    """The operators of a node, and of its bodies, that draw numbers without a seed."""
    from onnx import GraphProto

    if draws(node.op) and "seed" not in node.attrs:
        yield node.op
    for attribute in node.attrs.values():
        if isinstance(attribute, Opaque) and attribute.kind == "GraphProto":
            body = GraphProto.FromString(attribute.data)
            for graph in (body, *nested_graphs(body.node)):
                for inner in graph.node:
                    is_seeded = any(each.name == "seed" for each in inner.attribute)
                    is_off = inner.op_type == "Dropout" and len(inner.input) < 3
                    if draws(inner.op_type) and not inner.domain and not is_seeded and not is_off:
                        yield f"{node.op} with {inner.op_type}"


def _first_of_parts(
    part: MicroBatch,
    programs: Programs,
    directory: Path,
    inputs: Mapping[str, np.ndarray],
    optimization: Optimization,
) -> FirstDifference | None:
    """The first value that differs in the first micro-batch in which any does."""
    from partitioner.backends.onnx.files.emit import emit_models
    from partitioner.backends.regions import cut

    alone = uncut_programs(part.graph)
    models = emit_models(alone, part.graph)
    regions = part.parts.regions
    for index in range(part.parts.count):
        own = {
            name: cut(array, regions[name][index]) if name in regions else array
            for name, array in inputs.items()
        }
        first = first_difference(
            part.graph,
            Side(programs, _run(directory, inputs, optimization, index)),
            Side(alone, _run(models, own, optimization)),
        )
        if first is not None:
            return first
    return None


def _run(
    source: Path | Sequence[onnx.ModelProto],
    inputs: Mapping[str, np.ndarray],
    optimization: Optimization,
    micro_batch: int | None = None,
) -> Run:
    """Runs ranks that keep values, which are those of a micro-batch if its number is given."""
    from partitioner.backends.onnx.running.simulator import Simulator

    def run(keep: Mapping[int, Collection[str]]) -> Mapping[int, Mapping[str, np.ndarray]]:
        values = Simulator(source, keep=keep, optimization=optimization).run([inputs])[0].values
        if micro_batch is None:
            return values
        return {
            rank: {name: array[micro_batch] for name, array in kept.items()}
            for rank, kept in values.items()
        }

    return run
