"""Nodes that another node's kernel computes lie on its device."""

import math

import numpy as np
from onnx import helper

from helpers.onnx_files import onnx_models
from helpers.plans.cost_cases import flat
from partitioner.cost_model.equal_devices.columns import DeviceColumns
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.search.request import Request
from partitioner.search.spaces.explicit import JointSearch, beside_producers
from partitioner.strategies.derive import Rules
from partitioner.strategies.spaces import families


def block() -> Graph:
    """A Conv with its normalization and activation, and a node behind; called a, b, c, y."""
    of_channels = ["scale", "bias", "mean", "variance"]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="a", pads=[1] * 4),
        helper.make_node("BatchNormalization", ["a", *of_channels], ["b"], name="b"),
        helper.make_node("Relu", ["b"], ["c"], name="c"),
        helper.make_node("MaxPool", ["c"], ["y"], name="y", kernel_shape=[3, 3], pads=[1] * 4),
    ]
    weights = dict.fromkeys(of_channels, np.ones(4, np.float32))
    weights["w"] = np.ones((4, 4, 3, 3), np.float32)
    type_ = ("float32", [1, 4, 6, 6])
    return load_onnx(onnx_models.model(nodes, {"x": type_}, {"y": type_}, weights)).graph


def test_nodes_move_to_the_device_of_their_kernel_unless_it_costs() -> None:
    graph = block()
    (family,) = families("inter", 2)
    request = Request(strategy="inter", time_limit_s=5)
    prices = DeviceColumns(graph, Resharder(flat(2)))
    shared = JointSearch(graph, flat(2), request, Rules.of(graph), prices)
    built = shared.problem(family, shared.options(family))

    def choice(name: str, device: int) -> int:
        meshes = [placed.mesh for placed in built.candidates[name]]
        return meshes.index(DeviceMesh.single(device))

    chosen = (choice("a", 0), choice("b", 1), choice("c", 1), choice("y", 1))
    moved = beside_producers(graph, built, chosen, lambda _: 1.0)
    assert moved == (choice("a", 0), choice("b", 0), choice("c", 0), choice("y", 1))
    costs = iter((1.0, 2.0))  # of the choices, and with b moved; c is beside b then
    assert beside_producers(graph, built, chosen, lambda _: next(costs)) == chosen
    assert beside_producers(graph, built, chosen, lambda _: math.inf) == chosen
