"""Whole copies as a plan: which devices have one, what they cost, and what they refuse."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import partitioner
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import one_device
from partitioner.ir.errors import OptionError, PartitionerError
from partitioner.ir.mesh import copies_on
from partitioner.solver.outcome import Infeasible
from partitioner.strategies.spaces import SearchError


@cache
def model() -> onnx.ModelProto:
    return examples.build("mlp", layers=4, hidden=64, batch=8)


def copied(**options: Any) -> Compiled:
    return partitioner.compile(model(), strategy="copies", time_limit_s=5, **options)


@cache
def need() -> int:
    """Bytes of a device that holds the model."""
    return partitioner.compile(model(), devices=1).evaluation.needed_bytes[0]


def unlike(**changes: Mapping[str, Any]) -> Cluster:
    """Devices of which some are not as the first, by number."""
    cluster = resolve_cluster("h100", 4)
    devices = [
        replace(spec, name=f"other{number}", **changes.get(f"device{number}", {}))
        for number, spec in enumerate(cluster.devices)
    ]
    return replace(cluster, devices=tuple(devices))


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_each_device_has_a_copy_and_rates_add_up(devices: int) -> None:
    result = copied(devices=devices)
    alone = one_device(result.graph, result.cluster)
    assert result.plan.kind == "copies"
    assert copies_on(result.plan.groups) == tuple((device,) for device in range(devices))
    assert result.evaluation.serving == pytest.approx(dict.fromkeys(range(devices), 1 / devices))
    assert result.evaluation.step_s == pytest.approx(alone.step_s / devices)
    assert result.evaluation.latency_s == alone.latency_s
    assert result.evaluation.needed_bytes == dict.fromkeys(range(devices), need())
    assert not any(result.evaluation.comm_s.values())
    certificate = result.plan.certificate
    assert certificate.cost == certificate.bound
    assert (certificate.strategy, certificate.status) == ("copies", "optimal")
    assert certificate.space == f"{devices} whole copies, one on each device"


def test_rates_of_unlike_devices_add_up_over_those_that_hold_the_model() -> None:
    cluster = unlike(device1={"launch_s": 12e-6}, device2={"memory_bytes": need() - 1})
    result = copied(cluster=cluster)
    assert copies_on(result.plan.groups) == ((0,), (1,), (3,))
    seconds = [one_device(result.graph, cluster, device).step_s for device in (0, 1, 3)]
    assert seconds[1] > 2 * seconds[0]
    assert 1 / result.evaluation.step_s == pytest.approx(sum(1 / s for s in seconds))
    assert result.evaluation.latency_s == max(seconds)
    assert result.plan.certificate.bound == result.cost
    assert result.verify()


@pytest.mark.parametrize(("devices", "copies"), [(4, 2), (5, 2), (6, 3)])
def test_a_model_that_fits_no_device_is_copied_on_the_smallest_groups(
    devices: int, copies: int
) -> None:
    limit = int(0.75 * need())
    result = copied(devices=devices, memory=limit)
    pair = partitioner.compile(model(), devices=2, memory=limit, time_limit_s=5)
    assert [len(own) for own in copies_on(result.plan.groups)] == [2] * copies
    assert result.evaluation.devices_used == 2 * copies
    assert result.cost == pytest.approx(pair.cost / copies)
    assert result.plan.certificate.bound == pytest.approx(pair.plan.certificate.bound / copies)
    space = result.plan.certificate.space
    assert space == f"{copies} whole copies on 2 devices each: intra (x=2), inter (2 x one device)"
    assert max(result.evaluation.needed_bytes.values()) <= limit
    for device, own in enumerate(result.evaluation.sent_bytes.values()):
        assert own == pair.evaluation.sent_bytes[device % 2] or device >= 2 * copies
    found = result.verify()
    assert found
    assert f"equal: {copies} whole copies on {devices} ranks" in str(found)


def test_groups_lie_along_the_links() -> None:
    cluster = resolve_cluster("2x2xh100").with_memory(int(0.75 * need()))
    result = copied(cluster=cluster)
    assert copies_on(result.plan.groups) == ((0, 1), (2, 3))
    pair = partitioner.compile(model(), cluster=cluster.first(2), time_limit_s=5)
    assert result.cost == pytest.approx(pair.cost / 2)


def test_groups_of_unlike_devices_run_one_plan() -> None:
    limit = {"memory_bytes": int(0.75 * need())}
    slow = {**limit, "launch_s": 8e-6}
    result = copied(cluster=unlike(device0=limit, device1=limit, device2=slow, device3=slow))
    assert copies_on(result.plan.groups) == ((0, 1), (2, 3))
    fast_s, slow_s = result.evaluation.copies.seconds
    assert slow_s > 1.5 * fast_s
    assert 1 / result.cost == pytest.approx(1 / fast_s + 1 / slow_s)
    assert result.plan.certificate.bound <= result.cost
    assert result.verify()


def test_an_operator_without_a_rule_is_in_each_copy() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[4,8,8] x) => (float[4] d) { y = Relu(x) d = Det(y) }"""
    result = partitioner.compile(onnx.parser.parse_model(text), devices=3, strategy="copies")
    assert copies_on(result.plan.groups) == ((0,), (1,), (2,))
    assert result.verify()


