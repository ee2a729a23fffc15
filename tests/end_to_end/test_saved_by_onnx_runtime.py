"""Models as ONNX Runtime's optimizer and its quantisers write them: read, cut, and verified."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import partitioner
from helpers.onnx_files import onnx_models as om
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import load_onnx

LEVELS = {
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
FORMATS = {
    "QDQ": {"quant_format": QuantFormat.QDQ},
    "QDQ by channel": {
        "quant_format": QuantFormat.QDQ,
        "per_channel": True,
        "activation_type": QuantType.QUInt8,
        "weight_type": QuantType.QInt8,
    },
    "QOperator": {
        "quant_format": QuantFormat.QOperator,
        "activation_type": QuantType.QUInt8,
        "weight_type": QuantType.QUInt8,
    },
}


class Calibration(CalibrationDataReader):
    """Random inputs of a model, a few times."""

    def __init__(self, path: Path) -> None:
        graph = load_onnx(path).graph
        self.feeds = iter([random_inputs(graph, seed) for seed in range(3)])

    def get_next(self) -> dict[str, om.Array] | None:
        return next(self.feeds, None)


@contextmanager
def quiet() -> Iterator[None]:
    """The quantisers log remarks, and more of other loggers' than their own."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def quantised(path: Path, name: str, target: Path) -> Path:
    """The model of a file, with its activations and weights quantised, and saved."""
    with quiet():
        if name == "dynamic":
            quantize_dynamic(path, target)
        elif name.startswith("int4"):
            symmetric = not name.endswith("asymmetric")
            quantiser = MatMulNBitsQuantizer(onnx.load(path), block_size=32, is_symmetric=symmetric)
            quantiser.process()
            quantiser.model.save_model_to_file(str(target))
        else:
            quantize_static(path, target, Calibration(path), **FORMATS[name])
    return target


def saved(path: Path, level: str, target: Path) -> Path:
    """The model of a file as ONNX Runtime optimizes it."""
    options = ort.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.optimized_model_filepath = str(target)
    options.log_severity_level = 4
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return target


def assert_right(path: Path, devices: tuple[int, ...] = (2, 3)) -> set[str]:
    """The file is read, planned and verified; the operators that its graph has."""
    for count in devices:
        compiled = partitioner.compile(path, devices=count, cluster="ideal")
        assert compiled.verify().equal, (path.name, count)
    return {node.op for node in load_onnx(path).graph.nodes}


def convolutional(ir_version: int = 8) -> onnx.ModelProto:
    """Convolutions with activations, a residual sum, pools and a product."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> om.Array:
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    def node(op: str, reads: str, makes: str, **attrs: object) -> onnx.NodeProto:
        return helper.make_node(op, reads.split(), [makes], name=makes, **attrs)

    nodes = [
        node("Conv", "x w0 b0", "c0", pads=[1, 1, 1, 1]),
        node("Relu", "c0", "r0"),
        node("MaxPool", "r0", "p0", kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", "p0 w1 b1", "c1", pads=[1, 1, 1, 1]),
        node("Add", "c1 p0", "s1"),
        node("Relu", "s1", "r1"),
        node("Conv", "r1 w2 b2", "c2"),
        node("Sigmoid", "c2", "g2"),
        node("Concat", "r1 g2", "k2", axis=1),
        node("AveragePool", "k2", "a2", kernel_shape=[2, 2]),
        node("GlobalAveragePool", "a2", "g3"),
        node("Flatten", "g3", "f3"),
        node("Gemm", "f3 w3 b3", "y"),
    ]
    weights = {"w0": weight(16, 3, 3, 3), "w1": weight(16, 16, 3, 3), "w2": weight(16, 16, 1, 1)}
    weights |= {f"b{i}": weight(16, 1)[:, 0] for i in range(3)}
    weights |= {"w3": weight(32, 10), "b3": weight(10, 1)[:, 0]}
    proto = om.model(
        nodes, {"x": ("float32", [2, 3, 8, 8])}, {"y": ("float32", [2, 10])}, weights, opset=17
    )
    if ir_version == 3:
        tensors = [(t.name, t.data_type, list(t.dims)) for t in proto.graph.initializer]
        proto.graph.input.extend(helper.make_tensor_value_info(*tensor) for tensor in tensors)
    proto.ir_version = ir_version
    return proto


@pytest.mark.parametrize(
    ("level", "op"),
    [("extended", "com.microsoft::FusedConv"), ("all", "com.microsoft.nchwc::Conv")],
)
def test_a_convolutional_network_as_onnx_runtime_saves_it(
    level: str, op: str, tmp_path: Path
) -> None:
    """It saves no types of its results, and one of IR version 3 without its new inputs."""
    for version in (3, 8):
        onnx.save(convolutional(version), tmp_path / "m.onnx")
        path = saved(tmp_path / "m.onnx", level, tmp_path / f"{version}.onnx")
        ops = assert_right(path, (2,))
        assert (op in ops) or level == "all"  # blocks of channels are the processor's


@pytest.mark.parametrize("level", ["", "extended", "all"])
def test_a_convolutional_network_in_quantised_operators(level: str, tmp_path: Path) -> None:
    onnx.save(convolutional(), tmp_path / "m.onnx")
    path = quantised(tmp_path / "m.onnx", "QOperator", tmp_path / "q.onnx")
    if level:
        path = saved(path, level, tmp_path / "s.onnx")
    ops = assert_right(path, (2,))
    expected = {"QLinearConcat", "QLinearGlobalAveragePool"}
    assert {f"com.microsoft::{op}" for op in expected} <= ops


def light(name: str) -> onnx.ModelProto:
    """A network of ONNX's light models, with random weights in place of fills."""
    proto = onnx.load(Path(onnx.__file__).parent / f"backend/test/data/light/light_{name}.onnx")
    shapes = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    rng = np.random.default_rng(0)
    kept = []
    for node in proto.graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in shapes:
            sizes = [int(size) for size in shapes[node.input[0]]]
            fan = max(int(np.prod(sizes[1:])), 1)
            drawn = (rng.standard_normal(sizes) / fan**0.5).astype(np.float32)
            drawn = abs(drawn) / 10 + 0.5 if len(sizes) == 1 else drawn
            proto.graph.initializer.append(
                numpy_helper.from_array(drawn.astype(np.float32), node.output[0])
            )
        else:
            kept.append(node)
    del proto.graph.node[:]
    proto.graph.node.extend(kept)
    return proto


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_light_networks_as_onnx_runtime_saves_them(name: str, tmp_path: Path) -> None:
    onnx.save(light(name), tmp_path / "m.onnx")
    for level in LEVELS:
        assert_right(saved(tmp_path / "m.onnx", level, tmp_path / f"{level}.onnx"))


#: The quantiser of dynamic ranges fails on a ViT.
QUANTISED = [
    (name, kind)
    for name in ("bert", "gpt2", "llama", "vit")
    for kind in ("", "QDQ", "QOperator", "dynamic", "int4", "int4 asymmetric")
    if (name, kind) != ("vit", "dynamic")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), QUANTISED)
def test_transformers_as_onnx_runtime_saves_them(
    name: str, kind: str, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    path = exported(name)
    if kind:
        path = quantised(path, kind, tmp_path / "quantised.onnx")
    for level in LEVELS:
        assert_right(saved(path, level, tmp_path / f"{level}.onnx"), (2,))
