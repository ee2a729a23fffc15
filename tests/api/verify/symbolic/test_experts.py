"""Layers of experts are proven, gathered and sent, and spoilt ones are refused."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import partitioner
from helpers.modules.expert_models import Experts, Loss
from helpers.plans.mutated_programs import mutants
from helpers.plans.mutated_sendings import sending_mutants
from partitioner.api.verify.symbolic.ir_programs import programs_of
from partitioner.api.verify.symbolic.prove import prove
from partitioner.ir.graph import AMONG
from partitioner.ir.program import Compute

#: Of the mutants of communications, every so manyth is proven.
STRIDE = 7


def planned(parallel: str, mesh: dict[str, int], *, training: bool = True, **layer: Any) -> Any:
    torch.manual_seed(0)
    module = Loss(Experts(**{"experts": 5, **layer}))
    return partitioner.compile(
        module,
        tuple(torch.randn(2, 7, 8)),
        devices=int(torch.tensor([*mesh.values()]).prod()),
        mesh=mesh,
        parallel=parallel,
        training=training,
        time_limit_s=5,
    )


def sends(compiled: Any) -> set[str]:
    steps = (step for program in compiled.programs.ranks for step in program.steps)
    nodes = (step.node for step in steps if isinstance(step, Compute))
    return {node.op for node in nodes if AMONG in node.attrs}


@pytest.mark.parametrize(
    ("parallel", "mesh", "options"),
    [
        ("dispatch", {"ep": 3}, {}),
        ("dispatch", {"ep": 2}, {"training": False, "biased": True}),
        pytest.param("dispatch", {"ep": 3}, {"biased": True}, marks=pytest.mark.slow),
        pytest.param("dp+dispatch", {"dp": 2, "ep": 2}, {}, marks=pytest.mark.slow),
        pytest.param("dispatch+tp", {"ep": 2, "tp": 3}, {}, marks=pytest.mark.slow),
    ],
)
def test_tokens_that_are_sent_are_proven_from_programs_and_from_files(
    parallel: str, mesh: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    compiled = planned(parallel, mesh, **options)
    assert sends(compiled)
    proof = compiled.verify(symbolic=True)
    assert proof, str(proof)
    compiled.save(tmp_path / "out")
    proof = compiled.prove_written(tmp_path / "out")
    assert proof, str(proof)


@pytest.mark.parametrize("biased", [False, True])
def test_experts_that_get_all_tokens_are_proven(biased: bool) -> None:
    """Tokens are gathered: the first products are a sum over experts, which gradients read."""
    with torch.device("meta"):
        layer = Experts(width=2048, inner=1024, experts=8, chosen=6, biased=biased)
        example = torch.empty(2, 16384, 2048)
    compiled: Any = partitioner.compile(
        Loss(layer), tuple(example), devices=2, parallel="ep", training=True, time_limit_s=5
    )
    assert not sends(compiled)
    proof = compiled.verify(symbolic=True)
    assert proof, str(proof)


@pytest.mark.parametrize(
    ("parallel", "mesh"),
    [
        ("dispatch", {"ep": 3}),
        pytest.param("dp+dispatch", {"dp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param("dispatch+tp", {"ep": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_mutations_of_what_is_sent_are_refused(parallel: str, mesh: dict[str, int]) -> None:
    compiled = planned(parallel, mesh)
    ends: Counter[str] = Counter()
    for mutant in sending_mutants(compiled.programs):
        proof = prove(compiled.graph, programs_of(mutant.programs, compiled.graph))
        ends[f"{mutant.kind} {proof.verdict}"] += 1
        assert not proof.proven, f"{mutant.kind} {mutant.what}"
        if mutant.kind in ("swapped", "region"):
            assert proof.verdict == "WRONG", f"{mutant.what}: {proof}"
            assert "its settings are not those of '/" in str(proof)
        assert "experts" in str(proof) or proof.verdict == "WRONG", str(proof)
    assert ends["dropped WRONG"]
    assert ends["group WRONG"]


@pytest.mark.slow
def test_mutations_of_communications_beside_experts_are_refused() -> None:
    compiled = planned("dp+dispatch", {"dp": 2, "ep": 2})
    for mutant in itertools.islice(mutants(compiled.programs), 0, None, STRIDE):
        proof = prove(compiled.graph, programs_of(mutant.programs, compiled.graph))
        assert not proof.proven, f"{mutant.kind} {mutant.what}"
