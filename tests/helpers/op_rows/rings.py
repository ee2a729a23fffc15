"""Graphs of attention and its gradients, and their rings."""

from partitioner.ir.graph import Graph, Node
from partitioner.ir.types import TensorType

RESULTS = "o", "l", "dq", "dk", "dv"


def attention(rows: int, *, causal: bool, mask: bool = False) -> Graph:
    """Attention of two query heads a key-value head, and its gradients."""
    shapes = {"q": 4, "k": 2, "v": 2, "g": 4, "o": 4, "dq": 4, "dk": 2, "dv": 2}
    types = {name: TensorType.of("float32", (2, h, rows, 8)) for name, h in shapes.items()}
    types |= {"l": TensorType.of("float32", (2, 4, rows)), "m": TensorType.of("bool", (rows, rows))}
    extra = "m" if mask else ""
    settings = {"is_causal": causal}
    nodes = (
        Node("a", "partitioner::attention", ("q", "k", "v", extra), ("o", "l"), settings),
        Node(
            *("b", "partitioner::attention_backward"),
            *(("g", "q", "k", "v", extra, "o", "l"), ("dq", "dk", "dv"), settings),
        ),
    )
    inputs = ("q", "k", "v", "g", "m") if mask else ("q", "k", "v", "g")
    return Graph("a", inputs, RESULTS, nodes, types, {}, {}, frozenset({"b"}), twins={"b": "a"})
