"""Local forms of operators: what decides the seconds of a kernel on a given device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from partitioner.cost_model.executors import executor_of
from partitioner.ir.graph import LOADS, Attr, Graph, Node, Opaque, once_a_graph
from partitioner.ir.layout import Placement
from partitioner.ir.loops.factors import FactorKind
from partitioner.ir.ops import row_of, rule_of, writes_stored
from partitioner.ir.plan import PlacedNode
from partitioner.ir.rule import Rule

#: Shape of a device's part of a placement.
LocalShape: TypeAlias = Callable[[Placement], tuple[int, ...]]
#: Dims by their strides, the longest first.
Order: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """An operator on one device.

    Two nodes of one form, whichever model they are of, take equal time on equal devices, but for
    operators whose time depends on contents (NonZero, Loop). A pointwise operator that alone reads
    the result of another one may be computed by the other's kernel, at its end: the operators that
    it stands behind are part of its form.
    """

    op: str  #: Key of the op table.
    #: Attributes in the form of `_plain`, by name, sorted; of an operator that writes to a stored
    #: value also "in_parts": whether the plan stores any parameter in parts (see `stores_parts`).
    attrs: tuple[tuple[str, Any], ...]
    #: Element type and local shape of each operand, then each capture, and its `memory_order` if it
    #: is another than that of its dims; None if absent.
    operands: tuple[tuple[str, tuple[int, ...]] | tuple[str, tuple[int, ...], Order] | None, ...]
    #: Element type and local shape of each result; None if absent.
    results: tuple[tuple[str, tuple[int, ...]] | None, ...]
    #: Operators that the form stands behind, see `chain`; empty for an operator alone.
    behind: tuple[str, ...] = ()

    @cached_property
    def key(self) -> str:
        """The form as canonical JSON."""
        fields = [self.op, dict(self.attrs), self.operands, self.results]
        fields += [self.behind] if self.behind else []
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @property
    def family(self) -> str:
        """The operator and those that it stands behind: "Relu behind Conv BatchNormalization"."""
        return f"{self.op} behind {' '.join(self.behind)}" if self.behind else self.op

    @property
    def alone(self) -> Form:
        """The form of the operator by itself."""
        return replace(self, behind=()) if self.behind else self

    @property
    def dense(self) -> Form:
        """The form of operands that lie in memory in the order of their dims."""
        return replace(self, operands=tuple(part and part[:2] for part in self.operands))


#: Role of the node that writes to a trained parameter.
TRAINED = "gradient"

#: Most operators that a form stands behind.
_LONGEST_CHAIN = 4


@once_a_graph
def chain(graph: Graph, name: str, most: int = _LONGEST_CHAIN) -> tuple[Node, ...]:
    """The nodes whose kernel may compute a pointwise one too, the first of them first.

    Each alone reads the result of the one before it. The first one sums (a convolution, a product),
    the others are pointwise. Empty if there are none, or more than `most`.
    """
    node = graph.by_name[name]
    rule = rule_of(graph, node)
    if not most or not isinstance(rule, Rule) or not rule.is_pointwise:
        return ()
    shape = graph.types[node.writes[0]].shape
    for value in node.inputs:
        producer = graph.producers.get(value)
        if producer is None or graph.consumers[value] != (node,) or value in graph.outputs:
            continue
        if node.inputs.count(value) > 1 or graph.types[value].shape != shape:
            continue
        producer_rule = rule_of(graph, producer)
        if isinstance(producer_rule, Rule) and any(
            factor.kind is FactorKind.REDUCE for factor in producer_rule.factors.values()
        ):
            return (producer,)
        producer_chain = chain(graph, producer.name, most - 1)
        if producer_chain:
            return (*producer_chain, producer)
    return ()


@once_a_graph
def memory_order(graph: Graph, value: str) -> Order | None:
    """The order in which a value lies in memory, if views have changed it: (1, 0) of ``w.T``.

    None if it is that of its dims, or not known: of a view that does more than to change the order.
    """
    producer = graph.producers.get(value)
    permuted = None if producer is None else _permutation(graph, producer)
    if producer is None or permuted is None:
        return None
    lies = memory_order(graph, producer.inputs[0]) or range(len(permuted))
    order = tuple(permuted[dim] for dim in lies)
    return None if order == tuple(range(len(order))) else order


def turns_back(graph: Graph, first: Node, second: Node) -> bool:
    """Test whether a view of a view is the first operand, by one operator twice: ``x.T.T``."""
    before, after = _permutation(graph, first), _permutation(graph, second)
    if first.op != second.op or before is None or after is None:
        return False
    return all(after[dim] == index for index, dim in enumerate(before))


def _permutation(graph: Graph, node: Node) -> Order | None:
    """The dim of a view's result that each dim of its operand becomes; None of other nodes."""
    row = row_of(node)
    if not row.view or row.moved is not None:
        return None
    rule = rule_of(graph, node)
    if not isinstance(rule, Rule) or rule.windows:
        return None
    before, after = rule.operands[0], rule.results[0]
    if before is None or after is None or sorted(before) != sorted(after):
        return None
    if len(set(before)) < len(before):  # of two dims of one element none is the other
        return None
    return tuple(map(after.index, before))


