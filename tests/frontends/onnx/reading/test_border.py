"""Invalid models on which a library or a rule raises: one line that names file and node, exit 1."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from helpers.onnx_files import onnx_models as om
from helpers.pages.command_line import one_line
from partitioner.cli.main import main
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.load import load_onnx
from partitioner.frontends.onnx.reading.border import border

F32 = "float32"


def node(op: str, reads: str, makes: str, **attrs: object) -> onnx.NodeProto:
    return helper.make_node(op, reads.split(), makes.split(), **attrs)


def one(
    made: onnx.NodeProto, dims: om.Dims, opset: int = 17, **weights: om.Array
) -> onnx.ModelProto:
    """A model of one node that reads x and makes y."""
    return om.model([made], {"x": (F32, dims)}, {"y": (F32, None)}, weights, opset=opset)


def ints(*values: int) -> om.Array:
    return np.array(values, np.int64)


def floats(*dims: int) -> om.Array:
    return np.zeros(dims, np.float32)


def typed(number: int) -> onnx.ModelProto:
    model = one(node("Relu", "x", "y"), [2])
    model.graph.input[0].type.tensor_type.elem_type = number
    return model


def weighted(**fields: object) -> onnx.ModelProto:
    model = one(node("Add", "x w", "y"), [2], w=floats(2))
    for name, value in fields.items():
        setattr(model.graph.initializer[0], name, value)
    return model


def of_strings() -> onnx.ModelProto:
    text = helper.make_tensor("v", TensorProto.STRING, [1], [b"a"])
    nodes = [
        helper.make_node("ConstantOfShape", ["s"], ["v"], value=text),
        node("Identity", "v", "y"),
    ]
    return om.model(nodes, {}, {"y": ("string", None)}, {"s": ints(2, 3)})


def sequence() -> onnx.ModelProto:
    """ONNX's own test_split_to_sequence_1: the size of the pieces is known at run time."""
    nodes = [node("SplitToSequence", "x s", "q"), node("SequenceLength", "q", "y")]
    return om.model(nodes, {"x": (F32, [6]), "s": ("int64", [])}, {"y": ("int64", [])})


