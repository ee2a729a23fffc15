"""The traced model: nodes in one topological order over values with static types.

A graph is data: it knows no framework and no file format, and holds no decision. Plans are
separate values that carry the graph's digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from partitioner.ir.errors import IRError
from partitioner.ir.types import TensorType

if TYPE_CHECKING:
    import networkx as nx

    from partitioner.ir.exchange import Region

#: Constants of at most this many elements may steer rules.
SMALL_CONSTANT = 4096
#: Constants of at most this many elements count by content in the digest, larger ones by type.
DIGEST_CONSTANT = 64
#: Attribute with the share of the choices that each expert of a layer gets (`ir.nodes.loads`):
#: plans are priced by it, nothing computes with it, and it is no part of the digest.
LOADS = "loads"
#: Attribute of a local node with the ranks that send each other rows inside of it.
AMONG = "ranks"


@dataclass(frozen=True)
class Opaque:
    """A serialized attribute that only a backend can read, such as a subgraph body."""

    kind: str  #: The message's type.
    data: bytes  #: The message.
    #: FLOPs of all runs of a body in one run of its node. No part of the digest.
    flops: float = 0.0


#: A graph is the body of a branch of the node: its inputs stand for operands, in order.
Attr: TypeAlias = (
    "int | float | str | bytes | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]"
    "| np.ndarray | Opaque | Graph"
)


@dataclass(frozen=True)
class Constant:
    """A weight, whose contents steer no rule and may change, or a small constant; loaded lazily."""

    type: TensorType
    load: Callable[[], np.ndarray] = field(repr=False, compare=False)
    weight: bool = False
    #: Name and region of the model's constant that this one, of a rewritten graph, is a part of.
    part: tuple[str, Region] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, array: np.ndarray, dtype: str | None = None) -> Constant:
        """A constant held in memory."""
        name = array.dtype.name
        small = {"float8_e4m3fn": "float8e4m3fn", "float8_e5m2": "float8e5m2"}
        return cls(
            TensorType.of(dtype or small.get(name, name), array.shape), partial(np.asarray, array)
        )


@dataclass(frozen=True)
class Node:
    """An operation."""

    name: str  #: Unique in the graph.
    #: Key of the op table: the bare operator name in the default ONNX domain ("MatMul"),
    #: "domain::Name" elsewhere ("com.microsoft::Gelu").
    op: str
    #: Value names in operand order; "" where an optional operand is absent.
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]  #: Value names in result order; "" where an optional result is absent.
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    #: Outer values that a subgraph attribute reads; for order, placement and lifetime they are
    #: operands like the others.
    captures: tuple[str, ...] = ()

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Values read, each once, in operand order."""
        return tuple(dict.fromkeys(name for name in (*self.inputs, *self.captures) if name))

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Values written."""
        return tuple(name for name in self.outputs if name)


@dataclass(frozen=True, eq=False)
class Graph:
    """A model."""

    name: str
    inputs: tuple[str, ...]  #: Values fed at each request, in order.
    #: Values returned, in order: results of nodes, each once. (An input or a constant is returned
    #: through an Identity node.)
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]  #: In a topological order, in which each device runs its share.
    types: Mapping[str, TensorType]  #: Type of every value.
    #: Weights and small constants by value name; never graph inputs.
    constants: Mapping[str, Constant]
    opsets: Mapping[str, int]  #: Operator-set version by domain ("" is ai.onnx).
    #: Names of the nodes of the backward pass, which follow all others. Empty for inference.
    backward: frozenset[str] = frozenset()
    #: Names of nodes that may be left out: offers, which `graph_writer.chosen` turns into the graph
    #: that a plan is for. Their results are read only by optional nodes and by nodes that
    #: take either of their operands.
    optional: frozenset[str] = frozenset()
    #: Name of the forward node that each node of the backward pass differentiates or repeats, by
    #: its own name, where the front end knows it. No part of the digest.
    twins: Mapping[str, str] = field(default_factory=dict)
    #: Module of a node, "encoder.layers.0.attn", by the node's name, where the model says it apart
    #: from names. For people alone; no part of the digest.
    modules: Mapping[str, str] = field(default_factory=dict)
    #: Block of a node that runs in one, by its name; blocks follow each other in ascending order. A
    #: backend that loads constants from a file (ONNX's) loads a block's when it runs, and drops
    #: them after.
    blocks: Mapping[str, int] = field(default_factory=dict)
    #: The user's name of each output that has another one here: it is an input or a constant, too.
    #: No part of the digest.
    output_names: Mapping[str, str] = field(default_factory=dict)
    #: Outputs whose sizes depend on data: those of their types are bounds. No part of the digest.
    bounded: frozenset[str] = frozenset()
    #: Outputs that every rank gets whole: the results of a module. No part of the digest.
    delivered: frozenset[str] = frozenset()
    #: Inputs of images that callers give with their channels last in memory. No part of the digest.
    channels_last: frozenset[str] = frozenset()

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
        _check_blocks(self)

    @property
    def domain(self) -> str:
        """Domain of the operators: "aten" of PyTorch's, "" of ONNX's with all that extend them."""
        return "aten" if list(self.opsets) == ["aten"] else ""

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that computes each value; graph inputs and constants have none."""
        return {value: node for node in self.nodes for value in node.writes}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read each value, in graph order; () for a value that none reads."""
        readers: dict[str, list[Node]] = {value: [] for value in self.types}
        for node in self.nodes:
            for value in node.reads:
                readers.setdefault(value, []).append(node)
        return {value: tuple(nodes) for value, nodes in readers.items()}

    @cached_property
    def order(self) -> Mapping[str, int]:
        """Position of each node, by name."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over structure, types and small constants; weights count by type only."""
        return hashlib.sha256("\n".join(self._digest_lines()).encode()).hexdigest()

    @cached_property
    def search_digest(self) -> str:
        """SHA-256 over all that a search of plans reads: the digest, and what is no part of it."""
        lines = [self.digest, *self._facts_beside()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def weights_digest(self) -> str:
        """SHA-256 over the contents of all constants, by name; reads them all (about 1 GB/s)."""
        digest = hashlib.sha256()
        for value, constant in sorted(self.constants.items()):
            digest.update(f"{value} {constant.type}\n".encode())
            digest.update(np.ascontiguousarray(constant.load()).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def constant(self, value: str) -> np.ndarray | None:
        """Contents of a small constant, None for anything else (large weights, computed values)."""
        constant = self.constants.get(value)
        if constant is None or constant.weight or constant.type.numel > SMALL_CONSTANT:
            return None
        return constant.load()

    def to_networkx(self) -> nx.DiGraph:
        """Make a `networkx.DiGraph` of the nodes, for its algorithms and its file formats.

        A node is the name of an operation, with `op`, `backward` (whether it is of the backward
        pass), `bytes` of its results and `weight_bytes` of the weights and constants that it
        reads. An edge leads from the node that makes values to one that reads them, with their
        names as `values` and their `bytes` together. Nodes stand in the order of the graph.
        """
        import networkx as nx

        graph = nx.DiGraph(name=self.name)
        for node in self.nodes:
            graph.add_node(
                node.name,
                op=node.op,
                backward=node.name in self.backward,
                bytes=sum(self.types[value].nbytes for value in node.writes),
                weight_bytes=sum(self.types[v].nbytes for v in node.reads if v in self.constants),
            )
        for node in self.nodes:
            made_by: dict[str, list[str]] = {}
            for value in node.reads:
                if value in self.producers:
                    made_by.setdefault(self.producers[value].name, []).append(value)
            for source, values in made_by.items():
                size = sum(self.types[value].nbytes for value in values)
                graph.add_edge(source, node.name, values=tuple(values), bytes=size)
        return graph

    def _digest_lines(self) -> Iterator[str]:
        yield json.dumps([self.inputs, self.outputs, sorted(self.opsets.items())])
        for node in self.nodes:
            attrs = sorted(
                (key, _attr_text(value)) for key, value in node.attrs.items() if key != LOADS
            )
            yield json.dumps([node.name, node.op, node.inputs, node.outputs, node.captures, attrs])
        if self.backward:
            yield json.dumps(["backward", *sorted(self.backward)])
        if self.optional:
            yield json.dumps(["optional", *sorted(self.optional)])
        if self.blocks:
            yield json.dumps(["blocks", *sorted(self.blocks.items())])
        for value, type_ in sorted(self.types.items()):
            yield f"{value} {type_}"
        for value, constant in sorted(self.constants.items()):
            if constant.type.numel <= DIGEST_CONSTANT and not constant.weight:
                yield f"{value} {_attr_text(constant.load())}"

    def _facts_beside(self) -> Iterator[str]:
        sets = self.bounded, self.delivered, self.channels_last
        yield json.dumps([*map(sorted, sets), sorted(self.twins.items())])
        yield json.dumps(sorted(self.output_names.items()))
        for value in sorted(self.constants):
            array = self.constant(value)
            yield f"{value} {None if array is None else _attr_text(array)}"
        for node in self.nodes:
            for key, attr in sorted(node.attrs.items()):
                if isinstance(attr, Graph):
                    yield f"{node.name} {key} {attr.search_digest}"
                elif isinstance(attr, Opaque):
                    yield f"{node.name} {key} {attr.flops}"
                elif key == LOADS:
                    yield f"{node.name} {key} {_attr_text(attr)}"


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
    for value in node.reads:
        if value not in known:
            raise IRError(f"node {node.name!r} ({node.op}) reads {value!r} before it is made")
    for value in node.writes:
        if value in known or node.writes.count(value) > 1:
            raise IRError(f"value {value!r} is made twice, the second time by {node.name!r}")
        if value not in types:
            raise IRError(f"value {value!r} of node {node.name!r} ({node.op}) has no type")


def _check_outputs(graph: Graph) -> None:
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


def _check_blocks(graph: Graph) -> None:
    """Nodes of a block follow each other, and blocks ascend."""
    last: int | None = None
    ended = -1
    for node in graph.nodes:
        block = graph.blocks.get(node.name)
        if block != last and last is not None:
            ended = last
        if block is not None and block <= ended:
            raise IRError(f"node {node.name!r} of block {block} is behind block {ended}")
        last = block


def _attr_text(value: Attr) -> str:
    if isinstance(value, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    if isinstance(value, Opaque):
        return hashlib.sha256(value.data).hexdigest()
    if isinstance(value, Graph):
        return value.digest
    return repr(value)


Others = ParamSpec("Others")
Result = TypeVar("Result")


def once_a_graph(
    function: Callable[Concatenate[Graph, Others], Result],
) -> Callable[Concatenate[Graph, Others], Result]:
    """Keep results of a function while the graph lives, by its other arguments in their order."""
    results: WeakKeyDictionary[Graph, dict[object, Result]] = WeakKeyDictionary()

    @wraps(function)
    def kept(graph: Graph, /, *args: Others.args, **kwargs: Others.kwargs) -> Result:
        known, key = results.setdefault(graph, {}), (args, *kwargs.items())
        if key not in known:
            known[key] = function(graph, *args, **kwargs)
        return known[key]

    return kept
