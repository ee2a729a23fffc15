"""A communication that is dropped, swapped, of another group, region or reduction is refused."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

import partitioner
from helpers.plans.mutated_programs import Mutant, mutants
from partitioner import examples
from partitioner.api.verify.symbolic.onnx_files import read_programs
from partitioner.api.verify.symbolic.prove import prove
from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.backends.onnx.running.simulator import run_lockstep
from partitioner.frontends.inputs import random_inputs

MLP: dict[str, Any] = {"layers": 3, "hidden": 16, "batch": 4}
#: Of Llama's mutants, every so manyth is run.
STRIDE = 12


@pytest.mark.parametrize(
    ("name", "sizes", "devices", "options"),
    [
        ("mlp", MLP, 2, {"parallel": "tp"}),
        ("mlp", MLP, 4, {"parallel": "tp"}),
        ("mlp", MLP, 4, {"mesh": {"a": 2, "b": 2}, "strategy": "intra"}),
        ("tiny", {}, 2, {"strategy": "intra"}),
        ("tiny", {}, 3, {"parallel": "spatial"}),
        ("tiny", {}, 2, {"strategy": "inter", "cluster": None}),
        pytest.param("llama", {}, 2, {"parallel": "tp"}, marks=pytest.mark.slow),
        pytest.param("llama", {}, 4, {"parallel": "cp"}, marks=pytest.mark.slow),
    ],
)
def test_a_mutation_that_changes_a_result_is_refused(
    name: str, sizes: dict[str, Any], devices: int, options: dict[str, Any]
) -> None:
    model = examples.build(name, **sizes)
    options = {"cluster": f"{devices}xideal", **options}
    compiled = partitioner.compile(model, devices=devices, time_limit_s=5, **options)
    graph, emitted = compiled.graph, emit_models(compiled.programs, compiled.graph)
    assert prove(graph, read_programs(emitted)).proven
    inputs = random_inputs(graph, 3)
    right = run_lockstep(emitted, inputs, optimization="disable")

    def changes(mutant: Mutant) -> bool:
        models = emit_models(mutant.programs, graph)
        try:
            other = run_lockstep(models, inputs, optimization="disable")
        except BackendError:
            return True
        return any(not np.allclose(other[n], right[n], rtol=1e-4, atol=1e-5) for n in right)

    stride = STRIDE if name == "llama" else 1
    ends: Counter[str] = Counter()
    for mutant in itertools.islice(mutants(compiled.programs), 0, None, stride):
        try:
            proof = prove(graph, read_programs(emit_models(mutant.programs, graph)))
        except BackendError:  # the files contradict each other
            ends["refused"] += 1
            continue
        ends[proof.verdict] += 1
        assert not (proof.proven and changes(mutant)), f"{mutant.kind} {mutant.what}"
    assert ends["WRONG"] > ends["proven"]
