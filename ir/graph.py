"""The traced model: nodes in one topological order over values with static types.

A graph is data. It knows no framework, no file format, and holds no decision: plans are
separate values that carry the graph's digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import networkx as nx
import numpy as np

from partitioner.ir.errors import IRError
from partitioner.ir.types import TensorType

#: Constants of at most this many elements may steer rules.
SMALL_CONSTANT = 4096
#: Constants of at most this many elements count by content in the digest, larger ones by type.
DIGEST_CONSTANT = 64


@dataclass(frozen=True)
class Opaque:
    """An attribute that only a backend can read, such as a subgraph body (serialized)."""

    kind: str
    data: bytes


#: A graph is a branch of the node: its inputs stand for operands, in order.
Attr: TypeAlias = (
    "int | float | str | bytes | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]"
    "| np.ndarray | Opaque | Graph"
)


@dataclass(frozen=True)
class Constant:
    """A weight or a small constant: its type, and how to read it (lazily).

    Attributes:
        type: Its type.
        load: Reads it.
        weight: Whether its contents steer nothing, however small it is: they need not be there
            for planning, and may change.
    """

    type: TensorType
    load: Callable[[], np.ndarray] = field(repr=False, compare=False)
    weight: bool = False

    @classmethod
    def of(cls, array: np.ndarray, dtype: str | None = None) -> Constant:
        """A constant held in memory."""
        kind = dtype or {"float8_e4m3fn": "float8e4m3fn", "float8_e5m2": "float8e5m2"}.get(
            array.dtype.name, array.dtype.name
        )
        return cls(TensorType.of(kind, array.shape), lambda: array)


@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
        name: Unique in the graph.
        op: Key of the op table: the bare operator name in the default ONNX domain ("MatMul"),
            "domain::Name" elsewhere ("com.microsoft::Gelu").
        inputs: Value names in operand order; "" where an optional operand is absent.
        outputs: Value names in result order; "" where an optional result is not wanted.
        attrs: Attributes by name.
        captures: Outer values that a subgraph attribute reads; operands like the others for
            order, placement and lifetime.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    captures: tuple[str, ...] = ()

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Values read, each once, in operand order."""
        return tuple(dict.fromkeys(name for name in (*self.inputs, *self.captures) if name))

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Values written."""
        return tuple(name for name in self.outputs if name)


@dataclass(frozen=True)
class Graph:
    """A model.

    Attributes:
        name: For people.
        inputs: Values fed at each request, in order.
        outputs: Values returned, in order: results of nodes, each once. (An input or a constant
            is returned through an Identity node.)
        nodes: In a topological order, which is also the order a device runs its share in.
        types: Type of every value.
        constants: Weights and small constants by value name; never graph inputs.
        opsets: Operator-set version by domain ("" is ai.onnx).
        backward: Names of the nodes of the backward pass; they come after all others. Empty for
            inference.
        optional: Names of nodes that may be left out: an offer, which `ir.offers.chosen` turns
            into the graph that a plan is for. Their results are read by optional nodes, and by
            nodes that take either of their operands.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    constants: Mapping[str, Constant]
    opsets: Mapping[str, int]
    backward: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        known = set(self.inputs) | set(self.constants)
        for value in sorted(known - set(self.types)):
            raise IRError(f"graph input or constant {value!r} has no type")
        names: set[str] = set()
        for node in self.nodes:
            if node.name in names:
                raise IRError(f"two nodes are called {node.name!r}")
            names.add(node.name)
            _check_values(node, known, self.types)
            known.update(node.writes)
        _check_outputs(self)

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that makes a value (graph inputs and constants have none)."""
        return {value: node for node in self.nodes for value in node.writes}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read a value, in graph order (every value has an entry)."""
        found: dict[str, list[Node]] = {value: [] for value in self.types}
        for node in self.nodes:
            for value in node.reads:
                found.setdefault(value, []).append(node)
        return {value: tuple(nodes) for value, nodes in found.items()}

    @cached_property
    def order(self) -> Mapping[str, int]:
        """Position of each node, by name."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over structure, types and small constants; weights count by type only."""
        return hashlib.sha256("\n".join(self._digest_lines()).encode()).hexdigest()

    @cached_property
    def weights_digest(self) -> str:
        """SHA-256 over the contents of all constants, by name; reads them all (about 1 GB/s)."""
        found = hashlib.sha256()
        for value, constant in sorted(self.constants.items()):
            found.update(f"{value} {constant.type}\n".encode())
            found.update(np.ascontiguousarray(constant.load()).reshape(-1).view(np.uint8).data)
        return found.hexdigest()

    def constant(self, value: str) -> np.ndarray | None:
        """Contents of a small constant, None for anything else (large weights, computed values)."""
        held = self.constants.get(value)
        if held is None or held.weight or held.type.numel > SMALL_CONSTANT:
            return None
        return held.load()

    def to_networkx(self) -> nx.MultiDiGraph:
        """Nodes by name, an edge a (producer, consumer, value)."""
        graph: nx.MultiDiGraph = nx.MultiDiGraph()
        graph.add_nodes_from(node.name for node in self.nodes)
        for node in self.nodes:
            for value in node.reads:
                if value in self.producers:
                    graph.add_edge(self.producers[value].name, node.name, key=value)
        return graph

    def _digest_lines(self) -> Iterator[str]:
        yield json.dumps([self.inputs, self.outputs, sorted(self.opsets.items())])
        for node in self.nodes:
            attrs = sorted((key, _attr_text(value)) for key, value in node.attrs.items())
            yield json.dumps([node.name, node.op, node.inputs, node.outputs, node.captures, attrs])
        if self.backward:
            yield json.dumps(["backward", *sorted(self.backward)])
        if self.optional:
            yield json.dumps(["optional", *sorted(self.optional)])
        for value, kind in sorted(self.types.items()):
            yield f"{value} {kind}"
        for value, constant in sorted(self.constants.items()):
            if constant.type.numel <= DIGEST_CONSTANT and not constant.weight:
                yield f"{value} {_attr_text(constant.load())}"


