"""Mutated ONNX models: the inputs of fuzzers. The same seed gives the same model."""

import random
import re
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
    numpy_helper,
)

from helpers.onnx_files import onnx_models as om
from partitioner.frontends.onnx.reading.checks import nested_graphs, node_lists

#: Integers, floats and texts at which readers break.
_FLOATS = (0.0, -1.0, 1e-5, 0.5, 3e38, float("nan"), float("inf"))
_TEXTS = ("", "constant", "linear", "SAME_UPPER", "NOTSET", "sum", "ij,jk->ik", "ij->qq", "\n")
_INTS = (-(2**63), -(2**31), -5, -2, -1, 0, 1, 2, 3, 5, 7, 64, 1000, 2**31 - 1, 2**40, 2**63 - 1)
_OPS = (
    *("Relu", "Add", "MatMul", "Softmax", "Transpose", "Reshape", "Concat", "Split", "Gather"),
    *("Squeeze", "Unsqueeze", "Slice", "Pad", "Expand", "Tile", "ReduceSum", "Cast", "Range"),
    *("ConstantOfShape", "TopK", "Conv", "Gemm", "Flatten", "ArgMax", "Where", "Identity"),
    *("LayerNormalization", "BatchNormalization", "MaxPool", "Resize", "CumSum", "OneHot"),
    *("SplitToSequence", "SequenceAt", "Shape", "Size", "If", "Loop", "Einsum", "GatherND"),
    *("ScatterND", "DepthToSpace", "NonZero", "LSTM", "Attention", "Dropout", "DequantizeLinear"),
)
_NUMBERS = ("0", "1", "2", "3", "4", "8", "1e-3", "1e12", "true", "false")
#: Words at which readers of JSON and TOML break.
_WORDS = (
    *("null", "true", "-1", "0", "1", "2", "7", "1e30", "1" + "0" * 400, "nan", "inf", "2.5"),
    *(
        '""',
        '"\\u0000"',
        '"\\ud800"',
        '"tp"',
        '"tp:9,0"',
        "[]",
        "[null]",
        "{}",
        "[[",
        "\n[[pin]]\n",
    ),
    *('"*"', '"0B"', '"1GiB"', "x", "=", ",", "[" * 2000),
)
_ELEMENT_TYPES = (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 13, 14, 16, 17, 20, 21, 22, 77)
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


def mutate_text(data: bytes, seed: int) -> bytes:
    """A text of JSON or TOML with some words changed; one in eight: some bytes."""
    draw = random.Random(seed)
    if not draw.randrange(8):
        return mutate_bytes(data, seed)
    words = re.findall(r'"[^"]*"|[\w.+-]+|\s+|.', data.decode())
    for _ in range(draw.choice((1, 1, 2, 3))):
        kinds = {kind for word in words if (kind := _sort(word))}
        kind = draw.choice(
            sorted(kinds & set('"0') or kinds) if draw.randrange(6) else sorted(kinds)
        )
        alike = [index for index, word in enumerate(words) if _sort(word) == kind]
        at, other = draw.choice(alike), draw.choice(alike)
        number = draw.choice(_NUMBERS) if kind == "0" else words[other]
        words[at], words[other] = draw.choice((
            *((words[other], words[other]), (words[other], words[at]), (number, words[other])),
            *((number, words[other]), (draw.choice(_WORDS), words[other])),
            *(("", words[other]), (words[at] * 2, words[other])),
        ))  # fmt: skip
    return "".join(words).encode(errors="surrogatepass")


def _sort(word: str) -> str:
    """The sort of a word: text, number, name or sign."""
    first = word[:1]
    return "0" if first.isdigit() else "a" if first.isalpha() else first.strip()


def mutate_model(model: ModelProto, seed: int) -> ModelProto:
    """A model with one to three parts changed; it stays a protobuf message of a model."""
    draw, out = random.Random(seed), ModelProto()
    out.CopyFrom(model)
    for _ in range(draw.choice((1, 1, 2, 3))):
        try:
            draw.choice(_MUTATIONS)(out, draw)
        except (ValueError, OverflowError, RecursionError):
            continue  # a field does not hold the value
    return out


def _node_lists(model: ModelProto) -> list[Sequence[NodeProto]]:
    """The nodes of the graph, of its functions and of the bodies in either."""
    return list(node_lists(model))


def _a_node(model: ModelProto, draw: random.Random) -> NodeProto | None:
    nodes = [node for nodes in _node_lists(model) for node in nodes]
    return draw.choice(nodes) if nodes else None


