"""Spatial parallelism: which dim each axis cuts, what follows it, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

import partitioner
from helpers.onnx_files import onnx_models as om
from helpers.plans.cost_cases import graph as graph_with
from partitioner.ir.graph import Graph, Node
from partitioner.ir.types import TensorType
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.kinds.kind import Asked
from partitioner.strategies.kinds.spatial import image_factors, spatial_constraints
from partitioner.strategies.spaces import SearchError

POOL = {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}


class Net(nn.Module):
    """A convolution, one of 1 x 1 on channels last, a pool and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.point = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4)
        self.classes = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.point(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.classes(nn.functional.max_pool2d(x, 2).mean((2, 3)))


def graph_of(module: nn.Module, *shape: int) -> Graph:
    example = (torch.randn(shape),)
    return partitioner.compile(module.eval(), example_inputs=example, devices=1).graph


def test_dims_are_followed_through_the_graph() -> None:
    graph = graph_of(Net(), 2, 3, 8, 6)
    factors = image_factors(graph)
    followed = {node.name for node in graph.nodes if set(factors.get(node.name, {})) == {-2, -1}}
    last = [node.name for node in graph.nodes if "classes" in node.name]
    images = [node.name for node in graph.nodes if graph.types[node.outputs[0]].rank == 4]
    assert followed >= {name for name in images if "/weight" not in name}
    assert not followed & set(last)
    busy = spatial_constraints(Asked(graph, {"h": 2, "w": 3})).busy
    assert set(busy) == {"h", "w"}
    pool = next(node.name for node in graph.nodes if "max_pool" in node.op)
    assert busy["h"][pool] != busy["w"][pool]


@pytest.mark.parametrize(
    ("module", "shape", "axis", "dim"),
    [
        (nn.Conv1d(2, 2, 3), (1, 2, 9), "spatial", -1),
        (nn.Conv2d(2, 2, 3), (1, 2, 9, 9), "spatial", -2),
        (nn.Conv2d(2, 2, 3), (1, 2, 9, 9), "w", -1),
        (nn.Conv3d(2, 2, 3), (1, 2, 9, 9, 9), "spatial", -3),
        (nn.Conv3d(2, 2, 3), (1, 2, 9, 9, 9), "h", -2),
    ],
    ids=str,
)
def test_axes_cut_dims_by_name(
    module: nn.Module, shape: tuple[int, ...], axis: str, dim: int
) -> None:
    graph = graph_of(module, *shape)
    (conv,) = (node.name for node in graph.nodes if node.op == "aten::convolution")
    factors = image_factors(graph)[conv]
    assert spatial_constraints(Asked(graph, {axis: 2})).busy[axis][conv] == {factors[dim]}


@pytest.mark.parametrize(
    ("module", "shape", "axes", "message"),
    [
        (nn.Conv2d(2, 2, 3), (1, 2, 9, 9), {"d": 2}, "axis 'd' has no dim to cut; windows of the "),
        (nn.Linear(4, 4), (2, 4), {"h": 2}, "windows of the model slide over no dims"),
        (nn.Conv2d(2, 2, 3), (1, 2, 5, 9), {"h": 4}, "'h' has 4 devices, .* a height of more than"),
    ],
    ids=["depth", "no image", "too small"],
)
def test_what_cannot_be_cut_is_refused(
    module: nn.Module, shape: tuple[int, ...], axes: dict[str, int], message: str
) -> None:
    graph = graph_of(module, *shape)
    with pytest.raises(ConstraintError, match=message):
        spatial_constraints(Asked(graph, axes))


def compiled(module: nn.Module, *shape: int, **options: Any) -> partitioner.Compiled:
    example = (torch.randn(shape),)
    return partitioner.compile(module.eval(), example_inputs=example, time_limit_s=5, **options)


def test_a_dim_without_a_word_is_named_by_its_number() -> None:
    """A resize may slide over channels of a volume: the fourth dim from the end."""
    resize = helper.make_node("Resize", ["x", "", "s"], ["y"], mode="nearest")
    scales = {"s": np.array([1, 2, 1, 1, 1], np.float32)}
    ends = {"y": ("float32", [1, 4, 2, 2, 2])}
    proto = om.model([resize], {"x": ("float32", [1, 2, 2, 2, 2])}, ends, scales)
    with pytest.raises(ConstraintError, match="has a dim -4 of more than 4"):
        partitioner.compile(proto, devices=5, parallel="spatial", cluster="ideal")


def test_an_axis_of_another_kind_is_refused() -> None:
    with pytest.raises(SearchError, match="spatial"):
        compiled(Net(), 2, 3, 8, 6, devices=2, parallel="spatial", mesh={"tp": 2})


def test_windows_that_stay_whole_are_noted() -> None:
    net = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.AvgPool2d((1, 8)))
    mesh = {"h": 2, "w": 2}
    result = compiled(net, 1, 2, 8, 8, devices=4, parallel="spatial", mesh=mesh)
    (note,) = (n for n in result.summary["notes"] if "spatial" in n)
    assert "(avg_pool2d) cannot be cut along width over axis w" in note
    assert result.verify(seed=0).equal


def test_joined_with_data_parallelism() -> None:
    mesh = {"dp": 2, "w": 2}
    result = compiled(Net(), 2, 3, 8, 6, devices=4, parallel="dp+spatial", mesh=mesh)
    conv = next(node.name for node in result.graph.nodes if node.op == "aten::convolution")
    axes = {axis for cut in result.plan.nodes[conv].cuts.values() for axis in cut.axes}
    assert axes == {"dp", "w"}
    assert result.verify(seed=0).equal


def test_nodes_without_a_rule_have_no_dim_of_an_image() -> None:
    types = {name: TensorType.of("float32", (1, 2, 6, 6)) for name in "xyz"}
    nodes = [Node("a", "Unknown", ("x",), ("y",)), Node("b", "MaxPool", ("y",), ("z",), POOL)]
    factors = image_factors(graph_with(nodes, types, ("x",), ("z",)))
    assert set(factors["b"]) == {-2, -1}
    assert not factors.get("a")