def test_one_device_has_the_model_itself() -> None:
    assert copied(devices=1).plan.kind == "single"


@pytest.mark.parametrize("devices", [2, 3])
def test_two_copies_that_do_not_fit_are_refused(devices: int) -> None:
    said = (
        r"^no two whole copies fit, each on devices of its own: .*bytes are short.*"
        r"--strategy auto weighs partitions; it fits with --memory \d+ .* or on 4 devices"
    )
    with pytest.raises(Infeasible, match=said):
        copied(devices=devices, memory=int(0.75 * need()))


PIN = {"pin": [{"tensor": "layer3.weight", "dim": 0}]}
LAYOUT = {"dims": {"batch": "x.0"}, "layout": {"batch": "dp"}}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"objective": "latency"}, "objective 'latency'"),
        ({"objective": "memory"}, "objective 'memory'"),
        ({"mesh": {"tp": 2}}, r"mesh \{'tp': 2\}"),
        ({"parallel": "dp"}, "parallel 'dp'"),
        ({"schedule": "forward"}, "schedule 'forward'"),
        ({"micro_batches": 2}, "micro_batches 2"),
        ({"micro_batches": "auto"}, "micro_batches 'auto'"),
        ({"constraints": PIN}, "pin 1"),
        ({"constraints": LAYOUT}, "a layout in constraints"),
    ],
    ids=str,
)
def test_options_of_a_partition_are_named(options: Mapping[str, Any], named: str) -> None:
    said = f"{named}.*: whole copies .* are no partition; leave it out with strategy 'copies'"
    with pytest.raises(SearchError, match=said):
        copied(devices=2, **options)


def test_a_plan_of_a_partition_is_no_whole_copies() -> None:
    plan = partitioner.compile(model(), devices=2, strategy="inter").plan
    with pytest.raises(SearchError, match=r"^the plan in constraints: whole copies"):
        copied(devices=2, constraints=plan)


def test_training_has_data_parallelism_for_it() -> None:
    said = "strategy 'copies' serves requests, and training=True has steps: parallel 'dp' trains"
    with pytest.raises(OptionError, match=said):
        partitioner.compile(nn.Linear(4, 4), torch.ones(2, 4), 2, training=True, strategy="copies")


class Counter(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.calls


def test_what_is_kept_between_requests_is_refused() -> None:
    said = "requests that know nothing of each other, and '.*' is kept from one to the next"
    with pytest.raises(SearchError, match=said):
        partitioner.compile(Counter(), torch.ones(2), 2, strategy="copies")


def test_a_mesh_has_no_axis_of_copies() -> None:
    said = "mesh axis 'copies' is that of whole copies: ask for strategy 'copies'"
    with pytest.raises(PartitionerError, match=said):
        partitioner.compile(model(), devices=2, mesh={"copies": 2})


def test_a_plan_of_copies_is_kept() -> None:
    plan = copied(devices=3).plan
    for options in ({}, {"strategy": "copies"}):
        again = partitioner.compile(model(), devices=3, constraints=plan, **options)
        assert again.plan.digest == plan.digest
        assert again.plan.certificate.space == "the plan that is kept"
    with pytest.raises(Infeasible, match="the plan that is kept does not fit: device 0 is short"):
        partitioner.compile(model(), devices=3, constraints=plan, memory=need() - 1)
    for other in ({"strategy": "intra"}, {"objective": "latency"}):
        with pytest.raises(SearchError, match="leave it out with strategy 'copies'"):
            partitioner.compile(model(), devices=3, constraints=plan, **other)


def test_many_devices_are_copies_soon() -> None:
    result = copied(cluster=resolve_cluster("128x8xh100"))
    assert result.evaluation.devices_used == 1024
    assert result.cost == pytest.approx(one_device(result.graph, result.cluster).step_s / 1024)
