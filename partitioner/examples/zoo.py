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

# What a weight is, by the operator and the operand it feeds.
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

# What a kernel's result passes on its way to the Relu.
_TRANSPARENT = ("Add", "BatchNormalization", "Dropout", "Mul", "Sum")

Weights = NDArray[np.float32]


def build(name: str, *, seed: int = 0) -> onnx.ModelProto:
    """Build a zoo model with random weights as initializers.

    Args:
        name: a key of `FILES`.
        seed: of the weights; the same seed gives the same bytes.

    Returns:
        A model of the zoo's opset (9), one float32 input of shape (1, 3, 224, 224).

    Raises:
        ExampleError: this onnx wheel does not hold the graph.
    """
    graph = _load(name)
    made = {node.output[0] for node in graph.graph.node if node.op_type == "ConstantOfShape"}
    shapes = _weight_shapes(graph.graph)
    roles = _roles(graph.graph)
    weights = [
        numpy_helper.from_array(_draw(roles[key], shapes[key], _generator(seed, key)), key)
        for key in sorted(shapes)
        if key in roles
    ]
    return _rebuilt(graph, made, weights)


def _load(name: str) -> onnx.ModelProto:
    file = files(onnx).joinpath(f"{_FOLDER}/{FILES[name]}")
    if not file.is_file():
        raise ExampleError(f"onnx {onnx.__version__} holds no graph of {name} ({FILES[name]})")
    return onnx.load_model_from_string(file.read_bytes())


def _weight_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Shapes of all float weights, stored or made by a node."""
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
    return shapes


def _roles(graph: onnx.GraphProto) -> dict[str, str]:
    """Map each weight to its role: `_ROLES`, and those that depend on what follows."""
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
    """Return the operator that reads the node's output, empty for a graph output."""
    reader = readers.get(node.output[0])
    return reader.op_type if reader else ""


def _draw(role: str, shape: tuple[int, ...], random: np.random.Generator) -> Weights:
    """Draw one weight.

    Args:
        role: a value of `_ROLES`, `residual`, `linear` or `classifier`.
        shape: (out, in / groups, *window) of Conv, (1, ..., out, in) of Gemm, (channels,).
        random: what to draw from.
    """
    if role in _VARIANCE_GAIN:
        fan_in = _fan_in(shape)
        kernel = random.standard_normal((prod(shape) // fan_in, fan_in), np.float32)
        kernel -= kernel.mean(axis=1, keepdims=True)
        return (kernel * np.float32(sqrt(_VARIANCE_GAIN[role] / fan_in))).reshape(shape)
    uniform = random.random(shape, np.float32)
    if role in _CENTRE:
        return np.float32(_CENTRE[role]) * (np.float32(0.75) + np.float32(0.5) * uniform)
    return np.float32(0.2) * uniform - np.float32(0.1)


def _fan_in(shape: tuple[int, ...]) -> int:
    """Return the products summed for one output of a kernel."""
    outer = next((place for place, size in enumerate(shape) if size > 1), 0)
    return prod(shape[outer + 1 :])


def _generator(seed: int, name: str) -> np.random.Generator:
    """One generator a tensor, so that a weight does not depend on the others' order."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def _rebuilt(
    model: onnx.ModelProto, made: set[str], weights: list[onnx.TensorProto]
) -> onnx.ModelProto:
    """Assemble the model anew: weights stored, none of them an input, nothing unused."""
    graph = model.graph
    stored = {tensor.name for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.output[0] not in made]
    used = {name for node in nodes for name in node.input}
    drawn = {tensor.name for tensor in weights}
    kept = [t for t in graph.initializer if t.name in used and t.name not in drawn]
    rebuilt = onnx.helper.make_graph(
        nodes,
        graph.name,
        [value for value in graph.input if value.name not in stored],
        list(graph.output),
        initializer=[*kept, *weights],
    )
    return onnx.helper.make_model(
        rebuilt,
        ir_version=IR_VERSION,
        opset_imports=list(model.opset_import),
        producer_name="partitioner.examples",
    )
