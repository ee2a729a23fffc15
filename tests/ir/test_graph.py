"""Graphs: what they refuse, who makes and reads values, and the digest."""

from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import networkx as nx
import numpy as np
import pytest

from partitioner.ir.errors import IRError
from partitioner.ir.graph import (
    DIGEST_CONSTANT,
    SMALL_CONSTANT,
    Attr,
    Constant,
    Graph,
    Node,
    Opaque,
)
from partitioner.ir.types import TensorType

KIND = TensorType.of("float32", (4,))


def node(name: str, inputs: tuple[str, ...], output: str, **attrs: Attr) -> Node:
    return Node(name, "Op", inputs, (output,), attrs)


def graph(*nodes: Node, constants: Mapping[str, np.ndarray] | None = None) -> Graph:
    """A graph of one input x whose last value is the output; every value has 4 floats."""
    held = {name: Constant.of(array) for name, array in (constants or {}).items()}
    made = [value for one in nodes for value in one.writes]
    types = {"x": KIND, **dict.fromkeys(made, KIND), **{k: v.type for k, v in held.items()}}
    return Graph("g", ("x",), (made[-1],), nodes, types, held, {"": 21})


def diamond(**attrs: Attr) -> Graph:
    """``a(x); b(a), c(a, w); d(b, c, c)``."""
    return graph(
        node("a", ("x",), "va"),
        node("b", ("va",), "vb"),
        node("c", ("va", "w"), "vc", **attrs),
        node("d", ("vb", "vc", "vc"), "vd"),
        constants={"w": np.arange(4, dtype=np.float32)},
    )


def test_makers_readers_and_order() -> None:
    found = diamond()
    assert {value: made.name for value, made in found.producers.items()} == {
        "va": "a",
        "vb": "b",
        "vc": "c",
        "vd": "d",
    }
    assert [reader.name for reader in found.consumers["va"]] == ["b", "c"]
    assert [reader.name for reader in found.consumers["vc"]] == ["d"]
    assert found.consumers["vd"] == ()
    assert [reader.name for reader in found.consumers["x"]] == ["a"]
    assert found.order == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert found.by_name["c"].inputs == ("va", "w")


def test_a_node_reads_captures_and_each_value_once() -> None:
    found = Node("n", "If", ("a", "", "a"), ("r", "", "s"), captures=("b", "a"))
    assert found.reads == ("a", "b")
    assert found.writes == ("r", "s")


def test_a_captured_value_is_read() -> None:
    body = Node("n", "If", ("x",), ("r",), captures=("va",))
    assert graph(node("a", ("x",), "va"), body).consumers["va"] == (body,)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((node("a", ("x",), "u"), node("a", ("u",), "v")), "two nodes are called 'a'"),
        ((node("a", ("v",), "u"), node("b", ("x",), "v")), r"'a' \(Op\) reads 'v' before"),
        ((node("a", ("x",), "x"),), "value 'x' is made twice, the second time by 'a'"),
        ((node("a", ("x",), "u"), node("b", ("x",), "u")), "'u' is made twice, .* by 'b'"),
        ((Node("a", "Op", ("x",), ("u", "u")),), "'u' is made twice, the second time by 'a'"),
    ],
)
def test_graphs_that_are_refused(nodes: tuple[Node, ...], message: str) -> None:
    with pytest.raises(IRError, match=message):
        graph(*nodes)


def test_a_captured_value_must_be_made_before() -> None:
    with pytest.raises(IRError, match=r"'a' \(If\) reads 'late' before it is made"):
        graph(Node("a", "If", ("x",), ("r",), captures=("late",)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("vd", r"value 'vd' of node 'd' \(Op\) has no type"),
        ("x", "graph input or constant 'x' has no type"),
        ("w", "graph input or constant 'w' has no type"),
    ],
)
def test_every_value_has_a_type(value: str, message: str) -> None:
    found = diamond()
    types = {name: kind for name, kind in found.types.items() if name != value}
    with pytest.raises(IRError, match=message):
        replace(found, types=types)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (("x",), "graph output 'x' is an input, not a node's result; .* Identity"),
        (("vd", "w"), "graph output 'w' is a constant, not a node's result; .* Identity"),
        (("vd", "vd"), "graph output 'vd' is listed twice; .* Identity"),
    ],
)
def test_outputs_are_results_of_nodes_each_once(outputs: tuple[str, ...], message: str) -> None:
    with pytest.raises(IRError, match=message):
        replace(diamond(), outputs=outputs)


def test_an_output_must_be_made() -> None:
    with pytest.raises(IRError, match="graph output 'nowhere' is not made by any node"):
        replace(diamond(), outputs=("nowhere",))


def test_small_constants_are_read_and_large_ones_are_not() -> None:
    small, large = np.zeros(SMALL_CONSTANT), np.zeros(SMALL_CONSTANT + 1)
    found = graph(node("a", ("x",), "v"), constants={"s": small, "l": large})
    assert found.constant("s") is small
    assert found.constant("l") is None
    assert found.constant("x") is None


def test_the_same_graph_has_the_same_digest() -> None:
    assert diamond().digest == diamond().digest
    assert replace(diamond(), name="other").digest == diamond().digest


