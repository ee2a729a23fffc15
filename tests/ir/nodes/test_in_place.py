"""Which writes may take the memory of what they write to: by who reads the old contents."""

import gc
import weakref
from dataclasses import replace

import pytest

from partitioner.ir.graph import Graph, Node
from partitioner.ir.nodes.in_place import writes_in_place
from partitioner.ir.types import TensorType

STATE = Node("state", "partitioner::state", (), ("cache",), {"state_bytes": 0})
WHOLE, AT = TensorType.of("float32", (6, 2)), TensorType.of("int64", (6,))


def copied(name: str, data: str, source: str = "x") -> Node:
    return Node(name, "aten::index_copy", (data, "at", source), (f"{name}:0",), {"dim": 0})


def update(value: str) -> Node:
    return Node("next", "partitioner::update", (value, "cache"), ("next:0",), {"role": "next"})


def graph(*nodes: Node) -> Graph:
    made = [value for node in (STATE, *nodes) for value in node.writes]
    types = {"x": WHOLE, "at": AT, **dict.fromkeys(made, WHOLE)}
    return Graph("g", ("x", "at"), (made[-1],), (STATE, *nodes), types, {}, {"aten": 1})


ONE = (copied("a", "cache"), update("a:0"))


def negative(name: str, x: str) -> Node:
    return Node(name, "aten::neg", (x,), (f"{name}:0",))


CASES = {
    "one": (ONE, {"a"}),
    "two": ((copied("a", "cache"), copied("b", "a:0"), update("b:0")), {"a", "b"}),
    "new contents are read": ((ONE[0], negative("r", "a:0"), ONE[1]), {"a"}),
    "old contents are read behind": ((ONE[0], negative("r", "cache"), ONE[1]), set()),
    "old contents are read before": ((negative("r", "cache"), *ONE), set()),
    "contents between are read": (
        (copied("a", "cache"), negative("r", "a:0"), copied("b", "a:0"), update("b:0")),
        set(),
    ),
    "rows are of the cache itself": ((copied("a", "cache", "cache"), update("a:0")), set()),
    "an input is written": ((copied("a", "x"), update("a:0")), set()),
    "other contents come next": (
        (copied("a", "cache"), negative("r", "a:0"), update("r:0")),
        set(),
    ),
    "nothing comes next": ((copied("a", "cache"),), set()),
}


@pytest.mark.parametrize("name", CASES)
def test_writes_in_place(name: str) -> None:
    nodes, expected = CASES[name]
    assert writes_in_place(graph(*nodes)) == expected


def test_a_backward_pass_may_read_old_contents() -> None:
    nodes = *ONE, negative("back", "x")
    assert writes_in_place(graph(*nodes)) == {"a"}
    assert not writes_in_place(replace(graph(*nodes), backward=frozenset({"back"})))


def test_a_graph_is_freed_when_nobody_holds_it() -> None:
    """It has the model's weights."""
    made = graph(*ONE)
    assert writes_in_place(made)
    held = weakref.ref(made)
    del made
    gc.collect()
    assert held() is None
