"""Element types of ONNX Runtime's own operators, compared with its schemas."""

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import helper
from onnx_ir import DataType
from onnx_shape_inference import infer_symbolic_shapes
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

import partitioner
from helpers.onnx_files import onnx_models as om
from helpers.onnx_files.rank_files import assert_rank_files_run
from partitioner.api.compiled.onnx_model import OnnxRanks
from partitioner.frontends.onnx.inferring.corrections import correct_inference
from partitioner.frontends.onnx.load import load_onnx

#: ONNX's names of element types where they are not those of `DataType` in small letters.
_NAMES = {"float": "FLOAT", "double": "DOUBLE", "bool": "BOOL", "string": "STRING"}
#: Typed by an attribute; CUDA only.
_BY_ATTRIBUTE = {"GemmFloat8"}


def _dtypes(names: Any) -> list[DataType]:
    plain = [name[7:-1] for name in names if name.startswith("tensor(")]
    known = [_NAMES.get(name, name.upper()) for name in plain]
    return [DataType[name] for name in known if name in DataType.__members__]


def _bindings(schema: Any) -> Iterator[Mapping[str, DataType]]:
    allowed = {c.type_param_str: _dtypes(c.allowed_type_strs) for c in schema.type_constraints}
    names = sorted({value.typeStr for value in schema.inputs})
    choices = [allowed.get(name, _dtypes([name])) for name in names]
    for dtypes in itertools.islice(itertools.product(*choices), 100):
        yield dict(zip(names, dtypes, strict=True))


def _inferred(schema: Any, types: Mapping[str, DataType], rank: int) -> list[DataType | None]:
    inputs = [
        onnx_ir.Value(
            name=f"x{index}",
            type=onnx_ir.TensorType(types[value.typeStr]),
            shape=onnx_ir.Shape([4] * rank),
        )
        for index, value in enumerate(schema.inputs)
    ]
    node = onnx_ir.Node("com.microsoft", schema.name, inputs, num_outputs=len(schema.outputs))
    for index, value in enumerate(node.outputs):
        value.name = f"y{index}"
    opsets = {"": 17, "com.microsoft": 1}
    graph = onnx_ir.Graph(inputs, node.outputs, nodes=[node], opset_imports=opsets)
    try:
        infer_symbolic_shapes(onnx_ir.Model(graph, ir_version=10), warn_on_missing=False)
    except ValueError:  # these operands do not make this operator
        return []
    return [value.dtype for value in node.outputs]


def test_result_types_are_those_of_onnx_runtime() -> None:
    correct_inference()
    wrong, compared = [], 0
    for schema in get_all_operator_schema():
        if schema.domain != "com.microsoft" or schema.name in _BY_ATTRIBUTE:
            continue
        allowed = {c.type_param_str: _dtypes(c.allowed_type_strs) for c in schema.type_constraints}
        for types, rank in itertools.product(_bindings(schema), (2, 3, 4)):
            for value, dtype in zip(schema.outputs, _inferred(schema, types, rank), strict=False):
                name = value.typeStr
                right = [types[name]] if name in types else allowed.get(name, _dtypes([name]))
                compared += dtype is not None
                if dtype is not None and dtype not in right:
                    wrong.append((schema.name, value.name, types, dtype))
    assert not wrong
    assert compared > 500


def quantised_gemm(*, quantised: bool, rows: int = 4) -> om.onnx.ModelProto:
    """Two QGemm, the first with a result in uint8 or in float."""
    rng = np.random.default_rng(0)
    scale, zero = np.array(0.05, np.float32), np.array(120, np.uint8)
    weights: dict[str, om.Array] = {"s": scale, "z": zero, "zw": np.array(3, np.int8)}
    weights |= {"w": rng.integers(-9, 9, (8, 6), np.int8), "c": np.arange(6, dtype=np.int32)}
    ends = ["s", "z"] if quantised else []
    node = helper.make_node(
        "QGemm", ["x", "s", "z", "w", "s", "zw", "c", *ends], ["y"], domain="com.microsoft"
    )
    dtype = "uint8" if quantised else "float32"
    last = helper.make_node("Identity", ["y"], ["out"])
    inputs, outputs = {"x": ("uint8", [rows, 8])}, {"out": (dtype, [rows, 6])}
    return om.model([node, last], inputs, outputs, weights, domains=["com.microsoft"])


