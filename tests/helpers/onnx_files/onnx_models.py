"""Hand-built ONNX models for front-end tests, and an ir.Graph written back whole."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from partitioner.backends.onnx.files.messages import node_proto, tensor_proto, value_info
from partitioner.frontends.onnx.load import Traced
from partitioner.ir.graph import Graph

Array = np.ndarray[Any, np.dtype[Any]]
Dims = Sequence[int | str | None] | None
Values = Mapping[str, tuple[str, Dims]]

_TYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "string": 8,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "bfloat16": 16,
}


def infos(values: Values) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(name, _TYPES[dtype], dims)
        for name, (dtype, dims) in values.items()
    ]


def body(
    nodes: Sequence[onnx.NodeProto],
    inputs: Values,
    outputs: Values,
    weights: Mapping[str, Array] | None = None,
) -> onnx.GraphProto:
    tensors = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    return helper.make_graph(nodes, "built", infos(inputs), infos(outputs), tensors)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Values,
    outputs: Values,
    weights: Mapping[str, Array] | None = None,
    *,
    opset: int = 17,
    domains: Sequence[str] = (),
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    graph = body(nodes, inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=imports, ir_version=8, functions=functions)


def to_proto(graph: Graph) -> onnx.ModelProto:
    """The whole graph as one model, weights inlined."""
    written = helper.make_graph(
        [node_proto(node) for node in graph.nodes],
        "written",
        [value_info(name, graph.types[name]) for name in graph.inputs],
        [value_info(name, graph.types[name]) for name in graph.outputs],
        [
            tensor_proto(name, constant.load(), constant.type.dtype)
            for name, constant in graph.constants.items()
        ],
    )
    imports = [helper.make_opsetid(domain, version) for domain, version in graph.opsets.items()]
    return helper.make_model(written, opset_imports=imports, ir_version=10)


def run(proto: onnx.ModelProto, feeds: Mapping[str, Array], folder: str = "") -> list[Array]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    if folder:
        key = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(key, folder)
    session = ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    outputs: list[Array] = session.run(None, dict(feeds))
    return outputs


def assert_same(traced: Traced, feeds: Mapping[str, Array], tolerance: float = 0.0) -> list[Array]:
    """The graph computes what the model computes, with the types it claims; the results."""
    whole = run(traced.whole, feeds, str(traced.folder or ""))
    written = run(to_proto(traced.graph), feeds)
    assert len(written) == len(whole) == len(traced.graph.outputs)
    for name, mine, theirs in zip(traced.graph.outputs, written, whole, strict=True):
        type_ = traced.graph.types[name]
        assert (mine.shape, mine.dtype.name) == (theirs.shape, theirs.dtype.name)
        if name in traced.graph.bounded:
            assert all(size <= most for size, most in zip(mine.shape, type_.shape, strict=True))
        else:
            assert mine.shape == type_.shape
        np.testing.assert_allclose(
            mine.astype(np.float64), theirs.astype(np.float64), rtol=tolerance, atol=tolerance
        )
    return whole
