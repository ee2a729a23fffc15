"""Shares of seconds and bytes that a micro-batch of a step in stages takes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from helpers.modules.staged_models import Plain, seeded
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.equal_devices.columns import DeviceColumns
from partitioner.cost_model.prices.compute import adding_seconds, kernel_seconds
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import trace_micro_batch
from partitioner.ir.layout import DimLayout, Placement, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode, place
from partitioner.ir.types import dense_bytes
from partitioner.strategies.derive import Rules

MESH = DeviceMesh.of({"dp": 2})


@pytest.fixture(scope="module")
def columns() -> DeviceColumns:
    """Those of 4 micro-batches on 8 lanes."""
    example = Example(Plain.batch(0, 8), {})
    graph = trace_micro_batch(seeded(Plain), example, ModuleOptions(True), 4).graph
    return DeviceColumns(graph, Resharder(resolve_cluster(None, 2)), 4, 8)


def placement(*cuts: str, partial: bool = False) -> Placement:
    whole = Sharding.replicate((8,))
    dims = tuple(DimLayout.even(8, (axis,), MESH) for axis in cuts) or whole.dims
    pending = (("dp", "sum"),) if partial else ()
    return Placement(MESH, Sharding(dims, pending))


def test_the_optimizer_runs_once_a_step(columns: DeviceColumns) -> None:
    graph, cluster = columns.graph, columns.resharder.cluster
    once, rules = replace(columns, micro_batches=1), Rules.of(graph)
    for node in graph.nodes:
        placed = place(graph, node, DeviceMesh.single(0), {}, rules.rule(node))
        ((device, step_s),) = once.node_seconds(placed).items()
        expected_s = step_s
        if node.attrs.get("role") == "gradient":
            type_ = graph.types[node.inputs[0]]
            nbytes = dense_bytes(type_.numel, type_.dtype)
            moved = nbytes if len(type_.shape) == 2 else 2 * nbytes  # of weights, and of biases
            sum_s = kernel_seconds(0.0, moved, type_.dtype, cluster.devices[device])
            expected_s = step_s / 4 + sum_s * 3 / 4  # the first micro-batch adds to none
        assert columns.node_seconds(placed) == {device: pytest.approx(expected_s)}


def test_a_strategy_is_priced_once(columns: DeviceColumns, monkeypatch: pytest.MonkeyPatch) -> None:
    priced: list[PlacedNode] = []

    def seconds(_graph: object, placed: PlacedNode, _cluster: object) -> dict[int, float]:
        priced.append(placed)
        return {0: float(len(priced))}

    monkeypatch.setattr("partitioner.cost_model.equal_devices.columns.node_seconds", seconds)
    graph, own = columns.graph, DeviceColumns(columns.graph, columns.resharder)
    one, other = (place(graph, node, DeviceMesh.single(0), {}, None) for node in graph.nodes[:2])
    found = [own.node_seconds(placed) for placed in (one, other, one)]
    assert found == [{0: 1.0}, {0: 2.0}, {0: 1.0}]


def test_gradients_are_reduced_once_a_step_unless_they_are_stored_cut(
    columns: DeviceColumns,
) -> None:
    updates = [n for n in columns.graph.nodes if n.attrs.get("role") == "gradient"]
    gradient, stored = updates[0].inputs[:2]
    pending, whole, cut = placement(partial=True), placement(), placement("dp")
    assert columns.move_share(gradient, pending, whole) == 1 / 4
    assert columns.move_share(gradient, pending, cut) == 1.0
    assert columns.move_share(stored, cut, whole) == 1.0


def test_stages_share_stored_values_and_gradients_alone(columns: DeviceColumns) -> None:
    for node in columns.graph.nodes:
        row = row_of(node)
        for value in node.writes:
            if row is not None and row.stored:
                assert columns.held_share(value) == 1 / 8
            elif node.name not in columns.graph.backward and row is not None and not row.view:
                assert columns.held_share(value) == 1.0
        if node.attrs.get("role") == "gradient":
            assert columns.held_share(node.inputs[0]) == 1 / 8
    assert replace(columns, lanes=1).held_share(columns.graph.nodes[0].outputs[0]) == 1.0


class Products(nn.Module):
    """Weights whose gradients are a batch of products, or views of one, or products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.direct = nn.Parameter(torch.ones(4, 5, 7))
        self.viewed = nn.Parameter(torch.ones(4, 7, 5))
        self.regrouped = nn.Parameter(torch.ones(2, 2, 5, 6))
        self.linear = nn.Linear(6, 3)
        self.conv = nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.bmm(x.transpose(0, 1), self.direct).transpose(0, 1)
        x = torch.einsum("bgi,gio->bgo", x, self.viewed)
        x = torch.einsum("bgi,ghio->bgho", x.reshape(-1, 2, 10)[..., :5], self.regrouped)
        return self.conv(self.linear(x).flatten(1, 2).transpose(1, 2)).sum()


def test_a_gradient_has_the_price_of_a_plain_sum_unless_its_own_kernel_adds_it() -> None:
    """A pass adds what it returns: of a product that is seen under another shape, the view."""
    example = Example((torch.ones(8, 4, 5),), {})
    graph = trace_micro_batch(Products(), example, ModuleOptions(True), 4).graph
    (device,) = resolve_cluster(None, 1).devices
    nbytes = 2**30
    one_pass_s = kernel_seconds(0.0, nbytes, "float32", device) * 3 / 4
    passes = {
        node.name.strip("/").removesuffix("/gradient"): round(
            adding_seconds(graph, node.inputs[0], nbytes, device, 4) / one_pass_s
        )
        for node in graph.nodes
        if node.attrs.get("role") == "gradient"
    }
    assert passes == {
        "direct": 1,
        "viewed": 2,
        "regrouped": 2,
        "linear/weight": 1,
        "linear/bias": 2,
        "conv/weight": 2,
        "conv/bias": 2,
    }
