"""The programs of PyTorch modules' ranks are proven, and mutations of them are refused."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from helpers.plans.mutated_programs import mutants
from partitioner.api.verify.symbolic.ir_programs import programs_of
from partitioner.api.verify.symbolic.prove import prove


class Block(nn.Module):
    """A transformer layer, and the mean square of its results as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).pow(2).mean()


def planned(devices: int = 2, *, training: bool = True, **options: Any) -> Any:
    example = (torch.randn(4, 8, 16),)
    cluster = f"{devices}xideal"
    return partitioner.compile(
        Block(), example, devices=devices, training=training, cluster=cluster, **options
    )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, {"parallel": "dp"}),
        (2, {"parallel": "zero3"}),
        (2, {"parallel": "tp"}),
        (2, {"parallel": "tp", "micro_batches": 2}),
        (4, {"parallel": "dp+tp"}),
        (2, {"parallel": "pp", "micro_batches": 2}),
        (2, {"strategy": "intra"}),
    ],
)
def test_programs_of_a_module_are_proven(
    training: bool, devices: int, options: dict[str, Any]
) -> None:
    proof = planned(devices, training=training, time_limit_s=5, **options).verify(symbolic=True)
    assert proof, str(proof)
    assert "of the programs that the graphs of ranks are made from" in str(proof)
    assert ("of one micro-batch" in str(proof)) == ("micro_batches" in options)


@pytest.mark.parametrize("parallel", ["dp", "zero3", "tp"])
def test_mutations_of_a_training_step_are_refused(parallel: str) -> None:
    compiled = planned(parallel=parallel)
    graph = compiled.graph
    assert prove(graph, programs_of(compiled.programs, graph)).proven
    ends: Counter[tuple[str, str]] = Counter()
    for mutant in mutants(compiled.programs):
        proof = prove(graph, programs_of(mutant.programs, graph))
        ends[mutant.kind, proof.verdict] += 1
        assert not proof.proven, f"{mutant.kind} {mutant.what}"
    assert ends["dropped", "WRONG"]
    assert ends["group", "WRONG"]
    assert ends["reduction", "WRONG"]
