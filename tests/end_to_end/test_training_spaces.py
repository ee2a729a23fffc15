"""Training is searched over all spaces of its strategy, and its certificate names them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.errors import BackendError
from partitioner.cost_model.evaluate import evaluate
from partitioner.ir.errors import PartitionerError


class Rows(nn.Module):
    """Two cumulative sums over long rows: their rows alone can be split, each over two devices."""

    def __init__(self, width: int = 100_000) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2, width))
        self.second = nn.Parameter(torch.zeros(2, width))

    def forward(self, x: Tensor) -> Tensor:
        ends = [row.cumsum(1)[:, -1] for row in (self.first, self.second)]
        return (ends[0] * x).sum() + (ends[1] * x).sum()


class Chain(nn.Module):
    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def compiled(module: nn.Module, x: Tensor, **options: Any) -> ModuleProgram:
    program = partitioner.compile(
        module, x, training=True, optimizer="sgd", **{"time_limit_s": 4, **options}
    )
    assert isinstance(program, ModuleProgram)
    return program


def test_steps_on_several_groups_run_in_sequence() -> None:
    placed = partitioner.Constraints.placed({f"layers.{k}": k // 2 for k in range(4)})
    options = {"devices": 2, "strategy": "inter", "constraints": placed}
    program = compiled(Chain(), torch.randn(8, 64), **options)
    figures = program.evaluation
    assert figures.devices_used == 2
    assert figures.sequential
    assert figures.step_s == figures.latency_s > max(figures.load_s.values())
    assert figures.throughput_per_s == pytest.approx(1 / figures.latency_s)
    certificate = program.plan.certificate
    assert certificate is not None
    assert certificate.cost == figures.latency_s
    assert certificate.bound <= certificate.cost
    assert f"{program.summary['throughput_per_s']:.6g}" == f"{1 / figures.latency_s:.6g}"


def test_steps_on_one_group_cost_their_load() -> None:
    program = compiled(Chain(), torch.randn(8, 64), cluster="2xideal", strategy="intra")
    figures = program.evaluation
    assert {group.devices for group in program.plan.groups} == {(0, 1)}
    assert not figures.sequential
    assert figures.step_s == max(figures.load_s.values())


def test_inference_on_several_groups_is_a_stream() -> None:
    program = partitioner.compile(Chain(), torch.randn(8, 64), devices=2, strategy="inter")
    figures = evaluate(program.graph, program.plan, program.cluster)
    assert not figures.sequential
    assert figures.step_s == max(figures.load_s.values())


def test_the_certificate_names_the_spaces_of_auto() -> None:
    program = compiled(Chain(), torch.randn(8, 64), cluster="4xideal")
    certificate = program.plan.certificate
    assert certificate is not None
    for space in (
        "intra (x=4)",
        "intra (x=2 y=2)",
        "inter (4 x one device)",
        "hybrid (2 groups of x=2)",
    ):
        assert space in certificate.space
    assert ": plans that keep all values for the backward pass" in certificate.space


@pytest.mark.slow
def test_what_fits_split_and_placed_only_is_found() -> None:
    """The third textbook case, in training: two groups, each of which splits its weight."""
    limit = {"devices": 4, "memory": 2_200_000}  # bytes; a weight of a device alone takes 0.8 MB
    program = compiled(Rows(), torch.ones(2), **limit, time_limit_s=30)
    certificate = program.plan.certificate
    assert certificate is not None
    assert certificate.strategy == "hybrid"
    assert program.evaluation.fits
    assert program.verify()
    for strategy in ("intra", "inter"):
        with pytest.raises(PartitionerError, match="bytes are short"):
            compiled(Rows(), torch.ones(2), **limit, strategy=strategy)


@pytest.mark.slow
def test_a_space_that_fits_exactly_is_compared_with_one_that_fits_safely() -> None:
    """The search of placed plans finds none that fits by the safe formula; liveness has one."""
    limit = {"devices": 4, "memory": 2_400_000, "time_limit_s": 300, "launches": "native"}
    program = compiled(Rows(), torch.ones(2), **limit)
    certificate = program.plan.certificate
    assert certificate is not None
    assert certificate.strategy == "inter"
    assert program.evaluation.fits_exactly
    assert certificate.cost < 38e-6  # seconds: the bound of all hybrid plans


def test_a_rank_without_a_backward_pass_is_saved_and_read_back(tmp_path: Path) -> None:
    """All trained weights are on rank 0; rank 1 computes what needs no gradient."""
    placed = partitioner.Constraints.placed({"layers.0": 0, "layers.1": 0})
    options = {"devices": 2, "strategy": "inter", "constraints": placed}
    program = compiled(Chain(2, 8), torch.randn(4, 8), **options)
    with pytest.raises(BackendError, match="rank 1 has no 'backward' pass"):
        program.rank(1, "backward")
    folder = program.save(tmp_path / "saved")
    assert [(folder / f"rank{rank}.backward.pt2").is_file() for rank in (0, 1)] == [True, False]
    assert program.verify_written(folder)
