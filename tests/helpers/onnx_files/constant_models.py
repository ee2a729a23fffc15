"""Models of constants, run by ONNX Runtime in one thread, and their results bit by bit."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import onnx
import onnxruntime as ort
import torch

from helpers.onnx_files import onnx_models as om
from partitioner.backends.onnx.sessions.whole import run_whole

_NONE: Mapping[str, om.Array] = MappingProxyType({})


def run(proto: onnx.ModelProto, inputs: Mapping[str, om.Array] = _NONE) -> list[om.Array]:
    """The outputs of a model without optimizations; bfloat16 and float8 as arrays of ml_dtypes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return list(run_whole(proto, None, inputs, optimization="disable").values())
    finally:
        torch.set_num_threads(threads)


def run_node(node: onnx.NodeProto, operands: Mapping[str, om.Array]) -> list[om.Array] | None:
    """The results of a node; None where ONNX Runtime refuses it."""
    infos = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output]
    inputs = om.infos({name: (x.dtype.name, x.shape) for name, x in operands.items()})
    graph = onnx.helper.make_graph([node], "one", inputs, infos)
    imports = [onnx.helper.make_opsetid("", 17)]
    proto = onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        results: list[om.Array] = session.run(None, dict(operands))
    except Exception:  # noqa: BLE001 - its errors have no common class
        return None
    return results


def bits(array: om.Array) -> tuple[str, tuple[int, ...], bytes]:
    """Element type, shape and contents, with every NaN alike."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.kind not in "biuSUO":
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return array.dtype.name, array.shape, array.tobytes()
