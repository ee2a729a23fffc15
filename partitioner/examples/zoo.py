"""The nine model-zoo graphs inside the onnx wheel, with random weights in place of equal ones.

The wheel's files hold the graph but no weights: `ConstantOfShape` nodes make
each tensor from one number. Outputs of such a model prove nothing, so every
float tensor is drawn anew here, scaled by its role so that values stay of
order one through 121 normalizations and 16 residual sums.
"""

import hashlib
from importlib.resources import files
from math import prod, sqrt

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from partitioner.examples.builder import IR_VERSION, ExampleError

_FOLDER = "backend/test/data/light"

FILES = {
    "alexnet": "light_bvlc_alexnet.onnx",
    "densenet121": "light_densenet121.onnx",
    "inception_v1": "light_inception_v1.onnx",
    "inception_v2": "light_inception_v2.onnx",
    "resnet50": "light_resnet50.onnx",
    "shufflenet": "light_shufflenet.onnx",
    "squeezenet": "light_squeezenet.onnx",
    "vgg19": "light_vgg19.onnx",
    "zfnet512": "light_zfnet512.onnx",
}

# The role of a weight by the operator and the operand that it feeds.
_ROLES = {
    ("Conv", 1): "kernel",
    ("Conv", 2): "bias",
    ("Gemm", 1): "kernel",
    ("Gemm", 2): "bias",
    ("BatchNormalization", 1): "scale",
    ("BatchNormalization", 2): "bias",
    ("BatchNormalization", 3): "mean",
    ("BatchNormalization", 4): "variance",
    ("Mul", 1): "scale",
    ("Add", 1): "bias",
}

# Kernels sum to zero over their fan-in, or the mean that Relu leaves would drown
# what differs between two inputs. Relu keeps a third of a normal's variance, so a
# kernel before it triples; the classifier spreads a thousand classes to the eye.
_VARIANCE_GAIN = {"kernel": 3.0, "linear": 1.5, "classifier": 4.0}

# A branch that ends in a residual sum is damped, or 16 sums would grow the
# variance 2**16 times.
_CENTRE = {"scale": 1.0, "variance": 1.0, "residual": 0.5}

# Operators that a kernel's result passes on its way to the Relu.
_TRANSPARENT = ("Add", "BatchNormalization", "Dropout", "Mul", "Sum")

Weights = NDArray[np.float32]


def build(name: str, *, seed: int = 0) -> onnx.ModelProto:
    """A zoo model of opset 9 with random weights: one float32 input of (1, 3, 224, 224).

    Args:
        name: A key of `FILES`.
        seed: Of the weights; the same seed gives the same bytes.

    Raises:
        ExampleError: This onnx wheel does not hold the graph.
    """
    file = files(onnx).joinpath(f"{_FOLDER}/{FILES[name]}")
    if not file.is_file():
        raise ExampleError(f"onnx {onnx.__version__} holds no graph of {name} ({FILES[name]})")
    model = onnx.load_model_from_string(file.read_bytes())
    graph, roles = model.graph, _roles(model.graph)
    stored = {tensor.name: tensor for tensor in graph.initializer}
    shapes = {
        name: tuple(tensor.dims)
        for name, tensor in stored.items()
        if tensor.data_type == onnx.TensorProto.FLOAT
    }
    for node in graph.node:
        if node.op_type == "ConstantOfShape":
            dims = numpy_helper.to_array(stored[node.input[0]])
            shapes[node.output[0]] = tuple(int(dim) for dim in dims)
    weights = []
    for key in sorted(shapes.keys() & roles.keys()):
        # each has a generator of its own, so that a weight does not depend on the others' order
        digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
        random = np.random.default_rng(int.from_bytes(digest[:8], "big"))
        weights.append(numpy_helper.from_array(_draw(roles[key], shapes[key], random), key))
    # Assembled anew: weights are stored, none of them is an input, nothing is unused.
    nodes = [node for node in graph.node if node.op_type != "ConstantOfShape"]
    used = {name for node in nodes for name in node.input} - {tensor.name for tensor in weights}
    rebuilt = onnx.helper.make_graph(
        nodes,
        graph.name,
        [value for value in graph.input if value.name not in stored],
        list(graph.output),
        initializer=[*(t for t in graph.initializer if t.name in used), *weights],
    )
    return onnx.helper.make_model(
        rebuilt,
        ir_version=IR_VERSION,
        opset_imports=list(model.opset_import),
        producer_name="partitioner.examples",
    )


def _roles(graph: onnx.GraphProto) -> dict[str, str]:
    """The role of each weight: of `_ROLES`, refined by the operators that follow."""
    viewed = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type in ("Reshape", "Unsqueeze")
    }
    readers = {name: node for node in graph.node for name in node.input}
    roles: dict[str, str] = {}
    for node in graph.node:
        for position, name in enumerate(node.input):
            if (role := _ROLES.get((node.op_type, position))) is not None:
                roles[viewed.get(name, name)] = _refined(role, node, readers)
    return roles


def _refined(role: str, node: onnx.NodeProto, readers: dict[str, onnx.NodeProto]) -> str:
    """Tell a residual branch's last scale, and a kernel with no Relu behind it, from others."""
    after = _next(node, readers)
    if role == "scale" and after == "Sum":
        return "residual"
    while role == "kernel" and after in _TRANSPARENT:
        node = readers[node.output[0]]
        after = _next(node, readers)
    if role == "kernel" and after != "Relu":
        return "classifier" if after in ("", "Softmax") else "linear"
    return role


def _next(node: onnx.NodeProto, readers: dict[str, onnx.NodeProto]) -> str:
    reader = readers.get(node.output[0])
    return reader.op_type if reader else ""


def _draw(role: str, shape: tuple[int, ...], random: np.random.Generator) -> Weights:
    """A weight: (out, in / groups, *window) of Conv, (1, ..., out, in) of Gemm, or (channels,)."""
    if role in _VARIANCE_GAIN:
        outer = next((place for place, size in enumerate(shape) if size > 1), 0)
        fan_in = prod(shape[outer + 1 :])  # products summed for one output
        kernel = random.standard_normal((prod(shape) // fan_in, fan_in), np.float32)
        kernel -= kernel.mean(axis=1, keepdims=True)
        return (kernel * np.float32(sqrt(_VARIANCE_GAIN[role] / fan_in))).reshape(shape)
    uniform = random.random(shape, np.float32)
    if role in _CENTRE:
        return np.float32(_CENTRE[role]) * (np.float32(0.75) + np.float32(0.5) * uniform)
    return np.float32(0.2) * uniform - np.float32(0.1)
