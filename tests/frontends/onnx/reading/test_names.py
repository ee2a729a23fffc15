"""Results that nobody reads stay where ONNX Runtime needs them, and go where it does not."""

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import helper

import partitioner
from helpers.onnx_files import onnx_models as om
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import load_onnx

F32 = "float32"
HEADS = {"q": (1, 2, 3, 4), "k": (1, 2, 3, 4), "v": (1, 2, 3, 4), "pk": (1, 2, 5, 4)}
NORM = {"x": (4, 3), "s": (3,), "b": (3,), "m": (3,), "e": (3,)}


@pytest.mark.parametrize(
    ("scopes", "module"),
    [
        ("['', 'layers', 'layers.0', 'add_3']", "layers.0"),
        ("['add_3']", None),
        ("['', 'add_3']", None),
        ("__import__('os').abort()", None),
        ("'" * 20_000, None),
    ],
)
def test_the_exporter_tells_the_module_of_a_node(scopes: str, module: str | None) -> None:
    node = helper.make_node("Relu", ["x"], ["y"], name="node_relu")
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    model = om.model([node], {"x": (F32, (2,))}, {"y": (F32, (2,))})
    graph = load_onnx(model).graph
    assert graph.modules.get("node_relu") == module
    bare = om.model([helper.make_node("Relu", ["x"], ["y"], name="node_relu")],
                    {"x": (F32, (2,))}, {"y": (F32, (2,))})  # fmt: skip
    assert load_onnx(bare).graph.digest == graph.digest


def attention(outputs: Sequence[str], read: dict[str, Sequence[int]]) -> onnx.ModelProto:
    node = helper.make_node("Attention", ["q", "k", "v", "", "pk", "pv"], list(outputs))
    shapes = {**HEADS, "pv": HEADS["pk"]}
    return om.model(
        [node],
        {name: (F32, shape) for name, shape in shapes.items()},
        {name: (F32, shape) for name, shape in read.items()},
        opset=23,
    )


def norm(outputs: Sequence[str], opset: int, **attrs: int) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Exp", ["e"], ["var"]),
        helper.make_node("BatchNormalization", ["x", "s", "b", "m", "var"], list(outputs), **attrs),
    ]
    values = {name: (F32, shape) for name, shape in NORM.items()}
    return om.model(nodes, values, {"y": (F32, (4, 3))}, opset=opset)


Y, PRESENT = (1, 2, 3, 4), (1, 2, 8, 4)


@pytest.mark.parametrize(
    ("outputs", "read"),
    [
        (("y", "a", "b"), {"y": Y}),
        (("y", "a", "b"), {"y": Y, "a": PRESENT}),
        (("y", "a", "b", ""), {"y": Y, "b": PRESENT}),
        (("y", "", "b"), {"y": Y, "b": PRESENT}),
    ],
)
def test_both_presents_of_attention_stay(
    outputs: Sequence[str], read: dict[str, Sequence[int]]
) -> None:
    traced = load_onnx(attention(outputs, read))
    (node,) = traced.graph.nodes
    assert len(node.outputs) == len(node.writes) == 3
    om.assert_same(traced, random_inputs(traced.graph, 0))


def test_rank_files_of_attention_with_an_unread_present_load() -> None:
    proto = attention(("y", "a", "b"), {"y": Y, "a": PRESENT})
    assert partitioner.compile(proto, devices=2, cluster="ideal", mesh={"tp": 2}).verify().equal


@pytest.mark.parametrize(
    ("outputs", "opset", "attrs", "kept"),
    [
        (("y", "", "", "", ""), 9, {}, 1),
        (("y", "", ""), 15, {}, 1),
        (("y", "", ""), 15, {"training_mode": 1}, 3),
        (("y", "mean", "spread"), 15, {"training_mode": 1}, 3),
    ],
)
def test_batch_norm_has_no_absent_result(
    outputs: Sequence[str], opset: int, attrs: dict[str, int], kept: int
) -> None:
    traced = load_onnx(norm(outputs, opset, **attrs))
    batch_norm = traced.graph.nodes[-1]
    assert len(batch_norm.outputs) == len(batch_norm.writes) == kept
    om.assert_same(traced, random_inputs(traced.graph, 0))


def test_absent_results_of_split_are_named_apart_from_the_models_names() -> None:
    nodes = [
        helper.make_node("Split", ["x"], ["", "a", ""], axis=0),
        helper.make_node("Neg", ["a"], ["Split_unread_0"]),
    ]
    proto = om.model(nodes, {"x": (F32, (6, 2))}, {"Split_unread_0": (F32, (2, 2))}, opset=13)
    traced = load_onnx(proto)
    assert traced.graph.nodes[0].outputs == ("Split_unread_1", "a", "Split_unread_2")
    om.assert_same(traced, random_inputs(traced.graph, 0))


def test_absent_results_in_bodies_and_functions_are_named() -> None:
    split = helper.make_node("Split", ["h"], ["p", ""], axis=0)
    shape = (F32, (2, 2))
    body = om.body([helper.make_node("Exp", ["x"], ["h"]), split], {}, {"p": shape})
    other = om.body([helper.make_node("Slice", ["x", "o", "t", "o"], ["r"])], {}, {"r": shape})
    function = helper.make_function(
        "own", "halves", ["h"], ["p"], [split], [helper.make_opsetid("", 13)]
    )
    proto = om.model(
        [
            helper.make_node("If", ["c"], ["i"], then_branch=body, else_branch=other),
            helper.make_node("halves", ["x"], ["f"], domain="own"),
            helper.make_node("Add", ["i", "f"], ["y"]),
        ],
        {"c": ("bool", ()), "x": (F32, (4, 2))},
        {"y": shape},
        {"o": np.array([0], np.int64), "t": np.array([2], np.int64)},
        opset=13,
        domains=("own",),
        functions=(function,),
    )
    traced = load_onnx(proto)
    om.assert_same(traced, random_inputs(traced.graph, 0))


def test_results_that_stand_alone_are_left_out() -> None:
    nodes = [
        helper.make_node("MaxPool", ["x"], ["p", "places"], kernel_shape=[2, 2]),
        helper.make_node("LayerNormalization", ["p", "g"], ["n", "mean", "spread"]),
        helper.make_node("Exp", ["x"], ["unread"]),
        helper.make_node("Add", ["n", "mean"], ["y"]),
    ]
    traced = load_onnx(
        om.model(
            nodes,
            {"x": (F32, (1, 1, 4, 4)), "g": (F32, (3,))},
            {"y": (F32, (1, 1, 3, 3))},
            {"spare": np.zeros(2, np.float32)},
        )
    )
    assert [node.outputs for node in traced.graph.nodes] == [("p",), ("n", "mean"), ("y",)]
    assert "spare" not in traced.graph.types
    om.assert_same(traced, random_inputs(traced.graph, 0), 1e-6)