@pytest.mark.parametrize("quantised", [True, False])
def test_a_qgemm_has_the_type_of_its_zero_point(quantised: bool) -> None:
    proto = quantised_gemm(quantised=quantised)
    traced = load_onnx(proto)
    assert traced.graph.types["out"].dtype == ("uint8" if quantised else "float32")
    x = np.random.default_rng(1).integers(0, 255, (4, 8)).astype(np.uint8)
    om.assert_same(traced, {"x": x})
    compiled = partitioner.compile(proto, devices=2, strategy="inter")
    assert compiled.verify().equal
    assert isinstance(compiled.ranks, OnnxRanks)
    assert_rank_files_run(compiled.ranks.folder)


def test_a_pad_with_axes_of_run_time_has_its_declared_shape() -> None:
    """Axes [1, 0] swap the pads: inference that takes them for all dims says [5, 4]."""
    node = helper.make_node("Pad", ["x", "p", "", "axes"], ["y"])
    inputs = {"x": ("float32", [3, 4]), "axes": ("int64", [2])}
    pads = {"p": np.array([1, 0, 1, 0])}
    proto = om.model([node], inputs, {"y": ("float32", [3, 6])}, pads, opset=18)
    x = np.ones((3, 4), np.float32)
    om.assert_same(load_onnx(proto), {"x": x, "axes": np.array([1, 0])})
    proto = om.model(
        [node],
        {**inputs, "axes": ("int64", [1])},
        {"y": ("float32", [3, 6])},
        {"p": np.array([1, 1])},
        opset=18,
    )
    om.assert_same(load_onnx(proto), {"x": x, "axes": np.array([1])})


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean"])
def test_a_reduction_over_axes_of_run_time_has_the_shape_of_its_declared_result(op: str) -> None:
    nodes = [helper.make_node(op, ["x", "axes"], ["h"]), helper.make_node("Sqrt", ["h"], ["y"])]
    inputs = {"x": ("float32", [3, 4]), "axes": ("int64", [1])}
    proto = om.model(nodes, inputs, {"y": ("float32", [3, 1])}, opset=18)
    traced = load_onnx(proto)
    assert traced.graph.types["h"].shape == (3, 1)
    om.assert_same(traced, {"x": np.ones((3, 4), np.float32), "axes": np.array([1])})
    assert partitioner.compile(proto, devices=2).graph.types["h"].shape == (3, 1)


WINDOWS = [
    (op, {"kernel_shape": [kernel], "strides": [stride], "dilations": [dilation], **pads})
    for op in ("AveragePool", "LpPool", "MaxPool")
    for kernel, stride, dilation in ((2, 1, 2), (3, 2, 3), (3, 3, 1))
    for pads in (
        {"auto_pad": "SAME_UPPER"},
        {"auto_pad": "SAME_LOWER", "ceil_mode": 1},
        {"auto_pad": "VALID", "ceil_mode": 1},
        {"pads": [1, 1], "ceil_mode": 1},
        {"pads": [1, 0]},
    )
] + [
    ("ConvTranspose", {"strides": [stride], "dilations": [dilation], "auto_pad": auto})
    for stride, dilation in ((2, 2), (4, 1), (7, 2))
    for auto in ("SAME_UPPER", "SAME_LOWER")
]


