"""Parts of a mesh that have nodes of their own take turns."""

from helpers.plans.cost_cases import graph
from partitioner.ir.graph import Graph, Node
from partitioner.ir.types import TensorType
from partitioner.strategies.side_by_side import side_by_side


def joined(*nodes: tuple[str, str]) -> Graph:
    """Nodes by name and what they read; each makes the value of its name."""
    made = [
        Node(name, "Relu" if len(reads.split()) == 1 else "Add", tuple(reads.split()), (name,))
        for name, reads in nodes
    ]
    types = {value: TensorType.of("float32", (4,)) for value in ("x", *(name for name, _ in nodes))}
    return graph(made, types, ("x",), (nodes[-1][0],))


def test_places_take_turns_between_what_they_wait_for_and_what_waits_for_them() -> None:
    model = joined(
        *(("pre", "x"), ("a0", "pre"), ("behind", "a0"), ("a1", "a0"), ("a2", "a1")),
        *(("b0", "pre"), ("b1", "b0"), ("early", "pre")),
        *(("join", "a2 b1"), ("free", "x"), ("all", "join early")),
    )
    places = {name: ("experts", int(name[0] == "b")) for name in ("a0", "a1", "a2", "b0", "b1")}
    assert list(side_by_side(model, places)) == [
        *("pre", "early", "free", "a0", "b0", "a1", "b1", "a2", "behind", "join", "all")
    ]


def test_without_places_nothing_moves() -> None:
    model = joined(("a", "x"), ("b", "x"), ("c", "a b"))
    assert list(side_by_side(model, {})) == ["a", "b", "c"]
