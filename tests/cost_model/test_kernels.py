"""Nodes that another node's kernel computes: found in the graph, free by measured costs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_models
import pytest
from cost_cases import flat
from onnx import helper
from profiled import write_profile

from partitioner.cost_model.compute import node_seconds
from partitioner.cost_model.kernels import computed_within
from partitioner.cost_model.profile import Profile
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import place
from partitioner.search.one_kernel import beside_producers

SHAPE = [1, 4, 6, 6]
WEIGHTS = {
    "w": np.ones((4, 4, 3, 3), np.float32),
    **{name: np.ones(4, np.float32) for name in ("scale", "bias", "mean", "variance")},
}


def graph(*lines: str, outputs: tuple[str, ...] = ("y",)) -> Graph:
    """A graph of lines like ``a = Relu x``; a node is called like its result."""
    nodes = []
    for line in lines:
        result, text = line.split(" = ")
        op, *operands = text.split()
        if op == "Conv":
            nodes.append(
                helper.make_node(op, [*operands, "w"], [result], name=result, pads=[1] * 4)
            )
            continue
        if op == "BatchNormalization":
            operands += ["scale", "bias", "mean", "variance"]
        nodes.append(helper.make_node(op, operands, [result], name=result))
    used = {name for node in nodes for name in node.input}
    weights = {name: array for name, array in WEIGHTS.items() if name in used}
    types = dict.fromkeys(("x", *outputs), ("float32", SHAPE))
    model = onnx_models.model(
        nodes, {"x": types["x"]}, {name: types[name] for name in outputs}, weights
    )
    return load_onnx(model).graph


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            ("a = Conv x", "b = BatchNormalization a", "y = Relu b"),
            {"b": "a", "y": "b"},
        ),
        (
            ("a = Conv x", "b = BatchNormalization a", "s = Sum b x", "y = Relu s"),
            {"b": "a", "s": "b", "y": "s"},
        ),
        (("a = Conv x", "r = Relu a", "y = Add r x"), {"r": "a"}),  # the activation comes last
        (("a = Conv x", "r = Relu a", "y = Add a r"), {}),  # two nodes read the Conv's result
        (("a = Neg x", "s = Add a x", "y = Relu s"), {}),  # no kernel at the root
        (("r = Relu x", "y = BatchNormalization r"), {}),
    ],
)
def test_what_a_kernel_computes_at_its_end(
    lines: tuple[str, ...], expected: dict[str, str]
) -> None:
    assert computed_within(graph(*lines)) == expected


def test_a_result_of_the_model_is_computed_by_itself() -> None:
    of_two = graph("a = Conv x", "y = Relu a", outputs=("a", "y"))
    assert computed_within(of_two) == {}


def test_such_nodes_are_free_where_costs_are_measured(tmp_path: Path) -> None:
    block = graph("a = Conv x", "b = BatchNormalization a", "y = Relu b")
    write_profile(tmp_path / "p", block, 1e-3, device="d", threads=1, processes=2)
    (spec, *_) = flat(2).devices
    measured = replace(spec, profile=Profile.read(tmp_path / "p", "d", 1, 2))
    for devices, is_measured in (((spec,) * 2, False), ((measured,) * 2, True)):
        cluster = replace(flat(2), devices=devices)
        seconds = {
            node.name: node_seconds(
                block, place(block, node, DeviceMesh.single(0), {}, None), cluster
            )[0]
            for node in block.nodes
        }
        if is_measured:
            assert seconds == {"a": 1e-3, "b": 0.0, "y": 0.0}
        else:
            assert min(seconds.values()) > 0


def test_free_nodes_move_to_the_device_of_their_kernel() -> None:
    from partitioner.cost_model.reshard import Resharder
    from partitioner.search.explicit import JointSearch
    from partitioner.search.request import Request
    from partitioner.strategies.derive import Rules
    from partitioner.strategies.spaces import families

    block = graph("a = Conv x", "b = BatchNormalization a", "c = Relu b", "y = Neg c")
    (family,) = families("inter", 2)
    request = Request(strategy="inter", time_limit_s=5)
    shared = JointSearch(block, flat(2), request, Rules.of(block), Resharder(flat(2)))
    built = shared.problem(family, shared.options(family))

    def choice(name: str, device: int) -> int:
        meshes = [placed.mesh for placed in built.candidates[name]]
        return meshes.index(DeviceMesh.single(device))

    chosen = [choice("a", 0), choice("b", 1), choice("c", 1), choice("y", 1)]
    moved = beside_producers(block, built, chosen, lambda _: 1.0)
    assert moved == (choice("a", 0), choice("b", 0), choice("c", 0), choice("y", 1))
    costs = iter((1.0, 2.0, 1.0))  # of the choices, with b moved, with c moved
    assert beside_producers(block, built, chosen, lambda _: next(costs)) == tuple(chosen)