@pytest.mark.parametrize("size", [5, 6, 9])
def test_windows_are_as_many_as_onnx_runtime_computes(size: int) -> None:
    """Some windows begin in the padding, some are wider than the image."""
    for op, attributes in WINDOWS:
        weights = {"w": np.ones((1, 1, 3), np.float32)} if op == "ConvTranspose" else {}
        node = helper.make_node(op, ["x", *weights], ["y"], **attributes)
        inputs, outputs = {"x": ("float32", [1, 1, size])}, {"y": ("float32", ["a", "b", "c"])}
        proto = om.model([node], inputs, outputs, weights, opset=22)
        proto.ir_version = 10
        traced = load_onnx(proto)
        x = np.random.default_rng(size).standard_normal((1, 1, size)).astype(np.float32)
        om.assert_same(traced, {"x": x})


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_a_last_window_that_begins_in_the_padding_is_none_where_it_is_an_output(op: str) -> None:
    """ONNX Runtime infers a position for it, and computes none."""
    pool = {"kernel_shape": [2, 2], "strides": [3, 3], "auto_pad": "VALID", "ceil_mode": 1}
    node = helper.make_node(op, ["x"], ["y"], **pool)
    ends = {"y": ("float32", ["n", "c", "h", "w"])}
    proto = om.model([node], {"x": ("float32", [1, 1, 6, 6])}, ends, opset=18)
    assert load_onnx(proto).graph.types["y"].shape == (1, 1, 2, 2)
    compiled = partitioner.compile(proto, devices=2, strategy="inter")
    assert compiled.verify().equal
    assert_rank_files_run(compiled.ranks.folder)


def test_ceil_mode_is_kept_where_onnx_runtime_needs_it() -> None:
    """Without it, ONNX Runtime refuses the negative padding of a stride wider than the window."""
    pool = {"kernel_shape": [1, 2], "strides": [3, 2], "auto_pad": "SAME_LOWER", "ceil_mode": 1}
    node = helper.make_node("AveragePool", ["x"], ["y"], count_include_pad=1, **pool)
    ends = {"y": ("float32", ["n", "c", "h", "w"])}
    proto = om.model([node], {"x": ("float32", [2, 4, 3, 6])}, ends, opset=18)
    assert partitioner.compile(proto, devices=2, strategy="intra", cluster="ideal").verify().equal


def test_a_window_wider_than_the_image_keeps_its_mean() -> None:
    """Where ceil_mode goes, for the rows, ONNX Runtime would count the columns of the window."""
    pool = {"kernel_shape": [2, 4], "strides": [3, 2], "ceil_mode": 1, "count_include_pad": 1}
    node = helper.make_node("AveragePool", ["x"], ["y"], **pool)
    ends = {"y": ("float32", ["n", "c", "h", "w"])}
    traced = load_onnx(om.model([node], {"x": ("float32", [1, 1, 3, 3])}, ends, opset=11))
    assert traced.graph.nodes[0].attrs["kernel_shape"] == (2, 3)
    x = np.random.default_rng(0).standard_normal((1, 1, 3, 3)).astype(np.float32)
    om.assert_same(traced, {"x": x}, 1e-6)


def drawn_pool(rng: random.Random) -> onnx.ModelProto:
    """A pool of two dims, whose window may be wider than the image, in any operator set."""
    op = rng.choice(("AveragePool", "LpPool", "MaxPool"))
    dilates, ceils, opsets = {
        "AveragePool": (19, 10, (7, 10, 11, 13, 18, 19, 22)),
        "LpPool": (18, 18, (11, 18, 22)),
        "MaxPool": (10, 10, (8, 10, 12, 22)),
    }[op]
    opset = rng.choice(opsets)

    def pair(least: int, most: int) -> list[int]:
        return [rng.randint(least, most), rng.randint(least, most)]

    attributes: dict[str, Any] = {"kernel_shape": pair(1, 6), "strides": pair(1, 4)}
    if opset >= dilates and rng.random() < 0.4:
        attributes["dilations"] = pair(1, 3)
    if opset >= ceils and rng.random() < 0.7:
        attributes["ceil_mode"] = 1
    if op == "AveragePool":
        attributes["count_include_pad"] = rng.randint(0, 1)
    padding = rng.random()
    if padding < 0.3:
        attributes["auto_pad"] = rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    elif padding < 0.7:
        attributes["pads"] = [*pair(0, 2), *pair(0, 2)]
    node = helper.make_node(op, ["x"], ["y"], **attributes)
    values = {"x": ("float32", [1, 1, *pair(1, 7)])}, {"y": ("float32", ["n", "c", "h", "w"])}
    proto = om.model([node], *values, opset=opset)
    proto.ir_version = 8
    return proto


