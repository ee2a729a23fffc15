"""What a loaded graph holds, and that it computes what the model computes."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from helpers.onnx_files import onnx_models as om
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.types import Dim

RNG = np.random.default_rng(0)
F16, F32 = "float16", "float32"


def floats(*shape: int) -> om.Array:
    return RNG.standard_normal(shape).astype(np.float32)


def node(op: str, reads: str, makes: str, **attrs: object) -> onnx.NodeProto:
    return helper.make_node(op, reads.split(), makes.split(), **attrs)


def test_a_small_model_keeps_names_types_and_weights() -> None:
    w = floats(3, 4)
    proto = om.model(
        [helper.make_node("MatMul", ["x", "w"], ["h"], name="mm"), node("Relu", "h", "y")],
        {"x": (F32, ["batch", 3])},
        {"y": (F32, ["batch", 4])},
        {"w": w},
    )
    traced = load_onnx(proto, dims={"batch": 2})
    graph = traced.graph
    assert [(n.name, n.op, n.inputs, n.outputs) for n in graph.nodes] == [
        ("mm", "MatMul", ("x", "w"), ("h",)),
        ("Relu_0", "Relu", ("h",), ("y",)),
    ]
    assert graph.types["x"].dims == (Dim(2, "batch"), Dim(3))
    assert graph.types["y"].shape == (2, 4)
    assert graph.opsets == {"": 17}
    np.testing.assert_array_equal(graph.constants["w"].load(), w)
    assert traced.notes == ("dims: batch=2",)
    om.assert_same(traced, {"x": floats(2, 3)})


def test_the_users_message_is_not_changed() -> None:
    proto = om.model([node("Relu", "x", "y")], {"x": (F32, [2])}, {"y": (F32, [2])})
    before = proto.SerializeToString(deterministic=True)
    load_onnx(proto)
    assert proto.SerializeToString(deterministic=True) == before


def test_unnamed_nodes_are_named_by_op_and_names_in_use_are_skipped() -> None:
    proto = om.model(
        [
            node("Relu", "x", "a"),
            helper.make_node("Neg", ["a"], ["b"], name="Relu_0"),
            node("Relu", "b", "c"),
            helper.make_node("Neg", ["c"], ["d"], name="twice"),
            helper.make_node("Abs", ["d"], ["y"], name="twice"),
        ],
        {"x": (F32, [2])},
        {"y": (F32, [2])},
    )
    names = [n.name for n in load_onnx(proto).graph.nodes]
    assert names == ["Relu_1", "Relu_0", "Relu_2", "twice", "twice_1"]


def test_initializers_are_not_inputs_and_unused_inputs_stay() -> None:
    proto = om.model(
        [node("Add", "x w", "y")],
        {"x": (F32, [2]), "unused": (F32, [5]), "w": (F32, [2])},
        {"y": (F32, [2])},
        {"w": floats(2)},
    )
    traced = load_onnx(proto)
    assert traced.graph.inputs == ("x", "unused")
    om.assert_same(traced, {"x": floats(2), "unused": floats(5)})


def test_outputs_that_are_inputs_weights_constants_or_repeated() -> None:
    proto = om.model(
        [
            node("Relu", "x", "y"),
            node("Constant", "", "c", value_floats=[1.0, 2.0]),
            node("Add", "c y", "z"),
            node("Shape", "x", "s"),
        ],
        {"x": (F32, [2])},
        {name: (F32, [2]) for name in ("y", "x", "w", "c", "z")} | {"s": ("int64", [1])},
        {"w": floats(2)},
    )
    proto.graph.output.append(proto.graph.output[0])
    traced = load_onnx(proto)
    assert traced.graph.outputs == ("y", "x_output", "w_output", "c", "z", "s", "y_output")
    assert [o.name for o in traced.whole.graph.output] == list(traced.graph.outputs)
    assert traced.graph.output_names == {"x_output": "x", "w_output": "w"}
    assert "output 'y' repeats another output: it is returned as 'y_output'" in traced.notes
    x = floats(2)
    whole = om.assert_same(traced, {"x": x})
    np.testing.assert_array_equal(whole[1], x)
    np.testing.assert_array_equal(whole[5], [2])


def test_an_identity_between_two_outputs_keeps_both_names() -> None:
    proto = om.model(
        [node("Relu", "x", "y"), node("Identity", "y", "z"), node("Identity", "x", "v")],
        {"x": (F32, [2])},
        {"y": (F32, [2]), "z": (F32, [2]), "v": (F32, [2])},
    )
    traced = load_onnx(proto)
    assert traced.graph.outputs == ("y", "z", "v")
    om.assert_same(traced, {"x": floats(2)})


def test_identities_and_dropout_that_is_off_are_removed() -> None:
    proto = om.model(
        [
            node("Identity", "x", "a"),
            node("Dropout", "a", "b mask"),
            node("Relu", "b", "c"),
            node("Identity", "c", "d"),
            node("Identity", "d", "y"),
        ],
        {"x": (F32, [2])},
        {"y": (F32, [2])},
    )
    traced = load_onnx(proto)
    assert [(n.op, n.inputs, n.outputs) for n in traced.graph.nodes] == [("Relu", ("x",), ("y",))]
    om.assert_same(traced, {"x": floats(2)})


@pytest.mark.parametrize(("opset", "kept"), [(7, False), (10, False), (12, True)])
def test_old_dropout_is_off_and_new_dropout_in_training_stays(opset: int, kept: bool) -> None:
    reads = "x ratio on" if opset >= 12 else "x"
    weights = {"ratio": np.float32(0.5), "on": np.array(True)} if opset >= 12 else {}
    proto = om.model(
        [node("Dropout", reads, "a"), node("Relu", "a", "y")],
        {"x": (F32, [2])},
        {"y": (F32, [2])},
        {name: np.asarray(value) for name, value in weights.items()},
        opset=opset,
    )
    ops = [n.op for n in load_onnx(proto).graph.nodes]
    assert ops == (["Dropout", "Relu"] if kept else ["Relu"])


def test_equal_subexpressions_are_computed_once_and_random_ones_are_not() -> None:
    twice = [node("Exp", "x", "a"), node("Exp", "x", "b"), node("Add", "a b", "y")]
    proto = om.model(twice, {"x": (F32, [2])}, {"y": (F32, [2])})
    traced = load_onnx(proto)
    assert [n.op for n in traced.graph.nodes] == ["Exp", "Add"]
    om.assert_same(traced, {"x": floats(2)})
    drawn = [node("RandomNormalLike", "x", "a"), node("RandomNormalLike", "x", "b"), twice[2]]
    proto = om.model(drawn, {"x": (F32, [2])}, {"y": (F32, [2])})
    assert len(load_onnx(proto).graph.nodes) == 3


def test_scalars_made_of_constants_stay_apart() -> None:
    half = onnx.TensorProto.FLOAT16
    nodes = []
    for layer, (x, y) in enumerate((("x", "h"), ("h", "y"))):
        nodes += [
            node("Cast", "two", f"half{layer}", to=half),
            node("Sqrt", f"half{layer}", f"root{layer}"),
            node("Mul", f"{x} root{layer}", y),
        ]
    proto = om.model(nodes, {"x": (F16, [3])}, {"y": (F16, [3])}, {"two": np.array(2, np.float32)})
    traced = load_onnx(proto)
    assert [n.op for n in traced.graph.nodes] == ["Cast", "Sqrt", "Mul"] * 2
    assert all(not set(n.attrs) - {"to"} for n in traced.graph.nodes)
    om.assert_same(traced, {"x": floats(3).astype(np.float16)})
    rows = [node("Cast", "two", f"half{layer}", to=half) for layer in (0, 1)]
    proto = om.model(  # vectors are made once
        [*rows, node("Mul", "x half0", "h"), node("Mul", "h half1", "y")],
        {"x": (F16, [3])},
        {"y": (F16, [3])},
        {"two": floats(3)},
    )
    assert [n.op for n in load_onnx(proto).graph.nodes] == ["Cast", "Mul", "Mul"]


def test_reshapes_computed_from_shapes_are_folded() -> None:
    def part(name: str, index: int) -> list[onnx.NodeProto]:
        return [
            node("Constant", "", f"i{name}", value_int=index),
            node("Gather", f"shape i{name}", f"d{name}", axis=0),
            node("Unsqueeze", f"d{name} zero", f"u{name}"),
        ]

    proto = om.model(
        [
            node("Shape", "x", "shape"),
            node("Constant", "", "zero", value_ints=[0]),
            *part("b", 0),
            *part("s", 1),
            node("Constant", "", "heads", value_ints=[4]),
            node("Constant", "", "rest", value_ints=[-1]),
            node("Concat", "ub us heads rest", "target", axis=0),
            node("Reshape", "x target", "r"),
            node("Transpose", "r", "t", perm=[0, 2, 1, 3]),
            node("Concat", "ub us rest", "back", axis=0),
            node("Reshape", "t back", "y"),
        ],
        {"x": (F32, ["b", "s", 32])},
        {"y": (F32, None)},
    )
    traced = load_onnx(proto, dims={"b": 2, "s": 5})
    graph = traced.graph
    assert [n.op for n in graph.nodes] == ["Reshape", "Transpose", "Reshape"]
    target = graph.constant(graph.nodes[0].inputs[1])
    assert target is not None
    assert graph.types["t"].shape == (2, 4, 5, 8)
    om.assert_same(traced, {"x": floats(2, 5, 32)})


def test_bfloat16_weights() -> None:
    w = floats(3, 2).astype(ml_dtypes.bfloat16)
    proto = om.model(
        [node("Cast", "x", "h", to=16), node("MatMul", "h w", "g"), node("Cast", "g", "y", to=1)],
        {"x": (F32, [2, 3])},
        {"y": (F32, [2, 2])},
        {"w": w},
    )
    graph = load_onnx(proto).graph
    assert graph.types["w"].dtype == "bfloat16"
    assert graph.constants["w"].load().dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(graph.constants["w"].load(), w)


def test_zero_size_dims() -> None:
    proto = om.model(
        [node("Concat", "x empty", "y", axis=0)],
        {"x": (F32, ["n", 3]), "empty": (F32, [0, 3])},
        {"y": (F32, ["m", 3])},
    )
    traced = load_onnx(proto, dims={"n": 2})
    assert traced.graph.types["empty"].shape == (0, 3)
    om.assert_same(traced, {"x": floats(2, 3), "empty": floats(0, 3)})


def test_constants_by_all_attribute_forms_and_shared_views() -> None:
    w = floats(200, 100)
    proto = om.model(
        [
            node("Constant", "", "f", value_float=2.0),
            node("Constant", "", "t", value=numpy_helper.from_array(floats(100))),
            node("Transpose", "w", "wt", perm=[1, 0]),
            node("ConstantOfShape", "size", "ones", value=numpy_helper.from_array(floats(1))),
            node("MatMul", "x wt", "a"),
            node("Add", "a ones", "b"),
            node("Mul", "b f", "y"),
            node("MatMul", "y w", "z"),
            node("Add", "z t", "v"),
        ],
        {"x": (F32, [2, 100])},
        {"v": (F32, [2, 100])},
        {"w": w, "size": np.array([2, 200])},
    )
    traced = load_onnx(proto)
    ops = [n.op for n in traced.graph.nodes]
    assert ops == ["Transpose", "MatMul", "Add", "Mul", "MatMul", "Add"], "w is read by others too"
    assert traced.graph.constants["ones"].load().strides == (0, 0), "no memory for equal elements"
    om.assert_same(traced, {"x": floats(2, 100)})


def test_a_weight_only_read_transposed_becomes_its_transpose_without_a_copy() -> None:
    proto = om.model(
        [node("Transpose", "w", "wt", perm=[1, 0]), node("MatMul", "x wt", "y")],
        {"x": (F32, [2, 100])},
        {"y": (F32, [2, 200])},
        {"w": floats(200, 100)},
    )
    traced = load_onnx(proto)
    assert [n.op for n in traced.graph.nodes] == ["MatMul"]
    assert not traced.graph.constants["wt"].load().flags.owndata
    om.assert_same(traced, {"x": floats(2, 100)})


def test_a_huge_constant_is_not_folded() -> None:
    proto = om.model(
        [
            node("ConstantOfShape", "size", "big"),
            node("ReduceSum", "big", "s", keepdims=0),
            node("Range", "zero limit one", "r"),
            node("Cast", "r", "c", to=1),
            node("ReduceMax", "c", "m", keepdims=0),
            node("Add", "s m", "a"),
            node("Add", "a x", "y"),
        ],
        {"x": (F32, [1])},
        {"y": (F32, [1])},
        {
            "size": np.array([2**33]),
            "zero": np.array(0),
            "limit": np.array(2**40),
            "one": np.array(1),
        },
    )
    graph = load_onnx(proto).graph
    assert [n.op for n in graph.nodes][:3] == ["ConstantOfShape", "ReduceSum", "Range"]
    assert graph.types["c"].shape == (2**40,)


def test_local_functions_are_inlined() -> None:
    inner = helper.make_function(
        "local", "Inner", ["a"], ["b"], [node("Exp", "a", "b")], [helper.make_opsetid("", 17)]
    )
    call = helper.make_node("Inner", ["p"], ["q"], domain="local")
    outer = helper.make_function(
        "local",
        "Outer",
        ["p", "w"],
        ["r"],
        [call, node("Mul", "q w", "r")],
        [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)],
    )
    proto = om.model(
        [helper.make_node("Outer", ["x", "w"], ["y"], domain="local")],
        {"x": (F32, [2])},
        {"y": (F32, [2])},
        {"w": floats(2)},
        domains=["local"],
        functions=[inner, outer],
    )
    traced = load_onnx(proto)
    assert [n.op for n in traced.graph.nodes] == ["Exp", "Mul"]
    om.assert_same(traced, {"x": floats(2)})


def test_custom_ops_are_kept_with_their_declared_shapes() -> None:
    proto = om.model(
        [helper.make_node("Twirl", ["x"], ["h"], domain="acme", speed=2), node("Relu", "h", "y")],
        {"x": (F32, ["n", 2])},
        {"y": (F32, None)},
        domains=["acme"],
    )
    proto.graph.value_info.extend(om.infos({"h": (F32, ["n", 7])}))
    traced = load_onnx(proto, dims={"n": 3})
    assert traced.graph.nodes[0].op == "acme::Twirl"
    assert traced.graph.nodes[0].attrs == {"speed": 2}
    assert traced.graph.types["y"].shape == (3, 7)
    assert traced.graph.opsets == {"": 17, "acme": 1}
    assert [note for note in traced.notes if "ONNX Runtime" in note] == [
        "stock ONNX Runtime has no operator acme::Twirl ('Twirl_0'): verify and run will fail"
    ]


def test_operators_that_onnx_runtime_adds_are_not_called_unknown() -> None:
    gelu = helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    proto = om.model([gelu], {"x": (F32, [2])}, {"y": (F32, [2])}, domains=["com.microsoft"])
    assert not any("ONNX Runtime" in note for note in load_onnx(proto).notes)


def test_the_long_name_of_the_default_domain() -> None:
    proto = om.model([node("Relu", "x", "y")], {"x": (F32, [2])}, {"y": (F32, [2])})
    proto.opset_import[0].domain = "ai.onnx"
    proto.graph.node[0].domain = "ai.onnx"
    traced = load_onnx(proto)
    assert traced.graph.nodes[0].op == "Relu"
    assert traced.graph.opsets == {"": 17}
    om.assert_same(traced, {"x": floats(2)})


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 18, 22, 26])
def test_supported_opsets_load_and_run(opset: int) -> None:
    axes = {} if opset >= 13 else {"axes": [0]}
    reads = "a axes" if opset >= 13 else "a"
    proto = om.model(
        [node("Relu", "x", "a"), node("Unsqueeze", reads, "y", **axes)],
        {"x": (F32, [2])},
        {"y": (F32, [1, 2])},
        {"axes": np.array([0])} if opset >= 13 else {},
        opset=opset,
    )
    proto.ir_version = 14
    traced = load_onnx(proto)
    assert traced.graph.opsets == {"": opset}
    om.assert_same(traced, {"x": floats(2)})


OLD_FORMS = {
    "Upsample-7": (7, "x", {"scales": [1.0, 1.0, 2.0, 2.0]}, (2, 4, 12, 12)),
    "Upsample-9": (9, "x scales", {}, (2, 4, 12, 12)),
    "Resize-10": (10, "x scales", {}, (2, 4, 12, 12)),
    "Slice-1": (7, "x", {"axes": [2, 3], "starts": [1, 0], "ends": [3, 99]}, (2, 4, 2, 6)),
    "TopK-1": (7, "x", {"axis": 1, "k": 3}, (2, 3, 6, 6)),
    "Sum-6": (7, "x x", {}, (2, 4, 6, 6)),
    "Clip-6": (7, "x", {"min": 0.0, "max": 0.5}, (2, 4, 6, 6)),
    "Pad-2": (7, "x", {"pads": [0, 0, 1, 1, 0, 0, 1, 1]}, (2, 4, 8, 8)),
    "ReduceSum-1": (7, "x", {"axes": [1], "keepdims": 0}, (2, 6, 6)),
    "Split-2": (7, "x", {"axis": 1}, (2, 4, 6, 6)),
}


@pytest.mark.parametrize("name", OLD_FORMS)
def test_old_forms_of_ops_are_kept_and_inferred(name: str) -> None:
    opset, reads, attrs, shape = OLD_FORMS[name]
    op = name.partition("-")[0]
    makes = {"y": (F32, None)} | ({"i": ("int64", None)} if op == "TopK" else {})
    proto = om.model(
        [node(op, reads, " ".join(makes), **attrs), node("Neg", "y", "z")],
        {"x": (F32, [2, 4, 6, 6])},
        makes | {"z": (F32, None)},
        {"scales": np.array([1, 1, 2, 2], np.float32)},
        opset=opset,
    )
    traced = load_onnx(proto)
    assert traced.graph.nodes[0].op == op
    assert traced.graph.types["z"].shape == shape
    om.assert_same(traced, {"x": floats(2, 4, 6, 6)})


def test_external_weights_are_mapped(tmp_path: Path) -> None:
    w, b = floats(300, 200), floats(200)
    proto = om.model(
        [node("MatMul", "x w", "h"), node("Add", "h b", "y")],
        {"x": (F32, [2, 300])},
        {"y": (F32, [2, 200])},
        {"w": w, "b": b},
    )
    path = tmp_path / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    traced = load_onnx(path)
    constant = traced.graph.constants["w"]
    np.testing.assert_array_equal(constant.load(), w)
    assert not constant.load().flags.owndata
    assert len(traced.whole.SerializeToString()) < 2000, "weights stay in their file"
    om.assert_same(traced, {"x": floats(2, 300)})


LIGHT = {
    "bvlc_alexnet": (22, 16, 243_860_896),
    "densenet121": (668, 848, 32_584_608),
    "inception_v1": (142, 116, 27_994_208),
    "inception_v2": (371, 485, 44_939_168),
    "resnet50": (176, 267, 102_440_608),
    "shufflenet": (203, 248, 5_680_608),
    "squeezenet": (65, 52, 4_941_984),
    "vgg19": (44, 38, 574_668_960),
    "zfnet512": (22, 16, 349_002_144),
}


def light(name: str) -> Path:
    return Path(onnx.__file__).parent / f"backend/test/data/light/light_{name}.onnx"


@pytest.mark.parametrize("name", LIGHT)
def test_the_light_zoo_loads_with_all_its_weights(name: str) -> None:
    """Weights made by ConstantOfShape are parameters (shape operands of Reshape not counted)."""
    graph = load_onnx(light(name)).graph
    floating = [c for c in graph.constants.values() if c.type.dtype == F32]
    assert (len(graph.nodes), len(floating), sum(c.type.nbytes for c in floating)) == LIGHT[name]
    assert not {n.op for n in graph.nodes} & {"ConstantOfShape", "Constant", "Dropout"}


@pytest.mark.parametrize("name", ["shufflenet", "squeezenet", "inception_v1"])
def test_light_zoo_models_compute_the_same(name: str) -> None:
    traced = load_onnx(light(name))
    om.assert_same(traced, random_inputs(traced.graph, 0), tolerance=1e-5)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists mappings as Linux does")
def test_external_weights_are_mapped_no_longer_than_they_are_read(tmp_path: Path) -> None:
    """Else all weights of a model count as memory of the process, one rank after the other."""
    w = floats(64, 64)
    proto = om.model(
        [node("MatMul", "x w", "y")], {"x": (F32, [2, 64])}, {"y": (F32, [2, 64])}, {"w": w}
    )
    path = tmp_path / "m.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    constant = load_onnx(path).graph.constants["w"]
    np.testing.assert_array_equal(constant.load(), w)
    maps = Path("/proc/self/maps")
    assert str(tmp_path) not in maps.read_text()
    array = constant.load()
    assert str(tmp_path) in maps.read_text()
    np.testing.assert_array_equal(array, w)
