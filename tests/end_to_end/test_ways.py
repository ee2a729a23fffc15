"""`auto` weighs all ways that a request leaves open; none that is asked for by name beats it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import partitioner
from helpers.modules.small_gpt import small_gpt
from partitioner import examples
from partitioner.api.compiled.module import ModuleProgram
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.examples import zoo
from partitioner.solver.work import now_s


class Mlp(nn.Module):
    """Square layers and a loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        made = [one for _ in range(layers) for one in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(*made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x).square().mean()
        return result


class Cells(nn.Module):
    """Two LSTM cells over a sequence."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(size, size), nn.LSTMCell(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = g = d = torch.zeros(x.shape[1], x.shape[2])
        for part in x:
            h, c = self.first(part, (h, c))
            g, d = self.second(h, (g, d))
        return g.square().mean()


def trained(module: nn.Module, batch: Any, **options: Any) -> ModuleProgram:
    program = partitioner.compile(module, batch, training=True, **options)
    assert isinstance(program, ModuleProgram)
    return program


def beaten(module: nn.Module, batch: Any, *forced: dict[str, Any], **options: Any) -> list[str]:
    """The forced plans that cost less than that of `auto`, or less than its bound."""
    program = trained(module, batch, **options)
    certificate = program.plan.certificate
    assert certificate is not None
    costs = {str(one): trained(module, batch, **options, **one).cost for one in forced}
    least = max(program.cost, certificate.bound) * (1 - 1e-9)
    return [one for one, cost in costs.items() if cost < least]


class Small(nn.Module):
    """Two operators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.layer(x).mean()
        return mean


def test_more_devices_than_operators_leave_the_ways_without_stages() -> None:
    """Five devices have stages of one device only, and two operators make no five stages."""
    program = trained(Small(), torch.zeros(10, 16), devices=5, cluster="5xcpu")
    assert program.verify()


def test_no_stages_are_searched_that_are_more_than_operators() -> None:
    said: list[str] = []
    options = {"cluster": "4xcpu", "micro_batches": 2, "progress": said.append}
    assert trained(Small(), torch.zeros(8, 16), devices=4, **options).verify()
    assert "cutting stages of 2 devices" in said
    assert "cutting stages of 1 device" not in said


def test_training_runs_in_stages_where_these_are_faster() -> None:
    module, batch = Mlp(4, 64), (torch.randn(8, 64),)
    program = trained(module, batch, devices=2)
    assert set(program.plan.stages) == {0, 1}
    assert any(note.startswith("at once, the best plan takes") for note in program.summary["notes"])
    assert program.cost < trained(module, batch, devices=2, strategy="intra").cost
    loss, gradients = program.gradients(*batch)
    whole = module(*batch)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_stages_that_a_bound_rules_out_are_not_traced() -> None:
    lines: list[str] = []
    program = trained(Mlp(2, 64), (torch.randn(8, 64),), cluster="2xideal", progress=lines.append)
    certificate = program.plan.certificate
    assert certificate is not None
    assert "stages (no plan below " in certificate.space
    assert lines.count("tracing the module") == 1


def test_a_request_that_names_how_operators_lie_is_not_planned_in_stages() -> None:
    for options in ({"strategy": "intra"}, {"parallel": "dp"}, {"mesh": {"tp": 2}}):
        program = trained(Mlp(2, 16), (torch.randn(4, 16),), devices=2, **options)
        assert program.plan.pipeline is None


@pytest.mark.slow
def test_one_request_of_inference_runs_in_stages_where_these_are_faster() -> None:
    cluster = resolve_cluster("2xcpu")
    (level,) = cluster.levels
    slow = replace(cluster, levels=(replace(level, bandwidth_bytes_per_s=3e8),))
    model = examples.build("mlp", layers=24, hidden=128, batch=256)
    options = {"cluster": slow, "memory": 1_476_608, "objective": "latency", "time_limit_s": 60.0}
    result = partitioner.compile(model, **options)
    assert (result.plan.kind, result.plan.micro_batches) == ("pipeline", 2)
    assert result.cost < partitioner.compile(model, **options, strategy="inter").cost
    assert result.verify().equal
    stream = partitioner.compile(model, **{**options, "objective": "throughput"})
    assert stream.plan.micro_batches is None


@pytest.mark.slow
def test_layers_of_a_thousand_on_four_gpus_are_fastest_in_stages() -> None:
    with torch.device("meta"):
        module, batch = Mlp(8, 1024), (torch.zeros(64, 1024),)
    options = {"devices": 4, "cluster": "h100"}
    assert beaten(module, batch, {"parallel": "pp"}, {"parallel": "dp"}, **options) == []


@pytest.mark.slow
def test_cells_that_gain_nothing_run_on_one_device() -> None:
    module, batch = Cells(64), (torch.randn(6, 8, 64),)
    four = trained(module, batch, cluster="4xcpu")
    assert four.cost <= trained(module, batch, cluster="1xcpu").cost * (1 + 1e-9)
    copied = trained(module, batch, cluster="4xcpu", strategy="intra")
    assert four.cost <= copied.cost


@pytest.mark.slow
def test_unlike_devices_are_weighed_in_stages() -> None:
    module, batch = small_gpt(2)
    cluster, other = resolve_cluster("4xa100"), resolve_cluster("1xl4")
    devices = (*cluster.devices[:2], *other.devices * 2)
    options = {"cluster": replace(cluster, name="unlike", devices=devices), "time_limit_s": 60.0}
    forced = {"parallel": "pp"}, {"parallel": "dp+tp", "mesh": {"dp": 2, "tp": 2}}
    assert beaten(module, batch, *forced, **options) == []


@pytest.mark.slow
def test_a_model_in_a_fraction_of_its_memory_is_planned_where_a_forced_way_fits() -> None:
    module, batch = small_gpt(4)
    needed = trained(module, batch, devices=1).summary["peak_bytes"][0]
    program = trained(module, batch, devices=4, memory=needed // 3, time_limit_s=60.0)
    assert program.evaluation.fits_exactly


@pytest.mark.slow
def test_blocks_are_searched_within_the_time_limit() -> None:
    begun: list[float] = []
    model = zoo.build("resnet50")

    def say(text: str) -> None:
        if text == "searching" and not begun:
            begun.append(now_s())

    options = {"memory": 58445664, "time_limit_s": 8.0, "gap": 0.99, "progress": say}
    result = partitioner.compile(model, devices=2, **options)
    assert result.plan.blocks
    assert now_s() - begun[0] < 3 * 8.0  # minutes before; other processes share this machine
