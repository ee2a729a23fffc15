"""Equal values of a model have one name in a proof, others keep theirs."""

import numpy as np

from partitioner.api.verify.symbolic.equal_values import by_content, content, merged
from partitioner.ir.graph import Constant, Graph, Node
from partitioner.ir.types import TensorType


def test_results_of_equal_constants_have_one_name() -> None:
    one = TensorType.of("float32", (1,))
    names = ("x", "a", "b", "a.cast", "b.cast", "a.drawn", "b.drawn", "y", "z")
    graph = Graph(
        name="equal",
        inputs=("x",),
        outputs=("y", "z"),
        nodes=(
            Node("cast a", "Cast", ("a",), ("a.cast",), {"to": 1}),
            Node("cast b", "Cast", ("b",), ("b.cast",), {"to": 1}),
            Node("drawn a", "RandomNormalLike", ("a",), ("a.drawn",), {"seed": 1.0}),
            Node("drawn b", "RandomNormalLike", ("b",), ("b.drawn",), {"seed": 1.0}),
            Node("y", "Sum", ("x", "a.cast", "a.drawn"), ("y",)),
            Node("z", "Sum", ("x", "b.cast", "b.drawn"), ("z",)),
        ),
        types=dict.fromkeys(names, one),
        constants={name: Constant.of(np.ones(1, np.float32)) for name in ("a", "b")},
        opsets={"": 21},
    )
    found, gone = merged(graph)
    assert gone == {"b": "a", "b.cast": "a.cast"}
    assert [node.name for node in found.nodes] == ["cast a", "drawn a", "drawn b", "y", "z"]
    assert found.nodes[-1].inputs == ("x", "a.cast", "b.drawn")
    array = np.ones(1, np.float32)
    assert by_content(graph, ["a", "b"]) == {content(array): ["a", "b"]}
