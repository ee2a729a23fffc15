"""A layout passes through a chain of data movement without a reshard, and the numbers hold."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from onnx import helper

from helpers.op_rows import rows
from partitioner.backends.onnx.files.messages import node_proto, tensor_proto
from partitioner.ir.graph import Attr, Constant, Graph, Node
from partitioner.ir.layout import DimLayout, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.ops.table import LocalOp, LocalView, OpView
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType

Step = tuple[str, tuple[Sequence[int], ...], Mapping[str, Attr]]  #: op, constant operands, attrs


def step(op: str, *operands: Sequence[int], **attrs: Attr) -> Step:
    return op, operands, attrs


@dataclass(frozen=True)
class Chain:
    """Unary steps from x of one shape, cut in one dim; a chain takes a step's first result.

    Attributes:
        shape: Of x.
        dim: Of x that is cut.
        layout: Its layout.
        steps: In order.
        result: How the last result is cut.
    """

    shape: tuple[int, ...]
    dim: int
    layout: DimLayout
    steps: tuple[Step, ...]
    result: str


LINE = DeviceMesh.line(2, "tp")

CHAINS = {
    "channel shuffle by groups": Chain(
        (1, 12, 5, 5),
        1,
        DimLayout.even(12, ("tp",), LINE, unit=4),
        (
            step("Reshape", (1, 3, 4, 5, 5)),
            step("Transpose", perm=(0, 2, 1, 3, 4)),
            step("Reshape", (1, -1, 5, 5)),
        ),
        "[-, tp:2,1|2,1|2,1|2,1, -, -]",
    ),
    "channel shuffle and back": Chain(
        (2, 12, 3),
        1,
        DimLayout.even(12, ("tp",), LINE, unit=4),
        (
            step("Reshape", (2, 3, 4, 3)),
            step("Transpose", perm=(0, 2, 1, 3)),
            step("Reshape", (2, 12, 3)),
            step("Reshape", (2, 4, 3, 3)),
            step("Transpose", perm=(0, 2, 1, 3)),
            step("Reshape", (2, 12, 3)),
        ),
        "[-, tp:8,4, -]",
    ),
    "heads of a fused projection": Chain(
        (3, 60),
        1,
        DimLayout.cut(("tp",), [(12, 8)] * 3),
        (
            step("Split", (20, 20, 20), axis=1),
            step("Reshape", (3, 5, 4)),
            step("Transpose", perm=(1, 0, 2)),
        ),
        "[tp, -, -]",
    ),
    "key heads repeated for query heads": Chain(
        (3, 20),
        1,
        DimLayout.even(20, ("tp",), LINE, unit=4),
        (
            step("Reshape", (3, 5, 4)),
            step("Unsqueeze", (2,)),
            step("Expand", (3, 5, 2, 4)),
            step("Reshape", (3, 10, 4)),
        ),
        "[-, tp:6,4, -]",
    ),
    "images to words": Chain(
        (2, 6, 4, 3),
        1,
        DimLayout.even(6, ("tp",), LINE),
        (
            step("Reshape", (2, 6, 12)),
            step("Transpose", perm=(0, 2, 1)),
            step("Slice", (1,), (9,), (1,)),
            step("Flatten", axis=1),
        ),
        "[-, " + "tp:" + "|".join(["3,3"] * 8) + "]",
    ),
    "a slice of shards, gathered and padded": Chain(
        (12, 5),
        0,
        DimLayout.even(12, ("tp",), LINE),
        (
            step("Slice", (2,), (11,), (0,)),
            step("Gather", (4, 0), axis=1),
            step("Pad", (0, 1, 0, 0)),
            step("Tile", (2, 1)),
        ),
        "[tp:4,5|4,5, -]",
    ),
}


def graph_of(chain: Chain) -> Graph:
    """The chain with the shapes that ONNX Runtime finds."""
    constants: dict[str, np.ndarray] = {}
    nodes = []
    for i, (op, operands, attrs) in enumerate(chain.steps):
        names = [f"c{i}.{j}" for j in range(len(operands))]
        constants.update(zip(names, (np.array(x, np.int64) for x in operands), strict=True))
        extra = [f"v{i + 1}.{j}" for j in range(1, len(operands[0]))] if op == "Split" else []
        inputs = (value(i), *names)
        nodes.append(Node(f"n{i}", op, inputs, (value(i + 1), *extra), attrs))
    values = run(nodes, constants, {value(0): data(chain)})
    types = {
        name: TensorType.of(x.dtype.name, x.shape) for name, x in {**values, **constants}.items()
    }
    weights = {name: Constant.of(x) for name, x in constants.items()}
    return Graph(
        "chain", (value(0),), (nodes[-1].outputs[0],), tuple(nodes), types, weights, {"": 21}
    )


def value(index: int) -> str:
    return f"v{index}"


def data(chain: Chain) -> np.ndarray:
    return np.arange(np.prod(chain.shape), dtype=np.float32).reshape(chain.shape)


def run(
    nodes: Sequence[Node], constants: Mapping[str, np.ndarray], feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Every value that nodes make, and what they are fed."""
    written = [name for node in nodes for name in node.writes]
    graph = helper.make_graph(
        [node_proto(node) for node in nodes],
        "chain",
        [
            helper.make_tensor_value_info(k, onnx.TensorProto.FLOAT, x.shape)
            for k, x in feeds.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in written],
        [tensor_proto(name, x, x.dtype.name) for name, x in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, ir_version=10, opset_imports=opsets)
    session = rows._session(model.SerializeToString(), reference=False)
    return {**feeds, **dict(zip(written, session.run(written, dict(feeds)), strict=True))}


@dataclass(frozen=True)
class Placed:
    """A step under the layout that reaches it."""

    node: Node
    rule: Rule
    layouts: Mapping[str, DimLayout]
    ins: tuple[Sharding, ...]
    outs: tuple[Sharding, ...]


def carried(graph: Graph, sharding: Sharding) -> Iterator[Placed]:
    """Each step cut as its operand is; factors that the operand does not name are even."""
    for node in graph.nodes:
        rule = rule_of(graph, node)
        assert isinstance(rule, Rule), rule
        layouts: dict[str, DimLayout] = {}
        for expr, layout in zip(rule.operands[0] or (), sharding.dims, strict=True):
            if layout.axes:
                factors = rule.factor_layouts(expr, layout, LINE)
                assert factors is not None, f"{node.op}: {expr} cannot be {layout}"
                layouts.update(factors)
        ins, outs = rule.shardings(layouts, LINE)
        assert ins[0] == sharding, node.op
        yield Placed(node, rule, layouts, ins, outs)
        sharding = outs[0]


def local(graph: Graph, placed: Placed, point: Mapping[str, int]) -> LocalOp:
    row = row_of(placed.node)
    assert row is not None
    if row.localize is None:
        return LocalOp((placed.node,))
    view = LocalView(
        placed.rule.local_sizes(placed.layouts, LINE, point),
        tuple(sharding.local_shape(LINE, point) for sharding in placed.ins),
        tuple(sharding.local_shape(LINE, point) for sharding in placed.outs),
    )
    return row.localize(OpView(placed.node, graph), view)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_layout_passes_through(chain: Chain) -> None:
    graph = graph_of(chain)
    dims = [DimLayout.whole(size) for size in chain.shape]
    dims[chain.dim] = chain.layout
    start = Sharding(tuple(dims))
    placed = list(carried(graph, start))
    constants = {name: constant.load() for name, constant in graph.constants.items()}
    whole = run(graph.nodes, constants, {value(0): data(chain)})[graph.outputs[0]]
    assert str(placed[-1].outs[0]) == chain.result
    for _, point in LINE.coords():
        ops = [local(graph, node, point) for node in placed]
        nodes = [node for op in ops for node in op.nodes]
        weights = constants | {name: x for op in ops for name, x in op.constants.items()}
        part = rows._slice(data(chain), start, LINE, point)
        result = run(nodes, weights, {value(0): part})[graph.outputs[0]]
        np.testing.assert_array_equal(result, rows._slice(whole, placed[-1].outs[0], LINE, point))