def needed(nodes: Sequence[Node], values: Iterable[str], roots: Container[str] = ()) -> list[Node]:
    """The nodes that these values depend on, and that the nodes named in `roots` do, in order."""
    live = set(values)
    kept = []
    for node in reversed(nodes):
        if node.name in roots or live.intersection(node.writes):
            live.update(node.reads)
            kept.append(node)
    return kept[::-1]


def _check_values(node: Node, known: set[str], types: Mapping[str, TensorType]) -> None:
    """A node reads known values and makes new ones that have types."""
    for value in node.reads:
        if value not in known:
            raise IRError(f"node {node.name!r} ({node.op}) reads {value!r} before it is made")
    for value in node.writes:
        if value in known or node.writes.count(value) > 1:
            raise IRError(f"value {value!r} is made twice, the second time by {node.name!r}")
        if value not in types:
            raise IRError(f"value {value!r} of node {node.name!r} ({node.op}) has no type")


def _check_outputs(graph: Graph) -> None:
    """Each output is the result of a node, and listed once."""
    for index, value in enumerate(graph.outputs):
        if value in graph.inputs or value in graph.constants:
            kind = "an input" if value in graph.inputs else "a constant"
            raise IRError(
                f"graph output {value!r} is {kind}, not a node's result; "
                "return the result of an Identity node that reads it"
            )
        if value not in graph.producers:
            raise IRError(f"graph output {value!r} is not made by any node")
        if value in graph.outputs[:index]:
            raise IRError(
                f"graph output {value!r} is listed twice; "
                "return the result of an Identity node that reads it"
            )


def _attr_text(value: Attr) -> str:
    if isinstance(value, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    if isinstance(value, Opaque):
        return hashlib.sha256(value.data).hexdigest()
    if isinstance(value, Graph):
        return value.digest
    return repr(value)