def test_the_digest_does_not_depend_on_the_order_of_attributes_and_types() -> None:
    one, other = diamond(p=1, q=2), diamond(q=2, p=1)
    assert one.digest == other.digest
    turned = replace(one, types=dict(reversed(one.types.items())))
    assert turned.digest == one.digest


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"p": 1}, {"p": 2}),
        ({"p": 1}, {"q": 1}),
        ({"p": 1}, {"p": 1.0}),
        ({"p": (1, 2)}, {"p": (2, 1)}),
        ({"p": np.array([1])}, {"p": np.array([2])}),
        ({"p": Opaque("GraphProto", b"a")}, {"p": Opaque("GraphProto", b"b")}),
    ],
)
def test_the_digest_changes_with_attributes(
    one: Mapping[str, Attr], other: Mapping[str, Attr]
) -> None:
    assert diamond(**one).digest == diamond(**one).digest
    assert diamond(**one).digest != diamond(**other).digest


def test_the_digest_changes_with_structure_and_types() -> None:
    found = diamond()
    changed = [
        replace(found, opsets={"": 20}),
        replace(found, outputs=("vc",)),
        replace(found, types={**found.types, "vd": TensorType.of("float32", (5,))}),
        replace(found, nodes=(*found.nodes[:3], node("d", ("vc", "vb", "vb"), "vd"))),
        replace(found, nodes=(*found.nodes[:3], replace(found.nodes[3], op="Other"))),
    ]
    assert len({found.digest, *(other.digest for other in changed)}) == 1 + len(changed)


@pytest.mark.parametrize(("size", "equal"), [(DIGEST_CONSTANT, False), (DIGEST_CONSTANT + 1, True)])
def test_small_constants_count_by_content_and_weights_by_type(size: int, equal: bool) -> None:
    def holding(value: float) -> Graph:
        return graph(node("a", ("x",), "v"), constants={"w": np.full(size, value, np.float32)})

    assert (holding(1).digest == holding(2).digest) == equal


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (diamond(), replace(diamond(), delivered=frozenset({"vd"}))),
        (diamond(), replace(diamond(), bounded=frozenset({"vd"}))),
        (diamond(), replace(diamond(), channels_last=frozenset({"x"}))),
        (diamond(), replace(diamond(), twins={"d": "a"})),
        (diamond(), replace(diamond(), output_names={"vd": "y"})),
        (diamond(loads=(1.0, 1.0)), diamond(loads=(1.0, 2.0))),
        (diamond(p=Opaque("Graph", b"a", 1.0)), diamond(p=Opaque("Graph", b"a", 2.0))),
        (diamond(p=diamond(loads=(1.0,))), diamond(p=diamond(loads=(2.0,)))),
        *[
            tuple(
                graph(node("a", ("x",), "v"), constants={"w": np.full(SMALL_CONSTANT, value)})
                for value in (1, 2)
            )
        ],
    ],
)
def test_what_searches_read_beside_the_digest_has_a_digest(one: Graph, other: Graph) -> None:
    assert one.digest == other.digest
    assert one.search_digest == replace(one).search_digest
    assert one.search_digest != other.search_digest


def test_a_constant_knows_the_names_of_small_floats() -> None:
    for dtype, name in ((ml_dtypes.float8_e5m2, "float8e5m2"), (ml_dtypes.bfloat16, "bfloat16")):
        assert str(Constant.of(np.zeros(3, dtype)).type) == f"{name}[3]"
    assert str(Constant.of(np.zeros(3, np.uint8), "uint4").type) == "uint4[3]"


def test_a_graph_is_a_digraph_of_networkx() -> None:
    network = replace(diamond(), backward=frozenset({"d"})).to_networkx()
    assert list(network) == ["a", "b", "c", "d"]
    assert nx.immediate_dominators(network, "a")["d"] == "a"
    assert network.nodes["c"] == {"op": "Op", "backward": False, "bytes": 16, "weight_bytes": 16}
    assert [name for name, late in network.nodes(data="backward") if late] == ["d"]
    assert dict(network.edges) == {
        ("a", "b"): {"values": ("va",), "bytes": 16},
        ("a", "c"): {"values": ("va",), "bytes": 16},
        ("b", "d"): {"values": ("vb",), "bytes": 16},
        ("c", "d"): {"values": ("vc",), "bytes": 16},
    }
    several = Node("s", "Split", ("x",), ("p", "q", ""))
    both = Node("t", "Op", ("p", "x", "q"), ("vt",), captures=("p",))
    types = dict.fromkeys(("x", "p", "q", "vt"), KIND)
    parts = Graph("g", ("x",), ("vt",), (several, both), types, {}, {"": 21}).to_networkx()
    assert parts.edges["s", "t"] == {"values": ("p", "q"), "bytes": 32}
    assert parts.nodes["s"]["bytes"] == 32


def test_the_weights_digest_is_of_names_types_and_contents() -> None:
    arrays = [np.arange(4.0), np.arange(4.0)[::-1], np.arange(4), np.zeros(()), np.zeros((0, 4))]
    arrays += [np.zeros(3, ml_dtypes.int4), np.zeros(3, ml_dtypes.bfloat16), np.zeros(3, bool)]
    body = node("a", ("x",), "va")
    digests = [graph(body, constants={"w": array}).weights_digest for array in arrays]
    digests.append(graph(body, constants={"v": arrays[0]}).weights_digest)
    assert len(set(digests)) == len(digests)
    assert graph(body, constants={"w": np.arange(4.0).copy()}).weights_digest == digests[0]
