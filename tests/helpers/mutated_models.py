"""Mutated ONNX models: the inputs of fuzzers. The same seed gives the same model."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_models as om
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

#: Integers at which readers break.
_INTS = (-(2**63), -(2**31), -5, -2, -1, 0, 1, 2, 3, 5, 7, 64, 1000, 2**31 - 1, 2**40, 2**63 - 1)
_OPS = (
    *("Relu", "Add", "MatMul", "Softmax", "Transpose", "Reshape", "Concat", "Split", "Gather"),
    *("Squeeze", "Unsqueeze", "Slice", "Pad", "Expand", "Tile", "ReduceSum", "Cast", "Range"),
    *("ConstantOfShape", "TopK", "Conv", "Gemm", "Flatten", "ArgMax", "Where", "Identity"),
    *("LayerNormalization", "BatchNormalization", "MaxPool", "Resize", "CumSum", "OneHot"),
    *("SplitToSequence", "SequenceAt", "Shape", "Size", "If", "Loop", "Einsum", "GatherND"),
    *("ScatterND", "DepthToSpace", "NonZero", "LSTM", "Attention", "Dropout", "DequantizeLinear"),
)
_KEYS = (
    *("axis", "axes", "perm", "to", "group", "pads", "strides", "kernel_shape", "dilations"),
    *("keepdims", "num_outputs", "blocksize", "hidden_size", "num_groups", "epsilon", "mode"),
    *("equation", "value", "split", "transA", "batch_dims", "allowzero", "ceil_mode"),
)


def small_models() -> dict[str, ModelProto]:
    """Small valid models of many operators, by name."""
    f32, f = "float32", np.float32

    def node(op: str, reads: str, makes: str, **attrs: object) -> NodeProto:
        return helper.make_node(op, reads.split(), makes.split(), **attrs)

    weights = {"w": np.ones((8, 6), f), "b": np.ones(6, f), "s": np.array([2, -1], np.int64)}
    mlp = [
        *(node("MatMul", "x w", "h"), node("Add", "h b", "i"), node("Softmax", "i", "j", axis=-1)),
        *(node("Reshape", "j s", "k"), node("Transpose", "k", "y", perm=[1, 0])),
    ]
    kernel = {"w": np.ones((4, 2, 3, 3), f), "p": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)}
    conv = [
        *(node("Pad", "x p", "h"), node("Conv", "h w", "i", group=2, strides=[1, 1])),
        *(node("MaxPool", "i", "j", kernel_shape=[2, 2]), node("Flatten", "j", "y", axis=1)),
    ]
    moved = [
        *(node("Split", "x", "a b", axis=1), node("Concat", "b a", "c", axis=1)),
        *(node("Gather", "c g", "d", axis=0), node("Unsqueeze", "d u", "e")),
        *(node("Squeeze", "e u", "h"), node("Slice", "h from to ax", "i")),
        *(node("Tile", "i r", "j"), node("ReduceSum", "j ax", "k", keepdims=1)),
        *(node("Expand", "k z", "l"), node("TopK", "l one", "y n", axis=0)),
    ]
    numbers = {
        "g": [0, 2, 1],
        "u": [1],
        "from": [0],
        "to": [2],
        "ax": [1],
        "r": [1, 3],
        "z": [3, 5],
        "one": [1],
    }
    sized = [
        *(node("Shape", "x", "a"), node("Gather", "a zero", "n"), node("Range", "i n o", "t")),
        *(node("Cast", "t", "u", to=1), node("ConstantOfShape", "a", "v")),
        *(node("Unsqueeze", "u one", "q"), node("Add", "q v", "p"), node("Mul", "p x", "y")),
    ]
    scalars = {
        "zero": np.array(0),
        "i": np.array(0),
        "o": np.array(1),
        "one": np.array([1]),
    }
    then = om.body([node("Relu", "x", "t")], {}, {"t": (f32, [2, 3])})
    other = om.body([node("Neg", "x", "e")], {}, {"e": (f32, [2, 3])})
    branch = helper.make_node("If", ["c"], ["h"], then_branch=then, else_branch=other)
    norm = {"one": np.ones(3, f), "zero": np.zeros(3, f)}
    choice = [
        branch,
        node("LayerNormalization", "h one zero", "i", axis=-1),
        node("Gemm", "i m", "y", transB=1),
    ]
    ints = {name: np.array(value, np.int64) for name, value in numbers.items()}
    return {
        "mlp": om.model(mlp, {"x": (f32, [4, 8])}, {"y": (f32, None)}, weights),
        "conv": om.model(conv, {"x": (f32, [2, 4, 6, 6])}, {"y": (f32, None)}, kernel),
        "moved": om.model(
            moved, {"x": (f32, [4, 6])}, {"y": (f32, None), "n": ("int64", None)}, ints
        ),
        "sized": om.model(sized, {"x": (f32, [4, 6])}, {"y": (f32, None)}, scalars),
        "choice": om.model(
            choice,
            {"x": (f32, [2, 3]), "c": ("bool", [])},
            {"y": (f32, None)},
            {**norm, "m": np.ones((4, 3), f)},
        ),
    }


def mutate_bytes(data: bytes, seed: int) -> bytes:
    """A file with a few bytes changed, inserted, removed or repeated."""
    draw, out = random.Random(seed), bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(out))
        kind = draw.randrange(5)
        if kind == 0:
            out[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            out[at] = draw.choice((0, 1, 127, 128, 255))
        elif kind == 2:
            del out[at : at + draw.randrange(1, 9)]
        elif kind == 3:
            out[at:at] = draw.randbytes(draw.randrange(1, 9))
        else:
            out[at:at] = out[at : at + draw.randrange(1, 65)]
        if not out:
            break
    return bytes(out)


def mutate_model(model: ModelProto, seed: int) -> ModelProto:
    """A model with one to three parts changed; it stays a protobuf message of a model."""
    draw, out = random.Random(seed), ModelProto()
    out.CopyFrom(model)
    for _ in range(draw.choice((1, 1, 2, 3))):
        draw.choice(_MUTATIONS)(out, draw)
    return out


def _a_node(model: ModelProto, draw: random.Random) -> NodeProto | None:
    return draw.choice(model.graph.node) if model.graph.node else None


def _names(model: ModelProto) -> Sequence[str]:
    names = [name for node in model.graph.node for name in (*node.input, *node.output)]
    return [*names, "", "unknown"]


def _attribute_value(model: ModelProto, draw: random.Random) -> None:
    node = _a_node(model, draw)
    if node is None or not node.attribute:
        return
    attribute = draw.choice(node.attribute)
    if attribute.type == AttributeProto.INT:
        attribute.i = draw.choice(_INTS)
    elif attribute.type == AttributeProto.INTS:
        values = [draw.choice(_INTS) for _ in range(draw.randrange(6))]
        attribute.ClearField("ints")
        attribute.ints.extend(values)
    else:
        node.attribute.remove(attribute)


def _attribute(model: ModelProto, draw: random.Random) -> None:
    node = _a_node(model, draw)
    if node is None:
        return
    values = [
        draw.choice(_INTS),
        [draw.choice(_INTS) for _ in range(draw.randrange(1, 6))],
        draw.choice((0.0, -1.0, float("nan"), float("inf"))),
        draw.choice(("", "constant", "ij,jk->ik", "ij->qq", "\n")),
        helper.make_tensor("v", draw.choice((1, 7, 10)), [1], [1]),
        helper.make_tensor("v", TensorProto.STRING, [1], [b"a"]),
    ]
    key = draw.choice(_KEYS)
    for old in [a for a in node.attribute if a.name == key]:
        node.attribute.remove(old)
    node.attribute.append(helper.make_attribute(key, draw.choice(values)))


def _operator(model: ModelProto, draw: random.Random) -> None:
    node = _a_node(model, draw)
    if node is not None:
        node.op_type = draw.choice(_OPS)


def _operand(model: ModelProto, draw: random.Random) -> None:
    node = _a_node(model, draw)
    if node is None:
        return
    kind = draw.randrange(3)
    if kind == 0 or not node.input:
        node.input.append(draw.choice(_names(model)))
    elif kind == 1:
        node.input[draw.randrange(len(node.input))] = draw.choice(_names(model))
    else:
        del node.input[draw.randrange(len(node.input))]


def _result(model: ModelProto, draw: random.Random) -> None:
    node = _a_node(model, draw)
    if node is None:
        return
    kind = draw.randrange(3)
    if kind == 0 or not node.output:
        node.output.append(f"extra_{draw.randrange(99)}")
    elif kind == 1:
        node.output[draw.randrange(len(node.output))] = draw.choice(_names(model))
    else:
        del node.output[draw.randrange(len(node.output))]


def _dims(model: ModelProto, draw: random.Random) -> None:
    graph = model.graph
    values = [*graph.input, *graph.output, *graph.value_info]
    if not values:
        return
    tensor = draw.choice(values).type.tensor_type
    kind = draw.randrange(4)
    if kind == 0:
        tensor.elem_type = draw.choice((0, 1, 2, 6, 7, 8, 9, 10, 14, 16, 20, 77))
    elif kind == 1 or not tensor.shape.dim:
        tensor.shape.dim.add().dim_value = draw.choice(_INTS)
    elif kind == 2:
        draw.choice(tensor.shape.dim).dim_value = draw.choice(_INTS)
    else:
        del tensor.shape.dim[draw.randrange(len(tensor.shape.dim))]


def _tensor(model: ModelProto, draw: random.Random) -> None:
    if not model.graph.initializer:
        return
    tensor = draw.choice(model.graph.initializer)
    kind = draw.randrange(4)
    if kind == 0:
        tensor.data_type = draw.choice((0, 1, 6, 7, 8, 9, 10, 14, 16, 22, 77))
    elif kind == 1:
        tensor.dims.append(draw.choice(_INTS))
    elif kind == 2:
        tensor.raw_data = tensor.raw_data[: draw.randrange(9)] + draw.randbytes(draw.randrange(9))
    elif tensor.data_type in (TensorProto.INT64, TensorProto.INT32) and tensor.raw_data:
        size = draw.randrange(5)
        values = np.array([draw.choice(_INTS) for _ in range(size)], np.int64)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def _nodes(model: ModelProto, draw: random.Random) -> None:
    nodes = list(model.graph.node)
    if not nodes:
        return
    node, kind = draw.choice(nodes), draw.randrange(3)
    if kind == 0:
        model.graph.node.remove(node)
    elif kind == 1:
        copy = model.graph.node.add()
        copy.CopyFrom(node)
        copy.output[:] = [f"{name}_copy" for name in copy.output]
    else:
        draw.shuffle(nodes)
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del model.graph.node[:]
        model.graph.node.extend(copies)


def _opset(model: ModelProto, draw: random.Random) -> None:
    model.opset_import[0].version = draw.choice((7, 9, 11, 12, 13, 17, 18, 21, 23, 25))


_MUTATIONS: Sequence[Callable[[ModelProto, random.Random], None]] = (
    *(_attribute_value, _attribute_value, _attribute, _attribute, _operator, _operand),
    *(_result, _dims, _tensor, _tensor, _nodes, _opset),
)
