"""Attention whose keys and values pass round a ring is proven, and spoilt rings are refused."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import partitioner
from helpers.modules.small_gpt import small_gpt
from helpers.plans.mutated_cases import Attention
from helpers.plans.mutated_programs import mutants
from partitioner.api.verify.symbolic.ir_programs import programs_of
from partitioner.api.verify.symbolic.prove import prove
from partitioner.ir.program import Compute

#: Of all mutants, every so manyth is proven.
STRIDE = 3


def planned(devices: int, *, training: bool) -> Any:
    compiled = partitioner.compile(
        Attention(),
        (torch.randn(2, 16, 16),),
        devices=devices,
        cluster=f"{devices}xideal",
        training=training,
        parallel="ring",
        time_limit_s=5,
    )
    assert any(node.op == "partitioner::turn" for node in compiled.graph.nodes)
    return compiled


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_ring_is_proven_from_its_programs_and_from_its_files(
    devices: int, tmp_path: Path
) -> None:
    compiled = planned(devices, training=True)
    assert compiled.verify(symbolic=True)
    compiled.save(tmp_path / "out")
    assert compiled.prove_written(tmp_path / "out")


def test_positions_of_a_rank_of_a_ring_are_proven_though_they_are_apart() -> None:
    """Causal rings give the first rank tokens from both ends, and numbers of their places."""
    options: dict[str, Any] = {"devices": 2, "training": True, "parallel": "ring"}
    compiled = partitioner.compile(*small_gpt(), time_limit_s=5, **options)
    (positions,) = (
        step.node.inputs
        for step in compiled.programs.ranks[0].steps
        if isinstance(step, Compute) and step.node.name == "/arange"
    )
    assert len(positions) == 2
    proof = compiled.verify(symbolic=True)
    assert proof, str(proof)


def test_mutations_of_a_ring_are_refused() -> None:
    compiled = planned(4, training=False)
    ends: Counter[str] = Counter()
    for mutant in itertools.islice(mutants(compiled.programs), 0, None, STRIDE):
        proof = prove(compiled.graph, programs_of(mutant.programs, compiled.graph))
        ends[proof.verdict] += 1
        assert not proof.proven, f"{mutant.kind} {mutant.what}"
    assert ends["WRONG"]
