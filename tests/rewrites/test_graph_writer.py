"""The writer of graphs: free names, what stands in the place of a node, and what is left out."""

import numpy as np
import pytest
import torch
from torch import nn

from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import trace_module
from partitioner.ir.graph import Constant, Graph, Node
from partitioner.ir.ops.aten.state import UPDATE
from partitioner.ir.pieces.blocks import Blocks, Stretch
from partitioner.ir.types import TensorType
from partitioner.rewrites.block_graph import block_graph
from partitioner.rewrites.graph_writer import GraphWriter, elements, reading, replaced

SIX = TensorType.of("float32", (6,))


def graph() -> Graph:
    """Two passes: `c` differentiates `a`, and nothing reads `unread`."""
    nodes = (
        Node("a", "Add", ("x", "w"), ("y",)),
        Node("unread", "Neg", ("y",), ("z",)),
        Node("b", "Exp", ("y",), ("loss",)),
        Node("c", "Mul", ("y", "v"), ("gradient",)),
    )
    constants = {name: Constant.of(np.arange(6, dtype=np.float32)) for name in "wv"}
    types = dict.fromkeys(("x", "w", "v", "y", "z", "loss", "gradient"), SIX)
    return Graph(
        *("g", ("x",), ("loss", "gradient"), nodes, types, constants, {"": 20}),
        backward=frozenset({"c"}),
        twins={"c": "a"},
        modules={"a": "first", "c": "last"},
    )


def in_two(writer: GraphWriter, node: Node) -> None:
    """Writes a node as two."""
    (half,) = writer.add(f"{node.name}/half", "Neg", node.inputs[:1], [SIX])
    writer.add(f"{node.name}/other", "Neg", (half,), made=node.outputs)


def test_names_are_free() -> None:
    writer = GraphWriter(source=graph(), mark="_")
    assert [writer.free(name) for name in ("a", "a", "y", "new", "new")] == [
        *("a_1", "a_2", "y_1", "new", "new_1")
    ]
    assert writer.copied("y", "again") == "y.again"
    assert writer.types["y.again"] == SIX


def test_what_nothing_reads_any_more_is_left_out() -> None:
    writer = GraphWriter(source=graph())
    for node in writer.source.nodes:
        writer.nodes.append(reading(node, {"y": "x"}) if node.name == "c" else node)
    assert writer.graph().digest != writer.source.digest
    assert "unread" in writer.graph().by_name, "nothing read it before"
    alone = writer.graph((), outputs=("gradient",))
    assert list(alone.by_name) == ["c"]
    assert alone.constants.keys() == {"v"}
    assert alone.types.keys() == {"x", "v", "gradient"}
    assert (alone.backward, alone.twins, alone.modules) == ({"c"}, {"c": "a"}, {"c": "last"})


def test_nodes_in_the_place_of_one_have_its_module_pass_and_twin() -> None:
    source = graph()
    assert replaced(source, {}) is source
    later = replaced(source, {"c": in_two})
    assert later.backward == {"c/half", "c/other"}
    assert later.twins == {"c/half": "a", "c/other": "a"}
    assert later.modules == {"a": "first", "c/half": "last", "c/other": "last"}
    assert later.constants.keys() == {"w"}
    first = replaced(source, {"a": in_two})
    assert first.twins == {"c": "a/half"}, "the first node stands for the one that is gone"
    assert first.modules["a/other"] == "first"
    assert first.backward == {"c"}


def test_parts_of_constants_are_read_when_they_are_needed() -> None:
    writer = GraphWriter(source=graph())
    region = (((1, 2), (5, 1)),)
    name = writer.constant_part("v", region, SIX.with_shape((3,)))
    np.testing.assert_array_equal(writer.constants[name].load(), [1, 2, 5])
    assert name == "v.part"
    square = np.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(elements(square, (((1, 2),), ((0, 2),))), square[1:3, :2])
    np.testing.assert_array_equal(
        elements(square, (((1, 2),), ((0, 1), (3, 1)))), [[4, 7], [8, 11]]
    )


class Named(nn.Module):
    """A parameter has the name that the backward pass gives the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.add = nn.Module()
        self.add.register_parameter("backward", nn.Parameter(torch.ones(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.add.backward  # type: ignore[operator]
        return (y * y).exp().sum()


@pytest.fixture(scope="module")
def trained() -> Graph:
    options = ModuleOptions(training=True, at_rest="zero1")
    return trace_module(Named(), Example((torch.ones(2, 3),), {}), options).graph


def test_names_of_the_backward_pass_are_free(trained: Graph) -> None:
    assert trained.producers["add.backward"].op == "partitioner::state"
    assert trained.producers["add.backward_1"].name in trained.backward


def test_steps_of_an_optimizer_stay_in_blocks(trained: Graph) -> None:
    """Nothing reads the results of an optimizer that works on other parts than lie at rest."""
    names = [node.name for node in trained.nodes if node.name not in trained.backward]
    in_blocks = block_graph(trained, Blocks((Stretch(names[0], names[-1], ()),)))
    steps = {node.name for node in trained.nodes if node.op == UPDATE}
    assert steps == {node.name for node in in_blocks.nodes if node.op == UPDATE}
    assert steps
