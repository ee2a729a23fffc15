"""The programs of PyTorch modules' ranks are proven, and mutations of them are refused."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from helpers.modules import torch_models
from helpers.modules.transformer_block import Block
from helpers.plans.mutated_cases import CASES
from helpers.plans.mutated_programs import mutants
from partitioner.api.verify.symbolic.ir_programs import programs_of
from partitioner.api.verify.symbolic.prove import prove
from partitioner.ir.program import Comm, Compute


class Mean(nn.Module):
    """The mean of all elements."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class Scored(nn.Module):
    """Blocks with their mean square, which is no row of the batch, and what it is of."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.layers(x).tanh()
        return made.pow(2).mean(), made


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
    assert ("run once each and share the batch" in str(proof)) == ("micro_batches" in options)


class FirstHeads(nn.Module):
    """Some heads of a joint projection, whose gradient has zeros for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(8, 24), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mix(x).unflatten(-1, (6, 4))[..., :-2, :].transpose(1, 2).softmax(-1)
        return self.out(heads.transpose(1, 2).flatten(2)).pow(2).mean()


def test_a_part_of_zeros_that_lies_beside_a_gradient_is_proven() -> None:
    """No operand tells which of the zeros a rank makes: those that it has of other values."""
    compiled = partitioner.compile(
        FirstHeads(),
        torch.randn(6, 6, 8),
        devices=2,
        parallel="tp",
        training=True,
        cluster="2xideal",
    )
    proof = compiled.verify(symbolic=True)
    assert proof, str(proof)


class OfKinds(nn.Module):
    """Tokens beside their kinds, which are all the same: zeros that are expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(12, 8), nn.Embedding(2, 8)
        self.register_buffer("zeros", torch.zeros(1, 6, dtype=torch.long), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        kinds = self.kinds(self.zeros.expand(ids.shape[0], -1))
        return (self.words(ids) + kinds).softmax(-1).pow(2).mean()


@pytest.mark.parametrize(("devices", "parallel"), [(3, "dp"), (4, "dp+tp")])
def test_rows_that_are_alike_are_those_that_they_are_added_to(devices: int, parallel: str) -> None:
    compiled = partitioner.compile(
        OfKinds(),
        torch.randint(12, (6, 6)),
        devices=devices,
        parallel=parallel,
        training=True,
        cluster=f"{devices}xideal",
    )
    proof = compiled.verify(symbolic=True)
    assert proof, str(proof)


class Pooled(nn.Module):
    """A product over channels between a convolution and a mean over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.mix = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = self.image(x).permute(0, 2, 3, 1)
        return (made + self.mix(made.tanh())).mean((1, 2)).pow(2).mean()


@pytest.mark.parametrize("devices", [2, 3])
def test_the_gradient_of_a_mean_is_proven_where_its_dims_become_one(devices: int) -> None:
    """All rows of the image have the same gradient, so a rank's may be any of them."""
    compiled = partitioner.compile(
        Pooled(),
        torch.randn(6, 3, 9, 8),
        devices=devices,
        parallel="spatial",
        training=True,
        cluster=f"{devices}xideal",
    )
    proof = compiled.verify(symbolic=True)
    assert proof, str(proof)


def in_one_micro_batch(devices: int = 2, **options: Any) -> Any:
    return partitioner.compile(
        Scored(),
        (torch.randn(4, 16),),
        devices=devices,
        cluster=f"{devices}xideal",
        time_limit_s=5,
        **{"parallel": "pp", "micro_batches": 1, "training": True, **options},
    )


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        *((2, {"schedule": name}) for name in ("gpipe", "1f1b", "interleaved", "zb1", "zbv")),
        *((2, {"training": False, "schedule": name}) for name in ("forward", "zbv")),
        (4, {"parallel": "pp+zero3"}),
    ],
)
def test_stages_in_one_micro_batch_are_proven(devices: int, options: dict[str, Any]) -> None:
    """What runs once a step reads what the only micro-batch has, and no result is its rows."""
    proof = in_one_micro_batch(devices, **options).verify(symbolic=True)
    assert proof, str(proof)
    assert "in one micro-batch" in proof.notes


def test_files_of_stages_in_one_micro_batch_are_proven(tmp_path: Path) -> None:
    compiled = in_one_micro_batch(schedule="zbv")
    compiled.save(tmp_path / "out")
    proof = compiled.prove_written(tmp_path / "out")
    assert proof, str(proof)


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


def test_a_rank_that_gets_no_gradient_of_its_part_is_refused() -> None:
    compiled = planned(parallel="dp")
    first, second = compiled.programs.ranks
    outputs = tuple(out for out in second.outputs if "linear1.weight" not in out.whole)
    assert len(outputs) == len(second.outputs) - 1
    programs = replace(compiled.programs, ranks=(first, replace(second, outputs=outputs)))
    proof = prove(compiled.graph, programs_of(programs, compiled.graph))
    assert proof.verdict == "WRONG"
    assert "rank 1, stored 'layer.linear1.weight': the rank has 'layer.linear1.weight'" in str(
        proof
    )


def test_a_rank_that_does_not_return_a_result_is_refused() -> None:
    compiled = planned(parallel="dp")
    first, second = compiled.programs.ranks
    (loss,) = (out for out in second.outputs if out.whole == "mean")
    outputs = tuple(out for out in second.outputs if out != loss)
    programs = replace(compiled.programs, ranks=(first, replace(second, outputs=outputs)))
    proof = prove(compiled.graph, programs_of(programs, compiled.graph))
    why = "the rank does not deliver each element of it once"
    assert str(proof) == f"WRONG: rank 1, output 'mean': {why}"


def test_a_rank_that_reads_another_parameter_of_the_same_form_is_refused() -> None:
    layers = [nn.Linear(8, 8, bias=False) for _ in range(2)]
    example = (torch.randn(4, 8),)
    module = nn.Sequential(*layers, Mean())
    compiled = partitioner.compile(module, example, devices=2, training=True, parallel="dp")
    names = iter(["/1/weight", "/0/weight"])

    def swapped(step: Compute | Comm) -> Compute | Comm:
        if not isinstance(step, Compute) or step.node.op != "partitioner::state":
            return step
        return replace(step, node=replace(step.node, name=next(names)))

    first, *others = compiled.programs.ranks
    spoilt = replace(first, steps=tuple(map(swapped, first.steps)))
    programs = replace(compiled.programs, ranks=(spoilt, *others))
    assert prove(compiled.graph, programs_of(compiled.programs, compiled.graph)).proven
    assert not prove(compiled.graph, programs_of(programs, compiled.graph)).proven


def test_a_rank_with_all_windows_that_has_what_they_read_is_proven() -> None:
    """The middle one of three ranks has all windows of a stride, and not the last row."""
    build = next(case for case in CASES if case.name == "train spatial 3 odd")
    proof = build.compiled().verify(symbolic=True)
    assert proof, str(proof)


@pytest.mark.slow
def test_rows_of_equal_gradients_that_ranks_send_each_other_are_proven() -> None:
    """The gradient of a mean over space is the same in all rows: any of them are meant."""
    model = torch_models.build("convnext", training=True)
    compiled: Any = partitioner.compile(
        model.module,
        dict(model.inputs),
        devices=3,
        cluster="3xideal",
        parallel="spatial",
        training=True,
        time_limit_s=10,
    )
    proof = compiled.verify(symbolic=True)
    assert proof, str(proof)