def _graphs(model: ModelProto) -> list[GraphProto]:
    return [model.graph, *nested_graphs(node for nodes in _node_lists(model) for node in nodes)]


def _names(model: ModelProto) -> Sequence[str]:
    nodes = [node for nodes in _node_lists(model) for node in nodes]
    names = [name for node in nodes for name in (*node.input, *node.output)]
    weights = [tensor.name for tensor in model.graph.initializer]
    return [*names, *weights, *(value.name for value in model.graph.input), "", "unknown"]


def _attribute_value(model: ModelProto, draw: random.Random) -> None:
    node = _a_node(model, draw)
    if node is None or not node.attribute:
        return
    attribute = draw.choice(node.attribute)
    if attribute.type == AttributeProto.INT:
        attribute.i = draw.choice(_INTS)
    elif attribute.type == AttributeProto.INTS and draw.randrange(4):
        values = [draw.choice(_INTS) for _ in range(draw.randrange(6))]
        attribute.ClearField("ints")
        attribute.ints.extend(values)
    elif attribute.type == AttributeProto.INTS:
        values = list(attribute.ints)
        draw.shuffle(values)
        attribute.ints[:] = values
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = draw.choice(_FLOATS)
    elif attribute.type == AttributeProto.STRING:
        attribute.s = draw.choice(_TEXTS).encode()
    elif attribute.type == AttributeProto.TENSOR and draw.randrange(2):
        _change_tensor(attribute.t, draw)
    else:
        node.attribute.remove(attribute)


def _attribute_type(model: ModelProto, draw: random.Random) -> None:
    """The declared type of an attribute, which then is not that of its value, or missing."""
    node = _a_node(model, draw)
    if node is not None and node.attribute:
        attribute = draw.choice(node.attribute)
        attribute.type = draw.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14))


