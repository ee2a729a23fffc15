"""Faults of single nodes that ONNX Runtime would find late come at planning, named."""

import math
import warnings

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, helper
from onnx.backend.test.case.node import collect_testcases

from helpers.onnx_files import onnx_models as om
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.load import load_onnx

F32 = "float32"
Types = dict[str, tuple[str, tuple[int, ...]]]


def one_node(op: str, inputs: Types, weights: dict[str, om.Array], **attrs: object) -> ModelProto:
    """A node, and an output that declares no shape."""
    node = helper.make_node(op, [*inputs, *weights], ["h"], **attrs)
    last = helper.make_node("Identity", ["h"], ["y"])
    listed = {name: (dtype, list(shape)) for name, (dtype, shape) in inputs.items()}
    proto = om.model([node, last], listed, {"y": (F32, [])}, weights)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return proto


def floats(*shape: int) -> om.Array:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


IMAGE: Types = {"x": (F32, (1, 2, 4, 4))}
ROWS: Types = {"x": (F32, (2, 3))}
CASES = [
    pytest.param(
        one_node("Conv", IMAGE, {"w": floats(1, 2, 5, 5)}),
        r"node 'Conv_0' \(Conv\): its kernel is larger than its input of shape \[1, 2, 4, 4\]",
        id="kernel",
    ),
    pytest.param(
        one_node("Conv", IMAGE, {"w": floats(4, 1, 3, 3)}),
        r"its input has 2 channels, but its weight of shape \[4, 1, 3, 3\] in 1 group takes 1",
        id="channels",
    ),
    pytest.param(
        one_node("Add", {**ROWS, "z": ("int64", (2, 3))}, {}),
        r"node 'Add_0' \(Add\): operands 0 and 1 \('z'\) are tensor\(float\) and tensor\(int64\)",
        id="mixed types",
    ),
    pytest.param(
        one_node("Where", {"c": (F32, (2, 3)), **ROWS}, {"w": floats(2, 3)}),
        r"operand 0 \('c'\) is tensor\(float\), but the operator takes tensor\(bool\)",
        id="type",
    ),
    pytest.param(
        one_node("Gather", ROWS, {"i": np.array([0, 7])}),
        r"index 7 in 'i' is out of range for dim 0 of 'x', which has 2 elements",
        id="Gather",
    ),
    pytest.param(
        one_node("GatherElements", ROWS, {"i": np.array([[-4]])}, axis=1),
        r"index -4 in 'i' is out of range for dim 1 of 'x', which has 3 elements",
        id="GatherElements",
    ),
    pytest.param(
        one_node("LayerNormalization", ROWS, {"s": floats(3)}, axis=5),
        r"axis 5 is not a dim of its operand \[2, 3\]",
        id="axis",
    ),
    pytest.param(
        one_node("LayerNormalization", ROWS, {"s": floats(4)}),
        r"operand 's' of shape \[4\] does not broadcast to the normalised dims \[3\]",
        id="scale",
    ),
    pytest.param(
        one_node(
            "BatchNormalization",
            IMAGE,
            {name: floats(3) for name in ("s", "b", "m", "v")},
        ),
        r"\(BatchNormalization\) is not valid: .*Dimension mismatch in unification between 3 and 2",
        id="inference",
    ),
]


@pytest.mark.parametrize(("proto", "message"), CASES)
def test_a_fault_is_named(proto: ModelProto, message: str) -> None:
    with pytest.raises(FrontendError, match=message):
        load_onnx(proto)


@pytest.mark.slow
def test_nothing_is_refused_that_onnx_runtime_opens() -> None:
    """ONNX's own operator tests: a refusal by these checks is one by ONNX Runtime too."""
    warnings.filterwarnings("ignore")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    wrong, loaded = [], 0
    for case in collect_testcases(None):
        proto = ModelProto()
        proto.CopyFrom(case.model)
        proto.ir_version = min(proto.ir_version, 10)
        for opset in proto.opset_import:
            opset.version = opset.version if opset.domain else min(opset.version, 26)
        try:
            load_onnx(proto)
            loaded += 1
        except FrontendError as error:
            if "the operator takes" not in str(error) and "must be of one type" not in str(error):
                continue
            try:
                ort.InferenceSession(proto.SerializeToString(), options)
            except Exception:  # noqa: BLE001
                continue
            wrong.append((case.name, str(error)))
        except Exception:  # noqa: BLE001 (other tests look for these)
            continue
    assert not wrong
    assert loaded > 1500