@pytest.mark.slow
def test_drawn_pools_are_read_as_onnx_runtime_runs_them() -> None:
    rng, same = random.Random(0), 0
    for _ in range(3000):
        proto = drawn_pool(rng)
        shape = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
        x = np.random.default_rng(same).standard_normal(shape).astype(np.float32)
        try:
            (whole,) = om.run(proto, {"x": x})
        except Exception:  # noqa: BLE001 - ONNX Runtime refuses the window
            continue
        if whole.size:
            om.assert_same(load_onnx(proto), {"x": x}, 1e-5)
            same += 1
    assert same > 1000


@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER"])
def test_a_transposed_convolution_with_gaps_runs_where_it_is_an_output(auto: str) -> None:
    """ONNX Runtime infers size x stride for it, and computes less."""
    strides = {"strides": [4, 1], "auto_pad": auto}
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], **strides)
    weights = {"w": np.random.default_rng(0).standard_normal((1, 1, 3, 4)).astype(np.float32)}
    ends = {"y": ("float32", ["n", "c", "h", "w"])}
    proto = om.model([node], {"x": ("float32", [1, 1, 6, 7])}, ends, weights)
    assert load_onnx(proto).graph.types["y"].shape == (1, 1, 23, 7)
    assert partitioner.compile(proto, devices=2, strategy="inter").verify().equal


@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER"])
def test_a_dilated_pool_is_cut_and_kept_whole(auto: str) -> None:
    pool = {"kernel_shape": [2, 2], "dilations": [3, 1], "strides": [2, 1], "auto_pad": auto}
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("MaxPool", ["a"], ["b"], name="pool", **pool),
        helper.make_node("Relu", ["b"], ["y"]),
    ]
    ends = {"y": ("float32", ["n", "c", "h", "w"])}
    proto = om.model(nodes, {"x": ("float32", [1, 1, 14, 8])}, ends, opset=17)
    proto.graph.output.append(helper.make_tensor_value_info("b", 1, ["n", "c", "h", "w"]))
    for options in ({"strategy": "inter"}, {"parallel": "spatial", "cluster": "ideal"}):
        compiled = partitioner.compile(proto, devices=2, **options)  # type: ignore[call-overload]
        assert compiled.verify().equal
        assert_rank_files_run(compiled.ranks.folder)
    assert compiled.plan.nodes["pool"].cuts


@pytest.mark.parametrize(
    ("op", "operands", "attributes", "shape"),
    [
        ("MelWeightMatrix", [(7, 8), (7, 16), (7, 8192), (1, 0.0), (1, 4096.0)], {}, (9, 8)),
        (
            "Resize",
            [(1, np.zeros((1, 1, 2, 4))), None, None, (7, [1, 3])],
            {"axes": [2, 3], "keep_aspect_ratio_policy": "not_smaller", "mode": "nearest"},
            (1, 1, 2, 3),
        ),
    ],
)
def test_shapes_that_onnx_itself_infers(
    op: str, operands: list[Any], attributes: dict[str, Any], shape: tuple[int, ...]
) -> None:
    dtypes = {1: np.float32, 7: np.int64}
    weights = {f"w{i}": np.asarray(x[1], dtypes[x[0]]) for i, x in enumerate(operands) if x}
    names = ["" if x is None else f"w{i}" for i, x in enumerate(operands)]
    nodes = [
        helper.make_node(op, names, ["h"], **attributes),
        helper.make_node("Add", ["h", "x"], ["y"]),
    ]
    proto = om.model(nodes, {"x": ("float32", [1])}, {"y": ("float32", None)}, weights, opset=19)
    traced = load_onnx(proto)
    assert traced.graph.types["y"].shape == shape
    om.assert_same(traced, {"x": np.ones(1, np.float32)})