def _attribute(model: ModelProto, draw: random.Random) -> None:
    node = _a_node(model, draw)
    if node is None:
        return
    values = [
        draw.choice(_INTS),
        [draw.choice(_INTS) for _ in range(draw.randrange(1, 6))],
        draw.choice(_FLOATS),
        draw.choice(_TEXTS),
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
    graphs = _graphs(model)
    values = [v for graph in graphs for v in (*graph.input, *graph.output, *graph.value_info)]
    if not values:
        return
    tensor = draw.choice(values).type.tensor_type
    kind = draw.randrange(5)
    if kind == 0:
        tensor.elem_type = draw.choice(_ELEMENT_TYPES)
    elif kind == 1 or not tensor.shape.dim:
        tensor.shape.dim.add().dim_value = draw.choice(_INTS)
    elif kind == 2:
        draw.choice(tensor.shape.dim).dim_value = draw.choice(_INTS)
    elif kind == 3:
        draw.choice(tensor.shape.dim).dim_param = draw.choice(("n", "n + 1", "n // 0", "", "-n"))
    else:
        del tensor.shape.dim[draw.randrange(len(tensor.shape.dim))]


def _declared(model: ModelProto, draw: random.Random) -> None:
    """A declaration of a computed value, mostly a wrong one."""
    names = [name for node in model.graph.node for name in node.output if name]
    if names:
        dims = [draw.choice((0, 1, 2, 3, 4, 6, 8, "n")) for _ in range(draw.randrange(5))]
        kind = draw.choice(_ELEMENT_TYPES)
        model.graph.value_info.append(helper.make_tensor_value_info(draw.choice(names), kind, dims))


def _tensor(model: ModelProto, draw: random.Random) -> None:
    tensors = [tensor for graph in _graphs(model) for tensor in graph.initializer]
    if tensors:
        _change_tensor(draw.choice(tensors), draw)


def _change_tensor(tensor: TensorProto, draw: random.Random) -> None:
    kind = draw.randrange(6)
    if kind == 0:
        tensor.data_type = draw.choice(_ELEMENT_TYPES)
    elif kind == 1:
        tensor.dims.append(draw.choice(_INTS))
    elif kind == 2:
        tensor.raw_data = tensor.raw_data[: draw.randrange(9)] + draw.randbytes(draw.randrange(9))
    elif kind == 3 and tensor.dims:
        tensor.dims[draw.randrange(len(tensor.dims))] = draw.choice(_INTS)
    elif kind == 4 and tensor.dims:
        dims = list(tensor.dims)
        draw.shuffle(dims)
        tensor.dims[:] = dims
    elif tensor.data_type in (TensorProto.INT64, TensorProto.INT32):
        size = draw.randrange(5)
        values = np.array([draw.choice(_INTS) for _ in range(size)], np.int64)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def _weight(model: ModelProto, draw: random.Random) -> None:
    """An input as a weight, or a weight as an input."""
    graph = model.graph
    if graph.initializer and draw.randrange(2):
        tensor = draw.choice(graph.initializer)
        graph.input.append(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
        graph.initializer.remove(tensor)
    elif graph.input:
        value = draw.choice(graph.input)
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        kind = value.type.tensor_type.elem_type
        if kind in (1, 6, 7, 9) and all(0 <= dim < 99 for dim in dims) and np.prod(dims) < 999:
            array = np.ones(dims, helper.tensor_dtype_to_np_dtype(kind))
            graph.initializer.append(numpy_helper.from_array(array, value.name))


def _nodes(model: ModelProto, draw: random.Random) -> None:
    nodes = list(model.graph.node)
    if not nodes:
        return
    node, kind = draw.choice(nodes), draw.randrange(5)
    if kind == 0:
        model.graph.node.remove(node)
    elif kind == 1:
        copy = model.graph.node.add()
        copy.CopyFrom(node)
        copy.output[:] = [f"{name}_copy" for name in copy.output]
    elif kind == 2:
        node.domain = draw.choice(
            ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "own", "partitioner")
        )
    elif kind == 3:
        node.name = draw.choice([other.name for other in nodes])
    else:
        draw.shuffle(nodes)
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del model.graph.node[:]
        model.graph.node.extend(copies)


def _chain(model: ModelProto, draw: random.Random) -> None:
    """A new node between a value and one of its readers."""
    node = _a_node(model, draw)
    if node is None or not node.input:
        return
    at, made = draw.randrange(len(node.input)), f"made_{draw.randrange(99)}"
    new = helper.make_node(draw.choice(_OPS), [node.input[at]], [made])
    holder = next(nodes for nodes in _node_lists(model) if any(n is node for n in nodes))
    index = next(i for i, n in enumerate(holder) if n is node)
    node.input[at] = made
    holder.insert(index, new)


def _into_body(model: ModelProto, draw: random.Random) -> None:
    """The graph's first nodes as the branch of an If, which another branch repeats."""
    nodes = list(model.graph.node)
    if not nodes or not nodes[0].output:
        return
    body = helper.make_graph(
        [NodeProto.FromString(nodes[0].SerializeToString())],
        "body",
        [],
        [helper.make_empty_tensor_value_info(name) for name in nodes[0].output],
    )
    condition = numpy_helper.from_array(np.array(bool(draw.randrange(2))), "condition")
    inputs = ["condition"]
    if draw.randrange(2):
        model.graph.initializer.append(condition)
    else:
        model.graph.input.append(helper.make_tensor_value_info("condition", 9, []))
    kind = draw.randrange(3)
    attributes = {"then_branch": body, "else_branch": body} if kind else {"body": body}
    chosen = helper.make_node("If" if kind else "Loop", inputs, list(nodes[0].output), **attributes)
    model.graph.node[0].CopyFrom(chosen)


def _into_function(model: ModelProto, draw: random.Random) -> None:
    """A node as a function that holds it and, seldom, calls itself."""
    nodes = list(model.graph.node)
    if not nodes:
        return
    node, name = draw.choice(nodes), f"f_{draw.randrange(9)}"
    body = [NodeProto.FromString(node.SerializeToString())]
    if not draw.randrange(4):
        body.append(helper.make_node(name, list(node.input), ["again"], domain="own"))
    inputs, outputs = dict.fromkeys(filter(None, node.input)), dict.fromkeys(node.output)
    imports = [helper.make_opsetid(o.domain, o.version) for o in model.opset_import]
    model.functions.append(
        helper.make_function("own", name, list(inputs), list(outputs), body, imports)
    )
    model.opset_import.append(helper.make_opsetid("own", 1))
    node.CopyFrom(helper.make_node(name, list(inputs), list(outputs), domain="own"))


def _opset(model: ModelProto, draw: random.Random) -> None:
    versions = (
        1,
        5,
        6,
        7,
        8,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
        17,
        18,
        19,
        20,
        21,
        22,
        23,
        24,
        25,
        26,
        99,
    )
    draw.choice(model.opset_import).version = draw.choice(versions)


_MUTATIONS: Sequence[Callable[[ModelProto, random.Random], None]] = (
    *(_attribute_value, _attribute_value, _attribute, _attribute, _attribute_type, _operator),
    *(_operand, _operand, _result, _dims, _dims, _declared, _tensor, _tensor, _weight, _nodes),
    *(_chain, _into_body, _into_function, _opset),
)