MODELS = {
    "a count that does not fit": (
        one(node("Reshape", "x s", "y"), [4, 6], s=ints(2, 6)),
        "node 'Reshape_0' (Reshape): shape (4, 6) has 24 elements, (2, 6) has 12",
    ),
    "an axis of Softmax": (
        one(node("Softmax", "x", "y", axis=5), [4, 6]),
        "node 'Softmax_0' (Softmax) is not valid: [ShapeInferenceError] 'axis' must be in [-2 , 1]",
    ),
    "an axis of LayerNormalization": (
        one(node("LayerNormalization", "x w", "y", axis=9), [4, 6], w=floats(6)),
        "node 'LayerNormalization_0' (LayerNormalization): axis 9 is not a dim of its operand",
    ),
    "an attribute of 2^63 - 1": (
        one(node("Concat", "x x", "y", axis=2**63 - 1), [4, 6]),
        "Concat (node 'Concat_0'): axis=9223372036854775807 is out of range",
    ),
    "an axis of a reduction": (
        one(node("ReduceSum", "x a", "y"), [4, 6], a=ints(9)),
        "ReduceSum (node 'ReduceSum_0'): Shape inference failed for ::ReduceSum: axis 9 is out of",
    ),
    "a permutation": (
        one(node("Transpose", "x", "y", perm=[5, 5]), [4, 6]),
        "node 'Transpose_0' (Transpose) is not valid: [TypeInferenceError] Invalid attribute perm",
    ),
    "too many pads": (
        one(node("Pad", "x p", "y"), [4, 6], p=ints(1, 1, 1, 1, 1, 1)),
        "node 'Pad_0' (Pad) is not valid: [ShapeInferenceError] Pads has incorrect number",
    ),
    "no groups": (
        one(node("Conv", "x w", "y", group=0), [1, 4, 6, 6], w=floats(4, 4, 3, 3)),
        "node 'Conv_0' (Conv): attribute 'group' is 0; it must be at least 1",
    ),
    "no groups to normalize": (
        one(node("GroupNormalization", "x w w", "y", num_groups=0), [1, 4, 6, 6], 21, w=floats(4)),
        "node 'GroupNormalization_0' (GroupNormalization): attribute 'num_groups' is 0; it must",
    ),
    "a negative size": (
        one(node("Expand", "x s", "y"), [1, 6], s=ints(-3, 6)),
        "node 'Expand_0' (Expand): dim size is -3; it must be at least 0",
    ),
    "a huge tensor": (
        one(node("Relu", "x", "y"), [2**31, 2**31]),
        "tensor 'x' (float32[2147483648,2147483648]) brings the model's tensors to 18,446,744,073",
    ),
    "many dims": (
        one(node("Relu", "x", "y"), [1] * 2000),
        "tensor 'x' has 2000 dims; at most 64 are supported",
    ),
    "a declared negative size": (
        one(node("Relu", "x", "y"), [-2, 3]),
        "value 'x' has sizes [-2, 3]; each must be at least 0 (an unknown one has a name)",
    ),
    "an unknown element type of an input": (
        typed(77),
        "value 'x' has element type 77, which ONNX does not define",
    ),
    "an unknown element type of a weight": (
        weighted(data_type=77),
        "tensor 'w' has element type 77, which ONNX does not define",
    ),
    "an unknown element type of a cast": (
        one(node("Cast", "x", "y", to=77), [2]),
        "Cast (node 'Cast_0'): Shape inference failed for ::Cast: 77 is not a valid DataType",
    ),
    "long raw data": (
        weighted(raw_data=bytes(12)),
        "tensor 'w' of dims (2,) needs 8 bytes, its raw_data has 12",
    ),
    "no hidden elements": (
        one(
            node("LSTM", "x w r", "y", hidden_size=0),
            [3, 2, 4],
            w=floats(1, 0, 4),
            r=floats(1, 0, 0),
        ),
        "(LSTM): attribute 'hidden_size' is 0; it must be at least 1",
    ),
    "axes of ReverseSequence": (
        one(node("ReverseSequence", "x n", "y", time_axis=-2), [4, 4], n=ints(4, 2, 1, 3)),
        "(ReverseSequence): time_axis -2 and batch_axis 1 must be 0 and 1, or 1 and 0",
    ),
    "an equation without letters": (
        one(node("Einsum", "x", "y", equation="\n"), []),
        r"(Einsum) is not valid: InferenceError: equation '\n' is not one of Einsum",
    ),
    "an equation with two results": (
        one(node("Einsum", "x", "y", equation="->->"), []),
        "(Einsum) is not valid: InferenceError: equation '->->' is not one of Einsum",
    ),
    "an absent operand": (
        one(helper.make_node("Max", ["x", "x", ""], ["y"]), [3]),
        "(Max) leaves out operand 2 (data_0), which is not optional",
    ),
    "strings": (of_strings(), "has elements of STRING, which are not supported"),
    "a sequence": (
        sequence(),
        "node 'SplitToSequence_0' (SplitToSequence): the sizes 's' of its pieces are computed at",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_invalid_model_is_refused_by_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, message = MODELS[name]
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    with pytest.raises(FrontendError, match=f"^{re.escape(str(path))}: .*{re.escape(message)}"):
        load_onnx(path)
    assert main([str(path), "-q", "-o", str(tmp_path / "out")]) == 1
    assert message in one_line(capsys.readouterr().err)


@pytest.mark.slow
def test_libraries_log_nothing_to_the_terminal(tmp_path: Path) -> None:
    """onnx_ir warns of a text that is not UTF-8."""
    model = one(node("AveragePool", "x", "y", kernel_shape=[9], auto_pad="VALID"), [1, 1, 4])
    model.graph.node[0].attribute[0].s = b"\xff"
    onnx.save(model, tmp_path / "m.onnx")
    command = [sys.executable, "-m", "partitioner", str(tmp_path / "m.onnx"), "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert one_line(done.stderr).startswith("partition: ")


def test_a_baked_batch() -> None:
    model = one(node("Reshape", "x s", "y"), ["batch", 6], s=ints(2, 6))
    with pytest.raises(FrontendError, match=r"'Reshape_0' \(Reshape\): shape \(4, 6\) has 24 elem"):
        load_onnx(model, {"batch": 4})


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (IndexError("list index"), r"^m: not a valid model: IndexError: list index$"),
        (MemoryError(), r"^m: this machine's memory is too small$"),
        (ValueError("a" * 500), r"^m: not a valid model: a{400}\.\.\.$"),
    ],
)
def test_errors_at_the_border(error: Exception, message: str) -> None:
    with pytest.raises(FrontendError, match=message), border("m"):
        raise error