def trains(node: Node) -> bool:
    """Test whether a node writes to a trained parameter: the step of an optimizer."""
    return writes_stored(node) and node.attrs.get("role") == TRAINED


def stores_parts(placed: Iterable[PlacedNode]) -> bool:
    """Test whether some device of a plan has only a part of a trained parameter.

    Then a rank holds all its parameters as DTensors, as PyTorch's operators on lists want; the
    update of each is dearer, whether it is cut itself or not.
    """
    homes = (at for node in placed if trains(node.node) for at in node.outs if at is not None)
    return any(home.sharding.axes for home in homes)


def call_form(node: Node) -> Form | None:
    """The form of a view that PyTorch makes by the call of an operator; None of other nodes."""
    row = row_of(node)
    is_call = row.view and row.moved is None and node.op.startswith("aten::")
    return Form(node.op, (), (), ()) if is_call else None


def form_of(
    graph: Graph, placed: PlacedNode, local_shape: LocalShape, *, in_parts: bool = False
) -> Form:
    """The form of a placed node on a device, which has these shapes of its operands and results."""
    node = placed.node
    call = call_form(node)
    if call is not None:
        return call
    attrs = {name: attr for name, attr in node.attrs.items() if name != LOADS}
    if writes_stored(node):
        stored = next(at for at in placed.outs if at is not None)
        attrs["in_parts"] = bool(stored.sharding.axes) or (in_parts and trains(node))

    def typed_part(value: str, at: Placement | None) -> tuple[str, tuple[int, ...]] | None:
        return None if at is None else (graph.types[value].dtype, local_shape(at))

    reads = (*node.inputs, *node.captures)
    operands = map(typed_part, reads, placed.ins)
    orders = [memory_order(graph, value) for value in reads]
    return Form(
        node.op,
        tuple((name, _plain(attr)) for name, attr in sorted(attrs.items())),
        tuple(
            (*operand, order) if operand and order else operand
            for operand, order in zip(operands, orders, strict=True)
        ),
        tuple(map(typed_part, node.outputs, placed.outs)),
        tuple(one.op for one in chain(graph, node.name)) if executor_of(graph).fuses else (),
    )


def _plain(attr: Attr) -> Any:
    """An attribute as JSON: contents that are long, or that only a backend can read, by digest."""
    if isinstance(attr, Graph):
        return {"graph": attr.digest}
    if isinstance(attr, Opaque):
        return {attr.kind: hashlib.sha256(attr.data).hexdigest()}
    if isinstance(attr, np.ndarray):
        return {attr.dtype.name: [attr.shape, hashlib.sha256(attr.tobytes()).hexdigest()]}
    if isinstance(attr, bytes):
        return {"bytes": attr.hex()}
    return attr
