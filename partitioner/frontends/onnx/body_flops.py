"""FLOPs of the bodies of control-flow nodes, as often as they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import onnx_ir
from onnx_ir import convenience

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.inferring.check_nodes import is_static
from partitioner.frontends.onnx.reading.bodies import captured
from partitioner.frontends.onnx.reading.border import border
from partitioner.ir.graph import Constant, Graph, Node
from partitioner.ir.ops import rule_of
from partitioner.ir.ops.estimate import estimated_flops
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType

#: A Loop of so many iterations or more runs as often as its condition says.
_ENDLESS = 2**31 - 1


def runs_of_bodies(node: onnx_ir.Node) -> int:
    """Count how often a node runs a body of its own; once where that depends on data."""
    if node.domain or node.op_type not in ("Loop", "Scan"):
        return 1
    body = node.attributes["body"].as_graph()
    if node.op_type == "Scan":
        count = node.attributes["num_scan_inputs"].as_int()
        axes = node.attributes.get_ints("scan_input_axes", [0])
        return _size(node.inputs[len(node.inputs) - count], axes[0])
    count_operand = node.inputs[0] if node.inputs else None
    tensor = None if count_operand is None else convenience.get_const_tensor(count_operand)
    if tensor is not None and tensor.size == 1 and int(tensor.numpy().item()) < _ENDLESS:
        return max(int(tensor.numpy().item()), 0)
    stacked = node.outputs[max(len(body.inputs) - 2, 0) :]
    return max((_size(value, 0) for value in stacked), default=1)


def _size(value: onnx_ir.Value | None, axis: int) -> int:
    """The size of a dim; 1 where it is not known."""
    if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return 1
    size = value.shape[axis]
    return size if isinstance(size, int) else 1


def flops_of_body(
    body: onnx_ir.Graph,
    convert: Callable[[onnx_ir.Node], Node],
    types: Callable[[onnx_ir.Value], TensorType],
    constants: Callable[[onnx_ir.Value], Constant],
    opsets: Mapping[str, int],
) -> float:
    """FLOPs of one run of a body; those of a node without static types are not known.

    Args:
        body: The body.
        convert: A node of the body as one of the IR.
        types: The type of a value with static types.
        constants: A constant.
        opsets: Versions of the operator sets by domain.
    """
    total = 0.0
    for node in body:
        operands = [*filter(None, node.inputs), *captured(node)]
        results = [value for value in node.outputs if value.name]
        if not all(is_static(x) or x.const_value is not None for x in (*operands, *results)):
            continue
        with suppress(FrontendError), border("a body"):
            inner = convert(node)
            held = {x.name or "": constants(x) for x in operands if x.const_value is not None}
            typed = {x.name or "": types(x) for x in (*operands, *results) if is_static(x)}
            graph = Graph(
                name="body",
                inputs=tuple(name for name in inner.reads if name not in held),
                outputs=inner.writes,
                nodes=(inner,),
                types={**typed, **{name: constant.type for name, constant in held.items()}},
                constants=held,
                opsets=opsets,
            )
            rule = rule_of(graph, inner)
            total += rule.flops if isinstance(rule, Rule) else estimated_flops(graph, inner)
    return total
