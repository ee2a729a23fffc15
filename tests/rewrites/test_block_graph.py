"""Stretches in blocks: the rewritten graph gives what the whole one gives, or is refused."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, helper

from helpers.onnx_files.onnx_models import model, run, to_proto
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph
from partitioner.ir.pieces.blocks import Blocks, Chunk, Stretch
from partitioner.rewrites.block_graph import block_graph
from partitioner.rewrites.stretch_layout import BlockError

#: Name of a model's value, with (dim, parts) of each dim that is cut.
Cut = tuple[str, tuple[tuple[int, int], ...]]


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def node(op: str, *inputs: str, out: str, **attrs: Any) -> NodeProto:
    return helper.make_node(op, list(inputs), [out], name=out, **attrs)


def built(
    nodes: Sequence[NodeProto], x: Sequence[int], *outputs: str, opset: int = 17, **weights: Any
) -> Graph:
    given = dict.fromkeys(outputs or ("y",), ("float32", None))
    return load_onnx(model(nodes, {"x": ("float32", x)}, given, weights, opset=opset)).graph


def blocks(first: str, last: str, cut: Cut) -> Blocks:
    chunks = tuple(Chunk(cut[0], dim, parts) for dim, parts in cut[1])
    return Blocks((Stretch(first, last, chunks),))


def check(graph: Graph, first: str, last: str, cut: Cut) -> Graph:
    """Compare the graph in blocks with the whole one."""
    in_blocks = block_graph(graph, blocks(first, last, cut))
    feeds = random_inputs(graph, 3)
    whole, parts = (run(to_proto(g), feeds) for g in (graph, in_blocks))
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * np.abs(one).max())
    count = int(np.prod([parts for _, parts in cut[1]]))
    assert sorted(set(in_blocks.blocks.values())) == list(range(count))
    return in_blocks


CHAINS = {
    "same": [node("Conv", "x", "w", out="a", pads=[1] * 4)],
    "dilated": [node("Conv", "x", "w", out="a", pads=[3, 2, 1, 2], dilations=[2, 2])],
    "strided": [node("Conv", "x", "w", out="a", strides=[2, 3], pads=[1] * 4)],
    "transposed": [node("ConvTranspose", "x", "w", out="a", strides=[2, 2], pads=[1, 0, 0, 1])],
    "ceil": [
        node("MaxPool", "x", out="p", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
        node("Conv", "p", "w", out="a", pads=[1] * 4),
    ],
    "average": [
        node(
            *("AveragePool", "x"),
            out="p",
            kernel_shape=[3, 2],
            strides=[2, 1],
            pads=[1, 0, 1, 1],
        ),
        node("Conv", "p", "w", out="a"),
    ],
}


@pytest.mark.parametrize("cut", [((2, 2),), ((2, 3),), ((3, 5),), ((2, 2), (3, 3)), ((1, 2),)])
@pytest.mark.parametrize("form", CHAINS)
def test_windows(form: str, cut: tuple[tuple[int, int], ...]) -> None:
    """A chain with a skip, of odd sizes: rows, columns, tiles, and channels of what it makes."""
    nodes = [
        *CHAINS[form],
        node("Relu", "a", out="b"),
        node("Conv", "b", "v", out="c", pads=[1, 2, 1, 2]),
        node("Add", "c", "b", out="y"),
    ]
    graph = built(nodes, (1, 3, 23, 19), w=weight(3, 3, 3, 3), v=weight(3, 3, 3, 5))
    first = graph.nodes[0].name
    if cut == ((1, 2),):
        with pytest.raises(BlockError, match="blocks: "):
            block_graph(graph, blocks(first, "y", ("y", cut)))
        check(graph, "c", "c", ("c", cut))
    else:
        check(graph, first, "y", ("y", cut))


@pytest.mark.parametrize("cut", [((2, 2),), ((3, 5),), ((2, 2), (3, 3))])
def test_blocks_read_what_they_combine_in_a_later_round(cut: tuple[tuple[int, int], ...]) -> None:
    """A mean of the whole image scales it; the round behind it computes the image again."""
    nodes = [
        node("Conv", "x", "w", out="a", pads=[1] * 4),
        node("ReduceSum", "a", "axes", out="s"),
        node("Sigmoid", "s", out="t"),
        node("Mul", "a", "t", out="b"),
        node("Conv", "b", "w", out="y", pads=[1] * 4),
    ]
    graph = built(nodes, (1, 3, 17, 19), w=weight(3, 3, 3, 3), axes=np.array([2, 3]))
    in_blocks = block_graph(graph, blocks("a", "y", ("y", cut)))
    feeds = random_inputs(graph, 3)
    whole, parts = (run(to_proto(g), feeds) for g in (graph, in_blocks))
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5, atol=1e-5)
    count = int(np.prod([parts for _, parts in cut]))
    assert sorted(set(in_blocks.blocks.values())) == list(range(2 * count))
    assert sum(node.op == "Conv" for node in in_blocks.nodes) == 3 * count


@pytest.mark.parametrize("opset", [7, 17])
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_a_value_inside_is_read_behind_the_stretch(parts: int, opset: int) -> None:
    """Its halo is dropped where it is handed on; older operator sets slice by attributes."""
    nodes = [
        node("Conv", "x", "w", out="a", pads=[1] * 4),
        node("MaxPool", "a", out="b", kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", "b", "w", out="c", pads=[1] * 4),
        node("Relu", "a", out="y"),
    ]
    graph = built(nodes, (2, 3, 17, 8), "c", "y", opset=opset, w=weight(3, 3, 3, 3))
    check(graph, "a", "c", ("c", ((2, parts),)))


def test_a_value_that_is_read_at_two_widths() -> None:
    """The halo of the wider one is kept, whichever comes first."""
    nodes = [
        node("Relu", "x", out="a"),
        node("Neg", "a", out="n"),
        node("Conv", "a", "w", out="c", pads=[1] * 4),
        node("Add", "c", "n", out="y"),
    ]
    check(built(nodes, (1, 2, 9, 8), w=weight(2, 2, 3, 3)), "a", "y", ("y", ((2, 3),)))


def test_batch_and_rows() -> None:
    nodes = [node("Conv", "x", "w", out="a", pads=[1] * 4), node("Relu", "a", out="y")]
    graph = built(nodes, (3, 2, 9, 8), w=weight(2, 2, 3, 3))
    check(graph, "a", "y", ("y", ((0, 3), (2, 2))))
    check(graph, "a", "y", ("y", ((0, 2), (2, 2), (3, 2))))


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_hidden_channels_are_added_up(parts: int) -> None:
    """Chunks of what lies between two products: weights are cut, results are summed."""
    nodes = [
        node("Gemm", "x", "w", "b", out="a"),
        node("Relu", "a", out="r"),
        node("Gemm", "r", "v", "c", out="y"),
    ]
    weights = {"w": weight(4, 14), "b": weight(14), "v": weight(14, 5), "c": weight(5)}
    cut = check(built(nodes, (3, 4), **weights), "a", "y", ("a", ((1, parts),)))
    sizes = [cut.types[name].shape for name in cut.constants if name.startswith("w")]
    assert sorted(sizes) == sorted((4, 14 // parts + (i < 14 % parts)) for i in range(parts))


@pytest.mark.parametrize(("dim", "parts"), [(1, 2), (1, 4), (2, 3), (2, 5)])
def test_attention_by_heads_and_by_rows_of_queries(dim: int, parts: int) -> None:
    nodes = [
        node("MatMul", "x", "q", out="queries"),
        node("MatMul", "x", "k", out="keys"),
        node("Transpose", "keys", out="turned", perm=[0, 1, 3, 2]),
        node("MatMul", "queries", "turned", out="scores"),
        node("Softmax", "scores", out="shares", axis=-1),
        node("MatMul", "shares", "x", out="y"),
    ]
    graph = built(nodes, (2, 4, 11, 6), q=weight(6, 6), k=weight(6, 6))
    check(graph, "scores", "y", ("y", ((dim, parts),)))
    cut = check(graph, "queries", "y", ("y", ((dim, parts),)))  # rows: keys run once, before
    assert sum(n.outputs[0] == "turned" for n in cut.nodes) == (dim == 2)


def test_a_mean_over_what_is_cut_is_added_up() -> None:
    nodes = [node("Conv", "x", "w", out="a"), node("GlobalAveragePool", "a", out="y")]
    graph = built(nodes, (1, 3, 11, 7), w=weight(3, 3, 3, 3))
    check(graph, "a", "y", ("a", ((2, 4),)))


def test_what_combines_blocks_is_refused_by_name() -> None:
    nodes = [
        node("Relu", "x", out="a"),
        node("Softmax", "a", out="b", axis=1),
        node("GlobalMaxPool", "b", out="y"),
    ]
    graph = built(nodes, (2, 4, 6, 6))
    for last, cut, why in (
        ("b", ("a", ((1, 2),)), r"blocks: 'b' \(Softmax\) needs dim 1 of 'a' as a whole"),
        ("y", ("a", ((2, 2),)), r"blocks: 'y' \(GlobalMaxPool\) combines the blocks"),
        ("y", ("x", ((2, 2),)), "blocks: dim 2 of 'x' is none of the stretch's"),
        ("b", ("a", ((2, 7),)), "blocks: "),
        ("z", ("a", ((2, 2),)), "blocks: the model has no node 'z'"),
    ):
        with pytest.raises(BlockError, match=why):
            block_graph(graph, blocks("a", last, cut))
    with pytest.raises(BlockError, match="blocks: 'a' runs before 'y'"):
        block_graph(graph, blocks("y", "a", ("a", ((2, 2),))))
    two = (*blocks("a", "b", ("a", ((2, 2),))).stretches, Stretch("b", "y", ()))
    with pytest.raises(BlockError, match="blocks: 'b' is in two stretches"):
        block_graph(graph, Blocks(two))


def test_blocks_as_data() -> None:
    both = Blocks((Stretch("a", "b", (Chunk("b", 2, 3),)), Stretch("c", "c", ())))
    assert Blocks.from_data(both.to_data()) == both
    with pytest.raises(ValueError, match="parts -1 is not a whole number"):
        Blocks.from_data([{"first": "a", "last": "b", "chunks": [{**vars(Chunk("b", 2, -1))}]}])
